# SPDX-License-Identifier: Apache-2.0
"""Replays of dead letters: to exactly what they would have been, once, and without loss."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from engage.api import (
    DROP,
    EVENT_TYPES,
    Kind,
    Seen,
    StorageUnavailable,
    Traits,
    WebhookResult,
    render_time,
)
from engage.pipeline.dead_letters import MAX_ITEM
from engage.pipeline.replay import is_delivery, obstacle_of, text_of
from engage.testing.factories import letter as factory_letter
from support.memory_store import MemoryStore
from support.pipeline import NOW, send_event
from support.replay import LATER, Bench, compose, edited, make_bench

BACKENDS = ["sqlite", pytest.param("mongo", marks=pytest.mark.mongo)]
backends = pytest.mark.parametrize("backend", BACKENDS)

#: What a replay changes in a stored event.
CHANGED = ("receivedAt", "messageId")


def same(replayed: dict[str, Any], sent: dict[str, Any], letter_id: str) -> None:
    """Check that a replayed event is the one that would have been stored."""
    context = dict(replayed.pop("context"))
    assert context.pop("engage") == {"replayOf": letter_id}
    if context:
        replayed["context"] = context
    for name in CHANGED:
        replayed.pop(name), sent.pop(name)
    assert replayed == sent


@backends
async def test_a_single_event_without_type_is_replayed_as_it_would_have_been(
    tmp_path: Path, backend: str
) -> None:
    sent = {
        "userId": "u",
        "properties": {"n": 9007199254740993},
        "originalTimestamp": "2026-11-21T09:29:00Z",
        "sentAt": "2026-11-21T09:29:50Z",
        "writeKey": "key-1",
    }
    async with make_bench(tmp_path, backend=backend) as bench:
        error = await bench.send(sent)
        assert error is not None
        assert error.code == "invalid_payload"
        (letter,) = await bench.letters()
        assert (letter.operation, letter.envelope) == ("track", b"{}")
        assert '"n": 9007199254740993' in text_of(letter)
        bench.now += LATER
        text = text_of(letter).replace('"userId"', '"event": "e", "userId"').encode()
        explained = await bench.replays.check(letter, text)
        assert (explained.outcome, explained.accepted) == ("stored", True)
        assert await bench.events() == []
        replayed = await bench.replays.replay(letter, text)
        assert replayed.outcome == "stored"
        assert await bench.letters() == []
        (event,) = await bench.events()
        assert explained.event == event
        assert event.received_at == bench.now
        # The client's clock was 10 seconds late when the letter arrived.
        assert event.timestamp == NOW - 50_000
        bench.now = NOW
        await bench.send({**sent, "event": "e"})
        first, second = sorted(await bench.documents(), key=lambda one: one["receivedAt"])
        same(second, first, letter.id)
        assert second["properties"] == {"n": 9007199254740993}


TIMES = st.sampled_from(
    [
        *("2026-11-21T09:29:00Z", "2026-11-21T08:00:00.5+00:00", "2031-01-01T00:00:00Z"),
        *("1970-01-01T00:00:00Z", "2026-11-21 08:00:00.5", "2026-11-21", 1_795_253_000),
        1_795_253_000_123,
    ]
)
CONTEXTS = st.sampled_from([{"app": "x"}, {"traits": {"plan": "pro"}}, {"engage": {"a": 1}}, {}])
ITEMS = st.fixed_dictionaries(
    {"userId": st.sampled_from(["u", 7]), "event": st.just("e"), "groupId": st.just("g")}
    | {"previousId": st.just("p")},
    optional={
        "messageId": st.just("m"),
        "timestamp": TIMES,
        "originalTimestamp": TIMES,
        "sentAt": TIMES,
        "context": CONTEXTS,
        "traits": st.just({"a": 9007199254740993}),
        "integrations": st.just({"A": False}),
    },
)


@hypothesis.given(
    item=ITEMS,
    kind=st.sampled_from(EVENT_TYPES),
    envelope=st.none()
    | st.fixed_dictionaries(
        {}, optional={"sentAt": TIMES, "context": CONTEXTS, "integrations": st.just({"B": 1})}
    ),
    key=st.sampled_from([None, "k"]),
    later=st.sampled_from([0, LATER]),
)
def test_a_replay_stores_what_would_have_been_stored(
    item: dict[str, Any], kind: str, envelope: Any, key: str | None, later: int
) -> None:
    """A transform was broken when the event arrived."""
    replayed, sent = asyncio.run(replay_and_send(item, kind, envelope, key, later))
    if not (item.get("messageId") or key):
        del replayed["messageId"], sent["messageId"]
    assert replayed.pop("receivedAt") == render_time(NOW + later)
    assert sent.pop("receivedAt") == render_time(NOW)
    mark = replayed["context"]["engage"].pop("replayOf")
    assert len(mark) == 32
    context = {name: value for name, value in replayed.pop("context").items() if value}
    own = sent.pop("context", {})
    assert context == {name: value for name, value in own.items() if value}
    assert replayed == sent


async def replay_and_send(
    item: dict[str, Any], kind: str, envelope: Any, key: str | None, later: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the event of a replay, and the same event without one."""
    broken = True

    def transform(event: dict[str, Any]) -> dict[str, Any]:
        if broken:
            raise ValueError
        return {**event, "seen": True}

    async def send() -> Bench:
        bench = compose(MemoryStore(), [("t", transform)])
        if envelope is None:
            await bench.send(item, kind, idempotency_key=key)
        else:
            await bench.send_batch([{**item, "type": kind}], envelope, idempotency_key=key)
        return bench

    first = await send()
    (letter,) = first.core.letters
    assert letter.reason == "transform_failed"
    broken = False
    first.now += later
    assert (await first.replays.replay(letter)).outcome == "stored"
    assert first.core.letters == []
    second = await send()
    return first.core.documents[0], second.core.documents[0]


