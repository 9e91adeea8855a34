# SPDX-License-Identifier: Apache-2.0
"""The table "who can do what" of docs/security.md: each kind of client tries all of it, on people
of its own and of others, and what it reaches is what its cell says."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from engage.api import Kind, WebhookRequest, render_time
from engage.cli.instance import now
from support.commands import run
from support.identity import REQUIRED, hash_of
from support.people import KEY as ERASURES_KEY
from support.preferences import GROUPS, SUBSCRIPTIONS, body_of, members, page_of
from support.provider_http import PUBLIC_URL, public
from support.providers import mandrill_delivery, segment_delivery
from support.server_process import KEY, SECRET, SQLITE, Server, start_server

PAGE = Path(__file__).resolve().parents[2] / "docs/security.md"
PUBLIC = {"acme": KEY, "verifying": "test-write-key-of-verifying"}
SERVER_KEYS = {one: hashlib.sha256(one.encode()).hexdigest()[:32] for one in PUBLIC}


def more(workspace: str) -> str:
    """Return the tables of a workspace: a server key, groups and webhooks."""
    sha256 = hashlib.sha256(SERVER_KEYS[workspace].encode()).hexdigest()
    return f"""
[[workspaces.write_keys]]
id = "backend"
kind = "server"
sha256 = "{sha256}"
{GROUPS}
[workspaces.webhooks.segment]
secret = "segment-{workspace}"
[workspaces.webhooks.mailchimp]
webhook_key = "mandrill-{workspace}"
[workspaces.unsubscribes.mailchimp]
action = "channel"
"""


CONFIG = f"""{more("acme")}
[[workspaces]]
id = "verifying"
subscription_secret = "{SECRET}-2"
protected_traits = ["plan"]
{REQUIRED}
[[workspaces.write_keys]]
id = "website"
key = "{PUBLIC["verifying"]}"
{more("verifying")}
[erasures]
key = "{ERASURES_KEY}"
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # An erasure takes twice the timeout.
    storage = SQLITE.replace("[storage]", "[storage]\nwrite_timeout = 2")
    folder, protected = tmp_path_factory.mktemp("who"), 'protected_traits = ["plan"]'
    options: Any = {"storage": storage, "workspace": protected, "config_extra": CONFIG}
    with start_server(folder, server=public(), **options) as server:
        yield server


#: What an actor has: a user and a visitor of its own, and those of others.
OWN_USER, USER, OWN_VISITOR, VISITOR = "own-user", "user", "own-visitor", "visitor"
NUMBER = "+491234567"
IDS = (OWN_USER, USER, OWN_VISITOR, VISITOR)
KINDS = {key: Kind.USER if key in IDS[:2] else Kind.VISITOR for key in IDS}
#: The words of the cells.
WORDS: Mapping[str, set[str]] = {
    "no": set(),
    "its user": {OWN_USER},
    "its visitor": {OWN_VISITOR},
    "its user, any visitor": {OWN_USER, OWN_VISITOR, VISITOR},
    "any user": {OWN_USER, USER},
    "any id": {*IDS},
}


