# SPDX-License-Identifier: Apache-2.0
"""A whole server with a log in front of its storage, over HTTP. The log is in memory."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engage.api import (
    DeadLetter,
    Event,
    Kind,
    StorageIncompatible,
    StorageMissing,
    StorageUnavailable,
    Subject,
    is_restated,
)
from engage.app import App, build
from engage.config import load
from engage.keys import table as keys_module
from engage.log import lag as log_lag
from engage.pipeline import ingest as ingest_module
from engage.subscriptions.links import subscription_hash
from support.exports import registry
from support.http_client import Answer
from support.log_loading import items_of
from support.log_loading import load as load_log
from support.memory_log import MemoryBroker
from support.server_inprocess import Meddling, Serving, Valve, serving
from support.server_process import KEY, SECRET, config_text
from support.waiting import eventually

SUBSCRIPTIONS = "/api/public/subscription-management/user-subscriptions"
GROUPS = """
[[workspaces.subscription_groups]]
id = "news"
name = "News"
channel = "email"
type = "opt_in"
"""
WEBHOOK = """
[workspaces.webhooks.postmark]
header = "X-Secret"
value = "a-secret-of-postmark"
"""
HOUR = 3_600_000
#: Every method of a store that a server with a log calls.
METHODS = (
    *("open", "check", "write", "find", "find_users", "holders", "apply", "state", "keep"),
    *("records_version", "list_records", "put_record", "get_record", "put_counts"),
)


def overloaded(answer: Answer, code: str = "overloaded") -> bool:
    """Return whether an answer is a 503 that a client repeats later."""
    assert (answer.status, answer.json["code"]) == (503, code)
    assert int(answer.headers["retry-after"]) >= 1
    return True


def no_log(answer: Answer) -> bool:
    """Return whether an answer says that the log is away."""
    return _away(answer, "the event log in front of the storage")


def no_store(answer: Answer) -> bool:
    """Return whether an answer says that the storage is away."""
    return _away(answer, "the storage")


def _away(answer: Answer, what: str) -> bool:
    assert answer.json["message"].startswith(f"{what} is unavailable and nothing was acknowledged")
    return overloaded(answer, "storage_unavailable")


def user_of(broker: MemoryBroker, partition: int, prefix: str = "u") -> str:
    """Return a user whose events are in a partition."""
    users = (f"{prefix}{number}" for number in range(1000))
    return next(u for u in users if broker.partition_of(f"acme:{u}".encode()) == partition)


def events_of(broker: MemoryBroker) -> list[Event]:
    return [item for item in items_of(broker) if isinstance(item, Event)]


def letters_of(broker: MemoryBroker) -> list[DeadLetter]:
    return [item for item in items_of(broker) if isinstance(item, DeadLetter)]


def put(server: Serving, **changed: Any) -> Any:
    """Change a subscription of a user with an e-mail address."""
    values: dict[str, Any] = {
        "workspaceId": "acme",
        "identifier": "ann@example.com",
        "identifierKey": "email",
        "changes": {"news": True},
        **changed,
    }
    values.setdefault(
        "hash",
        subscription_hash(
            SECRET,
            subject=Subject(Kind.USER, values.pop("user", "ann")),
            workspace_id="acme",
            identifier=values["identifier"],
            identifier_key=values["identifierKey"],
        ),
    )
    return server.send(SUBSCRIPTIONS, values, method="PUT", key=None)


async def readyz(server: Serving) -> Answer:
    return await server.send("/readyz", method="GET", key=None)


async def identify(server: Serving, user: str = "ann", email: str = "ann@example.com") -> None:
    answer = await server.send("/v1/identify", {"userId": user, "traits": {"email": email}})
    assert answer.status == 200


# ------------------------------------------------------------------------------------- events
async def test_requests_that_fail_leave_nothing_for_the_garbage_collector(tmp_path: Path) -> None:
    """During an outage there is little else to collect, and the events may have megabytes."""
    broker = MemoryBroker()
    one = {"type": "track", "event": "E", "userId": "u"}
    bodies = {"/v1/batch": {"batch": [one] * 5}, "/v1/track": one}

    def events() -> int:
        return sum(type(thing) is Event for thing in gc.get_objects())

    async with serving(tmp_path, broker=broker, storage="write_timeout = 2") as server:
        broker.leaderless.update(broker.ends())
        gc.collect()
        before = events()
        gc.disable()
        try:
            sent = [server.send(path, body) for path, body in bodies.items()]
            assert all(map(no_log, await asyncio.gather(*sent)))
            await eventually(lambda: events() <= before)
        finally:
            gc.enable()


async def test_an_event_is_acknowledged_when_it_is_in_the_log(tmp_path: Path) -> None:
    """It is in the store after the loader has run, once, however often it was sent."""
    broker = MemoryBroker()
    async with serving(tmp_path, broker=broker) as server:
        for _ in range(2):
            assert (await server.track(messageId="m")).json == {"success": True, "messageId": "m"}
        batch = {"batch": [{"type": "track", "userId": "u", "event": "E", "messageId": "m"}] * 3}
        answer = await server.send("/v1/batch", batch)
        assert (answer.status, answer.json["accepted"], answer.json["duplicates"]) == (200, 3, 0)
        assert len(events_of(broker)) == 5
        assert await server.events() == []
        await load_log(broker, server.app.store)
        assert [event.message_id for event in await server.events()] == ["m"]


async def test_a_log_that_is_down_is_a_503(tmp_path: Path) -> None:
    broker = MemoryBroker()
    async with serving(tmp_path, broker=broker) as server:
        assert (await readyz(server)).status == 200
        broker.down = True
        assert no_log(await server.track())
        broken = await server.send("/v1/track", {"userId": "u"})  # its letter is not durable
        assert no_log(broken)
        broker.down = False
        assert (await server.track()).status == 200


# -------------------------------------------------------------------------------- the backlog
async def test_events_are_refused_while_the_oldest_record_is_too_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Subscription changes, health and reads go on. ``log/test_lag.py`` has the bound."""
    monkeypatch.setattr(log_lag, "POLL_SECONDS", 0.02)
    broker = MemoryBroker(
        retention=24 * HOUR, clock=lambda: time.time_ns() // 1_000_000 - 11 * HOUR
    )
    async with serving(tmp_path, broker=broker, config_extra=GROUPS) as server:

        async def overdue() -> str:
            answer = await readyz(server)
            assert answer.status == 200
            return str(answer.json["overdue"])

        await identify(server)
        await load_log(broker, server.app.store, "somebody else")
        assert (await server.track()).status == 200
        assert await overdue() == "False"
        broker.retention = 20 * HOUR
        await until(overdue, "True")
        large = [{"type": "track", "userId": "u", "event": "E" * 1000}] * 500
        for answer in (
            await server.track(),
            await server.send("/v1/batch", {"batch": large}),
            await server.send(
                "/v1/track", {"userId": "u", "event": "E", "writeKey": KEY}, key=None
            ),
            await server.send("/v1/track", {"userId": "u"}),
        ):
            assert overloaded(answer)
            assert "behind the log" in answer.json["message"]
            assert int(answer.headers["retry-after"]) >= 5
        assert (await put(server)).status == 200
        broker.commit("engage", broker.ends())
        await until(overdue, "False")
        assert (await server.track()).status == 200


