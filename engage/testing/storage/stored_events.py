# SPDX-License-Identifier: Apache-2.0
"""The promises of every storage about events: stored unchanged, once, and independently."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from typing import Any

import orjson
import pytest

from engage.api import (
    MAX_TIME,
    Event,
    Status,
    StorageMissing,
    StorageUnavailable,
)
from engage.store.facade import Storage

from ..factories import AWKWARD, TIME, WORKSPACE, canonical, event, identify, ids, store_all
from .harness import Bench, on_open, on_store

#: Values that a careless storage changes or loses.
VALUES = {
    "integers": [0, -1, 2**31, 2**53 + 1, 2**63 - 1, -(2**63)],
    "floats": [0.1, -0.0, 1.0, 1e22, 1.7976931348623157e308, 5e-324],
    "others": [True, False, None, "", "null", "1"],
    "text": ["\x00", "a\x00b", "\u202e", "\ufeff", "😀", "\u2028", "é", "e\u0301"],
    "empty": {"object": {}, "list": []},
    "list in a list": [[1, [2, [3]]]],
    "keys": {
        "": 1,
        "$set": {"$inc": 1},
        "a.b": {"c.d": ".", "c": ""},
        "__proto__": {"x": 1},
        "\x00": "nul",
        "a\x00b": "nul inside",
        "%24": "%",
        "_id": 5,
        "~": "~0",
    },
    "like a date": "2025-01-01T00:00:00.000Z",
}


def _values(bench: Bench) -> dict[str, Any]:
    values = dict(VALUES)
    if not bench.subject.can("nested-arrays"):
        del values["list in a list"]
    return values


class EventTests:
    """``open``, ``close``, ``check``, ``write``, ``find``."""

    # --------------------------------------------------------------------- opening, closing
    @on_store
    async def test_a_missing_store_is_created_only_when_allowed(self, bench: Bench) -> None:
        with pytest.raises(StorageMissing):
            await bench.new().open(create=False)
        first = await bench.open()
        await first.check()
        await first.close()
        second = bench.new()
        await second.open(create=False)
        assert await ids(second) == []

    @on_open
    async def test_open_and_close_are_idempotent(self, store: Storage) -> None:
        await store.open(create=True)
        await store_all(store, event("m"))
        await store.close()
        await store.close()
        with pytest.raises(StorageUnavailable):
            await store.write([event("n")])
        await store.open(create=False)
        assert await ids(store) == ["m"]

    @on_store
    async def test_several_objects_can_open_one_store(self, bench: Bench) -> None:
        stores = await asyncio.gather(*(bench.open() for _ in range(4)))
        for number, store in enumerate(stores):
            await store_all(store, event(str(number)))
        for store in stores:
            assert await ids(store) == ["0", "1", "2", "3"]

    @on_open
    async def test_gauges_are_numbers(self, store: Storage) -> None:
        for name, value in store.gauges().items():
            assert name.replace("_", "").isalpha()
            assert value >= 0

    # ------------------------------------------------------------------------- unchanged
    @on_store
    async def test_an_event_is_returned_unchanged(self, bench: Bench) -> None:
        store = await bench.open()
        values = _values(bench)
        for type_ in ("track", "page", "screen", "identify", "group", "alias"):
            written = event(
                type_,
                type=type_,
                user_id="u\x00:😀",
                anonymous_id="a.b$",
                at=7,
                received=9,
                groupId="g",
                previousId="p",
                properties=values,
                context={"traits": values},
            )
            await store_all(store, written)
            await _check_stored(store, written)

    @on_store
    async def test_events_are_returned_unchanged_after_reopening(self, bench: Bench) -> None:
        values = _values(bench)
        written = [event(str(number), at=number, properties=values) for number in range(20)]
        store = await bench.open()
        await store_all(store, *written)
        await store.close()
        store = await bench.open()
        await _check_stored(store, *written)

    @on_open
    async def test_the_first_and_the_last_time_are_stored(self, store: Storage) -> None:
        for number, time in enumerate((0, 1, MAX_TIME)):
            written = dataclasses.replace(
                event(str(number)), timestamp=time, received_at=min(time + 1, MAX_TIME)
            )
            await store_all(store, written)
            await _check_stored(store, written)

    @on_open
    async def test_an_event_that_is_not_stored_is_not_found(self, store: Storage) -> None:
        await store_all(store, event("m"))
        for workspace, origin, message_id in (
            ("other", "api", "m"),
            (WORKSPACE, "sendgrid", "m"),
            (WORKSPACE, "api", "n"),
            (WORKSPACE, "api", "m\x00"),
            (WORKSPACE, "api", ""),
            (WORKSPACE, "api", "\ud800"),
        ):
            assert await store.find(workspace, origin, message_id) is None

    @on_open
    async def test_a_large_event_is_stored(self, store: Storage) -> None:
        written = event("large", properties={"text": "ä" * 500_000})
        await store_all(store, written)
        await _check_stored(store, written)

    @on_open
    async def test_a_write_without_events_returns_no_outcome(self, store: Storage) -> None:
        assert list(await store.write([])) == []

    # -------------------------------------------------------------------------- identity
    @on_open
    async def test_similar_ids_of_events_are_different(self, store: Storage) -> None:
        written = [
            event(text, user_id=text, workspace=workspace, origin=origin)
            for workspace in (WORKSPACE, "other")
            for origin in ("api", "sendgrid")
            for text in AWKWARD
        ]
        await store_all(store, *written)
        outcomes = await store.write(written)
        assert {outcome.status for outcome in outcomes} == {Status.DUPLICATE}
        await _check_stored(store, *written)
        for text in AWKWARD:
            assert await ids(store, workspace_id=WORKSPACE, user_id=text) == [text, text]

    @on_open
    async def test_the_first_event_of_an_identity_is_kept(self, store: Storage) -> None:
        first = event("m", at=5, properties={"which": "first"})
        await store_all(store, first)
        other = event("m", at=1, received=1000, properties={"which": "second"})
        for _ in range(2):
            (outcome,) = await store.write([other])
            assert outcome.status is Status.DUPLICATE
            assert outcome.stored is not None
            assert orjson.loads(outcome.stored) == first.document()
        await _check_stored(store, first)

    @on_open
    async def test_repeats_within_one_write_are_duplicates(self, store: Storage) -> None:
        await store_all(store, event("old", properties={"which": "stored"}))
        outcomes = await store.write(
            [
                event("new", properties={"which": 1}),
                event("old", properties={"which": 2}),
                event("new", properties={"which": 3}),
                event("old", properties={"which": 4}),
                event("last"),
            ]
        )
        assert [outcome.status.value for outcome in outcomes] == [
            "stored",
            "duplicate",
            "duplicate",
            "duplicate",
            "stored",
        ]
        which = [orjson.loads(x.stored)["properties"]["which"] for x in outcomes if x.stored]
        assert which == ["stored", 1, "stored"]
        assert await ids(store) == ["old", "new", "last"]

    @on_open
    async def test_overlapping_writes_store_each_event_once(self, store: Storage) -> None:
        order = random.Random(5)
        seen: set[str] = set()
        for _ in range(30):
            batch = [str(order.randrange(300)) for _ in range(order.randrange(1, 40))]
            outcomes = await store.write([event(name) for name in batch])
            for name, outcome in zip(batch, outcomes, strict=True):
                expected = Status.DUPLICATE if name in seen else Status.STORED
                assert outcome.status is expected
                seen.add(name)
        assert sorted(await ids(store)) == sorted(seen)

    @on_store
    async def test_concurrent_writes_store_each_event_once(self, bench: Bench) -> None:
        store, second = await bench.open(), await bench.open()
        batch = [event(str(number)) for number in range(20)]
        results = await asyncio.gather(
            *(writer.write(batch) for writer in (store, second) for _ in range(10))
        )
        for position in range(20):
            statuses = [outcomes[position].status for outcomes in results]
            assert statuses.count(Status.STORED) == 1
            assert statuses.count(Status.DUPLICATE) == 19
        assert sorted(await ids(store)) == sorted(str(number) for number in range(20))

    @on_open
    async def test_a_large_batch_is_stored_in_order(self, store: Storage) -> None:
        batch = [event(f"m{number}", at=number) for number in range(2500)]
        await store_all(store, *batch)
        assert await ids(store, limit=1000) == [event.message_id for event in batch]
        outcomes = await store.write(batch)
        assert {outcome.status for outcome in outcomes} == {Status.DUPLICATE}

    # --------------------------------------------------------------------------- refused
    @on_store
    async def test_an_unstorable_event_is_refused_alone(self, bench: Bench) -> None:
        store = await bench.open()
        batch = [identify(str(number), "u", number, traits={"n": number}) for number in range(50)]
        poison = bench.subject.unstorable(identify("poison", "u", 1000, traits={"n": "poison"}))
        for _ in range(2):
            outcomes = await store.write([*batch[:20], poison, *batch[20:], poison])
            refused = [outcome for outcome in outcomes if outcome.status is Status.REFUSED]
            assert outcomes[20] in refused
            assert outcomes[-1] in refused
            assert len(refused) == 2
            assert refused[0].reason
        assert await ids(store) == [str(number) for number in range(50)]
        profile = await store.profile(WORKSPACE, "u")
        assert profile is not None
        assert profile.traits == {"n": 49}
        assert profile.updated_at == TIME + 49

    @on_store
    async def test_many_unstorable_events_are_refused(self, bench: Bench) -> None:
        store = await bench.open()
        poison = [bench.subject.unstorable(event(f"p{number}")) for number in range(30)]
        outcomes = await store.write(poison)
        assert {outcome.status for outcome in outcomes} == {Status.REFUSED}
        assert await ids(store) == []

    @on_open
    async def test_a_lone_surrogate_is_refused_in_every_field(self, store: Storage) -> None:
        good = event("m", user_id="u")
        bad: list[Event] = [
            dataclasses.replace(good, message_id="x\udfff"),
            dataclasses.replace(good, message_id="y", user_id="u\ud800"),
            dataclasses.replace(good, message_id="z", anonymous_id="\ud800\ud800"),
            dataclasses.replace(good, message_id="w", name="\ud800"),
        ]
        outcomes = await store.write([good, *bad])
        assert [outcome.status for outcome in outcomes] == [Status.STORED] + [Status.REFUSED] * 4
        assert await ids(store) == ["m"]


async def _check_stored(store: Storage, *written: Event) -> None:
    """Check that events are found as they were written."""
    for given in written:
        stored = await store.find(*given.identity)
        assert stored is not None
        assert canonical(stored) == canonical(given)