class Actor:
    """Somebody with a credential of a workspace. Each has other people.

    :param named: whom its link names, if it has one.
    """

    workspace = "acme"

    def __init__(self, server: Server, name: str, named: str | None = None) -> None:
        self.server = server
        self.named = named
        self.ids = {one: f"{name}-{one}" for one in IDS}
        for key in IDS:
            traits = {"email": self.address(key), "note": f"the note of {self.ids[key]}"}
            self.owner("identify", **self.about(key), traits=traits)
            self.owners_choice(key, "product", on=False)

    def about(self, one: str) -> dict[str, Any]:
        return {"userId" if KINDS[one] is Kind.USER else "anonymousId": self.ids[one]}

    def address(self, one: str) -> str:
        return f"{self.ids[one]}@example.com"

    # ------------------------------------------------------------------ the owner of the workspace
    @property
    def secret(self) -> str:
        return SECRET if self.workspace == "acme" else f"{SECRET}-2"

    def owner(self, operation: str, **fields: Any) -> None:
        key = SERVER_KEYS[self.workspace]
        assert self.server.post(f"/v1/{operation}", fields, key=key).status_code == 200

    def links(self, one: str, secret: str) -> list[dict[str, str]]:
        """Return the links that name somebody: by the id, and by the address."""
        is_visitor = KINDS[one] is Kind.VISITOR
        signed: dict[str, Any] = {"secret": secret, "workspace": self.workspace}
        key = "anonymousId" if is_visitor else "id"
        return [
            members(self.ids[one], key=key, **signed),
            members(
                self.ids[one],
                identifier=self.address(one),
                key="email",
                visitor=is_visitor,
                **signed,
            ),
        ]

    def put(self, link: dict[str, str], group: str, *, on: bool) -> None:
        body = {**body_of(link, **{group: on}), **({"v": True} if "v" in link else {})}
        self.server.client.put(SUBSCRIPTIONS, json=body)

    def get(self, link: dict[str, str]) -> dict[str, Any]:
        found: dict[str, Any] = self.server.get(page_of(link, SUBSCRIPTIONS)).json()
        return found

    def owners_choice(self, one: str, group: str, *, on: bool) -> None:
        self.put(self.links(one, self.secret)[1], group, on=on)
        assert self.choices(one)[group] is on

    def choices(self, one: str) -> dict[str, bool]:
        subscriptions: dict[str, bool] = self.get(self.links(one, self.secret)[0])["subscriptions"]
        return subscriptions

    # ------------------------------------------------------------------------------- what it tries
    @property
    def key(self) -> str:
        """The secret that it has, with which it also forges links."""
        return PUBLIC[self.workspace]

    @property
    def credentials(self) -> dict[str, Any]:
        """Return what it sends with each request."""
        return {"auth": (self.key, "")}

    def send(self, operation: str, **fields: Any) -> None:
        self.server.post(f"/v1/{operation}", fields, key=None, **self.credentials)

    def tried(self, one: str) -> list[dict[str, str]]:
        """Return its links for somebody."""
        return self.links(one, self.key)

    def report(self, kind: str, one: str) -> None:
        """Report as a webhook provider that somebody does not want messages."""
        about = {"email": self.address(one), "metadata": self.about(one)}
        self.mandrill({"event": kind, "_id": f"{kind}-{self.ids[one]}", "msg": about})

    def mandrill(self, item: dict[str, Any], key: str | None = None) -> None:
        items = [{**item, "ts": 1_461_095_246}]
        self.post(mandrill_delivery(self.hook("mailchimp"), key or self.key, items))

    def hook(self, provider: str) -> str:
        return f"{PUBLIC_URL}/api/public/webhooks/{provider}?workspaceId={self.workspace}"

    def post(self, request: WebhookRequest) -> None:
        url, headers = request.url.removeprefix(PUBLIC_URL), dict(request.headers)
        self.server.client.post(url, content=request.body, headers=headers)

    def export(self, user: str) -> str:
        """Return what it reads when it asks for everything of a user."""
        paths = [re.sub(r"{\w+}", user, path) for path in self.paths()]
        answers = [self.server.get(path, **self.credentials).text for path in paths]
        links = [link for key in IDS for link in self.tried(key)]
        answers += [self.server.get(page_of(link)).text for link in links]
        return "\n".join(answers)

    def erase(self, one: str) -> None:
        for path in [re.sub(r"{\w+}", self.ids[one], path) for path in self.paths()]:
            self.server.client.request("DELETE", path, **self.credentials)
        self.send("batch", batch=[{"type": "delete", **self.about(one)}])

    def paths(self) -> list[str]:
        return list(self.server.get("/openapi.json").json()["paths"])


class Verified(Actor):
    workspace = "verifying"

    def send(self, operation: str, **fields: Any) -> None:
        context = {"userHash": hash_of(self.ids[OWN_USER])}
        super().send(operation, context=context, **fields)


class ServerKey(Actor):
    @property
    def key(self) -> str:
        return SERVER_KEYS[self.workspace]


class Link(Actor):
    """A link by an id; other links are tried with its signature."""

    by_address = False

    @property
    def own(self) -> dict[str, str]:
        assert self.named is not None
        return self.links(self.named, self.secret)[self.by_address]

    @property
    def key(self) -> str:
        return self.own["h"]

    @property
    def credentials(self) -> dict[str, Any]:
        return {"params": self.own}

    def tried(self, one: str) -> list[dict[str, str]]:
        return [{**link, "h": self.key} for link in self.links(one, "")]


class AddressLink(Link):
    by_address = True


class Provider(Actor):
    """Segment, which passes on events as they are, and Mandrill, which reports."""

    @property
    def key(self) -> str:
        return f"mandrill-{self.workspace}"

    @property
    def credentials(self) -> dict[str, Any]:
        return {"params": {"workspaceId": self.workspace}}

    def send(self, operation: str, **fields: Any) -> None:
        event = {"type": operation, "timestamp": render_time(now()), **fields}
        secret = f"segment-{self.workspace}"
        self.post(segment_delivery(event, secret, url=self.hook("segment")))

    def erase(self, one: str) -> None:
        super().erase(one)
        self.send("delete", **self.about(one))