@pytest.mark.parametrize("passed", [LATER, -LATER])
async def test_an_event_without_time_happened_when_its_letter_arrived(
    tmp_path: Path, passed: int
) -> None:
    """It never happens after it arrives, even if the clock was set back since then."""
    async with make_bench(tmp_path) as bench:
        await bench.send({"userId": "u"})
        (letter,) = await bench.letters()
        bench.now += passed
        await bench.replays.replay(letter, edited(letter, event="e"))
        (event,) = await bench.events()
        assert (event.timestamp, event.received_at) == (min(NOW, NOW + passed), NOW + passed)


async def test_the_message_id_of_an_idempotency_key_is_kept(tmp_path: Path) -> None:
    async with make_bench(tmp_path) as bench:
        items = [{"type": "track", "userId": str(n)} for n in range(2)]
        await bench.send_batch(items, idempotency_key="k")
        await bench.send({"userId": "s"}, idempotency_key="s")
        for letter in await bench.letters():
            await bench.replays.replay(letter, edited(letter, event="e"))
        replayed = {one["userId"]: one["messageId"] for one in await bench.documents()}
    other = tmp_path / "other"
    other.mkdir()
    async with make_bench(other) as bench:
        await bench.send_batch([{**item, "event": "e"} for item in items], idempotency_key="k")
        await bench.send({"userId": "s", "event": "e"}, idempotency_key="s")
        assert {one["userId"]: one["messageId"] for one in await bench.documents()} == replayed


async def test_an_equal_item_that_arrives_after_a_replay_can_be_replayed_with_another_text(
    tmp_path: Path,
) -> None:
    """Its letter has the same id."""
    async with make_bench(tmp_path) as bench:
        await bench.send({"userId": "u"})
        (first,) = await bench.letters()
        assert (await bench.replays.replay(first, edited(first, event="e"))).outcome == "stored"
        bench.now += LATER
        await bench.send({"userId": "u"})
        (second,) = await bench.letters()
        assert second.id == first.id
        other = edited(second, event="f")
        failed = await bench.replays.replay(second, other)
        assert failed.message is not None
        assert failed.message.endswith("replay it with a new message id")
        for outcome in ("stored", "duplicate"):
            replayed = await bench.replays.replay(second, other, new_id=True)
            assert replayed.outcome == outcome
        assert len(await bench.events()) == 2
        assert await bench.letters() == []


@backends
async def test_what_is_replayed_twice_is_stored_once(tmp_path: Path, backend: str) -> None:
    async with make_bench(tmp_path, backend=backend) as bench:
        await bench.send({"userId": "u"})
        (letter,) = await bench.letters()
        text = edited(letter, event="e")
        first = await bench.replays.replay(letter, text)
        bench.now += LATER
        assert (await bench.replays.check(letter, text)).outcome == "duplicate"
        again = await bench.replays.replay(letter, text)
        assert (first.outcome, again.outcome) == ("stored", "duplicate")
        assert first.message_id == again.message_id
        assert len(await bench.events()) == 1
        # With another text it would be another event with the same id.
        other = edited(letter, event="f")
        explained = await bench.replays.check(letter, other)
        assert (explained.outcome, explained.code) == ("conflict", "message_id_conflict")
        failed = await bench.replays.replay(letter, other)
        assert (failed.outcome, failed.code) == ("failed", "message_id_conflict")
        assert [problem.pointer for problem in failed.errors] == ["/event"]
        assert failed.message == explained.message
        assert len(await bench.events()) == 1
        assert await bench.letters() == []


