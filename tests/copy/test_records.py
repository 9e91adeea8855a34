# SPDX-License-Identifier: Apache-2.0
"""Copying what the console keeps: write keys, its audit and the counters, and nothing else."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engage.api import Record
from engage.copy import records as copy_records
from engage.copy.copy import Counts, copy_all
from engage.testing.factories import AWKWARD, TIME, all_pages, count, letter, record
from engage.testing.memory_store import MemoryStore
from support import mongo

#: The kind of the target.
both = pytest.mark.parametrize("kind", ["memory", pytest.param("mongo", marks=pytest.mark.mongo)])


@contextlib.asynccontextmanager
async def two_on(tmp_path: Path, kind: str) -> AsyncIterator[tuple[Any, Any]]:
    """Open a store in memory, and another one or one of MongoDB."""
    target: Any = MemoryStore()
    if kind == "mongo":
        target = mongo.make_store(tmp_path, mongo.shared(mongo.kinds()[-1]).url())
    await target.open(create=True)
    try:
        yield MemoryStore(), target
    finally:
        await target.close()


async def copied(source: Any, target: Any) -> dict[str, Counts]:
    """Copy everything, and return the counts of each kind."""
    return {counts.kind: counts async for counts in copy_all(source, target)}


def plain(one: Record) -> tuple[object, ...]:
    """Return everything of a record but its version, which each store counts by itself."""
    return (one.kind, one.workspace_id, one.id, one.body, one.at)


@both
async def test_keys_and_audit_are_copied_and_nothing_else(tmp_path: Path, kind: str) -> None:
    async with two_on(tmp_path, kind) as (source, target):
        kinds = ("key", "key-override", "audit")
        others = ("console-secret", "link", "session", "refused")
        for kind in (*kinds, *others):
            for number, name in enumerate(AWKWARD[:20]):
                body = b'{"n":%d}' % number
                one = record(name, ("", "acme")[number % 2], kind=kind, body=body, at=TIME + number)
                await source.put_record(one)
                await source.put_record(one)
        for turn in range(2):
            counts = await copied(source, target)
            for kind, total in (("write keys", 40), ("audit records", 20)):
                assert counts[kind].arrived
                assert (counts[kind].copied, counts[kind].duplicate) == (
                    (0, total) if turn else (total, 0)
                )
        for kind in kinds:
            there = [plain(one) for one in await all_pages(target.list_records, kind)]
            assert there == [plain(one) for one in await all_pages(source.list_records, kind)]
        for kind in others:
            assert list((await target.list_records(kind, limit=1)).items) == []


@both
async def test_the_later_of_two_records_stays(tmp_path: Path, kind: str) -> None:
    async with two_on(tmp_path, kind) as (source, target):
        on, off = b'{"disabled":false}', b'{"disabled":true}'
        for name, mine, theirs in (("later", TIME + 1, TIME), ("earlier", TIME, TIME + 1)):
            await source.put_record(record(name, body=off, at=mine))
            await target.put_record(record(name, body=on, at=theirs))
        await source.put_record(record("other", body=off))
        await target.put_record(record("other", body=on))
        # The same record, written in another way.
        await source.put_record(record("same", body=b'{"a":1,"b":[]}'))
        await target.put_record(record("same", body=b'{"b":[],"a":1}'))
        keys = (await copied(source, target))["write keys"]
        assert (keys.copied, keys.duplicate, keys.conflicting, keys.refused) == (1, 1, 2, 0)
        assert keys.reasons == ["the target has a newer record with the same id"]
        found = {one.id: one.body for one in await all_pages(target.list_records, "key")}
        assert found == {"later": off, "earlier": on, "other": on, "same": b'{"b":[],"a":1}'}


async def test_a_record_that_changes_meanwhile_is_not_overwritten() -> None:
    source, target = MemoryStore(), MemoryStore()
    await source.put_record(record("k", body=b'{"n":1}', at=TIME + 5))
    await target.put_record(record("k", body=b'{"n":0}'))
    found = await target.get_record("key", "acme", "k")

    async def get_record(*arguments: Any) -> Record | None:
        await target.put_record(record("k", body=b'{"n":9}', at=TIME + 9))
        return found

    target.get_record = get_record  # type: ignore[assignment]
    keys = (await copied(source, target))["write keys"]
    assert (keys.copied, keys.conflicting) == (0, 1)
    assert [one.body for one in await all_pages(target.list_records, "key")] == [b'{"n":9}']


@both
async def test_counters_are_added_by_neither_copy(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_records, "PAGE", 7)
    async with two_on(tmp_path, kind) as (source, target):
        written = [
            count(number, minute=minute, process=process, step=step)
            for number, (step, minute, process) in enumerate(
                itertools.product((60, 3600), (0, 60), "pqrst")
            )
        ]
        await source.put_counts(written)
        # The target has the value of an interrupted copy, and one of a later one.
        await target.put_counts([written[3], count(1000, process="p"), count(0, process="q")])
        for _ in range(2):
            counters = (await copied(source, target))["counters"]
            assert (counters.copied, counters.arrived) == (20, True)
        counts = sorted(await all_pages(target.scan_counts), key=repr)
        assert counts == sorted([count(1000, process="p"), *written[1:]], key=repr)


@both
async def test_letters_are_copied_with_what_a_replay_needs(tmp_path: Path, kind: str) -> None:
    async with two_on(tmp_path, kind) as (source, target):
        letters = [
            letter("new", operation="batch", envelope=b'{"sentAt":"2025-01-01T00:00:00Z"}'),
            letter("old"),
        ]
        await source.put(letters)
        assert (await copied(source, target))["dead letters"].copied == 2
        found = await all_pages(target.scan_dead_letters, None)
        assert [(one.operation, one.envelope) for one in found] == [
            (one.operation, one.envelope) for one in letters
        ]
