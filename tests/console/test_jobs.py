# SPDX-License-Identifier: Apache-2.0
"""Replays of many dead letters: each once, one job at a time, resumed after a crash."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from engage.api import EngageError, StorageUnavailable
from engage.console import jobs as jobs_module
from engage.console.job_records import CURRENT, JOB, Job
from engage.console.jobs import JobRunning, Jobs
from engage.storage.audit import AUDIT, Actor, read_entry
from engage.storage.letter_groups import LetterFilter
from engage.testing.factories import letter
from support.memory_store import MemoryDeadLetters, MemoryEvents
from support.pipeline import NOW
from support.replay import Bench, compose, make_bench
from support.sqlite import open_store
from support.waiting import eventually

ACTOR = Actor(who="ann", origin="command line")
ALL = LetterFilter(reason="invalid_payload")
BACKENDS = ["sqlite", pytest.param("mongo", marks=pytest.mark.mongo)]


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replay as fast as the machine can; one test looks at the pace."""
    monkeypatch.setattr(jobs_module, "RATE", 1_000_000)


async def put_letters(bench: Bench, count: int, *, good: bool = True, start: int = 0) -> None:
    """Keep letters that can be replayed now, or not."""
    item = {"userId": "u", **({"event": "e"} if good else {})}
    for first in range(start, start + count, 500):
        await bench.store.put(
            [
                letter(
                    f"l{n}",
                    item=orjson.dumps({**item, "messageId": f"m{n}"}),
                    operation="track",
                    envelope=b"{}",
                    received_at=NOW - 1000,
                )
                for n in range(first, min(first + 500, start + count))
            ]
        )


def make_jobs(bench: Bench) -> Jobs:
    return Jobs(bench.store, bench.replays, clock=lambda: bench.now)


@contextlib.asynccontextmanager
async def second(folder: Path) -> AsyncIterator[Bench]:
    """Open the store once more, as another process does."""
    async with open_store(folder / "engage.toml") as store:
        yield compose(store)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_all_letters_of_a_group_are_replayed(tmp_path: Path, backend: str) -> None:
    async with make_bench(tmp_path, backend=backend) as bench:
        await put_letters(bench, 240)
        await put_letters(bench, 3, good=False, start=240)
        others = [
            letter("other", reason="event_too_large"),
            letter("workspace", workspace_id="other"),
            letter("late", received_at=NOW + 1),
        ]
        await bench.store.put(others)
        jobs = make_jobs(bench)
        started = await jobs.start("acme", ALL, actor=ACTOR)
        assert started.state == "running"
        job = await jobs.wait()
        assert job is started
        assert (job.state, job.total, job.done, job.fraction) == ("done", 243, 243, 1.0)
        assert (job.stored, job.duplicates, job.failed) == (240, 0, 3)
        assert [failure["code"] for failure in job.failures] == ["invalid_payload"] * 3
        assert len(await bench.events()) == 240
        left = {one.id for one in await bench.letters()}
        assert left == {"l240", "l241", "l242", "other", "workspace", "late"}
        # Any process finds it, and the audit has it.
        assert await make_jobs(bench).current() == job
        assert await make_jobs(bench).finished() == [job]
        (record,) = (await bench.store.list_records(AUDIT, limit=9)).items
        entry = read_entry(record)
        assert (entry.actor, entry.action) == (ACTOR, "letters-replayed")
        assert entry.details["stored"] == 240
        assert entry.details["state"] == "done"
        # What failed can be replayed again: it fails again.
        bench.now += 1
        again = await make_jobs(bench).start("acme", ALL, actor=ACTOR)
        assert again.id != job.id


async def test_one_job_runs_at_a_time(tmp_path: Path) -> None:
    async with make_bench(tmp_path) as bench, second(tmp_path) as other:
        await put_letters(bench, 300)
        jobs, others = make_jobs(bench), make_jobs(other)
        results = await asyncio.gather(
            *(one.start("acme", ALL, actor=ACTOR) for one in (jobs, others, jobs, others)),
            return_exceptions=True,
        )
        failures = [result for result in results if isinstance(result, JobRunning)]
        assert len(failures) == 3
        assert "started by ann" in str(failures[0])
        assert await jobs.resume() is None
        assert await others.resume() is None
        await asyncio.gather(jobs.wait(), others.wait())
        assert len(await bench.events()) == 300
        assert (await others.start("acme", ALL, actor=ACTOR)).state == "running"
        await others.wait()


