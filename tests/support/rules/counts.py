# SPDX-License-Identifier: Apache-2.0
"""The promises of a :class:`~engage.store.facade.Storage`."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from typing import Any

from engage.api import Count, CountSum
from engage.testing.factories import AWKWARD, TIME, all_pages, count, sums
from engage.testing.storage.harness import Bench, on_open, on_store


def _expected(counts: Sequence[Count]) -> list[CountSum]:
    """Return the sums of registers, each of which is there once."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for one in counts:
        key = (one.at, one.name, one.workspace_id, one.labels)
        groups.setdefault(key, []).append(one.value)
    return [
        CountSum(
            at=at,
            name=name,
            workspace_id=workspace,
            labels=labels,
            total=sum(values),
            greatest=max(values),
            processes=len(values),
        )
        for (at, name, workspace, labels), values in groups.items()
    ]


def _in_order(found: Sequence[CountSum]) -> list[CountSum]:
    """Check the order of time, and return the sums in an order that does not depend on more."""
    assert [register.at for register in found] == sorted(register.at for register in found)
    return _sorted(found)


def _sorted(found: Sequence[CountSum]) -> list[CountSum]:
    return sorted(found, key=lambda one: (one.at, one.name, one.workspace_id, one.labels))


class CountTests:
    """``put_counts``, ``counts``, ``scan_counts``, ``expire_counts``."""

    @on_store
    async def test_the_counters_of_all_processes_are_added(self, bench: Bench) -> None:
        store = await bench.open()
        await store.put_counts([])
        written = [count(3), count(5, process="q"), count(4, process="r"), count(0, minute=1)]
        await store.put_counts(written[:2])
        await store.put_counts(written[2:])
        await store.close()
        store = await bench.open()
        first, second = await sums(store)
        assert first == CountSum(
            at=TIME,
            name="events",
            workspace_id="acme",
            labels=("website", "track", "stored"),
            total=12,
            greatest=5,
            processes=3,
        )
        assert (second.at, second.total, second.processes) == (TIME + 60_000, 0, 1)

    @on_open
    async def test_the_greatest_value_of_a_register_stays(self, store: Any) -> None:
        """So a write can be repeated, and an earlier one can arrive late."""
        values = [*range(20)] * 2
        random.Random(7).shuffle(values)
        for value in values:
            await store.put_counts([count(value), count(19 - value, process="q")])
        assert [(total.total, total.greatest) for total in await sums(store)] == [(38, 19)]
        # Also within one write.
        await store.put_counts([count(25), count(30), count(20), count(30)])
        assert [(total.total, total.greatest) for total in await sums(store)] == [(49, 30)]
        await asyncio.gather(*(store.put_counts([count(value)]) for value in range(40, 20, -1)))
        assert [(total.total, total.processes) for total in await sums(store)] == [(59, 2)]
        await store.put_counts([count(2**53 + 1)])
        assert [total.greatest for total in await sums(store)] == [2**53 + 1]

    @on_open
    async def test_sums_are_filtered_and_read_in_pages(self, store: Any) -> None:
        written = [
            count(
                number,
                minute=minute,
                process=process,
                name=name,
                workspace_id=workspace,
                labels=(label,),
            )
            for number, (process, label, name, workspace, minute) in enumerate(
                itertools.product("pqr", "ab", ("events", "up"), ("", "acme"), range(5))
            )
        ]
        hours = [count(1, step=3600, process=process) for process in "pq"]
        for start in range(0, len(written), 17):
            await store.put_counts(written[start : start + 17])
        await store.put_counts(hours)
        filters: list[dict[str, Any]] = [
            {},
            {"since": TIME + 60_000, "until": TIME + 240_000},
            {"since": TIME + 1},
            {"until": TIME},
            {"names": ["up"]},
            {"names": ["events", "up", "other"]},
            {"names": []},
            {"workspace_id": ""},
            {"workspace_id": "acme", "names": ["events"], "since": TIME + 180_000},
            {"workspace_id": "nobody"},
        ]
        for wanted in filters:
            chosen = [
                register
                for register in written
                if wanted.get("since", 0) <= register.at < wanted.get("until", TIME * 2)
                and register.name in wanted.get("names", [register.name])
                and register.workspace_id == wanted.get("workspace_id", register.workspace_id)
            ]
            for limit in (1, 3, 1000):
                found = await sums(store, limit=limit, **wanted)
                assert _in_order(found) == _sorted(_expected(chosen))
        assert await sums(store, step=3600) == _expected(hours)

    @on_open
    async def test_similar_counters_are_different(self, store: Any) -> None:
        labels = [(), ("",), ("", ""), ("a", "b"), ("a,b",), ("a\x00b",), ('a","b',), ("b", "a")]
        written = [count(1, labels=label) for label in labels]
        written += [count(1, labels=("x", text)) for text in AWKWARD]
        written += [count(1, workspace_id=text) for text in AWKWARD]
        written += [count(1, process=text, labels=("p",)) for text in AWKWARD]
        await store.put_counts(written)
        await store.put_counts(written)
        found = await sums(store, limit=20)
        assert _in_order(found) == _sorted(_expected(written))
        assert sum(total.total for total in found) == len(written)

    @on_store
    async def test_all_registers_are_read_for_a_copy(self, bench: Bench) -> None:
        store = await bench.open()
        written = [
            count(number, step=step, minute=minute, process=process, labels=(label,))
            for number, (step, minute, process, label) in enumerate(
                itertools.product((60, 3600), (0, 60, 120), "pqr", ("a", "b\x00"))
            )
        ]
        await store.put_counts(written)
        expected = sorted(map(repr, written))
        for limit in (1, 5, 1000):
            counts = await all_pages(store.scan_counts, limit=limit)
            assert sorted(map(repr, counts)) == expected
        page = await store.scan_counts(after=None, limit=10)
        # No counter is read twice, although others are written or expire in between.
        await store.put_counts([count(10**6, process="new"), *written])
        await store.close()
        store = await bench.open()
        rest = await all_pages(store.scan_counts, after=page.cursor)
        seen = [repr(one) for one in (*page.items, *rest) if one.process != "new"]
        assert sorted(seen) == expected

    @on_open
    async def test_old_counters_expire(self, store: Any) -> None:
        await store.put_counts([count(1, minute=n, process=p) for n in range(5) for p in "pq"])
        await store.put_counts([count(7, step=3600)])
        assert await store.expire_counts(60, TIME, limit=100) == 0
        assert await store.expire_counts(60, TIME + 120_000, limit=3) == 3
        assert await store.expire_counts(60, TIME + 120_000, limit=100) == 1
        assert await store.expire_counts(60, TIME + 120_000, limit=100) == 0
        assert [total.at for total in await sums(store)] == [TIME + n * 60_000 for n in (2, 3, 4)]
        assert [total.total for total in await sums(store, step=3600)] == [7]
        assert await store.expire_counts(3600, TIME + 1, limit=100) == 1
