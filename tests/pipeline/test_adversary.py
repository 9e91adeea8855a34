# SPDX-License-Identifier: Apache-2.0
"""Whoever has the public key, a user, a visitor and signed links of its own reaches no choice of
another person, and nothing that others sent or chose reaches it: random histories with and without
it are compared.

What it can do is in docs/security.md: it makes events, traits and links by events that name the ids
of others. The owner's servers pass on its cookies, and operators answer its requests."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import orjson
import pytest

from engage.api import EngageError, Kind, StorageContext, Subject
from engage.config import Workspace, WriteKey
from engage.errors import ApiError
from engage.keys.auth import Principal
from engage.people import erase
from engage.people.addresses import named_addresses
from engage.people.person import export_person
from engage.pipeline.operator import decide_link
from engage.subscriptions.links import BY_ID, subscription_hash
from engage.testing import MemoryStore
from engage.testing.factories import all_pages, user, visitor
from support import people
from support.identity import SECRET as IDENTITY_SECRET
from support.identity import hash_of
from support.memory_store import events_of
from support.pipeline import ACME, NOW, Core, make_core, send_event

#: The same text is a user of one person and a visitor of another.
OTHERS = (user("ann"), user("bob"), visitor("a-1"), visitor("b-1"), user("m-1"))
OWN = (user("mallory"), visitor("m-2"))
#: Texts of others' user ids as anonymous ids. What an unsubscription of such a user does to these
#: visitors is not compared: links of earlier versions could not tell them apart.
COPIES = (visitor("ann"), visitor("m-1"))
#: What earlier versions signed for the visitor of the adversary.
OLD = user("m-2")
PEOPLE = (*OTHERS, *OWN, *COPIES, OLD)
ADDRESSES = {one: f"{one.id}-{one.kind}@example.com" for one in PEOPLE}
GROUPS = ("news", "offers")
#: Users of others, with their visitors.
PAIRS = (("ann", "a-1"), ("bob", "b-1"))
LINKS: dict[Kind, str] = {kind: key for key, kind in BY_ID.items()}

BACKEND = WriteKey(id="backend", kind="server", sha256="0" * 64)
KEYS = (*ACME.write_keys, BACKEND)
CONTEXT = StorageContext(base_dir=Path(), identifiers={"acme": ("email",)})
#: The second workspace has the same ids, and another secret. All its links are the adversary's.
ELSEWHERE = dataclasses.replace(ACME, id="elsewhere", subscription_secrets=("of elsewhere",))


def workspaces(*, verified: bool) -> tuple[Workspace, Workspace]:
    acme = dataclasses.replace(ACME, write_keys=KEYS)
    if verified:
        secrets: Any = {"identity_secrets": (IDENTITY_SECRET,), "verify_identity": "required"}
        acme = dataclasses.replace(acme, **secrets)
    return acme, ELSEWHERE


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    own: bool
    kind: Literal["event", "choice", "unlink", "link", "erasure"]
    #: The fields of an event; the body of a choice; or what an operator names.
    fields: dict[str, Any]
    workspace: str = "acme"
    by_server: bool = False


def link_of(
    subject: Subject,
    *,
    by_address: bool = False,
    named: bool = True,
    workspace: Workspace = ACME,
    expires: int | None = None,
) -> dict[str, Any]:
    """Return the link of a user or visitor.

    :param named: whether one by an address has the id, too.
    """
    key = "email" if by_address else LINKS[subject.kind]
    signed: dict[str, Any] = {
        "workspace_id": workspace.id,
        "identifier": ADDRESSES[subject] if by_address else subject.id,
        "identifier_key": key,
        "expires": expires,
    }
    link = {
        "workspaceId": workspace.id,
        "identifier": signed["identifier"],
        "identifierKey": key,
        "hash": subscription_hash(workspace.subscription_secrets[0], subject=subject, **signed),
    }
    if expires is not None:
        link["expires"] = expires
    if by_address and subject.kind is Kind.VISITOR:
        link["v"] = True
    if named:
        link["userId" if subject.kind is Kind.USER else "anonymousId"] = subject.id
    return link


def history(seed: int, *, verified: bool) -> list[Step]:
    """Return what people do, and what the adversary does in between."""
    some = random.Random(seed)

    def choice(*, own: bool) -> Step:
        everyone: tuple[Subject, ...] = OTHERS
        workspace = ACME
        if own:
            everyone = (*OWN, *COPIES, OLD)
            if some.random() < 0.15:
                everyone, workspace = PEOPLE, ELSEWHERE
        forms: Any = {
            "by_address": some.random() < 0.4,
            # Without the id, a link finds whom an event has given the address.
            "named": not own or some.random() < 0.6,
            "workspace": workspace,
            "expires": some.choice([None, None, None, NOW // 1000 - 1, NOW // 1000 + 999]),
        }
        whose = some.choice(everyone)
        body = link_of(whose, **forms)
        if own and some.random() < 0.3:
            # One member of a link of somebody else, and the other way round with old forms.
            alike = [one for one in PEOPLE if one.id == whose.id] if some.random() < 0.5 else PEOPLE
            other = link_of(some.choice(alike), by_address=some.random() < 0.4)
            name = some.choice([*({*other, "v"} - {"hash"})])
            body[name] = other.get(name, name == "v" and not body.get("v"))
        body["changes"] = {
            one: some.random() < 0.5 for one in some.sample(GROUPS, some.randint(1, 2))
        }
        if some.random() < 0.3:
            body["messageId"] = f"c-{some.randint(1, 3)}"
        return Step(own=own, kind="choice", fields=body)

    def event(*, own: bool) -> Step:
        # Anyone can name any id and any address.
        known = PEOPLE if own else OTHERS
        ids = [one.id for one in known]
        kind = some.choice(("identify", "track", "alias", "group"))
        fields: dict[str, Any] = {"type": kind}
        fields |= {"userId": some.choice([None, *ids]), "anonymousId": some.choice([None, *ids])}
        sent_by = "sent by the adversary" if own else "sent by others"
        context: dict[str, Any] = {"app": {"name": sent_by}}
        if kind == "identify":
            fields["traits"] = {"email": ADDRESSES[some.choice(known)], "note": sent_by}
        fields |= {"track": {"event": "e"}, "group": {"groupId": "g"}}.get(kind, {})
        if kind == "alias":
            fields["previousId"] = some.choice(ids)
        by_server = some.random() < 0.2
        if by_server and own:
            # The server of the owner knows who is signed in, and believes the cookie.
            fields |= {"type": "track", "event": "e", "userId": OWN[0].id}
            fields.pop("traits", None)
        elif by_server:
            pair = some.choice(PAIRS)
            fields |= {"type": "identify", "userId": pair[0], "anonymousId": pair[1]}
            if "traits" in fields:
                fields["traits"]["email"] = ADDRESSES[user(pair[0])]
        elif some.random() < 0.3:
            fields["messageId"] = f"e-{some.randint(1, 4)}"
        if verified and not by_server and fields["userId"] is not None:
            # The adversary has one hash.
            hashed = OWN[0].id if own else fields["userId"]
            context["userHash"] = hash_of(hashed)
        fields = {name: value for name, value in fields.items() if value}
        workspace = "elsewhere" if own and not by_server and some.random() < 0.1 else "acme"
        return Step(
            own=own,
            kind="event",
            fields={**fields, "context": context},
            workspace=workspace,
            by_server=by_server,
        )

    def step() -> Step:
        own = some.random() < 0.6
        what = some.random()
        if what < 0.4:
            return choice(own=own)
        if what < 0.9:
            return event(own=own)
        if what < 0.96:
            if own:
                fields = {"user": OWN[0].id, "name": some.choice(PEOPLE).id}
                return Step(own=True, kind="unlink", fields=fields)
            whom, name = some.choice(PAIRS)
            decision: Any = some.choice(("link", "unlink"))
            return Step(own=False, kind=decision, fields={"user": whom, "name": name})
        whom = OWN[0].id if own else some.choice(("ann", "bob"))
        return Step(own=own, kind="erasure", fields={"user": whom})

    return [step() for _ in range(some.randint(4, 24))]


class Play:
    """A store on which a part of a history happens."""

    def __init__(self, store: Any, folder: Path, *, verified: bool) -> None:
        self.acme, elsewhere = workspaces(verified=verified)
        self.now = NOW
        self.store = store
        clock = lambda: self.now  # noqa: E731
        self.core: Core = make_core(
            store, clock=clock, workspace=self.acme, other=elsewhere, erasures_key=people.KEY
        )
        config = people.config(folder, write_timeout=0.0)
        self.config = dataclasses.replace(config, workspaces=(self.acme, elsewhere))
        config.path.with_name("engage.toml.erasures").unlink(missing_ok=True)

    async def run(self, steps: Sequence[Step], wanted: Callable[[Step], bool]) -> None:
        for number, step in enumerate(steps):
            self.now = NOW + 1000 * number
            if wanted(step):
                # Such as an event without an id, or a link that is none.
                with contextlib.suppress(ApiError):
                    await self._do(step)

    async def _do(self, step: Step) -> None:
        fields = step.fields
        match step.kind:
            case "event":
                workspace = self.acme if step.workspace == "acme" else ELSEWHERE
                key = BACKEND if step.by_server else workspace.write_keys[0]
                principal = Principal(workspace, key)
                await send_event(self.core, fields, fields["type"], principal=principal)
            case "choice":
                await self.core.pipeline.subscriptions(orjson.dumps(fields))
            case "link" | "unlink":
                linked = step.kind == "link"
                ids = fields["user"], fields["name"]
                if not step.own:
                    # An operator cannot decide about a link that only the adversary has made.
                    event = {"userId": ids[0], "anonymousId": ids[1], "context": {}}
                    principal = Principal(self.acme, BACKEND)
                    await send_event(self.core, event, "identify", principal=principal)
                with contextlib.suppress(EngageError):  # There is no such link.
                    await decide_link(self.store, "acme", *ids, linked=linked, now=self.now)
            case "erasure":
                whom: Any = self._named(fields["user"])
                config, actor = self.config, people.ACTOR
                with mock.patch.object(erase, "_now", return_value=self.now):
                    await erase.erase_user(
                        self.store, config, "acme", fields["user"], actor=actor, **whom
                    )

    @staticmethod
    def _named(user_id: str) -> dict[str, Any]:
        """Return what an operator names who has asked the person."""
        addresses = named_addresses([ADDRESSES[user(user_id)]])
        visitors = {"mallory": ["m-2"]}.get(user_id, [])
        return {"addresses": addresses, "visitors": visitors}

    async def shown(self, subjects: Sequence[Subject], *, by_id: bool = True) -> Any:
        """Return what the links of some people show, and their history.

        :param by_id: also what is suppressed for links by an id, of addresses that are certain.
        """
        found: dict[Any, Any] = {}
        for subject in subjects:
            for by_address in (False, True):
                link = {**link_of(subject, by_address=by_address), "changes": {}}
                person = await self.core.pipeline.person(link)
                shown = await self.core.pipeline.preferences(person)
                found[subject, by_address] = dict(shown.choices)
                suppressed = shown.suppressions
                if by_address or by_id:
                    found[subject, by_address, "suppressed"] = suppressed
            records = await all_pages(self.store.history, "acme", subject)
            found[subject, "history"] = [dataclasses.replace(x, change_id="") for x in records]
        return found

    async def certain(self, user_id: str) -> set[str]:
        """Return the addresses of a user that are certain."""
        found = await self.store.certain("acme", user_id)
        return {one for one in found.values() if one is not None}

    async def exported(self, user_id: str, *kinds: str) -> list[dict[str, Any]]:
        """Return the access export of a user, of some kinds or of all."""
        whom = self._named(user_id)
        lines = [
            orjson.loads(line)
            async for line in export_person(self.store, self.acme, user_id, **whom)
        ]
        for line in lines:
            line.pop("changeId", None)
        return [line for line in lines if not kinds or line["record"] in kinds]


CHOSEN = "subscriptions", "subscription-history", "suppressions"


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("verified", [False, True])
@pytest.mark.parametrize("part", range(2))
async def test_nobody_reaches_the_choices_of_others(
    part: int, verified: bool, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    for seed in range(part, pytestconfig.getoption("--histories") // 2, 2):
        steps = history(seed, verified=verified)
        everything, others, own = (
            Play(MemoryStore(None, CONTEXT), tmp_path, verified=verified) for _ in range(3)
        )
        await everything.run(steps, lambda _: True)
        await others.run(steps, lambda one: not one.own)
        await own.run(steps, lambda one: one.own)
        # Without a hash, the adversary can give a user an address, which is then not certain.
        theirs = await everything.shown(OTHERS, by_id=verified)
        assert theirs == await others.shown(OTHERS, by_id=verified), seed
        assert await everything.shown(OWN) == await own.shown(OWN), seed
        for one in ("ann", "bob"):
            chosen = await everything.exported(one, *CHOSEN)
            assert chosen == await others.exported(one, *CHOSEN), seed
            assert await everything.certain(one) <= {ADDRESSES[user(one)]}, seed
        assert await everything.certain("mallory") == set(), seed
        mine = await everything.exported("mallory")
        assert "sent by others" not in str(mine), seed
        chosen = [one for one in mine if one["record"] in CHOSEN]
        assert chosen == await own.exported("mallory", *CHOSEN), seed
        if verified:
            ids = {one.id for one in OTHERS if one.kind is Kind.USER}
            events = [x.document() for x in events_of(everything.store).values()]
            named = [x for x in events if x["workspaceId"] == "acme" and x.get("userId") in ids]
            assert "sent by the adversary" not in str(named), seed
