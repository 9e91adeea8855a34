# SPDX-License-Identifier: Apache-2.0
"""The steps together: one event, a delivery."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from engage.api import DROP, Event, StorageUnavailable
from engage.config import config_schema
from engage.keys.auth import Principal
from support.each import each
from support.memory_store import MemoryStore
from support.pipeline import (
    BAD,
    GOOD,
    NOW,
    OTHER,
    deliver,
    error_of,
    make_core,
    send_batch,
    send_event,
)


# ------------------------------------------------------------------------------------- one event
async def test_a_repeat_fails_in_time_while_the_store_hangs() -> None:
    class HangsFinding(MemoryStore):
        async def find(self, workspace_id: str, origin: str, message_id: str) -> Event | None:
            return await asyncio.Event().wait() and None

    store = HangsFinding()
    store.with_stored = False
    core = make_core(store, write_timeout=0.5)
    await send_event(core, {**GOOD, "messageId": "m"})
    with pytest.raises(StorageUnavailable):
        await send_event(core, {**GOOD, "messageId": "m"})


async def test_an_event_of_the_greatest_configurable_depth_is_stored() -> None:
    deepest = config_schema()["properties"]["limits"]["properties"]["json_depth"]["maximum"]
    core = make_core(json_depth=deepest)
    value: Any = 1
    for _ in range(deepest - 2):
        value = [value]
    await send_event(core, {**GOOD, "properties": {"a": value}})
    assert core.documents[0]["properties"] == {"a": value}
    error = await error_of(send_event(core, {**GOOD, "properties": {"a": [value]}}))
    assert error.code == "invalid_json"


@each(
    "item, pointer",
    [
        *(({"userId": "u"}, "/event"), ({**GOOD, "type": "page"}, "/type")),
        *(({**GOOD, "type": ["track"]}, "/type"), ({**GOOD, "userId": 1.0}, "/userId")),
        *(({**GOOD, "timestamp": "2026-02-30T00:00:00Z"}, "/timestamp"), ([], ""), (5, "")),
        (None, ""),
    ],
)
async def test_an_invalid_event_is_reported_and_kept(item: Any, pointer: str) -> None:
    core = make_core()
    error = await error_of(send_event(core, item))
    assert (error.status, error.code) == (400, "invalid_payload")
    assert error.errors[0].pointer == pointer
    assert core.documents == []
    (letter,) = core.letters
    assert (letter.reason, letter.write_key_id) == ("invalid_payload", "website")
    assert orjson.loads(letter.item) == item
    assert core.metrics.events == {("track", "invalid_payload"): 1}
    # a retry makes no second letter, and strict mode makes none
    await error_of(send_event(core, item))
    assert len(core.letters) == 1
    strict = make_core()
    await error_of(send_event(strict, item, strict=True))
    assert strict.letters == []


async def test_an_event_that_the_storage_refuses_is_refused() -> None:
    core = make_core()
    core.store.refuse["m"] = "a key is too long"
    error = await error_of(send_event(core, {**GOOD, "messageId": "m"}))
    assert (error.status, error.code, error.message) == (400, "event_refused", "a key is too long")
    assert core.letters[0].reason == "event_refused"


async def test_a_storage_that_is_unavailable_acknowledges_nothing() -> None:
    core = make_core()

    def down(*_: Any) -> None:
        raise StorageUnavailable("no")

    core.store.before = down
    with pytest.raises(StorageUnavailable):
        await send_event(core, GOOD)
    # a dead letter that cannot be kept is not acknowledged either
    core.store.before_put = down
    with pytest.raises(StorageUnavailable):
        await send_event(core, BAD)


async def test_requests_of_one_millisecond_are_not_mixed_up() -> None:
    core = make_core()
    ours, theirs = core.principal, Principal(OTHER, OTHER.write_keys[0])
    for principal in (ours, theirs, ours):
        await send_event(core, GOOD, principal=principal)
    await send_event(core, GOOD, idempotency_key="k")
    await send_batch(core, [GOOD], {"context": {"a": 1}})
    await send_event(core, GOOD)
    assert [(d["workspaceId"], d["writeKeyId"], d.get("context")) for d in core.documents] == [
        ("acme", "website", None),
        ("other", "app", None),
        ("acme", "website", None),
        ("acme", "website", None),
        ("acme", "website", {"a": 1}),
        ("acme", "website", None),
    ]
    assert len({document["messageId"] for document in core.documents}) == 6


# -------------------------------------------------------------------------------------- transforms
async def test_transforms_change_and_drop_events() -> None:
    def step(document: dict[str, Any]) -> Any:
        if document["event"] == "drop":
            return DROP
        if document["event"] == "fail":
            raise ValueError
        return {**document, "seen": True}

    core = make_core(transforms=[("step", step)])
    await send_event(core, {**GOOD, "messageId": "m"})
    dropped = await send_event(core, {**GOOD, "event": "drop", "messageId": "d"})
    assert dropped.message_id == "d"
    error = await error_of(send_event(core, {**GOOD, "event": "fail"}))
    assert (error.status, error.code) == (400, "transform_failed")
    assert [document["seen"] for document in core.documents] == [True]
    assert [letter.reason for letter in core.letters] == ["transform_failed"]
    result = await send_batch(
        core, [{**GOOD, "event": name} for name in ("e", "drop", "fail", "e", "drop")]
    )
    assert (result.accepted, len(result.rejected)) == (4, 1)
    assert core.metrics.events["track", "dropped"] == 3
    # a repeat is transformed before it is compared with the stored event
    await send_event(core, {**GOOD, "messageId": "m"})
    assert core.metrics.events["track", "conflict"] == 0


# ---------------------------------------------------------------------------------------- delivery
async def test_a_delivery_is_stored() -> None:
    core = make_core()
    time = "2020-01-01T00:00:00Z"
    documents = [
        {**GOOD, "messageId": "a", "timestamp": time, "sentAt": "2020-01-01T00:00:05Z"},
        {**GOOD, "messageId": "a", "timestamp": time, "sentAt": "2020-01-01T00:00:05Z"},
        {**BAD, "x": "y" * 50_000},
        {**GOOD, "messageId": "b", "x": "y" * 100_000},
    ]
    result = await deliver(core, documents)
    assert (result.accepted, result.duplicates) == (2, 1)
    assert [rejected.index for rejected in result.rejected] == [2]
    stored: list[Event] = list(core.store.events.values())
    assert [event.identity for event in stored] == [
        ("acme", "stripe", "a"),
        ("acme", "stripe", "b"),
    ]
    document = stored[0].document()
    assert document["source"] == "webhook:stripe"
    assert document["timestamp"] == "2020-01-01T00:00:00.000Z"
    assert "writeKeyId" not in document
    assert stored[0].received_at == NOW
    # The caller keeps the delivery as a whole.
    assert core.letters == []


async def test_a_strict_event_keeps_no_dead_letter_when_a_transform_fails() -> None:
    def fails(_document: dict[str, Any]) -> dict[str, Any]:
        raise RuntimeError

    core = make_core(transforms=[("broken", fails)])
    error = await error_of(send_event(core, GOOD, strict=True))
    assert (error.status, error.code) == (400, "transform_failed")
    assert (core.store.writes, core.letters) == ([], [])
    assert core.metrics.events["track", "transform_failed"] == 1
    await error_of(send_event(core, GOOD))
    assert [letter.reason for letter in core.letters] == ["transform_failed"]


async def test_a_delivered_event_that_a_transform_makes_too_large_is_rejected() -> None:
    core = make_core(
        transforms=[("swell", lambda event: {**event, "x": "y" * 2000})], webhook_event_bytes=1000
    )
    (refused,) = (await deliver(core, [{**GOOD, "messageId": "a"}])).rejected
    assert refused.error.code == "event_too_large"
    assert "limits.webhook_event_bytes" in refused.error.message


async def test_a_large_delivery_is_written_in_several_writes() -> None:
    core = make_core(webhook_event_bytes=1000, decompressed_bytes=10_000)
    documents: list[Any] = [{**GOOD, "messageId": str(n)} for n in range(1200)]
    documents[1100]["x"] = "y" * 1000
    result = await deliver(core, documents)
    assert (result.accepted, [r.index for r in result.rejected]) == (1199, [1100])
    assert "limits.webhook_event_bytes" in result.rejected[0].error.message
    assert len(core.store.writes) == 3
    assert core.letters == []


async def test_a_client_cannot_occupy_the_ids_of_deliveries() -> None:
    core = make_core()
    await send_event(core, {**GOOD, "messageId": "a", "source": "webhook:stripe"})
    result = await deliver(core, [{**GOOD, "messageId": "a"}])
    assert result.accepted == 1
