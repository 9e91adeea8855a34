# SPDX-License-Identifier: Apache-2.0
"""The promises of every log about one reader: batches, committed offsets, the backlog."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping

import pytest

from engage.api import Backlog, ReadRecord, StorageUnavailable

from .harness import (
    MAX_BYTES,
    LogBench,
    append_all,
    by_partition,
    log_record,
    names,
    numbered,
    offsets_after,
    on_log,
    read,
)


class LogReadTests:
    """``reader``, ``read``, ``commit``, ``rewind``, ``pause``, ``committed``, ``backlog``."""

    @on_log
    async def test_a_batch_has_limits(self, bench: LogBench) -> None:
        log = await bench.open()
        sizes = [10, 300, 5000, 20, 10, 10, 20, 0, 10, 10, 700] * 10
        await append_all(
            log, *(log_record(f"m{n}", f"u{n % 9}", bytes(size)) for n, size in enumerate(sizes))
        )
        reader = await bench.reader(log)
        entries: list[ReadRecord] = []
        end = time.monotonic() + bench.subject.patience
        while len(entries) < len(sizes) and time.monotonic() < end:
            batch = await reader.read(max_records=7, max_bytes=2000, wait=0.5)
            assert not batch.gaps
            assert len(batch.records) <= 7
            # A larger one comes alone.
            total = sum(entry.record.size for entry in batch.records)
            assert total <= 2000 or len(batch.records) == 1
            entries += batch.records
        assert sorted(names(entries)) == sorted(f"m{n}" for n in range(len(sizes)))
        _check_order(entries)

    @on_log
    async def test_a_record_is_returned_once(self, bench: LogBench) -> None:
        """It is not returned again because it is not committed yet."""
        log = await bench.open(*numbered(100))
        reader = await bench.reader(log)
        entries = await bench.take(reader, 100)
        await append_all(log, *numbered(100, name="n"))
        entries += await bench.take(reader, 100)
        assert len(set(names(entries))) == 200
        _check_order(entries)

    @on_log
    async def test_a_read_waits_for_the_first_record(self, bench: LogBench) -> None:
        log = await bench.open(log_record("first"))
        reader = await bench.reader(log)
        await bench.take(reader, 1)
        started = time.monotonic()
        assert await read(reader, wait=0.3) == []
        assert 0.2 < time.monotonic() - started < 60
        reading = asyncio.ensure_future(read(reader, wait=600))
        await asyncio.sleep(0.3)
        assert not reading.done()
        await append_all(log, log_record("second"))
        assert names(await asyncio.wait_for(reading, 120)) == ["second"]

    @on_log
    async def test_a_cancelled_read_loses_nothing(self, bench: LogBench) -> None:
        """Its records are returned by the next call."""
        log = await bench.open(*numbered(200))
        reader = await bench.reader(log)
        entries: list[ReadRecord] = []
        for n in range(200):
            reading = asyncio.ensure_future(read(reader, wait=5, max_records=2))
            for _ in range(n % 5):
                await asyncio.sleep(0)
            if n % 2:
                await asyncio.sleep(0.001 * (n % 7))
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                entries += await reading
        entries += await bench.take(reader, 200 - len(entries))
        assert set(names(entries)) == {f"m{n}" for n in range(200)}
        _check_order(entries)

    @on_log
    async def test_a_reader_begins_at_the_first_record(self, bench: LogBench) -> None:
        """In each partition that has no committed offset, when it joins the group or later."""
        log = await bench.open(log_record("a", "user0"))
        first = await bench.reader(log)
        (entry,) = await bench.take(first, 1)
        await first.commit(offsets_after([entry]))
        await first.close()
        await append_all(log, *numbered(100))
        second = await bench.reader(log)
        entries = await bench.take(second, 100)
        await append_all(log, log_record("z"))
        entries += await bench.take(second, 1)
        assert set(names(entries)) == {*(f"m{n}" for n in range(100)), "z"}

    @on_log
    async def test_a_group_continues_at_the_offsets_that_were_named(self, bench: LogBench) -> None:
        """And not where the reader is."""
        log = await bench.open(*numbered(120))
        first = await bench.reader(log)
        parts = by_partition(await bench.take(first, 120))
        done = [entry for part in parts.values() for entry in part[: len(part) // 3]]
        offsets = offsets_after(done)
        await first.commit(offsets)
        assert await log.committed("g") == offsets
        assert await (await bench.open()).committed("g") == offsets
        await first.close()
        assert await log.committed("g") == offsets
        second = await bench.reader(log)
        entries = await bench.take(second, 120 - len(done))
        assert set(names(entries)) == {f"m{n}" for n in range(120)} - set(names(done))
        # An offset may move back, as when an operator wants records to be read again.
        await second.commit({number: part[0].offset for number, part in parts.items()})
        await second.close()
        assert len(await bench.take(await bench.reader(log), 120)) == 120

    @on_log
    async def test_a_reader_commits_nothing_by_itself(self, bench: LogBench) -> None:
        log = await bench.open(*numbered(50))
        first = await bench.reader(log)
        await bench.take(first, 50)
        await asyncio.sleep(0.2)
        assert await log.committed("g") == {}
        await first.commit({})
        await first.close()
        assert await log.committed("g") == {}
        await bench.take(await bench.reader(log), 50)

    @on_log
    async def test_groups_do_not_know_each_other(self, bench: LogBench) -> None:
        log = await bench.open(*numbered(30))
        first, other = await bench.reader(log, "one"), await bench.reader(log, "other")
        await first.commit(offsets_after(await bench.take(first, 30)))
        assert await log.committed("other") == {}
        await bench.take(other, 30)

    @on_log
    async def test_rewinding_returns_what_is_not_committed_again(self, bench: LogBench) -> None:
        log = await bench.open(*numbered(60))
        reader = await bench.reader(log)
        parts = by_partition(await bench.take(reader, 60))
        await reader.rewind()
        again = await bench.take(reader, 60)
        assert set(names(again)) == {f"m{n}" for n in range(60)}
        _check_order(again)
        done = [entry for part in parts.values() for entry in part[: len(part) // 2]]
        await reader.commit(offsets_after(done))
        await append_all(log, *numbered(5, name="n"))
        await reader.rewind()
        again = await bench.take(reader, 65 - len(done))
        assert not set(names(again)) & set(names(done))

    @on_log
    async def test_a_paused_partition_waits(self, bench: LogBench) -> None:
        """The others go on; a rewind does not end the pause."""
        log = await bench.open(*numbered(60))
        reader = await bench.reader(log)
        parts = by_partition(await bench.take(reader, 60))
        paused = min(parts)
        reader.pause([paused])
        await append_all(log, *numbered(60, name="n"))
        others = 60 - len(parts[paused])
        entries = await bench.take(reader, others)
        await reader.rewind()
        entries += await bench.take(reader, 2 * others)
        assert paused not in by_partition(entries)
        assert await log.committed("g") == {}
        await reader.close()
        await bench.take(await bench.reader(log), 120)

    @on_log
    async def test_a_reader_begins_at_a_time(self, bench: LogBench) -> None:
        bench.require("times")
        log = await bench.open()
        for n in range(5):
            await append_all(log, *numbered(20, name=f"t{n}-"))
            await asyncio.sleep(0.05)
        everything = await bench.everything(log)
        assert len(everything) == 100
        since = sorted(entry.appended_at for entry in everything)[60]
        later = [entry for entry in everything if entry.appended_at >= since]
        reader = await bench.reader(log, since=since)
        entries = await bench.take(reader, len(later))
        assert set(names(entries)) == set(names(later))
        # It does not matter to a group that has committed offsets.
        await reader.commit({entry.partition: entry.offset for entry in reversed(entries)})
        await reader.close()
        now = max(entry.appended_at for entry in everything) + 3_600_000
        again = await bench.reader(log, since=now)
        expected = {name for part in by_partition(entries).values() for name in names(part)}
        assert set(names(await bench.take(again, len(entries)))) == expected
        # Nothing was appended at this time yet: it begins at the end.
        late = await bench.reader(log, "late", since=now)
        assert await read(late, wait=1) == []
        await append_all(log, log_record("new"))
        await bench.take(late, 1)

    @on_log
    async def test_the_backlog_is_what_is_not_committed(self, bench: LogBench) -> None:
        log = await bench.open()
        assert (await log.backlog("g")).records == 0
        assert (await log.backlog("g")).oldest_at is None
        await append_all(log, *numbered(50, name="a"))
        await asyncio.sleep(0.05)
        await append_all(log, *numbered(50, name="b"))
        everything = await bench.everything(log)
        backlog = await log.backlog("g")
        # Numbers that a log leaves out also count.
        assert backlog.records >= 100
        assert backlog.oldest_at == min(entry.appended_at for entry in everything)
        assert backlog.retention is None or backlog.retention > 0
        reader = await bench.reader(log)
        entries = await bench.take(reader, 100)
        done = [entry for entry in entries if names([entry])[0].startswith("a")]
        await reader.commit(offsets_after(done))
        left = await log.backlog("g")
        assert 50 <= left.records <= backlog.records - 50
        assert left.oldest_at == min(
            entry.appended_at for entry in entries if names([entry])[0].startswith("b")
        )
        await reader.commit(await log.ends())
        assert await log.backlog("g") == Backlog(
            records=0, oldest_at=None, retention=backlog.retention
        )
        assert (await log.backlog("another")).records >= 100

    @on_log
    async def test_a_gap_is_reported_once(self, bench: LogBench) -> None:
        """Records that were deleted before they were read may be lost."""
        bench.require("expire")
        log = await bench.open()
        await append_all(log, *(log_record(f"m{n}") for n in range(20)))
        reader = await bench.reader(log)
        records = await bench.take(reader, 20)
        number = records[0].partition
        await reader.commit({number: records[5].offset})
        await reader.close()
        first = records[12].offset
        await asyncio.to_thread(bench.subject.expire, bench.options, {number: first})
        assert (await log.firsts()).get(number, 0) == first
        assert (await log.backlog("g")).gaps == {number: (records[5].offset, first)}
        assert (await log.backlog("new")).gaps == {}
        again = await bench.reader(log)
        entries: list[ReadRecord] = []
        gaps: list[Mapping[int, tuple[int, int]]] = []
        end = time.monotonic() + bench.subject.patience
        while (len(entries) < 8 or not gaps) and time.monotonic() < end:
            batch = await again.read(max_records=3, max_bytes=MAX_BYTES, wait=0.5)
            entries += batch.records
            gaps += [batch.gaps] if batch.gaps else []
        entries += await read(again, wait=0.3)
        assert [dict(gap) for gap in gaps] == [{number: (records[5].offset, first)}]
        assert names(entries) == [f"m{n}" for n in range(12, 20)]
        # A group that has no offset yet has lost nothing.
        assert names(await bench.take(await bench.reader(log, "new"), 8)) == names(entries)
        assert (await log.backlog("g")).records == 8
        await again.commit({number: first})
        assert (await log.backlog("g")).gaps == {}
        # All of them were deleted.
        end = (await log.ends())[number]
        await asyncio.to_thread(bench.subject.expire, bench.options, {number: end})
        assert (await log.firsts()).get(number, 0) == end
        assert (await log.backlog("new")).records == 0

    @on_log
    async def test_a_closed_reader_raises(self, bench: LogBench) -> None:
        log = await bench.open(log_record("a"))
        reader = await bench.reader(log)
        await reader.open()
        entries = await bench.take(reader, 1)
        await reader.close()
        await reader.close()
        for closed in (reader, log.reader("g")):
            with pytest.raises(StorageUnavailable):
                await read(closed, wait=0)
            with pytest.raises(StorageUnavailable):
                await closed.commit(offsets_after(entries))
            with pytest.raises(StorageUnavailable):
                await closed.rewind()
        assert await log.committed("g") == {}
        other = await bench.reader(log)
        await log.close()
        with pytest.raises(StorageUnavailable):
            await read(other, wait=0)


def _check_order(entries: list[ReadRecord]) -> None:
    """Check that the records of each partition were returned in the order of the log."""
    for records in by_partition(entries).values():
        offsets = [entry.offset for entry in records]
        assert offsets == sorted(set(offsets))
