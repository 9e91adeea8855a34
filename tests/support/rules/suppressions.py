# SPDX-License-Identifier: Apache-2.0
"""The promises of a :class:`~engage.store.facade.Storage`."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from typing import Any

from engage.testing.factories import AWKWARD, TIME, WORKSPACE, all_pages, suppression
from engage.testing.storage.harness import Bench, on_open, on_store


async def in_force(store: Any, address: str = "a@b.c", channel: str = "email") -> set[str]:
    """Return why nothing must be sent to an address."""
    suppressions = await store.suppressions(WORKSPACE, [(channel, address)])
    assert {(one.channel, one.address) for one in suppressions} <= {(channel, address)}
    return {one.reason for one in suppressions}


class SuppressionTests:
    """``suppress``, ``suppressions``, ``scan_suppressions``."""

    @on_open
    async def test_a_suppression_is_found_by_its_address(self, store: Any) -> None:
        one = suppression(how="webhook:sendgrid", source_id="evt 1")
        two = suppression(group_id="news", reason="unsubscribe", at=5)
        await store.suppress([])
        await store.suppress([one, two, suppression("x@b.c"), suppression(channel="sms")])
        await store.suppress([suppression(workspace="other")])
        found = await store.suppressions(WORKSPACE, [("email", "a@b.c"), ("email", "none@b.c")])
        assert sorted(found, key=lambda one: one.at) == [one, two]
        assert len(await store.suppressions(WORKSPACE, [("email", "a@b.c"), ("sms", "a@b.c")])) == 3
        assert list(await store.suppressions(WORKSPACE, [])) == []
        assert await in_force(store, "A@b.c") == set()

    @on_open
    async def test_lifting_one_reason_leaves_the_others(self, store: Any) -> None:
        for reason in ("stop", "bounce"):
            await store.suppress([suppression("+1", channel="sms", reason=reason)])
        start = suppression("+1", channel="sms", reason="stop", at=1, lifted=True)
        await store.suppress([start])
        assert await in_force(store, "+1", "sms") == {"bounce"}
        # What is lifted is known to a copy.
        assert start in await all_pages(store.scan_suppressions, WORKSPACE)

    @on_open
    async def test_the_latest_holds_in_whatever_order_they_arrive(self, store: Any) -> None:
        values = [suppression(at=at, lifted=lifted) for at, lifted in ((1, False), (2, True))]
        values += [suppression(at=at, lifted=lifted) for at, lifted in ((3, False), (3, True))]
        for number, order in enumerate(itertools.permutations(values)):
            address = f"{number}@b.c"
            arriving = [dataclasses.replace(one, address=address) for one in order]
            for one in (*arriving[:3], *arriving):
                await store.suppress([one])
            # At the same time, one that is not lifted.
            assert await in_force(store, address) == {"complaint"}
            # The same in one call.
            together = [dataclasses.replace(one, group_id="g") for one in arriving]
            await store.suppress([*together, *together[:2]])
            assert len(await store.suppressions(WORKSPACE, [("email", address)])) == 2
            await store.suppress([suppression(address, at=4, lifted=True, how="operator")])
            await store.suppress(arriving)
            (left,) = await store.suppressions(WORKSPACE, [("email", address)])
            assert (left.group_id, left.at - TIME) == ("g", 3)

    @on_open
    async def test_similar_suppressions_are_separate(self, store: Any) -> None:
        for number, name in enumerate(AWKWARD):
            await store.suppress([suppression(name, at=number, how=name, source_id=name)])
            await store.suppress([suppression("x", at=number, group_id=name)])
            await store.suppress([suppression("x", at=number, channel=name, reason="stop")])
        for number, name in enumerate(AWKWARD):
            (found,) = await store.suppressions(WORKSPACE, [("email", name)])
            assert found == suppression(name, at=number, how=name, source_id=name)
            (found,) = await store.suppressions(WORKSPACE, [(name, "x")])
            assert found.at == TIME + number
        found = await store.suppressions(WORKSPACE, [("email", "x")])
        assert {one.group_id: one.at - TIME for one in found} == {
            name: number for number, name in enumerate(AWKWARD)
        }
        for limit in (1, 7, 1000):
            everything = await all_pages(store.scan_suppressions, None, limit=limit)
            assert len(everything) == len(set(everything)) == 3 * len(AWKWARD)
        assert await all_pages(store.scan_suppressions, "acm") == []

    @on_open
    async def test_a_scan_of_suppressions_is_complete_while_others_are_written(
        self, store: Any
    ) -> None:
        await store.suppress([suppression(f"{n}@b.c") for n in range(40)])
        found, after, number = [], None, 0
        while True:
            page = await store.scan_suppressions(WORKSPACE, after=after, limit=7)
            found += page.items
            number += 1
            # Some of these addresses sort before the cursor, and some after it.
            more = [suppression(f"{number}@0.c"), suppression(f"{number}@x.c", workspace="other")]
            await store.suppress([*more, suppression(f"{number}@b.c", at=9)])
            if (after := page.cursor) is None:
                break
            assert number < 50
        names = [one.address for one in found]
        assert len(names) == len(set(names))
        assert {f"{n}@b.c" for n in range(40)} <= set(names)
        assert len(await all_pages(store.scan_suppressions, "other")) == number

    @on_store
    async def test_concurrent_suppressions_leave_the_latest(self, bench: Bench) -> None:
        stores = [await bench.open()]
        if bench.subject.can("atomic-updates"):
            stores.append(await bench.open())
        calls = [
            stores[n % len(stores)].suppress([suppression(at=n * 7 % 30, lifted=n % 2 == 0)])
            for n in range(30)
        ]
        await asyncio.gather(*calls)
        (latest,) = await all_pages(stores[0].scan_suppressions, None)
        assert latest.at == TIME + 29
        assert latest.lifted == (29 * 13 % 30 % 2 == 0)

    @on_store
    async def test_a_suppression_is_there_after_reopening(self, bench: Bench) -> None:
        store = await bench.open()
        await store.suppress([suppression()])
        await store.close()
        assert await in_force(await bench.open()) == {"complaint"}
