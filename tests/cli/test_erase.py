# SPDX-License-Identifier: Apache-2.0
"""``engage erase`` and ``engage export user``, also beside a server."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import Result

from engage.config import erasures_file as erasures
from engage.people.requests import note_requests
from engage.store.keys import hash_of
from engage.testing.factories import TIME, event, identify, suppression
from support.commands import run
from support.exports import on_store
from support.people import KEY, fill, lines, traces
from support.rules.erasures import change
from support.server_process import KEY as PUBLIC
from support.server_process import SQLITE, start_server
from support.sqlite import config_file


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Make a config with a key, and a store with a person."""
    path = config_file(tmp_path)
    text = path.read_text().replace("[storage]", "[storage]\nwrite_timeout = 2", 1)
    path.write_text(f'[erasures]\nkey = "{KEY}"\n{text}\n[workspaces.webhooks]\n')
    on_store(path, fill)
    return path


#: What is said of a visitor that another user used first.
B1 = "b1 ({0}.001Z to {0}.001Z; events: 1; traits: city; also linked to another user)".format(
    "2025-01-01T00:00:00"
)
LEFT = ["visitors that are left and may be the person's; see --visitor and --linked-visitors:"]


def erase(config: Path, *arguments: str, user: str = "ann") -> Result:
    options = ("--config", config, "--workspace", "acme", "--user", user, "--yes")
    named = ("--address", "ANN@x.org", "--address", "+49 (123)") if user == "ann" else ()
    return run("erase", "user", *options, *named, *arguments)