# -------------------------------------------------------------------------------- dead letters
async def test_refused_events_become_letters_in_the_log(tmp_path: Path) -> None:
    broker = MemoryBroker()
    async with serving(tmp_path, broker=broker) as server:
        answer = await server.send("/v1/track", {"userId": "u", "messageId": "x"})
        assert (answer.status, answer.json["code"]) == (400, "invalid_payload")
        items = [{"type": "track", "userId": "u", "event": "E", "messageId": "y"}, {"type": "?"}]
        answer = await server.send("/v1/batch", {"batch": items})
        assert (answer.status, answer.json["accepted"], len(answer.json["rejected"])) == (200, 1, 1)
        assert len(letters_of(broker)) == 2
        assert await server.dead_letters() == []
        await load_log(broker, server.app.store)
        assert len(await server.dead_letters()) == 2
        # A letter that is not durable is not acknowledged, as without a log.
        broker.failing.add("append")
        assert no_log(await server.send("/v1/track", {"userId": "u", "messageId": "z"}))
        strict = {"X-Strict-Mode": "1"}
        answer = await server.send("/v1/track", {"userId": "u"}, headers=strict)
        assert answer.status == 400


async def test_deliveries_are_appended(tmp_path: Path) -> None:
    """With the user of their address as the store knows it; untranslated ones as letters."""
    broker = MemoryBroker()
    async with serving(tmp_path, broker=broker, workspace=WEBHOOK) as server:
        await identify(server)
        secret = {"X-Secret": "a-secret-of-postmark"}

        async def deliver(**record: Any) -> Answer:
            values = {"RecordType": "Bounce", "Type": "HardBounce", "Email": "ann@example.com"}
            return await server.send(
                "/api/public/webhooks/postmark", {**values, **record}, key=None, headers=secret
            )

        answer = await deliver(MessageID="1")
        assert (answer.status, answer.json["accepted"]) == (200, 1)
        await load_log(broker, server.app.store)
        await deliver(MessageID="2")
        assert (await deliver(RecordType=None)).status == 200
        bounces = {one.message_id: one for one in events_of(broker) if one.origin == "postmark"}
        # The first one came before its user was loaded: reads lag.
        assert sorted(str(bounce.user_id) for bounce in bounces.values()) == ["None", "ann"]
        # Two reports of a hard bounce are no conflict, and the loader must know.
        records = [
            record.record
            for record in broker.records
            if b"postmark" in record.record.headers.get("meta", b"")
        ]
        assert all(map(is_restated, records))
        [letter] = letters_of(broker)
        assert (letter.origin, letter.truncated) == ("postmark", False)