@backends
async def test_a_conflict_needs_a_new_message_id(tmp_path: Path, backend: str) -> None:
    seen: list[Any] = []

    def count(event: dict[str, Any]) -> dict[str, Any]:
        seen.append(event)
        return {**event, "properties": {"passes": event.get("properties", {}).get("passes", 0) + 1}}

    async with make_bench(tmp_path, backend=backend, transforms=[("count", count)]) as bench:
        first = {"messageId": "m", "userId": "u", "event": "e"}
        await bench.send(first)
        await bench.send(
            {
                **first,
                "userId": "v",
                "timestamp": "2026-11-21T09:29:00Z",
                "sentAt": "2026-11-21T09:29:50Z",
            }
        )
        (letter,) = await bench.letters()
        bench.now += LATER
        explained = await bench.replays.check(letter)
        failed = await bench.replays.replay(letter)
        assert (failed.outcome, failed.code) == ("failed", "message_id_conflict")
        assert explained.message == failed.message
        assert failed.message is not None
        assert failed.message.endswith("replay it with a new message id")
        assert await bench.letters() == [letter]
        assert (await bench.replays.check(letter, new_id=True)).accepted
        replayed = await bench.replays.replay(letter, new_id=True)
        again = await bench.replays.replay(letter, new_id=True)
        assert (replayed.outcome, again.outcome) == ("stored", "duplicate")
        assert await bench.letters() == []
        event = (await bench.events())[-1]
        assert event.user_id == "v"
        assert event.timestamp == NOW - 50_000
        # The letter has the event after the transforms, which are not applied again.
        assert event.document()["properties"] == {"passes": 1}
        assert event.document()["sentAt"] == "2026-11-21T09:29:50Z"
        assert len(seen) == 2


async def test_a_conflict_whose_stored_event_has_expired_keeps_its_id(tmp_path: Path) -> None:
    async with make_bench(tmp_path) as bench:
        first = {"messageId": "m", "userId": "u", "event": "e"}
        await bench.send(first)
        await bench.send({**first, "userId": "v"})
        (letter,) = await bench.letters()
        await bench.store.expire(NOW + 1, limit=10, force=True)
        replayed = await bench.replays.replay(letter)
        assert (replayed.outcome, replayed.message_id) == ("stored", "m")


async def test_a_replay_that_fails_leaves_the_letter(tmp_path: Path) -> None:
    async with make_bench(tmp_path) as bench:
        await bench.send({"userId": "u"})
        (letter,) = await bench.letters()
        for text in (None, b"", b"{", b"[]", b"7", b'{"userId": 99999999999999999999}', b"\xff"):
            explained = await bench.replays.check(letter, text)
            failed = await bench.replays.replay(letter, text)
            assert explained.outcome == "refused"
            assert failed.outcome == "failed"
            assert failed.code in ("invalid_payload", "invalid_json")
            assert (failed.code, failed.message) == (explained.code, explained.message)
        assert [problem.pointer for problem in (await bench.replays.check(letter)).errors] == [
            "/event"
        ]
        assert await bench.letters() == [letter]
        assert await bench.events() == []


async def test_the_letter_stays_until_the_event_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_bench(tmp_path) as bench:
        await bench.send({"userId": "u"})
        (letter,) = await bench.letters()
        text = edited(letter, event="e")
        remove = bench.store.remove

        async def unavailable(*_: object) -> None:
            raise StorageUnavailable("not now")

        with monkeypatch.context() as patch:
            patch.setattr(bench.core.ingest, "submit", unavailable)
            with pytest.raises(StorageUnavailable):
                await bench.replays.replay(letter, text)
        assert await bench.letters() == [letter]
        # The process is killed between the write and the removal.
        monkeypatch.setattr(bench.store, "remove", unavailable)
        with pytest.raises(StorageUnavailable):
            await bench.replays.replay(letter, text)
        assert len(await bench.events()) == len(await bench.letters()) == 1
        monkeypatch.setattr(bench.store, "remove", remove)
        assert (await bench.replays.replay(letter, text)).outcome == "duplicate"
        assert await bench.letters() == []


async def test_what_a_transform_drops_stays_a_letter(tmp_path: Path) -> None:
    broken = True

    def drop(event: dict[str, Any]) -> Any:
        if broken:
            raise ValueError("broken")
        return DROP

    async with make_bench(tmp_path, transforms=[("drop", drop)]) as bench:
        await bench.send({"userId": "u", "event": "e"})
        (letter,) = await bench.letters()
        assert letter.reason == "transform_failed"
        broken = False
        explained = await bench.replays.check(letter)
        assert (explained.outcome, explained.accepted) == ("dropped", False)
        failed = await bench.replays.replay(letter)
        assert (failed.outcome, failed.code) == ("failed", "dropped")
        assert len(await bench.letters()) == 1


