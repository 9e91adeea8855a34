# SPDX-License-Identifier: Apache-2.0
"""The promises of every log about readers that come and go: no record is skipped."""

from __future__ import annotations

import asyncio
import time

from engage.api import EventLog, LogReader, ReadRecord

from .harness import (
    LogBench,
    append_all,
    by_partition,
    names,
    numbered,
    offsets_after,
    on_log,
    read,
)


class LogGroupTests:
    """Several members of one group. Each can be in another process."""

    @on_log
    async def test_readers_divide_the_partitions(self, bench: LogBench) -> None:
        log, other = await bench.open(), await bench.open()
        await append_all(log, *numbered(100))
        readers = [await bench.reader(log), await bench.reader(other)]
        shares = await _divided(bench, log, readers)
        # Now each record goes to one of them.
        await append_all(log, *numbered(200, name="n"))
        taken: list[list[ReadRecord]] = [[], []]
        end = time.monotonic() + bench.subject.patience
        while sum(map(len, taken)) < 200 and time.monotonic() < end:
            for reader, share in zip(readers, taken, strict=True):
                share += await read(reader, wait=0.2)
        assert sorted(names(taken[0] + taken[1])) == sorted(f"n{n}" for n in range(200))
        for share, partitions in zip(taken, shares, strict=True):
            assert by_partition(share).keys() <= partitions

    @on_log
    async def test_a_reader_takes_over_what_another_leaves(self, bench: LogBench) -> None:
        """From the committed offsets on: records that were only read are read again."""
        log, other = await bench.open(), await bench.open()
        readers = [await bench.reader(log), await bench.reader(other)]
        await append_all(log, *numbered(100))
        shares = await _divided(bench, log, readers)
        await append_all(log, *numbered(100, name="n"))
        end = time.monotonic() + bench.subject.patience
        first: list[ReadRecord] = []
        while shares[0] and not first and time.monotonic() < end:
            first += await read(readers[0], wait=0.2)
        await readers[0].close()
        # The other one gets all of them, including those that the first had read without a commit.
        seen: set[str] = set()
        while len(seen) < 100 and time.monotonic() < end:
            more = await read(readers[1], wait=0.2)
            seen.update(names(more))
            await readers[1].commit(offsets_after(more))
        assert seen == {f"n{n}" for n in range(100)}
        assert (await log.backlog("g")).records == 0

    @on_log
    async def test_a_commit_of_a_lost_partition_is_ignored(self, bench: LogBench) -> None:
        """The member that has the partition now decides what is done with."""
        log, other = await bench.open(), await bench.open()
        await append_all(log, *numbered(100))
        loser = await bench.reader(log)
        old = offsets_after(await bench.take(loser, 100))
        winner = await bench.reader(other)
        lost: dict[int, list[ReadRecord]] = {}
        end = time.monotonic() + bench.subject.patience
        while not lost and len(old) > 1 and time.monotonic() < end:
            lost = by_partition(await read(winner, wait=0.2))
            await read(loser, wait=0.2)
        assert lost or len(old) == 1, "a second reader got no partition"
        await loser.commit({number: old[number] for number in lost})
        assert await log.committed("g") == {}
        offsets = {number: records[0].offset + 1 for number, records in lost.items()}
        await winner.commit(offsets)
        await loser.commit(old)
        committed = await log.committed("g")
        assert {number: committed.get(number) for number in offsets} == offsets

    @on_log
    async def test_nothing_is_skipped_while_readers_come_and_go(self, bench: LogBench) -> None:
        log = await bench.open()
        # More than the readers read in one batch, so that each of them is interrupted.
        await append_all(log, *numbered(1000, name="first"))
        sent = {f"first{n}" for n in range(1000)}
        done: set[str] = set()
        stop = False

        async def append() -> None:
            turn = 0
            while not stop:
                records = numbered(20, keys=20, name=f"t{turn}-")
                await append_all(log, *records)
                sent.update(record.headers["meta"].decode() for record in records)
                turn += 1
                await asyncio.sleep(0.02)

        async def load(reader: LogReader, turns: int) -> None:
            for turn in range(turns):
                entries = await read(reader, wait=0.2, max_records=10)
                # Some of it fails, and is read again.
                if turn % 5 == 4:
                    await reader.rewind()
                    continue
                await asyncio.sleep(0.005)
                done.update(names(entries))
                await reader.commit(offsets_after(entries))
            await reader.close()

        appending = asyncio.ensure_future(append())
        try:
            loads = []
            for n in range(4):
                reader = await bench.reader(await bench.open())
                loads.append(asyncio.ensure_future(load(reader, 40 + 20 * (n % 2))))
                await asyncio.sleep(0.1)
            await asyncio.gather(*loads)
        finally:
            stop = True
            await appending
        last = await bench.reader(log)
        end = time.monotonic() + bench.subject.patience
        while done < sent and time.monotonic() < end:
            entries = await read(last, wait=0.5)
            done.update(names(entries))
            await last.commit(offsets_after(entries))
        assert done == sent
        assert (await log.backlog("g")).records == 0


async def _divided(bench: LogBench, log: EventLog, readers: list[LogReader]) -> list[set[int]]:
    """Read and commit until each partition has one reader, and return the shares.

    Only the records that each reader gets show which partitions it has, so more are appended at the
    same time.
    """
    end = time.monotonic() + bench.subject.patience
    partitions = set(await log.ends())
    expected = min(len(partitions), len(readers))
    turn = 0
    before: list[set[int]] = []
    while True:
        turn += 1
        await append_all(log, *numbered(100, name=f"divide{turn}-"))
        shares: list[set[int]] = [set() for _ in readers]
        quiet = 0
        while quiet < 2:
            quiet += 1
            for reader, share in zip(readers, shares, strict=True):
                entries = await read(reader, wait=0.3)
                share.update(by_partition(entries))
                await reader.commit(offsets_after(entries))
                quiet = 0 if entries else quiet
        active = sum(map(bool, shares))
        # Twice the same: in one turn, a reader may have read from a partition before it lost it.
        divided = active == expected and sum(map(len, shares)) == len(set().union(*shares))
        if divided and shares == before:
            return shares
        before = shares
        assert time.monotonic() < end, f"the partitions were not divided: {shares}"