# ------------------------------------------------------------------------- the store is away
async def test_events_are_accepted_while_the_store_is_away(tmp_path: Path) -> None:
    """It goes away later. What needs it is a 503; the server stays ready, and shows it."""
    broker, valve = MemoryBroker(), Valve(*METHODS)
    async with serving(
        tmp_path, broker=broker, meddle=valve, workspace=WEBHOOK, config_extra=GROUPS
    ) as server:
        await identify(server)
        await load_log(broker, server.app.store)
        assert (await put(server)).status == 200
        answer = await readyz(server)
        assert (answer.status, answer.json) == (
            200,
            {"success": True, "storage": "available", "overdue": False},
        )
        valve.error = StorageUnavailable("away")
        for number in range(3):
            assert (await server.track(messageId=f"m{number}")).status == 200
        batch = {"batch": [{"type": "track", "userId": "u", "event": "E"}, {}]}
        assert (await server.send("/v1/batch", batch)).status == 200
        assert no_store(await put(server))
        assert no_store(await put(server, identifierKey="id", identifier="ann"))
        secret = {"X-Secret": "a-secret-of-postmark"}
        bounce = {"RecordType": "Open", "MessageID": "1", "Recipient": "ann@example.com"}
        path = "/api/public/webhooks/postmark"
        assert no_store(await server.send(path, bounce, key=None, headers=secret))
        named = {**bounce, "Metadata": {"userId": "ann"}}
        assert (await server.send(path, named, key=None, headers=secret)).status == 200

        async def shown() -> str:
            answer = await readyz(server)
            assert answer.status == 200
            return str(answer.json["storage"])

        await until(shown, "unavailable")
        valve.error = None
        await until(shown, "available")
        assert (await put(server)).status == 200


async def until(state: Any, wanted: str) -> None:
    async with asyncio.timeout(120):
        while await state() != wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_a_store_that_hangs_is_opened_again(tmp_path: Path) -> None:
    """No write finds out that its connection is dead."""
    valve, opened = Valve("check"), 0

    def meddle(store: Any) -> None:
        valve(store)
        open_store = store.open

        async def counted(*, create: bool) -> None:
            nonlocal opened
            opened += 1
            await open_store(create=create)

        store.open = counted

    async with serving(
        tmp_path, broker=MemoryBroker(), meddle=meddle, storage="write_timeout = 3"
    ) as server:

        async def shown() -> str:
            answer = await readyz(server)
            assert answer.status == 200
            return str(answer.json["storage"])

        await until(shown, "available")
        before = opened
        valve.gate.clear()
        await until(shown, "unavailable")
        await eventually(lambda: opened > before)
        assert (await server.track()).status == 200
        valve.gate.set()
        await until(shown, "available")