class Operator(Actor):
    """Who has the config can make all that the others have."""

    @property
    def key(self) -> str:
        return SERVER_KEYS[self.workspace]

    def tried(self, one: str) -> list[dict[str, str]]:
        return self.links(one, self.secret)

    def command(self, *words: str, known: int = 0) -> str:
        options = ("--config", self.server.config, "--workspace", self.workspace)
        result = run(*words, *options)
        assert result.exit_code in (0, known), result.output
        return result.stdout

    def export(self, user: str) -> str:
        return self.command("export", "user", "--user", user) + "".join(
            self.command("users", "show", self.ids[key]) for key in IDS
        )

    def erase(self, one: str) -> None:
        if one == USER:
            visitors = [word for x in IDS[2:] for word in ("--visitor", self.ids[x])]
            self.command("erase", "user", "--user", self.ids[USER], *visitors, "--yes", known=3)


ACTORS: dict[str, tuple[type[Actor], tuple[str | None, ...]]] = {
    "Public key": (Actor, (None,)),
    "Verified user": (Verified, (None,)),
    "Server key": (ServerKey, (None,)),
    "Link of a user": (Link, (OWN_USER,)),
    "Link of a visitor": (Link, (OWN_VISITOR,)),
    "Link by an address": (AddressLink, (OWN_USER, OWN_VISITOR)),
    "Webhook provider": (Provider, (None,)),
    "Operator": (Operator, (None,)),
}

Row = tuple[tuple[str, ...], Callable[[Actor, tuple[str, ...]], set[str]]]


# ---------------------------------------------------------------------------------------- the rows
def write_events(actor: Actor, ids: tuple[str, ...]) -> set[str]:
    for key in ids:
        actor.send("track", event="Tried", **actor.about(key))
    events = [e for e in actor.server.export("events") if e.get("event") == "Tried"]
    return {one for one in ids if any(e.items() >= actor.about(one).items() for e in events)}


def with_trait(actor: Actor, ids: tuple[str, ...], name: str, value: str) -> set[str]:
    for key in ids:
        actor.send("identify", traits={name: value}, **actor.about(key))
    found = {
        (kind, one["userId" if kind is Kind.USER else "anonymousId"])
        for kind in Kind
        for one in actor.server.export("users" if kind is Kind.USER else "visitors")
        if one["traits"].get(name) == value
    }
    return {one for one in ids if (KINDS[one], actor.ids[one]) in found}


def set_an_address(actor: Actor, ids: tuple[str, ...]) -> set[str]:
    return with_trait(actor, ids, "phone", NUMBER)


def make_an_address_certain(actor: Actor, ids: tuple[str, ...]) -> set[str]:
    """One that :func:`set_an_address` has set."""
    found = set()
    for key in ids:
        shown = preview(actor, key)
        found |= {key for line in shown if line.startswith("addresses:") and NUMBER in line}
    return found


def preview(actor: Actor, one: str) -> list[str]:
    """Return which ids and addresses an erasure of a user would take."""
    options = ("--config", actor.server.config, "--workspace", actor.workspace, "--dry-run")
    return run("erase", "user", "--user", actor.ids[one], *options).stdout.splitlines()


def set_a_protected_trait(actor: Actor, ids: tuple[str, ...]) -> set[str]:
    return with_trait(actor, ids, "plan", "pro")


def link_a_visitor(actor: Actor, ids: tuple[str, ...]) -> set[str]:
    names = {key: f"linked-{actor.ids[key]}" for key in ids}
    for one, name in names.items():
        actor.owner("identify", anonymousId=name, traits={"a": 1})
        actor.send("identify", anonymousId=name, **actor.about(one))
    owners = {x["anonymousId"]: x["userId"] for x in actor.server.export("visitors")}
    return {one for one, name in names.items() if owners[name] == actor.ids[one]}


def link_a_visitor_surely(actor: Actor, ids: tuple[str, ...]) -> set[str]:
    """Of those that :func:`link_a_visitor` has linked."""
    return {key for key in ids if f"anonymous ids: linked-{actor.ids[key]}" in preview(actor, key)}


def read_choices(actor: Actor, ids: tuple[str, ...]) -> set[str]:
    return {key for key in ids if any("subscriptions" in actor.get(x) for x in actor.tried(key))}


def chosen(actor: Actor, ids: tuple[str, ...], group: str, *, on: bool) -> set[str]:
    before = {one: actor.choices(one)[group] for one in ids}
    for key in ids:
        properties = {"subscriptionId": group, "action": "Subscribe" if on else "Unsubscribe"}
        event = "DFSubscriptionChange"
        actor.send("track", event=event, properties=properties, **actor.about(key))
        actor.report("subscribe" if on else "unsub", key)
        for link in actor.tried(key):
            actor.put(link, group, on=on)
    return {one for one in ids if before[one] is not on and actor.choices(one)[group] is on}


