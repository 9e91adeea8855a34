# SPDX-License-Identifier: Apache-2.0
"""The promises of every log about failures of the server under it, and about other processes."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from engage.api import EventLog, LogContext, StorageUnavailable

from ..harness import Call, eventually, find_factory, may_fail, must_fail
from ..processes import print_line, run_children
from .harness import (
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

#: The code of a child process, which reads its job from standard input.
_CHILD = "from engage.testing.log.failures import child; child()"
#: Seconds that a call may take in these tests.
_TIMEOUT = 2.0


class LogFailureTests:
    """Every method, while :meth:`LogSubject.break_log` makes the log fail."""

    @on_log
    async def test_nothing_is_acknowledged_while_the_log_is_broken(self, bench: LogBench) -> None:
        log = await bench.open(write_timeout=_TIMEOUT)
        await append_all(log, log_record("before"))
        async with bench.broken():
            for _ in range(2):
                started = time.monotonic()
                with pytest.raises(StorageUnavailable):
                    await log.append([log_record("during")])
                assert time.monotonic() - started < _TIMEOUT + 60
                with pytest.raises(StorageUnavailable):
                    await log.check()
        await eventually(log.check, StorageUnavailable)
        await eventually(lambda: append_all(log, log_record("after")), StorageUnavailable)
        stored = set(names(await bench.everything(log)))
        # Records that were not acknowledged may be there.
        assert {"before", "after"} <= stored <= {"before", "during", "after"}

    @on_log
    async def test_every_method_raises_unavailable(self, bench: LogBench) -> None:
        log = await bench.open(write_timeout=_TIMEOUT)
        await append_all(log, *numbered(5))
        reader = await bench.reader(log)
        entries = await bench.take(reader, 5)
        writing: list[Call] = [
            log.check,
            lambda: log.append([log_record("n")]),
            lambda: log.append_dead([log_record("n")]),
        ]
        reading: list[Call] = [
            log.ends,
            log.firsts,
            lambda: log.committed("g"),
            lambda: log.backlog("g"),
            lambda: reader.read(max_records=1, max_bytes=1, wait=0.1),
            lambda: reader.commit(offsets_after(entries)),
            reader.rewind,
        ]

        # At the same time, because each may wait until its time limit.
        async with bench.broken():
            await asyncio.gather(*map(must_fail, writing))
            for call in reading:
                await asyncio.wait_for(may_fail(call), 60)
        await eventually(log.check, StorageUnavailable)
        for call in (*writing, *reading):
            await eventually(call, StorageUnavailable)

    @on_log
    async def test_a_call_waits_only_for_its_own_partitions(self, bench: LogBench) -> None:
        bench.require("partition")
        log = await bench.open(write_timeout=_TIMEOUT)
        records = numbered(50)
        await append_all(log, *records)
        parts = by_partition(await bench.everything(log))
        broken = min(parts)
        inside = parts[broken][0].record
        outside = next(x for number in parts for x in parts[number] if number != broken).record
        await asyncio.to_thread(bench.subject.break_partition, bench.options, broken)
        try:
            waiting = asyncio.ensure_future(log.append([outside, inside]))
            for _ in range(5):
                await asyncio.wait_for(append_all(log, outside), _TIMEOUT / 2)
            with pytest.raises(StorageUnavailable):
                await waiting
            with pytest.raises(StorageUnavailable):
                await log.check()
            # A call whose time is over must not make others wait.
            await asyncio.wait_for(append_all(log, outside), _TIMEOUT / 2)
        finally:
            await asyncio.to_thread(bench.subject.mend_log, bench.options)
        await eventually(log.check, StorageUnavailable)
        await eventually(lambda: append_all(log, inside, outside), StorageUnavailable)

    @on_log
    async def test_a_log_is_opened_while_it_is_broken(self, bench: LogBench) -> None:
        """With ``create``: the server starts, and is ready later."""
        await append_all(await bench.open(), log_record("before"))
        log, other = bench.new(write_timeout=_TIMEOUT), bench.new(write_timeout=_TIMEOUT)
        async with bench.broken():
            await log.open(create=True)
            with pytest.raises(StorageUnavailable):
                await log.check()
            with pytest.raises(StorageUnavailable):
                await log.append([log_record("during")])
            with pytest.raises(StorageUnavailable):
                await other.open(create=False)
        await eventually(log.check, StorageUnavailable)
        await eventually(lambda: append_all(log, log_record("after")), StorageUnavailable)
        await eventually(lambda: other.open(create=False), StorageUnavailable)
        assert {"before", "after"} <= set(names(await bench.everything(other)))

    @on_log
    async def test_acknowledged_records_survive_failures(self, bench: LogBench) -> None:
        """At any moment: acknowledged records are read, and only records that were sent."""
        log = await bench.open(write_timeout=_TIMEOUT)
        reader = await bench.reader(log)
        acknowledged: set[str] = set()
        sent: set[str] = set()
        done: set[str] = set()
        stop = False
        stopped = 0.0

        async def append(name: str) -> None:
            turn = 0
            while not stop:
                records = numbered(5, keys=5, name=f"{name}{turn}-")
                turn += 1
                batch = {record.headers["meta"].decode() for record in records}
                sent.update(batch)
                with contextlib.suppress(StorageUnavailable):
                    await append_all(log, *records)
                    acknowledged.update(batch)
                await asyncio.sleep(0.005)

        async def load() -> None:
            while not stop or (
                not acknowledged <= done and time.monotonic() < stopped + bench.subject.patience
            ):
                try:
                    # Few at a time, so that there are more when the log breaks.
                    entries = await read(reader, wait=0.2, max_records=20)
                    done.update(names(entries))
                    await reader.commit(offsets_after(entries))
                except StorageUnavailable:
                    pass
                await asyncio.sleep(0.01)

        working = [asyncio.ensure_future(append(name)) for name in "abc"]
        working.append(asyncio.ensure_future(load()))
        try:
            await bench.break_twice(acknowledged)
        finally:
            stop, stopped = True, time.monotonic()
            await asyncio.gather(*working)
        assert acknowledged <= done <= sent
        assert acknowledged <= set(names(await bench.everything(log))) <= sent


class LogProcessTests:
    """Several Python processes open the log."""

    @on_log
    async def test_all_processes_append_a_key_to_one_partition(self, bench: LogBench) -> None:
        bench.require("durable")
        log = await bench.open()
        jobs = [{"name": name, "count": 60} for name in "ab"]
        async with run_children(_CHILD, [{**_common(bench), **job} for job in jobs]) as children:
            for child in children:
                assert child.stdout is not None
                assert (await child.stdout.read()).split()[-1] == b"done"
        await append_all(log, *numbered(60, keys=20, name="c"))
        entries = await bench.everything(log)
        assert sorted(names(entries)) == sorted(f"{name}{n}" for name in "abc" for n in range(60))
        assert len({(entry.record.key, entry.partition) for entry in entries}) == 20

    @on_log
    async def test_a_killed_process_loses_no_acknowledged_record(self, bench: LogBench) -> None:
        bench.require("durable")
        log = await bench.open()
        chance = random.Random(14)
        lines: list[str] = []
        for turn in range(3):
            job = {"name": f"k{turn}-", "count": 100_000}
            async with run_children(_CHILD, [{**_common(bench), **job}]) as (child,):
                assert child.stdout is not None
                count = chance.randrange(20, 120)
                lines += [(await child.stdout.readline()).decode() for _ in range(count)]
                child.kill()
                # The lines that it wrote before its end also count, except a line that was cut.
                lines += (await child.stdout.read()).decode().splitlines(keepends=True)
                await child.wait()
        acknowledged = {line.strip() for line in lines if line.endswith("\n")}
        await append_all(log, log_record("after"))
        stored = names(await bench.everything(log))
        assert len(stored) == len(set(stored))
        assert acknowledged | {"after"} <= set(stored)


def _common(bench: LogBench) -> dict[str, Any]:
    return {
        "plugin": bench.subject.plugin,
        "log": bench.subject.log,
        "options": dict(bench.options),
        "base_dir": str(bench.context.base_dir),
    }


# -------------------------------------------------------------------------------------- the child
def child() -> None:
    """Do the job of a child process, and write each acknowledged record to standard output."""
    job = orjson.loads(sys.stdin.readline())
    factory = find_factory(job["plugin"], job["log"], "log")[0]
    log = factory(job["options"], LogContext(base_dir=Path(job["base_dir"])))
    asyncio.run(_work(log, job))
    print_line("done")


async def _work(log: EventLog, job: dict[str, Any]) -> None:
    await log.open(create=True)
    try:
        for record in numbered(job["count"], keys=20, name=job["name"]):
            await append_all(log, record)
            print_line(record.headers["meta"].decode())
    finally:
        await log.close()
