# SPDX-License-Identifier: Apache-2.0
"""The promises of every storage about several processes, one that is killed, and power cuts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
import pytest

from engage.api import (
    Event,
    Status,
)
from engage.store.facade import Storage

from ..factories import (
    TIME,
    WORKSPACE,
    all_pages,
    change,
    count,
    event,
    identify,
    ids,
    letter,
    record,
    sums,
    suppression,
    unproven,
)
from ..harness import find_factory
from ..processes import print_line, run_children
from .harness import Bench, must_sync, on_store

#: The code of a child process, which reads its job from standard input.
_CHILD = "from engage.testing.storage.processes import child; child()"
#: Does the job of a child process.
Work = Callable[[Any, dict[str, Any]], Awaitable[None]]


class ProcessTests:
    """Several Python processes open the store."""

    @on_store
    async def test_one_id_in_several_processes_is_stored_once(self, bench: Bench) -> None:
        bench.require("several-processes")
        store = await bench.open()
        job = {"kind": "same ids", "count": 300, "batch": 7}
        async with children_of(bench, *({**job, "seed": seed} for seed in range(3))) as children:
            reports = await asyncio.gather(*(lines_of(child) for child in children))
        stored = [name for lines in reports for name in lines if name != "done"]
        assert sorted(stored) == sorted(f"m{number}" for number in range(300))
        assert sorted(await ids(store, limit=1000)) == sorted(stored)

    @on_store
    async def test_several_processes_set_traits_of_one_user(self, bench: Bench) -> None:
        bench.require("several-processes")
        bench.require("atomic-updates")
        store = await bench.open()
        jobs = [{"kind": "traits", "count": 120, "step": step} for step in range(3)]
        async with children_of(bench, *jobs) as children:
            for lines in await asyncio.gather(*(lines_of(child) for child in children)):
                assert lines == ["done"]
        profile = await store.profile(WORKSPACE, "u")
        assert profile is not None
        assert profile.traits == {"t0": 117, "t1": 118, "t2": 119, "all": 119}
        assert (profile.created_at, profile.updated_at) == (TIME, TIME + 119)
        assert profile.anonymous_ids == sorted(f"v{number}" for number in range(120))

    @on_store
    async def test_a_scan_misses_nothing_while_other_processes_write(self, bench: Bench) -> None:
        bench.require("several-processes")
        store = await bench.open()
        jobs = [{"kind": "own ids", "count": 200, "name": name} for name in "ab"]
        async with children_of(bench, *jobs) as children:
            acknowledged: set[str] = set()

            async def read(child: asyncio.subprocess.Process) -> None:
                assert child.stdout is not None
                async for line in child.stdout:
                    acknowledged.add(line.decode().strip())

            readers = [asyncio.ensure_future(read(child)) for child in children]
            while not all(reader.done() for reader in readers):
                before = acknowledged - {"done"}
                stored = await ids(store, limit=50)
                assert len(stored) == len(set(stored))
                assert before <= set(stored)
                await asyncio.sleep(0.01)
            await asyncio.gather(*readers)
        assert len(await ids(store, limit=1000)) == 400

    @on_store
    async def test_a_killed_process_loses_no_acknowledged_event(self, bench: Bench) -> None:
        """Acknowledged events are stored once, the rest can be sent again, the profiles fit."""
        bench.require("durable")
        chance = random.Random(11)
        lines: list[str] = []
        for turn in range(3):
            job = {"kind": "own ids", "count": 100_000, "name": f"k{turn}"}
            async with children_of(bench, job) as (child,):
                assert child.stdout is not None
                for _ in range(chance.randrange(20, 120)):
                    line = await child.stdout.readline()
                    lines.append(line.decode())
                child.kill()
                # The lines that it wrote before its end also count, except a line that was cut.
                lines += (await child.stdout.read()).decode().splitlines(keepends=True)
                await child.wait()
        acknowledged = {line.strip() for line in lines if line.endswith("\n")}
        store = await bench.open()
        stored = await ids(store, limit=1000)
        assert len(stored) == len(set(stored))
        assert acknowledged <= set(stored)
        # Send everything that may have been cut off again, and some more events.
        highest = dict.fromkeys(range(3), 0)
        for name in stored:
            turn, number = (int(part) for part in name[1:].split("-"))
            highest[turn] = max(highest[turn], number)
        everything = [
            _numbered_event(f"k{turn}", number)
            for turn in highest
            for number in range(highest[turn] + 20)
        ]
        for start in range(0, len(everything), 500):
            outcomes = await store.write(everything[start : start + 500])
            for sent, outcome in zip(everything[start:], outcomes, strict=False):
                expected = Status.DUPLICATE if sent.message_id in stored else Status.STORED
                assert outcome.status is expected
        assert sorted(await ids(store, limit=1000)) == sorted(x.message_id for x in everything)
        for turn, number in highest.items():
            for user in range(3):
                last = max(n for n in range(number + 20) if n % 3 == user)
                profile = await store.profile(WORKSPACE, f"k{turn}-{user}")
                assert profile is not None
                assert profile.traits == {"n": last}
                assert profile.updated_at == TIME + last

    @on_store
    async def test_writes_are_synced_before_they_return(self, bench: Bench) -> None:
        """A killed process loses nothing that the kernel has. A power cut does."""
        bench.require("durable")
        if not bench.subject.syncs_with_os:
            pytest.skip("this storage does not sync with the functions of os")
        store = await bench.open()
        await must_sync(lambda: store.write([event("m")]))
        await must_sync(lambda: store.apply(change("c", g=True)))
        await must_sync(lambda: store.suppress([suppression()]))
        await must_sync(lambda: store.keep([letter("l")]))
        await must_sync(lambda: store.put_record(record("r")))
        await must_sync(lambda: store.put_counts([count(1)]))

    @on_store
    async def test_each_choice_has_its_record_when_several_processes_write(
        self, bench: Bench
    ) -> None:
        bench.require("several-processes")
        bench.require("atomic-updates")
        store = await bench.open()
        jobs = [{"kind": "choices", "count": 60, "name": name} for name in "ab"]
        async with children_of(bench, *jobs) as children:
            reports = await asyncio.gather(*(lines_of(child) for child in children))
        assert [len(lines) for lines in reports] == [61, 61]
        await _check_choices(store, {name for lines in reports for name in lines[:-1]})

    @on_store
    async def test_each_choice_has_its_record_after_a_process_is_killed(self, bench: Bench) -> None:
        """At any moment, alone or while another process changes the same choices."""
        bench.require("several-processes")
        bench.require("durable")
        await bench.open()
        chance, acknowledged = random.Random(26), set[str]()
        for turn in range(4):
            counts = [10**6]
            if turn % 2 and bench.subject.can("atomic-updates"):
                counts.append(30)
            jobs = [{"kind": "choices", "count": n, "name": f"{turn} {n}"} for n in counts]
            async with children_of(bench, *jobs) as (killed, *others):
                assert killed.stdout is not None
                lines = [(await killed.stdout.readline()).decode() for _ in range(10)]
                await asyncio.sleep(chance.random() / 50)
                killed.kill()
                lines += (await killed.stdout.read()).decode().splitlines(keepends=True)
                await killed.wait()
                acknowledged.update(line.strip() for line in lines if line.endswith("\n"))
                for child in others:
                    acknowledged.update((await lines_of(child))[:-1])
            # As the process that a server starts in place of a killed one.
            await _check_choices(await bench.open(), acknowledged)

    @on_store
    async def test_one_process_writes_each_version_of_a_record(self, bench: Bench) -> None:
        bench.require("several-processes")
        bench.require("atomic-updates")
        store = await bench.open()
        jobs = [{"kind": "records", "count": 40, "name": name} for name in "abc"]
        async with children_of(bench, *jobs) as children:
            reports = await asyncio.gather(*(lines_of(child) for child in children))
        # Each child expected each version once: it wrote the next one, or another child had.
        written = sorted(int(line) for lines in reports for line in lines if line != "done")
        assert written == list(range(1, 121))
        record = await store.get_record("key", WORKSPACE, "shared")
        assert record is not None
        assert (record.version, orjson.loads(record.body)) == (120, {"a": 40, "b": 40, "c": 40})

    @on_store
    async def test_several_processes_write_registers_of_one_counter(self, bench: Bench) -> None:
        bench.require("several-processes")
        bench.require("atomic-updates")
        store = await bench.open()
        jobs = [{"kind": "counts", "count": 60, "name": name} for name in "abc"]
        async with children_of(bench, *jobs) as children:
            await asyncio.gather(*(lines_of(child) for child in children))
        counts = {count.labels: count for count in await sums(store)}
        own, shared = counts["own",], counts["shared",]
        assert (own.total, own.greatest, own.processes) == (180, 60, 3)
        # Register of a process that several of them write, as after a write that was repeated.
        assert (shared.total, shared.greatest, shared.processes) == (60, 60, 1)

    @on_store
    async def test_a_killed_process_loses_no_record_and_no_counter(self, bench: Bench) -> None:
        bench.require("several-processes")
        bench.require("durable")
        records = await bench.open()
        counts = await bench.open()
        for kind, name in (("records", "a"), ("counts", "k"), ("records", "b")):
            async with children_of(bench, {"kind": kind, "count": 10**6, "name": name}) as (child,):
                assert child.stdout is not None
                lines = [(await child.stdout.readline()).decode() for _ in range(25)]
                child.kill()
                lines += (await child.stdout.read()).decode().splitlines(keepends=True)
                await child.wait()
            last = [int(line) for line in lines if line.endswith("\n")][-1]
            if kind == "records":
                record = await records.get_record("key", WORKSPACE, "shared")
                assert record is not None
                # The write that was cut off is there as a whole, or not at all.
                assert last <= record.version <= last + 1
                assert sum(orjson.loads(record.body).values()) == record.version
            else:
                # Each register is a write of its own.
                own, shared = await sums(counts)
                assert last <= own.total <= last + 1
                assert last <= shared.total <= last + 1


async def _check_choices(store: Any, acknowledged: set[str]) -> None:
    """Check that each choice is that of its last record, and that no record is missing."""
    assert await unproven(store) == []
    before: dict[str, bool] = {}
    names = set()
    for entry in await all_pages(store.history, WORKSPACE, None, limit=1000):
        assert entry.before is before.get(entry.group_id)
        assert entry.after is not entry.before
        before[entry.group_id] = entry.after
        if entry.group_id != "shared":
            names.add(entry.change_id)
    assert acknowledged <= names


def _numbered_event(name: str, number: int) -> Event:
    return identify(f"{name}-{number}", f"{name}-{number % 3}", number, traits={"n": number})


# ------------------------------------------------------------------------------------- the parent
def children_of(
    bench: Bench, *jobs: dict[str, Any], code: str = _CHILD
) -> contextlib.AbstractAsyncContextManager[list[asyncio.subprocess.Process]]:
    """Start a process for each job; at the end, all of them have ended.

    :param code: of each; it calls :func:`child`.
    """
    common = {
        "plugin": bench.subject.plugin,
        "storage": bench.subject.storage,
        "options": dict(bench.options),
        "context": {
            "base_dir": str(bench.context.base_dir),
            "identifiers": {name: list(own) for name, own in bench.context.identifiers.items()},
        },
    }
    return run_children(code, [{**common, **job} for job in jobs])


async def lines_of(child: asyncio.subprocess.Process) -> list[str]:
    """Return what a child process that does its whole job writes until its end."""
    assert child.stdout is not None
    text = (await child.stdout.read()).decode()
    assert await child.wait() == 0
    return text.splitlines()


# -------------------------------------------------------------------------------------- the child
def child(work: Work | None = None) -> None:
    """Do the job of a child process, and write each acknowledged event to standard output.

    :param work: called with the store and the job, in place of what this module does.
    """
    job = orjson.loads(sys.stdin.readline())
    asyncio.run(_work(job, work))
    print_line("done")


async def _work(job: dict[str, Any], work: Work | None) -> None:
    from pathlib import Path

    from engage.api import StorageContext

    context = dict(job["context"], base_dir=Path(job["context"]["base_dir"]))
    store: Any = find_factory(job["plugin"], job["storage"], "storage")[0](
        job["options"], StorageContext(**context)
    )
    await store.open(create=True)
    try:
        if work is not None:
            await work(store, job)
        elif job["kind"] == "same ids":
            # All children write the same ids, each in a different order, and print the new ones.
            names = [f"m{number}" for number in range(job["count"])]
            random.Random(job["seed"]).shuffle(names)
            for start in range(0, len(names), job["batch"]):
                part = names[start : start + job["batch"]]
                outcomes = await store.write([event(name) for name in part])
                for name, outcome in zip(part, outcomes, strict=True):
                    if outcome.status is Status.STORED:
                        print_line(name)
        elif job["kind"] == "traits":
            for number in range(job["step"], job["count"], 3):
                # A trait that only this child sets, and one that all of them set: the latest wins.
                traits = {f"t{job['step']}": number, "all": number}
                new = identify(f"m{number}", "u", number, anonymous_id=f"v{number}", traits=traits)
                await store.write([new])
        elif job["kind"] == "records":
            await _count_in_a_record(store, job)
        elif job["kind"] == "choices":
            for number in range(job["count"]):
                # One group that only this child changes, and one that all of them change.
                choices = {job["name"]: number % 2 == 0, "shared": number % 3 == 0}
                made = change(f"{job['name']}-{number}", at=number)
                await store.apply(dataclasses.replace(made, choices=choices))
                print_line(f"{job['name']}-{number}")
        elif job["kind"] == "counts":
            for number in range(1, job["count"] + 1):
                own = count(number, process=job["name"], labels=("own",))
                await store.put_counts([own, count(number, labels=("shared",))])
                print_line(str(number))
        else:
            for number in range(job["count"]):
                await store.write([_numbered_event(job["name"], number)])
                print_line(f"{job['name']}-{number}")
    finally:
        await store.close()


async def _count_in_a_record(store: Storage, job: dict[str, Any]) -> None:
    """Add to a number in a record that all children change; print each version written."""
    written = 0
    while written < job["count"]:
        stored = await store.get_record("key", WORKSPACE, "shared")
        numbers = {} if stored is None else orjson.loads(stored.body)
        numbers[job["name"]] = numbers.get(job["name"], 0) + 1
        version = await store.put_record(
            record("shared", body=orjson.dumps(numbers)),
            expected_version=0 if stored is None else stored.version,
        )
        if version is not None:
            written += 1
            print_line(str(version))
