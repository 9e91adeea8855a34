# SPDX-License-Identifier: Apache-2.0
"""The promises of every storage about failures of the server under it: only stored events are
acknowledged, and the storage works again by itself.
"""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from engage.api import (
    EventFilter,
    Kind,
    Status,
    StorageUnavailable,
)
from engage.store.facade import Storage

from ..factories import (
    TIME,
    WORKSPACE,
    change,
    count,
    event,
    identify,
    ids,
    letter,
    record,
    store_all,
    suppression,
    user,
)
from ..harness import Call, eventually, may_fail, must_fail
from .harness import Bench, on_store


class FailureTests:
    """Every method, while :meth:`Subject.break_store` makes the store fail."""

    @on_store
    async def test_nothing_is_acknowledged_while_the_store_is_broken(self, bench: Bench) -> None:
        store = await bench.open()
        await store_all(store, event("before"))
        async with bench.broken():
            for _ in range(2):
                with pytest.raises(StorageUnavailable):
                    await store.write([event("during")])
                with pytest.raises(StorageUnavailable):
                    # The outcome "duplicate" is also an acknowledgement.
                    await store.write([event("before")])
                with pytest.raises(StorageUnavailable):
                    await store.check()
        await eventually(store.check, StorageUnavailable)
        outcomes = await store.write([event("before"), event("during"), event("after")])
        assert outcomes[0].status is Status.DUPLICATE
        assert outcomes[2].status is Status.STORED
        assert sorted(await ids(store)) == ["after", "before", "during"]

    @on_store
    async def test_every_method_raises_unavailable(self, bench: Bench) -> None:
        store = await bench.open()
        await store_all(store, identify("m", "u", traits={"email": "a@b.c"}))
        reading: list[Call] = [
            lambda: store.find(WORKSPACE, "api", "m"),
            lambda: store.scan(EventFilter(), after=None, limit=1),
            lambda: store.recent(EventFilter(), limit=1),
        ]
        writing: list[Call] = [store.check, lambda: store.write([event("n")])]
        if bench.subject.can("expire"):
            writing.append(lambda: store.expire(TIME + 1, limit=1, force=True))
        reading += [
            lambda: store.profile(WORKSPACE, "u"),
            lambda: store.find_users(WORKSPACE, "email", ["a@b.c"]),
            lambda: store.scan_users(None, after=None, limit=1),
            lambda: store.scan_groups(None, after=None, limit=1),
        ]
        writing.append(lambda: store.apply(change("c", g=True)))
        reading += [
            lambda: store.state(WORKSPACE, user("u")),
            lambda: store.scan_subscriptions(None, after=None, limit=1),
            lambda: store.history(None, None, after=None, limit=1),
        ]
        writing.append(lambda: store.suppress([suppression()]))
        reading += [
            lambda: store.suppressions(WORKSPACE, [("email", "a@b.c")]),
            lambda: store.scan_suppressions(None, after=None, limit=1),
        ]
        writing += [
            lambda: store.put([letter("l")]),
            lambda: store.remove(WORKSPACE, ["l"]),
        ]
        reading += [
            lambda: store.scan_dead_letters(None, after=None, limit=1),
            lambda: store.recent_dead_letters(None, limit=1),
            lambda: store.dead_letter(WORKSPACE, "l"),
        ]
        writing += [
            lambda: store.put_record(record("r")),
            lambda: store.delete_record("key", WORKSPACE, "r"),
            lambda: store.expire_records("key", TIME + 1, limit=1),
        ]
        reading += [
            lambda: store.get_record("key", WORKSPACE, "r"),
            lambda: store.list_records(None, limit=1),
            lambda: store.records_version("key"),
        ]
        writing += [
            lambda: store.erase_events([event("m")], [b""]),
            lambda: store.erase_profile(WORKSPACE, Kind.USER, "u"),
            lambda: store.erase_choices(WORKSPACE, user("u"), "x"),
            lambda: store.erase_suppressions(WORKSPACE, [("email", "a@b.c")]),
            lambda: store.reapply([identify("m", "u", traits={"a": 1})]),
        ]
        reading.append(lambda: store.links_to(WORKSPACE, "a"))
        reading.append(lambda: store.linked_to(WORKSPACE, "u"))
        writing += [
            lambda: store.put_counts([count(1)]),
            lambda: store.expire_counts(60, TIME + 1, limit=1),
        ]
        reading += [
            lambda: store.counts(60, since=TIME, until=TIME + 1, limit=1),
            lambda: store.scan_counts(after=None, limit=1),
        ]

        # At the same time, because each may wait until its time limit.
        async with bench.broken():
            await asyncio.gather(*map(must_fail, writing))
            await asyncio.gather(*map(may_fail, reading))
        await eventually(store.check, StorageUnavailable)
        for call in (*writing, *reading):
            await eventually(call, StorageUnavailable)

    @on_store
    async def test_opening_a_broken_store_raises_unavailable(self, bench: Bench) -> None:
        await store_all(await bench.open(), event("before"))
        store = bench.new()

        async def work() -> None:
            await store.open(create=True)
            await store.check()

        async with bench.broken():
            # A store on another machine may be opened; then the check fails.
            with pytest.raises(StorageUnavailable):
                await work()
        await eventually(work, StorageUnavailable)
        assert await ids(store) == ["before"]

    @on_store
    async def test_acknowledged_events_survive_a_failure_while_writing(self, bench: Bench) -> None:
        """At any moment: acknowledged events are stored, and the rest can be sent again."""
        store = await bench.open()
        acknowledged: set[str] = set()
        sent: set[str] = set()
        stop = False

        async def write(name: str) -> None:
            number = 0
            while not stop:
                batch = [identify(f"{name}-{number}-{n}", f"u{n}", number) for n in range(5)]
                number += 1
                sent.update(event.message_id for event in batch)
                with contextlib.suppress(StorageUnavailable):
                    await store.write(batch)
                    acknowledged.update(event.message_id for event in batch)
                await asyncio.sleep(0)

        writers = [asyncio.ensure_future(write(name)) for name in "abc"]
        try:
            await bench.break_twice(acknowledged)
        finally:
            stop = True
            await asyncio.gather(*writers)
        await eventually(store.check, StorageUnavailable)
        await _check_nothing_is_lost(store, acknowledged, sent)


async def _check_nothing_is_lost(store: Storage, acknowledged: set[str], sent: set[str]) -> None:
    stored = await ids(store, limit=1000)
    assert len(stored) == len(set(stored))
    assert acknowledged <= set(stored) <= sent
    missing = sorted(sent)
    await store.write([event(name) for name in missing])
    assert sorted(await ids(store, limit=1000)) == missing
