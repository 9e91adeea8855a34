# SPDX-License-Identifier: Apache-2.0
"""Writers that are killed or stopped at any moment: no event is lost, none is stored twice.

Each writer is a process that prints the numbers of the events that were acknowledged, and merges
its keys all the time.
"""

from __future__ import annotations

import contextlib
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from support.exactly_once import NotExactlyOnce, check_exactly_once

_WRITES = """
import random, sys
from pathlib import Path
from engage.api import Status, StorageUnavailable
from engage.testing import event
from engage_plugins.sqlite import checkpoint
from engage_plugins.sqlite.keys import event_keys as keys
from engage_plugins.sqlite.keys import merge, parts
from engage_plugins.sqlite.engine import Engine
from support import sqlite
from support.sqlite import settings

keys.MERGE_KEYS, keys.ALONE_KEYS, merge.LEAST_KEYS = 200, 20, 8
parts.BUILD_KEYS, parts._LEAST_CAPACITY = 50, 1000
checkpoint.CHECKPOINT_BYTES = 200_000
path, start = Path(sys.argv[1]), int(sys.argv[2])
engine = Engine(settings(path, write_timeout=2))
engine.open(True, True)
random.seed(start)
number = start
while True:
    # Mostly new events, and some again.
    count = random.choice((1, 3, 20, 60))
    new = list(range(number, number + count))
    again = [random.randrange(start, number) for _ in range(3)] if number > start else []
    try:
        outcomes = sqlite.write(engine, *(event(str(one)) for one in new + again))
    except StorageUnavailable as error:
        print("error", error, flush=True)
        continue
    for one, outcome in zip(again, outcomes[count:]):
        if outcome.status is not Status.DUPLICATE:
            print("lost", one, flush=True)
    number += count
    print(*new, flush=True)
    engine._last_write = 0.0
    engine.work()
"""


class WriterProcess:
    """A process that writes new events."""

    def __init__(self, path: Path, start: int, name: str = "") -> None:
        self.output = path.with_name(f"{name or start}.txt")
        tests = Path(__file__).parents[3]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _WRITES, str(path), str(start)],
                stdout=output,
                env={"PYTHONPATH": str(tests)},
            )

    def until(self, lines: int) -> None:
        """Wait until it has printed more lines."""
        before, deadline = len(self.lines()), time.monotonic() + 240
        while len(self.lines()) < before + lines:
            assert self.process.poll() is None
            assert time.monotonic() < deadline, self.lines()[-3:]
            time.sleep(0.002)

    def lines(self) -> list[str]:
        text = self.output.read_text()
        return text[: text.rfind("\n") + 1].splitlines()

    def acknowledged(self) -> list[int]:
        lines = self.lines()
        if lost := [line for line in lines if line.startswith("lost")]:
            raise NotExactlyOnce(lost)
        return [int(one) for line in lines if line[0].isdigit() for one in line.split()]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def check(path: Path, writers: list[WriterProcess]) -> None:
    with contextlib.closing(sqlite3.connect(path)) as db:
        found = Counter(int(one) for (one,) in db.execute("SELECT message_id FROM events"))
        (merged,) = db.execute("SELECT value FROM store WHERE name = 'merged'").fetchone()
        missing = db.execute(
            "SELECT count(*) FROM events e WHERE seq <= ? "
            "AND NOT EXISTS (SELECT 1 FROM event_keys k WHERE k.key = e.key AND k.seq = e.seq)",
            (merged,),
        ).fetchone()
        parts = [part for (part,) in db.execute("SELECT DISTINCT part FROM event_keys")]
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert missing == (0,)
    assert len(parts) > 1 or merged < 2000
    acknowledged = {number for writer in writers for number in writer.acknowledged()}
    check_exactly_once(found.elements(), acknowledged)


def test_a_writer_is_killed_at_any_moment(tmp_path: Path) -> None:
    path, rng, writers = tmp_path / "engage.db", random.Random(7), []
    for turn in range(6):
        writer = WriterProcess(path, turn * 1_000_000)
        writers.append(writer)
        try:
            writer.until(rng.randrange(10, 40))
        finally:
            writer.kill()
        check(path, writers)
    # Everything is known to the next writer.
    repeated = WriterProcess(path, 0, name="repeated")
    try:
        repeated.until(5)
    finally:
        repeated.kill()
    check(path, [])


def test_a_writer_is_stopped_while_another_one_writes(tmp_path: Path) -> None:
    """As when the lock file was deleted. The first one goes on from what the second one left."""
    path, rng = tmp_path / "engage.db", random.Random(3)
    first = WriterProcess(path, 0)
    writers = [first]
    try:
        first.until(10)
        for _ in range(3):
            # It may hold SQLite's lock; then the other one waits.
            time.sleep(rng.random() / 50)
            first.process.send_signal(signal.SIGSTOP)
            # The same events.
            second = WriterProcess(path, 0, name=f"second-{len(writers)}")
            writers.append(second)
            time.sleep(0.6)
            first.process.send_signal(signal.SIGCONT)
            second.until(5)
            second.kill()
            first.until(5)
    finally:
        for writer in writers:
            writer.kill()
    check(path, writers)