def subscribe(actor: Actor, ids: tuple[str, ...]) -> set[str]:
    return chosen(actor, ids, "offers", on=True)


def unsubscribe(actor: Actor, ids: tuple[str, ...]) -> set[str]:
    return chosen(actor, ids, "news", on=False)


def suppress(actor: Actor, ids: tuple[str, ...]) -> set[str]:
    """What the links of :func:`unsubscribe` did for the address, or a report of spam does."""
    for key in ids:
        actor.report("spam", key)
    shown = {one: actor.get(actor.links(one, actor.secret)[1])["suppressions"] for one in ids}
    return {one for one in ids if any(x["groupId"] != "product" for x in shown[one])}


def see_suppressions(actor: Actor, ids: tuple[str, ...]) -> set[str]:
    return {key for key in ids if any(actor.get(x).get("suppressions") for x in actor.tried(key))}


def delivered(actor: Actor, ids: tuple[str, ...], prefix: str) -> set[str]:
    found = set()
    for key in ids:
        name = f"{prefix}-{actor.ids[key]}"
        actor.send("identify", traits={"email": f"{name}@example.com"}, **actor.about(key))
        item = {"event": "open", "_id": name, "msg": {"email": f"{name}@example.com"}}
        actor.mandrill(item, f"mandrill-{actor.workspace}")
        events = [e for e in actor.server.export("events") if name in json.dumps(e)]
        deliveries = [e for e in events if e["type"] == "track"]
        assert len(deliveries) == 1
        if deliveries[0].get("userId") == actor.ids[key]:
            found.add(key)
    return found


def get_new_deliveries(actor: Actor, ids: tuple[str, ...]) -> set[str]:
    return delivered(actor, ids, "new")


def get_deliveries_of_others(actor: Actor, ids: tuple[str, ...]) -> set[str]:
    for key in ids:
        name = f"claimed-{actor.ids[key]}"
        actor.owner("identify", userId=f"owner-{name}", traits={"email": f"{name}@example.com"})
        if isinstance(actor, Operator):
            actor.command("users", "remove-trait", f"owner-{name}", "email")
    return delivered(actor, ids, "claimed")


def export(actor: Actor, ids: tuple[str, ...]) -> set[str]:
    read = "".join(actor.export(actor.ids[key]) for key in ids if KINDS[key] is Kind.USER)
    return {key for key in ids if f"the note of {actor.ids[key]}" in read}


def erase(actor: Actor, ids: tuple[str, ...]) -> set[str]:
    for key in ids:
        actor.erase(key)
    users = {x["userId"] for x in actor.server.export("users")}
    visitors = {x["anonymousId"] for x in actor.server.export("visitors")}
    return {x for x in ids if actor.ids[x] not in (users if KINDS[x] is Kind.USER else visitors)}


USERS = (OWN_USER, USER)
#: In the order of the table.
ROWS: tuple[Row, ...] = (
    (IDS, write_events),
    (IDS, set_an_address),
    (USERS, make_an_address_certain),
    (IDS, set_a_protected_trait),
    (USERS, link_a_visitor),
    (USERS, link_a_visitor_surely),
    (IDS, read_choices),
    (IDS, subscribe),
    (IDS, unsubscribe),
    (IDS, suppress),
    (IDS, see_suppressions),
    (USERS, get_new_deliveries),
    (USERS, get_deliveries_of_others),
    (IDS, export),
    # One erasure takes some seconds.
    (IDS[1:], erase),
)


def table() -> dict[str, list[str]]:
    """Return each column, without the first one."""
    text = PAGE.read_text("utf-8")
    lines = text[text.index("| Public key |") :].partition("\n\n")[0].splitlines()
    head, _, *rows = [[x.strip() for x in line.strip("|").split("|")] for line in lines]
    assert len(rows) == len(ROWS)
    names = head[-len(ACTORS) :]
    return {name: [row[-len(names) + n] for row in rows] for n, name in enumerate(names)}


def test_the_table_has_each_kind_of_client() -> None:
    assert [*table()] == [*ACTORS]


@pytest.mark.parametrize("name", ACTORS)
def test_each_cell_says_what_a_client_reaches(server: Server, name: str) -> None:
    make, links = ACTORS[name]
    for number, named in enumerate(links):
        actor = make(server, f"{name} {number}".replace(" ", "-").lower(), named)
        wrong = []
        for (ids, probe), cell in zip(ROWS, table()[name], strict=True):
            words = {**WORDS, "whom it names": {str(named)}}
            expected = words[cell] & {*ids}
            reached = probe(actor, ids)
            if reached != expected:
                wrong.append(f"{probe.__name__}: {reached}, and not {cell}")
        assert not wrong, "\n".join(wrong)