async def test_a_job_is_paced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "RATE", 500)
    async with make_bench(tmp_path) as bench:
        await put_letters(bench, 250)
        jobs = make_jobs(bench)
        started = time.monotonic()
        await jobs.start("acme", ALL, actor=ACTOR)
        await jobs.wait()
        # The last page is not waited for.
        assert time.monotonic() - started >= 0.4


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_job_is_cancelled(tmp_path: Path, elsewhere: bool) -> None:
    async with make_bench(tmp_path) as bench, second(tmp_path) as other:
        await put_letters(bench, 1000)
        jobs = make_jobs(bench)
        assert not await jobs.cancel()
        job = await jobs.start("acme", ALL, actor=ACTOR)
        await eventually(lambda: job.done > 0)
        assert await (make_jobs(other) if elsewhere else jobs).cancel()
        await jobs.wait()
        assert job.state == "cancelled"
        assert 0 < job.done < 1000
        assert len(await bench.events()) == job.stored
        assert len(await bench.letters()) == 1000 - job.stored
        assert not await jobs.cancel()


async def test_a_job_stops_after_many_failures_in_a_row(tmp_path: Path) -> None:
    async with make_bench(tmp_path) as bench:
        await put_letters(bench, 30, good=False)
        await put_letters(bench, 1, start=30)
        await put_letters(bench, 200, good=False, start=31)
        jobs = make_jobs(bench)
        await jobs.start("acme", ALL, actor=ACTOR)
        job = await jobs.wait()
        assert job is not None
        assert (job.state, job.stored) == ("stopped", 1)
        assert 80 <= job.failed <= 130
        assert len(job.failures) == 20
        assert job.message == "50 letters in a row failed: event: is required"
        assert len(await bench.letters()) == 230


async def test_an_interrupted_job_is_resumed(tmp_path: Path) -> None:
    async with make_bench(tmp_path) as bench, second(tmp_path) as other:
        await put_letters(bench, 1000)
        jobs = make_jobs(bench)
        job = await jobs.start("acme", ALL, actor=ACTOR)
        await eventually(lambda: job.done > 0)
        await jobs.close()
        await jobs.close()
        assert job.state == "running"
        others = make_jobs(other)
        with pytest.raises(JobRunning):
            await others.start("acme", ALL, actor=ACTOR)
        others.open()
        await eventually(lambda: others._task is not None)
        resumed = await others.wait()
        assert resumed is not None
        assert (resumed.id, resumed.state) == (job.id, "done")
        assert (resumed.stored, resumed.total) == (1000, 1000)
        assert len(await bench.events()) == 1000
        await others.close()