async def test_a_server_is_ready_while_its_log_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = MemoryBroker()
    async with serving(tmp_path, broker=broker) as server:
        assert (await readyz(server)).status == 200
        monkeypatch.setattr(server.app.readiness, "_clock", lambda: time.monotonic() + 60)
        broker.leaderless.add(2)
        assert no_log(await readyz(server))
        broker.leaderless.clear()
        broker.weak = "min.insync.replicas"
        assert no_log(await readyz(server))
        broker.weak = None
        assert (await readyz(server)).status == 200


@contextlib.asynccontextmanager
async def starting_without_store(
    folder: Path, broker: MemoryBroker, **options: Any
) -> AsyncIterator[tuple[Serving, Valve]]:
    """Start a server whose store is away."""
    valve = Valve(*METHODS)
    valve.error = StorageUnavailable("away")
    async with serving(folder, broker=broker, meddle=valve, works=False, **options) as server:
        yield server, valve


async def test_a_server_that_starts_while_its_store_is_down_waits_for_the_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key of the config may be disabled in the store."""
    monkeypatch.setattr(keys_module, "WAIT_SECONDS", 0.2)
    monkeypatch.setattr(ingest_module, "REOPEN_PAUSE", 0.05)
    broker = MemoryBroker()
    async with starting_without_store(tmp_path, broker) as (server, valve):
        assert no_store(await server.track())
        assert no_store(await readyz(server))
        valve.error = None
        await eventually(lambda: server.app.keys.loaded)
        assert (await server.track()).status == 200
        # A server that runs goes on without its store.
        valve.error = StorageUnavailable("down")
        assert (await server.track()).status == 200
        assert (await readyz(server)).status == 200
    assert len(events_of(broker)) == 2


# ------------------------------------------------------------------------ subscription changes
async def test_a_change_waits_until_its_user_is_loaded(tmp_path: Path) -> None:
    broker = MemoryBroker()
    async with serving(tmp_path, broker=broker, config_extra=GROUPS) as server:
        await identify(server)
        change = asyncio.create_task(put(server))
        await eventually(lambda: broker.calls["committed"] > 1)
        assert not change.done()
        await load_log(broker, server.app.store)
        answer = await change
        assert (answer.status, answer.json["subscriptions"]) == (200, {"news": True})
        # A user that is loaded is found without asking the log.
        calls = broker.calls["ends"]
        assert (await put(server)).status == 200
        assert broker.calls["ends"] == calls


async def test_a_change_is_a_503_if_the_loaders_are_behind_and_a_401_if_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engage.log.catch_up.MAX_SECONDS", 0.3)
    broker = MemoryBroker(3)
    async with serving(tmp_path, broker=broker, config_extra=GROUPS) as server:
        await identify(server)
        started = time.monotonic()
        assert overloaded(await put(server))
        assert time.monotonic() - started >= 0.3
        # All partitions count: this one has nothing of the user.
        assert (await server.track(userId=user_of(broker, 0))).status == 200
        assert (await server.track(userId=user_of(broker, 1))).status == 200
        behind = broker.ends()
        await load_log(broker, server.app.store)
        broker.commit("engage", {0: behind[0] - 1})
        assert overloaded(await put(server, user="nobody"))
        broker.commit("engage", behind)
        broker.down = True
        assert no_log(await put(server, user="nobody"))
        broker.down = False
        answer = await put(server, user="nobody")
        assert (answer.status, answer.json["code"]) == (401, "invalid_user_hash")
        assert (await put(server)).status == 200


async def test_a_change_that_looks_no_user_up_does_not_wait(tmp_path: Path) -> None:
    broker = MemoryBroker()
    async with serving(tmp_path, broker=broker, config_extra=GROUPS) as server:
        await identify(server)
        calls = broker.calls["ends"]
        for changed in (
            {"identifierKey": "id", "identifier": "ann"},
            {"userId": "ann"},
            {"identifierKey": "plan"},
            {"workspaceId": "other"},
            {"identifier": " "},
        ):
            answer = await put(server, **changed, hash="0" * 64)
            assert (answer.status, answer.json["code"]) == (401, "invalid_user_hash"), changed
        assert broker.calls["ends"] == calls


async def test_a_user_whose_events_are_not_loaded_can_change_by_id(tmp_path: Path) -> None:
    broker = MemoryBroker()
    async with serving(tmp_path, broker=broker, config_extra=GROUPS) as server:
        await identify(server)
        assert (await put(server, identifierKey="id", identifier="ann")).status == 200
        await load_log(broker, server.app.store)
        store = server.app.store
        profile = await store.profile("acme", "ann")
        assert profile is not None
        assert profile.traits == {"email": "ann@example.com"}


# ------------------------------------------------------------------------------ starting, composing
async def test_a_log_that_could_lose_events_ends_the_start(tmp_path: Path) -> None:
    broker = MemoryBroker()
    broker.weak = "min.insync.replicas"
    with pytest.raises(StorageIncompatible, match=r"min\.insync\.replicas"):
        async with serving(tmp_path, broker=broker):
            pass


def built(folder: Path, plugins: Any) -> App:
    """Compose a server with a log, and do not open it."""
    path = folder / "engage.toml"
    path.write_text(config_text(config_extra='[log]\nbackend = "memory"'))
    return build(load(path), plugins)


async def test_a_worker_that_replaces_another_waits_for_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engage.log.front.REOPEN_PAUSE", 0.02)
    broker = MemoryBroker()
    broker.weak = "min.insync.replicas"
    app = built(tmp_path, Meddling(lambda store: None, broker))
    await app.open(patient=True)
    try:
        assert not await app.readiness.ready()
        broker.weak = None
        await eventually(lambda: broker.calls["open"])
        await asyncio.sleep(1.1)  # a check that failed stands for a second
        assert await app.readiness.ready()
    finally:
        await app.close()
        await app.close()


async def test_a_start_without_creating_needs_the_log(tmp_path: Path) -> None:
    app = built(tmp_path, Meddling(lambda store: None, MemoryBroker(exists=False)))
    with pytest.raises(StorageMissing):
        await app.open(create=False)
    await app.close()


async def test_observers_are_not_called_by_a_server_with_a_log(tmp_path: Path) -> None:
    """The loaders call them: only they know what is stored."""

    class Observing(Meddling):
        def make_observers(self, config: Any) -> Any:
            raise AssertionError("not by a server with a log")

    await built(tmp_path, Observing(lambda store: None, MemoryBroker())).close()


async def test_commands_write_to_the_store_although_there_is_a_log(tmp_path: Path) -> None:
    """They show what became of an event, which only the store knows."""
    broker = MemoryBroker()
    async with serving(tmp_path, broker=broker) as server:
        await server.send("/v1/track", {"userId": "u", "messageId": "x"})
        await load_log(broker, server.app.store)
        [letter] = await server.dead_letters()
        plugins: Any = Meddling(lambda store: None, broker)
        app = build(server.app.config, plugins, direct=True)
        assert app.front is None
        await app.open(create=False)
        try:
            fixed = b'{"userId": "u", "messageId": "x", "event": "E"}'
            replayed = await app.replays.replay(letter, fixed)
            assert replayed.outcome == "stored"
            again = await app.replays.replay(letter, fixed)
            assert again.outcome == "duplicate"
        finally:
            await app.close()
        assert [event.message_id for event in await server.events()] == ["x"]
        assert events_of(broker) == []
        # The same event by way of the log is a duplicate for the loader.
        await server.track(messageId="x", userId="u")
        await load_log(broker, server.app.store)
        assert len(await server.events()) == 1


def test_without_a_log_none_of_its_modules_is_imported(tmp_path: Path) -> None:
    """In a new interpreter, as a worker starts."""
    import subprocess

    path = tmp_path / "engage.toml"
    path.write_text(config_text())
    code = f"""
import sys
from pathlib import Path
from engage.app import App, build
from engage.config import load
from engage.registry import load_plugins
build(load(Path({str(path)!r})), load_plugins())
parts = ("engage.log", "engage.server.load", "aiokafka")
print([name for name in sys.modules if name.startswith(parts)])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert registry().make_log(load(path)) is None
