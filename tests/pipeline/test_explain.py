# SPDX-License-Identifier: Apache-2.0
"""A check stores nothing and says what the pipeline does with the same event."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import orjson
import pytest

from engage.api import (
    DROP,
    EVENT_TYPES,
    Change,
    Kind,
    Link,
    LinkDecision,
    Membership,
    RemovedTraits,
    Seen,
    StorageUnavailable,
    Traits,
)
from engage.config import DEFAULT_LIMITS
from engage.pipeline.explain import Explained, Submission, describe_change
from support.each import each
from support.memory_store import MemoryStore
from support.pipeline import GOOD, NOW
from support.replay import Bench, compose, make_bench

ACME = Submission(workspace_id="acme", write_key_id="website")
TIMES = ["2026-11-21T09:29:00Z", "2027-01-01T00:00:00+01:00", "2026-02-30T00:00:00Z", "soon", None]

FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "type": st.sampled_from([*EVENT_TYPES, "event", None, 5]),
    "userId": st.sampled_from(["u", "", 7, 1.0, None, "undefined", "x" * 513]),
    "anonymousId": st.sampled_from(["a", "email:x", 7, None]),
    "groupId": st.sampled_from(["g", 5, ""]),
    "previousId": st.sampled_from(["p", None]),
    "event": st.sampled_from(["e", "", 5]),
    "name": st.sampled_from(["n", None]),
    "messageId": st.sampled_from(["m", "m2", "", 5]),
    "traits": st.sampled_from([{"a": 1}, {}, 5, {"writeKey": "k"}]),
    "properties": st.sampled_from([{"n": 2**63 - 1}, {"x": "x" * 3000}, None]),
    "context": st.sampled_from([{"traits": {"b": 2}}, {"engage": 1}, None, []]),
    "timestamp": st.sampled_from(TIMES),
    "originalTimestamp": st.sampled_from(TIMES),
    "sentAt": st.sampled_from(TIMES),
    "writeKey": st.just("key-1"),
    "large": st.just(2**63),
}
ITEMS = st.fixed_dictionaries({}, optional=FIELDS)


def transform(event: dict[str, Any]) -> Any:
    """Drop, refuse, or change some events."""
    if event.get("name") == "n":
        return DROP
    if event.get("anonymousId") == "7":
        raise ValueError
    return {**event, "seen": True}


def make() -> Bench:
    """Compose the parts on a store in memory."""
    limits = dataclasses.replace(DEFAULT_LIMITS, event_bytes=2048)
    return compose(MemoryStore(), [("t", transform)], limits)


@hypothesis.given(item=ITEMS, operation=st.sampled_from([*EVENT_TYPES, "batch"]), data=st.data())
def test_a_check_says_what_the_pipeline_does(
    item: dict[str, Any], operation: str, data: st.DataObject
) -> None:
    envelope = data.draw(
        st.sampled_from([{}, {"context": {"app": "x"}, "sentAt": "2026-11-21T09:29:50Z"}])
        if operation == "batch"
        else st.just({})
    )
    asyncio.run(agree(item, operation, envelope))


async def agree(item: dict[str, Any], operation: str, envelope: dict[str, Any]) -> None:
    bench = make()
    await bench.send({"messageId": "m2", "userId": "u", "event": "e", "type": "track"})
    before = dict(bench.core.store.events)
    submission = dataclasses.replace(ACME, operation=operation, envelope=orjson.dumps(envelope))
    explained = await bench.explainer.check(orjson.dumps(item), submission)
    assert bench.core.store.events == before
    assert bench.core.letters == []
    if operation == "batch":
        await bench.send_batch([item], envelope)
    else:
        await bench.send(item, operation)
    new = [event for key, event in bench.core.store.events.items() if key not in before]
    letters = bench.core.letters
    # An integer that is too large is found before there are items.
    refused_whole = "large" in item
    match explained.outcome:
        case "stored":
            (event,) = new
            assert explained.event is not None
            assert plain(explained.event.document()) == plain(event.document())
            assert letters == []
        case "refused":
            assert new == []
            if not refused_whole:
                (letter,) = letters
                assert (letter.reason, letter.message) == (explained.code, explained.message)
                assert letter.errors == [problem.as_dict() for problem in explained.errors]
                # The letter has all that is needed to find the same again.
                again = await bench.replays.check(letter)
                assert (again.code, again.message) == (explained.code, explained.message)
        case "conflict":
            assert new == []
            (letter,) = letters
            assert (letter.reason, letter.message) == (explained.code, explained.message)
        case "duplicate" | "dropped":
            assert new == []
            assert letters == []


def plain(document: dict[str, Any]) -> dict[str, Any]:
    """Return an event without a message id that the server made."""
    if document["messageId"] not in ("m", "m2"):
        del document["messageId"]
    return document


@pytest.mark.parametrize("backend", ["sqlite", pytest.param("mongo", marks=pytest.mark.mongo)])
async def test_a_check_finds_what_is_stored(tmp_path: Path, backend: str) -> None:
    async with make_bench(tmp_path, backend=backend) as bench:
        await bench.send({**GOOD, "messageId": "m"})

        async def check(**fields: Any) -> Explained:
            text = orjson.dumps({**GOOD, "messageId": "m", **fields})
            return await bench.explainer.check(text, ACME)

        same = await check()
        assert (same.outcome, same.accepted, same.changes) == ("duplicate", True, ())
        (event,) = await bench.events()
        assert same.stored == event
        other = await check(event="f")
        assert (other.outcome, other.accepted) == ("conflict", False)
        assert [problem.pointer for problem in other.errors] == ["/event"]
        assert other.stored == event
        assert (await check(messageId="n")).outcome == "stored"
        elsewhere = dataclasses.replace(ACME, workspace_id="other")
        text = orjson.dumps({**GOOD, "messageId": "m"})
        assert (await bench.explainer.check(text, elsewhere)).outcome == "stored"
        assert await bench.letters() == []


async def test_a_check_needs_no_store_if_it_looks_nothing_up(tmp_path: Path) -> None:
    async with make_bench(tmp_path) as bench:
        await bench.store.close()
        text = orjson.dumps({**GOOD, "messageId": "m"})
        assert (await bench.explainer.check(text, ACME, look_up=False)).outcome == "stored"
        with pytest.raises(StorageUnavailable):
            await bench.explainer.check(text, ACME)


@pytest.mark.parametrize("size", [100_000, 25_000_000])
async def test_a_text_of_any_size_is_checked(size: int) -> None:
    bench = make()
    text = orjson.dumps({**GOOD, "properties": {"x": "x" * size}})
    explained = await bench.explainer.check(text, ACME)
    assert explained.code == ("event_too_large" if size < 20_000_000 else "body_too_large")


@each("text", [b"", b"{", b"\xff", b'{"a":' * 100, b'"text"', b"null"])
async def test_a_text_that_is_not_an_event_is_refused(text: bytes) -> None:
    for operation in ("track", "batch", None, "nothing"):
        submission = dataclasses.replace(ACME, operation=operation)
        explained = await make().explainer.check(text, submission)
        assert explained.outcome == "refused"
        assert explained.code in ("invalid_json", "invalid_payload", "invalid_request")
        assert explained.event is None


async def test_a_new_event_happens_now() -> None:
    bench = make()
    bench.now += 5
    explained = await bench.explainer.check(orjson.dumps(GOOD), ACME)
    assert explained.event is not None
    assert explained.event.received_at == explained.event.timestamp == NOW + 5
    assert "context" not in explained.event.document()


@each(
    "change, text",
    [
        (Seen(Kind.USER, "u"), "the user u would exist"),
        (Seen(Kind.VISITOR, "v"), "the visitor v would exist"),
        (Traits(Kind.USER, "u", {"a": 1, "b": 2}), "sets traits of the user u: a, b"),
        (RemovedTraits(Kind.USER, "u", ["a"]), "removes traits of the user u: a"),
        (Traits(Kind.GROUP, "g", {"a": 1}), "sets traits of the group g: a"),
        (Membership(Kind.VISITOR, "v", "g", True), "the visitor v joins the group g"),
        (Membership(Kind.USER, "u", "g", False), "the user u leaves the group g"),
        (LinkDecision("u", "a", False), "undoes the link of the anonymous id a to the user u"),
        (LinkDecision("u", "a", True), "restores the link of the anonymous id a to the user u"),
        (Link("u", "a"), "links the anonymous id a to the user u"),
    ],
)
def test_every_change_has_a_phrase(change: Change, text: str) -> None:
    assert describe_change(change) == text