async def test_a_job_whose_process_was_killed_is_resumed(tmp_path: Path) -> None:
    """It had replayed a part of a page, and had not written that."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await process.wait()
    async with make_bench(tmp_path) as bench:
        await put_letters(bench, 120)
        killed = await bench.letters()
        jobs = make_jobs(bench)
        job = await jobs.start("acme", ALL, actor=ACTOR)
        assert jobs._task is not None
        jobs._task.cancel()
        await asyncio.wait([jobs._task])
        host, _, rest = job.owner.rsplit(" ", 2)
        job.owner = f"{host} {process.pid} {rest}"
        job.total, job.pending = 120, [one.id for one in killed[:50]]
        await rewrite(bench, job)
        await bench.replays.replay_all(killed[:30])
        resumed = await make_jobs(bench).resume()
        assert resumed is not None
        await eventually(lambda: resumed.state != "running")
        assert (resumed.state, resumed.stored, resumed.duplicates) == ("done", 120, 0)
        assert len(await bench.events()) == 120
        assert await bench.letters() == []


async def rewrite(bench: Bench, job: Job) -> None:
    """Write the current record, whoever owns it."""
    jobs = make_jobs(bench)
    await jobs._records._put(CURRENT, job, None)


@pytest.mark.parametrize(
    ("owner", "age", "abandoned"),
    [
        ("", 0, True),
        ("elsewhere 1 x", 29_000, False),
        ("elsewhere 1 x", 31_000, True),
        ("{host} 1 x", 0, False),
        ("{host} {pid} x", 0, True),
    ],
)
async def test_a_job_belongs_to_its_process_while_that_lives(
    tmp_path: Path, owner: str, age: int, abandoned: bool
) -> None:
    async with make_bench(tmp_path) as bench:
        jobs = make_jobs(bench)
        job = await jobs.start("acme", ALL, actor=ACTOR)
        await jobs.wait()
        job.state = "running"
        host = jobs._records.owner.split(" ")[0]
        job.owner = owner.format(host=host, pid=os.getpid())
        await rewrite(bench, job)
        bench.now += age
        resumed = await make_jobs(bench).resume()
        assert (resumed is not None) is abandoned
        if not abandoned:
            assert await jobs.cancel()
            current = await jobs.current()
            assert current is not None
            assert (current.state, current.cancelling) == ("running", True)
        else:
            await asyncio.sleep(0.05)


async def test_an_abandoned_job_is_cancelled_at_once(tmp_path: Path) -> None:
    async with make_bench(tmp_path) as bench:
        jobs = make_jobs(bench)
        job = await jobs.start("acme", ALL, actor=ACTOR)
        await jobs.wait()
        job.state, job.owner = "running", ""
        await rewrite(bench, job)
        assert await jobs.cancel()
        assert not await jobs.cancel()


async def test_a_job_that_another_process_has_taken_over_stops(tmp_path: Path) -> None:
    async with make_bench(tmp_path) as bench:
        await put_letters(bench, 300)
        jobs = make_jobs(bench)
        job = await jobs.start("acme", ALL, actor=ACTOR)
        copy = Job.read(await bench.store.get_record(JOB, "", CURRENT))
        assert copy is not None
        copy.owner = "elsewhere 1 x"
        await rewrite(bench, copy)
        await jobs.wait()
        assert job.done < 300
        record = await bench.store.get_record(JOB, "", CURRENT)
        found = Job.read(record)
        assert found is not None
        assert found.owner == "elsewhere 1 x"


async def test_a_job_waits_for_a_storage_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_bench(tmp_path) as bench:
        await put_letters(bench, 60)
        jobs = make_jobs(bench)
        replay_all = bench.replays.replay_all
        failures = 2

        async def sometimes(*arguments: Any, **options: Any) -> Any:
            nonlocal failures
            failures -= 1
            if failures >= 0:
                raise StorageUnavailable("not now")
            return await replay_all(*arguments, **options)

        monkeypatch.setattr(bench.replays, "replay_all", sometimes)
        await jobs.start("acme", ALL, actor=ACTOR)
        job = await jobs.wait()
        assert job is not None
        assert (job.state, job.stored) == ("done", 60)


async def test_a_job_is_resumed_when_the_storage_answers_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_module, "PATIENCE_SECONDS", 0)

    async def never(*_: Any, **__: Any) -> Any:
        raise StorageUnavailable("not now")

    async with make_bench(tmp_path) as bench:
        await put_letters(bench, 60)
        jobs = make_jobs(bench)
        with monkeypatch.context() as patch:
            patch.setattr(bench.replays, "replay_all", never)
            await jobs.start("acme", ALL, actor=ACTOR)
            job = await jobs.wait()
            assert job is not None
            assert (job.state, job.message) == ("running", "not now")
        assert await jobs.resume() is not None
        job = await jobs.wait()
        assert job is not None
        assert (job.state, job.stored) == ("done", 60)


async def test_an_unexpected_error_stops_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any, **__: Any) -> Any:
        raise ValueError

    async with make_bench(tmp_path) as bench:
        await put_letters(bench, 60)
        jobs = make_jobs(bench)
        monkeypatch.setattr(bench.replays, "replay_all", broken)
        await jobs.start("acme", ALL, actor=ACTOR)
        job = await jobs.wait()
        assert job is not None
        assert job.state == "stopped"
        assert await jobs.resume() is None


class Plain(MemoryEvents, MemoryDeadLetters):
    """A storage with dead letters and without records."""


async def test_a_storage_without_records_has_its_jobs_in_memory() -> None:
    bench = compose(Plain())
    await put_letters(bench, 40)
    jobs = make_jobs(bench)
    assert await jobs.current() is None
    job = await jobs.start("acme", ALL, actor=ACTOR)
    with pytest.raises(JobRunning):
        await jobs.start("acme", ALL, actor=ACTOR)
    await jobs.wait()
    assert (job.state, job.stored) == ("done", 40)
    assert await jobs.current() == job
    assert await jobs.finished() == [job]
    assert (await jobs.start("acme", ALL, actor=ACTOR)).state == "running"
    await jobs.wait()
    assert len(await jobs.finished()) == 2


async def test_a_storage_without_dead_letters_has_no_jobs() -> None:
    bench = compose(MemoryEvents())
    jobs = make_jobs(bench)
    with pytest.raises(EngageError, match="does not keep dead letters"):
        await jobs.start("acme", ALL, actor=ACTOR)
    assert await jobs.resume() is None
