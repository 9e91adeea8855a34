# SPDX-License-Identifier: Apache-2.0
"""Replays of many dead letters: each once, and again after an interruption."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from engage.api import StorageUnavailable
from engage.audit import AUDIT, Actor, read_entry
from engage.pipeline import bulk_replay as module
from engage.pipeline.bulk_replay import BulkReplay
from engage.reading.letter_groups import LetterFilter
from engage.testing.factories import letter
from support.pipeline import NOW
from support.replay import Bench, make_bench
from support.waiting import eventually

ACTOR = Actor(who="ann", origin="command line")
ALL = LetterFilter(reason="invalid_payload")
BACKENDS = ["sqlite", pytest.param("mongo", marks=pytest.mark.mongo)]


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replay as fast as the machine can; one test looks at the pace."""
    monkeypatch.setattr(module, "RATE", 1_000_000)


async def put_letters(bench: Bench, count: int, *, good: bool = True, start: int = 0) -> None:
    """Keep letters that can be replayed now, or not."""
    item = {"userId": "u", **({"event": "e"} if good else {})}
    await bench.store.put(
        [
            letter(
                f"l{n}",
                item=orjson.dumps({**item, "messageId": f"m{n}"}),
                operation="track",
                envelope=b"{}",
                received_at=NOW - 1000,
            )
            for n in range(start, start + count)
        ]
    )


def begin(bench: Bench) -> BulkReplay:
    replay = BulkReplay(
        bench.store, bench.replays, "acme", ALL, actor=ACTOR, clock=lambda: bench.now
    )
    replay.start()
    return replay


async def ended(bench: Bench) -> BulkReplay:
    replay = begin(bench)
    assert await replay.wait()
    return replay


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
        replay = begin(bench)
        assert replay.state == "running"
        assert await replay.wait()
        assert (replay.state, replay.total, replay.done) == ("done", 243, 243)
        assert (replay.stored, replay.duplicates, replay.failed) == (240, 0, 3)
        assert [failure.code for failure in replay.failures] == ["invalid_payload"] * 3
        assert len(await bench.events()) == 240
        # All of a page are one write.
        assert len(bench.core.metrics.writes) <= 6
        left = {one.id for one in await bench.letters()}
        assert left == {"l240", "l241", "l242", "other", "workspace", "late"}
        (record,) = (await bench.store.list_records(AUDIT, limit=9)).items
        entry = read_entry(record)
        assert (entry.actor, entry.action) == (ACTOR, "letters-replayed")
        assert (entry.details["stored"], entry.details["state"]) == (240, "done")


async def test_replays_at_the_same_time_store_each_event_once(tmp_path: Path) -> None:
    async with make_bench(tmp_path) as bench:
        await put_letters(bench, 300)
        one, other = begin(bench), begin(bench)
        assert await one.wait()
        assert await other.wait()
        assert one.state == other.state == "done"
        assert one.stored + other.stored == 300
        assert len(await bench.events()) == 300
        assert await bench.letters() == []


@pytest.mark.virtual_time
async def test_a_replay_is_paced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RATE", 500)
    async with make_bench(tmp_path) as bench:
        await put_letters(bench, 150)
        started = time.monotonic()
        await ended(bench)
        # The last page is not waited for.
        assert 0.2 <= time.monotonic() - started < 0.3


async def test_a_replay_is_cancelled_and_begun_again(tmp_path: Path) -> None:
    async with make_bench(tmp_path) as bench:
        await put_letters(bench, 500)
        replay = begin(bench)
        await eventually(lambda: replay.done > 0)
        replay.cancel()
        assert await replay.wait()
        assert replay.state == "cancelled"
        assert 0 < replay.done < 500
        assert len(await bench.events()) == replay.stored
        assert len(await bench.letters()) == 500 - replay.stored
        again = await ended(bench)
        assert (again.state, again.stored) == ("done", 500 - replay.stored)


async def test_a_replay_stops_after_many_failures_in_a_row(tmp_path: Path) -> None:
    async with make_bench(tmp_path) as bench:
        await put_letters(bench, 30, good=False)
        await put_letters(bench, 1, start=30)
        await put_letters(bench, 200, good=False, start=31)
        replay = await ended(bench)
        assert (replay.state, replay.stored) == ("stopped", 1)
        assert 80 <= replay.failed <= 130
        assert len(replay.failures) == 20
        assert replay.message == "50 letters in a row failed: event: is required"
        assert len(await bench.letters()) == 230


async def test_a_replay_stops_when_the_storage_does_not_answer_and_can_be_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_bench(tmp_path) as bench:
        await put_letters(bench, 120)
        remove = bench.store.remove
        removed = 0

        async def once(*arguments: Any) -> Any:
            nonlocal removed
            removed += 1
            if removed == 2:
                raise StorageUnavailable("not now")
            return await remove(*arguments)

        # The events of the second page are stored, and its letters are not removed.
        monkeypatch.setattr(bench.store, "remove", once)
        replay = await ended(bench)
        assert (replay.state, replay.message) == ("stopped", "not now; run it again")
        again = await ended(bench)
        assert (again.state, again.stored, again.duplicates) == ("done", 20, 50)
        assert len(await bench.events()) == 120
        assert await bench.letters() == []


async def test_an_unexpected_error_stops_a_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any, **__: Any) -> Any:
        raise ValueError

    async with make_bench(tmp_path) as bench:
        await put_letters(bench, 60)
        monkeypatch.setattr(bench.replays, "replay_all", broken)
        assert (await ended(bench)).state == "stopped"