def test_without_a_terminal_it_needs_yes(config: Path) -> None:
    before = on_store(config, lines)
    options = ("--config", config, "--workspace", "acme", "--user", "ann")
    result = run("erase", "user", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "it needs --yes when there is no terminal" in result.stderr
    assert on_store(config, lines) == before
    assert not config.with_name("engage.toml.erasures").exists()


def test_on_a_terminal_it_asks_first(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda _: True, raising=False)
    command = ("erase", "user", "--config", config, "--workspace", "acme", "--user", "nobody")
    refused = run(*command, "--json", text="n\n")
    assert refused.exit_code == 1
    assert refused.stdout == ""
    assert "Erase nobody in acme for ever?" in refused.stderr
    accepted = run(*command, "--json", text="y\n")
    assert (accepted.exit_code, json.loads(accepted.stdout)["known"]) == (4, False)
    assert "for ever" not in run(*command, "--json", "--yes").stderr


def test_the_addresses_of_the_user_are_named_before_and_after(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("erase", "user", "--config", config, "--workspace", "acme", "--user", "ann")
    preview = [
        *("user: ann", "anonymous ids: a1", "addresses: ann@x.org"),
        "addresses of this user that are left: +49123; see --address",
        *(*LEFT, f"  {B1}"),
    ]
    before = on_store(config, lines)
    result = run(*command, "--address", "ann@x.org", "--dry-run")
    assert (result.exit_code, result.stdout.splitlines()) == (0, preview)
    with monkeypatch.context() as patch:
        patch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda _: True, raising=False)
        result = run(*command, "--address", "ann@x.org", text="n\n")
    assert result.stderr.splitlines()[:6] == preview
    assert on_store(config, lines) == before
    assert not config.with_name("engage.toml.erasures").exists()
    wrong = run(*command, "--yes", "--address", "ann")
    assert wrong.exit_code == 1
    assert "'ann' is neither an e-mail address nor a phone number" in wrong.stderr
    result = run(*command, "--yes", "--address", "ann@x.org")
    assert result.exit_code == 3
    assert result.stdout.splitlines()[-4:] == preview[2:]
    suppressed = run("suppressions", "list", "--config", config, "--workspace", "acme")
    assert "+49123" in suppressed.stdout
    assert "ann@x.org" not in suppressed.stdout


def test_a_preview_of_an_unknown_id_says_so(config: Path) -> None:
    command = ("erase", "user", "--config", config, "--workspace", "acme", "--dry-run")
    result = run(*command, "--user", "nobody")
    assert (result.exit_code, result.stdout.splitlines()[0]) == (
        *(4, "nothing was known of this user id"),
    )
    # Somebody who only made a choice, as an erasure sees it.
    chose = change("c9", "chooser")
    on_store(config, lambda store: store.apply(chose))
    assert run(*command, "--user", "chooser").exit_code == 0


def test_erase_prints_a_receipt_and_notes_the_erasure(config: Path) -> None:
    result = erase(config, "--json")
    assert (result.exit_code, result.stderr) == (3, "")
    receipt = json.loads(result.stdout)
    assert receipt["user"] == hash_of(KEY, "acme", "ann")
    assert (receipt["known"], receipt["overwritten"]) == (True, True)
    assert receipt["erased"]["events"] == 8
    assert on_store(config, traces) == []
    known, _ = erasures.read(config.with_name("engage.toml.erasures"), KEY)
    assert {(one.kind, one.hash) for one in known} >= {
        ("user", receipt["user"]),
        ("visitor", hash_of(KEY, "acme", "a1")),
    }
    assert receipt["addresses"] == ["ann@x.org", "+49123"]
    assert receipt["otherAddresses"] == []
    (left,) = receipt["otherVisitors"]
    assert left == {
        "anonymousId": "b1",
        "firstSeen": "2025-01-01T00:00:00.001Z",
        "lastSeen": "2025-01-01T00:00:00.001Z",
        "events": 1,
        "traits": ["city"],
        "linked": True,
        "otherUsers": True,
    }
    again = erase(config)
    assert again.exit_code == 4
    assert again.stdout.startswith("nothing was known of this user id\nerased: nothing, in ")


def test_visitors_that_may_be_the_users_are_left_until_they_are_named(config: Path) -> None:
    async def claim(store: Any) -> None:
        await store.write(
            [
                event("x1", user_id="ann", anonymous_id="v1", at=5),
                event("x2", anonymous_id="v1", at=6),
                event("x3", anonymous_id="ann", at=7),
            ]
        )

    on_store(config, claim)
    own = "ann ({0}.007Z to {0}.007Z; events: 1; traits: -; not linked, but has the same id as the"
    own = f"{own} user)".format("2025-01-01T00:00:00")
    v1 = "v1 ({0}.006Z to {0}.006Z; events: 1; traits: -)".format("2025-01-01T00:00:00")

    def taken(*arguments: str) -> tuple[str, list[str]]:
        lines = erase(config, "--dry-run", *arguments).stdout.splitlines()
        return lines[1], lines[3:]

    assert taken() == ("anonymous ids: a1", [*LEFT, f"  {own}", f"  {B1}", f"  {v1}"])
    assert taken("--linked-visitors") == ("anonymous ids: a1, v1", [*LEFT, f"  {own}", f"  {B1}"])
    named = ("--visitor", "ann", "--visitor", "b1")
    assert taken(*named) == ("anonymous ids: a1, ann, b1", [*LEFT, f"  {v1}"])
    wrong = erase(config, "--visitor", "email:ann@x.org")
    assert wrong.exit_code == 1
    assert "'email:ann@x.org' is no visitor but an address" in wrong.stderr
    result = erase(config, *named, "--linked-visitors")
    assert result.exit_code == 0
    assert "visitors that are left" not in result.stdout
    assert "events 12" in result.stdout


def test_an_import_writes_to_nobody_who_objected_and_was_erased(config: Path) -> None:
    """The list that is imported still has the address, or somebody else has it now."""

    def must_not() -> str:
        options = ("--config", config, "--workspace", "acme", "--group", "news", "-")
        return run("suppressions", "check", *options, text="ANN@x.org\nbob@x.org\n").stdout

    others = "bob@x.org\tbounce\n"
    over = suppression("ann@x.org", reason="bounce", lifted=True, at=2**40)
    on_store(config, lambda store: store.suppress([over]))
    assert must_not() == f"ANN@x.org\tunsubscribed\n{others}"
    erase(config)
    assert must_not() == f"ANN@x.org\tobjection\n{others}"
    certain = {"engage": {"trusted": ["email"]}}
    later = identify("n1", "new", 2**40, traits={"email": "ann@x.org"}, context=certain)
    on_store(config, lambda store: store.write([later]))
    rows = "identifierKey,identifier,groupId,subscribed\nemail,ann@x.org,news,1\n"
    options = ("--config", config, "--workspace", "acme", "-")
    result = run("subscriptions", "import", *options, text=rows)
    assert (result.exit_code, result.stdout) == (0, "1 choice imported\n")
    assert must_not() == f"ANN@x.org\tobjection\n{others}"


def test_nothing_is_erased_if_the_file_cannot_be_written(config: Path) -> None:
    before = on_store(config, lines)
    (config.parent / "engage.toml.erasures").mkdir()
    result = erase(config)
    assert result.exit_code == 1
    assert result.stderr.startswith("engage: nothing was erased: ")
    assert "engage.toml.erasures cannot be read: Is a directory" in result.stderr
    assert on_store(config, lines) == before


def test_a_config_without_a_key_says_what_to_add(config: Path) -> None:
    config.write_text(config.read_text().partition("\n")[2].partition("\n")[2])
    result = erase(config)
    assert result.exit_code == 1
    assert "nothing was erased: the config has no key" in result.stderr
    assert "add this to" in result.stderr
    assert '[erasures] key = "…"' in result.stderr


def test_a_short_key_is_refused(config: Path) -> None:
    config.write_text(config.read_text().replace(KEY, KEY[:31]))
    result = erase(config)
    assert result.exit_code == 1
    assert "erasures.key: is too short (at least 32)" in result.stderr
    assert KEY[:31] not in result.stderr


def test_erasures_are_repeated_from_a_file(config: Path, tmp_path: Path) -> None:
    erase(config)
    file = config.with_name("engage.toml.erasures")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    other = config_file(elsewhere)
    other.write_text(f'[erasures]\nkey = "{KEY}"\n{other.read_text()}')
    on_store(other, fill)
    result = run("erase", "--config", other, "--from", file)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "erased: events 8" in result.stdout
    assert on_store(other, traces) == []
    assert "erased: nothing" in run("erase", "--config", other, "--from", file).stdout
    wrong = run("erase", "--config", other, "--from", file, "requests")
    assert wrong.exit_code == 2
    missing = run("erase", "--config", other, "--from", tmp_path / "none")
    assert missing.exit_code == 2
    assert "does not exist" in missing.stderr


def test_requests_of_providers_are_listed(config: Path) -> None:
    names = '\nshopify = {client_secret = "s"}\n'
    text = config.read_text().replace("[workspaces.webhooks]\n", "")
    acme, _, other = text.partition('[[workspaces]]\nid = "other"')
    config.write_text(f'{acme}[workspaces.webhooks]{names}[[workspaces]]\nid = "other"{other}')

    async def ask(store: Any) -> None:
        name: dict[str, Any] = {"event": "Customer Redaction Requested", "user_id": "ann"}
        await store.write(
            [
                event("r1", origin="shopify", at=9, **name),
                event("r2", at=9, **name),
                event("r3", origin="shopify", at=8, **{**name, "user_id": "bob"}),
            ]
        )
        for _ in range(2):
            await note_requests(store, "acme", "segment", ["ann", "eve"], now=TIME)

    on_store(config, ask)
    result = run("erase", "requests", "--config", config, "--workspace", "acme")
    assert (result.exit_code, result.stderr) == (0, "")
    assert sorted(line.split("\t")[1:] for line in result.stdout.splitlines()) == [
        ["segment", "ann"],
        ["segment", "eve"],
        ["shopify", "ann"],
        ["shopify", "bob"],
    ]
    exported = run("export", "user", "--config", config, "--workspace", "acme", "--user", "ann")
    assert {"provider": "segment", "userId": "ann", "record": "erasure-requests"} in [
        json.loads(line) for line in exported.stdout.splitlines()
    ]
    erase(config)
    result = run("erase", "requests", "--config", config, "--workspace", "acme")
    assert [line.split("\t")[1:] for line in result.stdout.splitlines()] == [
        ["segment", "eve"],
        ["shopify", "bob"],
    ]


def test_everything_about_a_user_is_exported(config: Path) -> None:
    options = ("--config", config, "--workspace", "acme")
    result = run("export", "user", *options, "--user", "ann")
    assert result.exit_code == 0
    assert result.stderr.splitlines() == [
        "engage: addresses of this user that are left out: ann@x.org, +49123; see --address",
        f"engage: left out: the visitor {B1}; see --visitor",
    ]
    kinds = [json.loads(line)["record"] for line in result.stdout.splitlines()]
    assert kinds[0] == "users"
    assert kinds.count("events") == 7
    assert "suppressions" not in kinds
    named = run("export", "user", *options, "--user", "ann", "--address", "Ann <ANN@x.org>")
    assert named.stderr.splitlines()[0] == (
        "engage: addresses of this user that are left out: +49123; see --address"
    )
    kinds = [json.loads(line)["record"] for line in named.stdout.splitlines()]
    assert (kinds.count("events"), kinds.count("suppressions")) == (8, 1)
    wider = run("export", "user", *options, "--user", "ann", "--visitor", "b1")
    documents = [json.loads(line) for line in wider.stdout.splitlines()]
    assert {one["anonymousId"] for one in documents if one["record"] == "visitors"} == {"a1", "b1"}
    assert "left out: the visitor" not in wider.stderr
    unknown = run("export", "user", *options, "--user", "nobody")
    assert unknown.exit_code == 1
    assert "nothing is known of the user 'nobody'" in unknown.stderr
    assert run("export", "user", *options).exit_code == 2
    assert run("export", "user", *options, "--user", "ann", "--limit", "1").exit_code == 2
    assert run("export", "events", *options, "--address", "ann@x.org").exit_code == 2
    assert run("export", "events", *options, "--visitor", "b1").exit_code == 2


def test_a_delivery_found_by_an_address_is_counted(config: Path) -> None:
    async def deliver(store: Any) -> None:
        mark: Any = {"context": {"engage": {"foundBy": "email:ann@x.org"}}}
        await store.write([event("x1", user_id="ann", origin="sendgrid", **mark)])

    on_store(config, deliver)
    options = ("--config", config, "--workspace", "acme", "--user", "ann")
    result = run("export", "user", *options)
    text = "engage: left out: 1 record of webhooks found by email:ann@x.org; see --address"
    assert text in result.stderr.splitlines()
    assert '"x1"' not in result.stdout
    assert '"x1"' in run("export", "user", *options, "--address", "ann@x.org").stdout


def test_a_delivery_that_is_left_out_is_not_in_the_profile(config: Path) -> None:
    """The user, or the visitor, may only have claimed the address of somebody else."""

    async def deliver(store: Any) -> None:
        mark: Any = {"context": {"engage": {"foundBy": "email:ann@x.org"}}, "origin": "stripe"}
        theirs = {"iban": "of-another", "city": "of-another"}
        await store.write(
            [
                identify("own", "ann", 5, traits={"city": "Ulm"}),
                identify("x1", "ann", 9, traits=theirs, **mark),
                event("x2", type="identify", anonymous_id="a1", at=9, traits=theirs, **mark),
                event("x3", type="group", user_id="ann", groupId="of-another", at=9, **mark),
            ]
        )

    on_store(config, deliver)
    options = ("--config", config, "--workspace", "acme", "--user", "ann")
    result = run("export", "user", *options)
    assert "of-another" not in result.stdout
    (user,) = [
        one for one in map(json.loads, result.stdout.splitlines()) if one["record"] == "users"
    ]
    assert user["traits"]["city"] == "Ulm"
    assert "of-another" in run("export", "user", *options, "--address", "ann@x.org").stdout


def test_the_state_of_a_key_is_noted(config: Path) -> None:
    for state in ("disable", "enable", "disable"):
        run("keys", state, "--config", config, "--workspace", "acme", "website")
    run("keys", "disable", "--config", config, "--workspace", "acme", "website")
    _, notes = erasures.read(config.with_name("engage.toml.erasures"), None)
    assert [note.state for note in notes] == ["disabled", "enabled", "disabled"]


def test_check_says_why_nobody_can_be_erased(config: Path, tmp_path: Path) -> None:
    """`engage erase` would say it only on the day when someone asks for it."""

    def warning() -> str:
        result = run("check", "--config", config)
        assert result.exit_code == 0
        found = [x for x in result.stdout.splitlines() if x.startswith("erasures\tpeople cannot")]
        return "".join(found).removeprefix("erasures\tpeople cannot be erased: ")

    file = config.with_name("engage.toml.erasures")
    assert warning() == ""
    erase(config, user="bob")
    assert warning() == ""
    text = config.read_text()
    config.write_text(text.replace(KEY, KEY[::-1]))
    assert warning().startswith(f"{file} has at line 1 a hash of another key")
    config.write_text(text.partition("\n")[2].partition("\n")[2])
    assert warning().startswith("the config has no key for erasures; add this to")
    config.write_text(text)
    with file.open("a") as damaged:
        damaged.write("{}\n")
    assert warning().startswith(f"{file} is damaged at line")
    file.unlink()
    file.mkdir()
    assert warning() == f"{file} cannot be read: Is a directory"


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_check_says_that_the_file_cannot_be_written(
    config: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """These tests may run as root, who can write everywhere; a mount may be read-only for all."""
    file = config.with_name("engage.toml.erasures")
    place = file if kind == "file" else file.parent
    if kind == "file":
        file.touch()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != place and access(path, mode))
    result = run("check", "--config", config)
    text = f"{file} cannot be written: {place}: this user may not write to it"
    assert f"erasures\tpeople cannot be erased: {text}\n" in result.stdout


# ----------------------------------------------------------------------------------------- a server
def test_the_message_ids_of_an_erased_user_swallow_no_event_of_another(tmp_path: Path) -> None:
    """Anyone with the public key can use the message ids that a server will use, and be erased."""
    extra = f"""
[[workspaces.write_keys]]
id = "backend"
kind = "server"
sha256 = "{hashlib.sha256(KEY.encode()).hexdigest()}"

[erasures]
key = "{KEY}"
"""
    storage = SQLITE.replace("[storage]", "[storage]\nwrite_timeout = 10", 1)
    with start_server(tmp_path, workers=2, storage=storage, config_extra=extra) as server:

        def orders(**ids: str) -> list[dict[str, Any]]:
            return [
                {"type": "track", "event": "Order Completed", "messageId": f"order-{n}", **ids}
                for n in range(100)
            ]

        def send(items: Any, key: str) -> Any:
            answer = server.post("/v1/batch", {"batch": items}, key=key)
            assert (answer.status_code, answer.json()["rejected"]) == (200, [])
            return answer.json()

        own = [*orders(userId="mallory")[:50], *orders(anonymousId="m-1")[50:]]
        assert send(own, PUBLIC)["accepted"] == 100
        link = {"userId": "mallory", "anonymousId": "m-1", "messageId": "link"}
        assert server.post("/v1/identify", link).status_code == 200
        options = ("--config", server.config, "--user", "mallory", "--visitor", "m-1")
        result = run("erase", "user", *options, "--yes", "--json")
        receipt = json.loads(result.stdout)
        assert receipt["erased"]["events"] == 101
        # It waited for no request.
        assert receipt["seconds"] < 20
        assert send(own, PUBLIC)["duplicates"] == 100
        assert server.export("dead-letters") == []
        theirs = orders(userId="victim")
        assert server.post("/v1/track", theirs[0], key=KEY).json()["success"]
        assert send(theirs, KEY)["duplicates"] == 100
        kept = server.export("dead-letters")
        assert server.export("events") == []
    found = sorted(
        (one["messageId"], one["userId"], json.loads(one["item"])["event"]) for one in kept
    )
    assert found == sorted((one["messageId"], "victim", "Order Completed") for one in theirs)
    assert {one["reason"] for one in kept} == {"message_id_conflict"}
    report = run("verify", "--config", server.config)
    assert report.exit_code == 0, report.stderr


@pytest.mark.long
def test_a_user_whose_events_arrive_is_erased_up_to_the_receipt(tmp_path: Path) -> None:
    """500 events a second of the same user arrive while it is erased."""
    extra = f'[erasures]\nkey = "{KEY}"\n'
    with start_server(tmp_path, workers=2, config_extra=extra) as server:
        stop = threading.Event()
        sent: list[int] = []

        def send(number: int) -> None:
            with httpx.Client(base_url=server.url, timeout=60) as client:
                send_all(number, client)

        def send_all(number: int, client: httpx.Client) -> None:
            count = 0
            while not stop.is_set():
                began = time.monotonic()
                batch = [
                    {
                        "type": "identify",
                        "userId": "ann",
                        "anonymousId": f"a{number}",
                        "messageId": f"m{number}-{count}-{n}",
                        "traits": {f"t{(count + n) % 7}": count},
                    }
                    for n in range(25)
                ]
                answer = client.post(
                    "/v1/batch", json={"batch": batch}, headers={"Authorization": auth}
                )
                assert answer.status_code == 200
                sent.append(25)
                count += 1
                time.sleep(max(0.0, 0.1 - (time.monotonic() - began)))

        auth = server.authorization
        threads = [threading.Thread(target=send, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(2)
        options = ("--config", server.config, "--json", "--yes")
        result = run("erase", "user", "--user", "ann", *options)
        time.sleep(1)
        stop.set()
        for thread in threads:
            thread.join()
        assert result.exit_code == 0, result.stderr
        receipt = json.loads(result.stdout)
        events = server.export("events")
        path = server.config.with_name("engage.db")
        with contextlib.closing(sqlite3.connect(path)) as db:
            query = "SELECT count(*) FROM events WHERE type = 'erased'"
            (gone,) = db.execute(query).fetchone()
        # Those that were on their way are erased as well.
        assert 0 < receipt["erased"]["events"] <= gone
        assert len(events) + gone == sum(sent)
        assert min(one["receivedAt"] for one in events) >= receipt["erasedBefore"]
        (user,) = server.export("users")
        expected: dict[str, Any] = {}
        for found in sorted(events, key=lambda one: (one["timestamp"], one["messageId"])):
            expected |= found["traits"]
        assert user["traits"] == expected
        assert user["anonymousIds"] == ["a0", "a1"]