async def test_an_event_of_the_largest_size_can_be_replayed(tmp_path: Path) -> None:
    """What a replay adds to an event does not count towards its size."""
    async with make_bench(tmp_path) as bench:
        await send_event(bench.core, {"userId": "u", "event": "e", "messageId": "m"})
        fill = "x" * (65536 - len((await bench.events())[0].body) - len('"properties":{"x":""},'))
        await bench.send({"userId": "v", "event": "e", "messageId": "m", "properties": {"x": fill}})
        (letter,) = await bench.letters()
        assert (await bench.replays.replay(letter, new_id=True)).outcome == "failed"
        await bench.send(
            {"userId": "v", "event": "e", "messageId": "m", "properties": {"x": fill[36:]}}
        )
        letter = (await bench.letters())[-1]
        assert (await bench.replays.replay(letter, new_id=True)).outcome == "stored"


@pytest.mark.parametrize("own", [None, {}, {"engage": 5}, {"engage": {"a": 1}, "x": 1}])
async def test_the_context_of_the_client_stays(tmp_path: Path, own: Any) -> None:
    async with make_bench(tmp_path) as bench:
        await bench.send({"userId": "u", "context": own})
        (letter,) = await bench.letters()
        await bench.replays.replay(letter, edited(letter, event="e"))
        context = (await bench.documents())[0]["context"]
        assert context.pop("engage")["replayOf"] == letter.id
        assert context == {name: value for name, value in (own or {}).items() if name != "engage"}


async def test_what_cannot_be_replayed_says_why(tmp_path: Path) -> None:
    async with make_bench(tmp_path) as bench:
        await bench.send({"userId": "u", "properties": {"x": "x" * MAX_ITEM}})
        large = {"x": "x" * MAX_ITEM}
        await bench.send_batch([{"type": "track", "userId": "v"}], {"context": large})
        cut, bare = await bench.letters()
        for letter, reason in ((cut, "only its first 16 KiB"), (bare, "larger than 16 KiB")):
            why = obstacle_of(letter)
            assert why is not None
            assert reason in why
            explained = await bench.replays.check(letter, b"{}")
            failed = await bench.replays.replay(letter, b"{}")
            assert explained.code == failed.code == "not_replayable"
            assert explained.message == failed.message == why
        assert text_of(cut).startswith('{"userId":"u"')
        assert len(await bench.letters()) == 2


async def test_the_letters_of_a_batch_do_not_multiply_a_large_envelope(tmp_path: Path) -> None:
    async with make_bench(tmp_path) as bench:
        context = {"x": "x" * (MAX_ITEM - 100)}
        items = [{"type": "track", "userId": str(n)} for n in range(300)]
        await bench.send_batch(items, {"context": context})
        sizes = [len(letter.envelope or b"") for letter in await bench.letters()]
        assert len(sizes) == 300
        assert 0 in sizes
        assert 1024 * 1024 < sum(sizes) <= 2 * 1024 * 1024


async def test_a_delivery_is_translated_again(tmp_path: Path) -> None:
    async with make_bench(tmp_path) as bench:
        delivery = factory_letter(
            "d", origin="stripe", reason="untranslated", item=b'{ "a": 1}', headers=[(":path", "/")]
        )
        await bench.store.put([delivery])
        (letter,) = await bench.letters()
        assert is_delivery(letter)
        assert obstacle_of(letter) is None
        assert text_of(letter) == '{ "a": 1}'
        assert (await bench.replays.check(letter)).code == "not_replayable"
        assert (await bench.replays.replay(letter, b"{}")).message == (
            "a webhook delivery cannot be edited"
        )
        result = WebhookResult(accepted=1, ignored=0, duplicates=0, rejected=1)
        bench.retried = [result, WebhookResult(accepted=1, ignored=0, duplicates=0, rejected=0)]
        assert (await bench.replays.replay(letter)).code == "untranslated"
        assert len(await bench.letters()) == 1
        assert (await bench.replays.replay(letter)).outcome == "stored"
        assert await bench.letters() == []


async def test_a_check_tells_what_changes_in_profiles(tmp_path: Path) -> None:
    async with make_bench(tmp_path) as bench:
        await bench.send({"userId": "u", "traits": 5}, "identify")
        (letter,) = await bench.letters()
        explained = await bench.replays.check(letter, edited(letter, traits={"a": 1}))
        assert explained.changes == (Seen(Kind.USER, "u"), Traits(Kind.USER, "u", {"a": 1}))
        assert await bench.store.profile("acme", "u") is None


def test_the_text_of_an_item_that_is_not_json_is_shown_as_it_is() -> None:
    assert text_of(factory_letter("x", item=b"<\xff>")) == "<�>"
