# SPDX-License-Identifier: Apache-2.0
"""The promises of every log about appending: durable, in order, each record with its outcome."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import time

import pytest

from engage.api import EventLog, LogRecord, Outcome, Status, StorageMissing, StorageUnavailable

from .harness import (
    LogBench,
    append_all,
    by_partition,
    log_record,
    names,
    numbered,
    offsets_after,
    on_log,
)

#: Bytes that a careless log changes or loses.
AWKWARD = (
    b"",
    b"\0",
    b"a\0b",
    b"\n",
    b"\r\n",
    b"\xff\xfe",
    "é😀".encode(),
    b"null",
    bytes(range(256)),
)


class LogAppendTests:
    """``open``, ``close``, ``check``, ``append``, ``append_dead``, ``ends``, ``gauges``."""

    @on_log
    async def test_a_record_is_in_the_log_once(self, bench: LogBench) -> None:
        log = await bench.open()
        before = await log.ends()
        await append_all(log, *numbered(10))
        after = await log.ends()
        assert after.keys() == before.keys()
        entries = await bench.everything(log)
        assert sorted(names(entries)) == sorted(f"m{n}" for n in range(10))
        assert offsets_after(entries).items() <= after.items()

    @on_log
    async def test_records_are_returned_unchanged(self, bench: LogBench) -> None:
        log = await bench.open()
        sent = [
            LogRecord(key=b"acme:" + raw, value=raw, headers={"engage": raw, "meta": b"m%d" % n})
            for n, raw in enumerate(AWKWARD)
        ]
        started = time.time()
        await append_all(log, *sent)
        entries = await bench.everything(log)
        assert sorted(entry.record.headers["meta"] for entry in entries) == [
            record.headers["meta"] for record in sent
        ]
        for entry in entries:
            original = sent[int(names([entry])[0][1:])]
            assert (entry.record.key, entry.record.value) == (original.key, original.value)
            assert dict(entry.record.headers) == dict(original.headers)
            # The clocks of other machines differ, but not by a day.
            assert abs(entry.appended_at / 1000 - started) < 86_400

    @on_log
    async def test_no_records_are_no_error(self, bench: LogBench) -> None:
        log = await bench.open()
        assert list(await log.append([])) == []
        assert list(await log.append_dead([])) == []
        assert await bench.everything(log) == []

    @on_log
    async def test_records_of_a_key_keep_their_order(self, bench: LogBench) -> None:
        """In the order of the calls, also if many of them run at the same time."""
        log = await bench.open()
        for start in range(0, 40, 10):
            await append_all(log, *numbered(10, keys=3, name=f"a{start // 10}-"))
        calls = [
            # A call with one key, between calls with several keys.
            log.append(
                [log_record(f"b{n:03}-{key}", f"user{key}") for key in range(3)]
                if n % 3
                else [log_record(f"b{n:03}-0", "user0")]
            )
            for n in range(100)
        ]
        await asyncio.gather(*map(asyncio.ensure_future, calls))
        entries = await bench.everything(log)
        assert len(entries) == 40 + 34 + 66 * 3
        for key in range(3):
            mine = [entry for entry in entries if entry.record.key == f"acme:user{key}".encode()]
            assert len({entry.partition for entry in mine}) == 1
            assert [entry.offset for entry in mine] == sorted({entry.offset for entry in mine})
            assert names(mine) == sorted(names(mine))

    @on_log
    async def test_a_record_that_is_too_large_is_refused_alone(self, bench: LogBench) -> None:
        log = await bench.open()
        large = bench.subject.too_large(log_record("large"))
        outcomes = await log.append([log_record("a"), large, log_record("b")])
        assert [x.status for x in outcomes] == [Status.STORED, Status.REFUSED, Status.STORED]
        assert outcomes[1].reason
        (alone,) = await log.append([large])
        assert alone.status is Status.REFUSED
        assert names(await bench.everything(log)) == ["a", "b"]

    @on_log
    async def test_the_largest_record_of_the_core_is_stored(self, bench: LogBench) -> None:
        log = await bench.open()
        value = os.urandom(bench.context.max_value_bytes)  # cannot be compressed
        await append_all(log, log_record("before"), log_record("large", value=value))
        entries = await bench.everything(log)
        assert [entry.record.value for entry in entries] == [b"before", value]

    @on_log
    async def test_ten_megabytes_are_appended_by_one_call(self, bench: LogBench) -> None:
        log = await bench.open()
        records = [log_record(f"m{n:05}", f"u{n % 97}", os.urandom(1000)) for n in range(10_000)]
        await append_all(log, *records)
        entries = await bench.everything(log)
        assert sorted(names(entries)) == names_of(records)
        values = {record.key + record.headers["meta"]: record.value for record in records}
        assert all(
            values[x.record.key + x.record.headers["meta"]] == x.record.value for x in entries
        )

    @on_log
    async def test_many_calls_run_at_the_same_time(self, bench: LogBench) -> None:
        log = await bench.open()
        await asyncio.gather(*(append_all(log, *numbered(7, name=f"c{n}-")) for n in range(200)))
        stored = names(await bench.everything(log))
        assert sorted(stored) == sorted(f"c{n}-{m}" for n in range(200) for m in range(7))

    @on_log
    async def test_a_cancelled_call_harms_no_other(self, bench: LogBench) -> None:
        """Its records may be appended, once; those of the others must be, in their order."""
        log = await bench.open()
        cancelled: set[str] = set()
        kept: list[str] = []
        for turn, delay in enumerate((0, 0.001, 0.01)):
            calls = []
            for n in range(30):
                records = [log_record(f"{turn}-{n:02}-{m}", f"user{m}") for m in range(5)]
                (cancelled.update if n % 3 == 0 else kept.extend)(names_of(records))
                calls.append(asyncio.ensure_future(log.append(records)))
            await asyncio.sleep(delay)
            for call in calls[::3]:
                call.cancel()
            done = await asyncio.gather(*calls, return_exceptions=True)
            for n, outcomes in enumerate(done):
                if n % 3:
                    assert not isinstance(outcomes, BaseException)
                    assert [x.status for x in outcomes] == [Status.STORED] * 5
        await log.close()
        reopened = await bench.open()
        await append_all(reopened, log_record("9-00-0", "user0"))
        entries = await bench.everything(reopened)
        assert len(entries) == len(set(names(entries)))
        assert {*kept, "9-00-0"} <= set(names(entries)) <= {*kept, *cancelled, "9-00-0"}
        for key in {entry.record.key for entry in entries}:
            all_of_key = names(entry for entry in entries if entry.record.key == key)
            mine = [name for name in all_of_key if name not in cancelled]
            assert mine == sorted(mine)

    @on_log
    async def test_records_are_there_after_reopening(self, bench: LogBench) -> None:
        first = await bench.open()
        await append_all(first, *numbered(20, name="a"))
        ends = await first.ends()
        await first.close()
        second = await bench.open()
        assert await second.ends() == ends
        await append_all(second, *numbered(20, name="b"))
        entries = await bench.everything(second)
        assert len(entries) == 40
        # A key stays in its partition.
        where = {entry.record.key: entry.partition for entry in entries}
        assert all(where[entry.record.key] == entry.partition for entry in entries)
        for records in by_partition(entries).values():
            assert names(records) == sorted(names(records), key=lambda name: name[0])

    @on_log
    async def test_what_was_appended_is_seen_by_others(self, bench: LogBench) -> None:
        """When ``append`` returns, all processes count the records."""
        log, other = await bench.open(), await bench.open()
        seen = sum((await other.ends()).values())
        for n in range(10):
            await append_all(log, log_record(f"m{n}", f"user{n}"))
            now = sum((await other.ends()).values())
            assert now > seen
            seen = now

    @on_log
    async def test_dead_records_are_not_read(self, bench: LogBench) -> None:
        log = await bench.open(log_record("a"))
        before = await log.ends()
        outcomes = await log.append_dead([log_record("dead"), log_record("dead")])
        assert list(outcomes) == [Outcome(Status.STORED)] * 2
        assert await log.ends() == before
        await append_all(log, log_record("b"))
        assert names(await bench.everything(log)) == ["a", "b"]

    @on_log
    async def test_a_dead_record_that_is_too_large_is_refused_alone(self, bench: LogBench) -> None:
        """Otherwise it would stop the loader, which repeats a call that raises."""
        log = await bench.open()
        large = bench.subject.too_large(log_record("large"))
        outcomes = await log.append_dead([log_record("a"), large, log_record("b")])
        assert [x.status for x in outcomes] == [Status.STORED, Status.REFUSED, Status.STORED]
        assert outcomes[1].reason
        (alone,) = await log.append_dead([large])
        assert alone.status is Status.REFUSED

    @on_log
    async def test_the_largest_record_of_the_core_is_taken_as_a_dead_one(
        self, bench: LogBench
    ) -> None:
        log = await bench.open()
        value = os.urandom(bench.context.max_value_bytes)  # cannot be compressed
        (outcome,) = await log.append_dead([log_record("large", value=value)])
        assert outcome.status is Status.STORED

    @on_log
    async def test_open_and_close_are_idempotent(self, bench: LogBench) -> None:
        log = await bench.open()
        await log.open(create=True)
        await append_all(log, log_record("a"))
        await log.close()
        await log.close()
        await log.open(create=False)
        await log.check()
        await append_all(log, log_record("b"))
        assert names(await bench.everything(log)) == ["a", "b"]

    @on_log
    async def test_a_log_that_does_not_exist_is_missing(self, bench: LogBench) -> None:
        bench.require("missing")
        log = bench.new()
        with pytest.raises(StorageMissing):
            await log.open(create=False)
        await log.open(create=True)
        await bench.new().open(create=False)

    @on_log
    async def test_a_closed_log_raises(self, bench: LogBench) -> None:
        closed = await bench.open()
        await append_all(closed, log_record("a"))
        await closed.close()
        for log in (closed, bench.new()):
            with pytest.raises(StorageUnavailable):
                await log.append([log_record("b")])
            with pytest.raises(StorageUnavailable):
                await log.append_dead([log_record("b")])
            with pytest.raises(StorageUnavailable):
                await log.check()
            with pytest.raises(StorageUnavailable):
                await log.ends()
            with pytest.raises(StorageUnavailable):
                await log.committed("g")
            with pytest.raises(StorageUnavailable):
                await log.backlog("g")
        assert names(await bench.everything(await bench.open())) == ["a"]

    @on_log
    async def test_closing_finishes_what_is_being_appended(self, bench: LogBench) -> None:
        log = await bench.open()
        calls = [asyncio.ensure_future(_try(log, f"m{n}")) for n in range(50)]
        await asyncio.sleep(0)
        await log.close()
        acknowledged = [f"m{n}" for n, done in enumerate(await asyncio.gather(*calls)) if done]
        stored = names(await bench.everything(await bench.open()))
        assert len(stored) == len(set(stored))
        assert set(acknowledged) <= set(stored)

    @on_log
    async def test_gauges_have_names_for_metrics(self, bench: LogBench) -> None:
        for log in (bench.new(), await bench.open()):
            for name, value in log.gauges().items():
                assert re.fullmatch("[a-z_]+", name)
                assert float(value) == value


def names_of(records: list[LogRecord]) -> list[str]:
    """Return the names of records that were not read yet."""
    return [record.headers["meta"].decode() for record in records]


async def _try(log: EventLog, name: str) -> bool:
    try:
        await append_all(log, dataclasses.replace(log_record(name), key=name.encode()))
    except StorageUnavailable:
        return False
    return True
