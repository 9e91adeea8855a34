# SPDX-License-Identifier: Apache-2.0
"""``python benchmarks/sqlite_writer.py --events 0 --events 5000000``: measures SQLite's engine.

Without HTTP and in one process: events per second, CPU time and bytes written for each event, and
how long one write takes, for writes of several sizes to stores of several sizes.
"""

from __future__ import annotations

import argparse
import os
import resource
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from engage.store import events
from engage.store.keys import key_of
from engage.store.tables import Row
from engage_plugins.sqlite import schema
from engage_plugins.sqlite.engine import Engine
from engage_plugins.sqlite.keys.parts import capacity_of
from support.sqlite import settings

#: Each write has one of these numbers of events.
SIZES = (1, 32, 100, 1000, 4000)

#: Bytes of an event's body, as the benchmarks' event is stored.
_BODY = 690


def rows(count: int, start: int, now: int) -> Iterator[Row]:
    """Yield the rows of different events of 1000 visitors, each with its key.

    :param start: the number of the first one.
    :param now: when the last one was received, in milliseconds since 1970 UTC.
    """
    body = b'{"type":"track","text":"' + b"x" * (_BODY - 26) + b'"}'
    for number in range(start, start + count):
        name, user = f"{number:032x}", f"user-{number % 1000}"
        at = now - count + number - start
        key = key_of("acme", "api", name)
        visitor = f"visitor-{number % 1000}"
        yield ("acme", "api", name, "track", user, visitor, "Clicked", at, at, body, key)


def make_store(path: Path, count: int) -> None:
    """Make a store of many events, in the format of the plugin but not through its writer.

    It takes 9 s for a million events.
    """
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA synchronous = OFF")
    db.execute("PRAGMA journal_mode = OFF")
    db.execute("BEGIN")
    schema.create(db)
    columns = ", ".join(("seq", *events.EVENTS.columns, "key"))
    numbered = ((number, *row) for number, row in enumerate(rows(count, 0, _now()), 1))
    db.executemany(f"INSERT INTO events ({columns}) VALUES ({', '.join('?' * 12)})", numbered)
    # In parts as large as the writer makes them.
    part = 1
    while part <= count:
        end = part + capacity_of(part - 1)
        db.execute(
            "INSERT INTO event_keys SELECT ?1, key, seq FROM events "
            "WHERE seq >= ?1 AND seq < ?2 ORDER BY key",
            (part, end),
        )
        part = end
    db.execute("UPDATE store SET value = ? WHERE name = 'merged'", (count,))
    db.execute("COMMIT")
    db.execute("PRAGMA journal_mode = WAL")
    db.close()


def _now() -> int:
    return int(time.time() * 1000)


def _written() -> int:
    """Return the number of bytes that this process has written to files."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("write_bytes")).split()[1])


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(engine: Engine, size: int, count: int, start: int) -> str:
    """Write events, and return a row of the table.

    :param size: events of each write.
    :param count: all events.
    :param start: the number of the first event.
    """
    made = list(rows(count, start, _now()))
    taken: list[float] = []
    written, cpu, begin = _written(), _cpu(), time.perf_counter()
    for first in range(0, count, size):
        before = time.perf_counter()
        engine.run(events.write, [made[first : first + size]])
        taken.append(time.perf_counter() - before)
        engine.work()
    seconds, cpu, written = time.perf_counter() - begin, _cpu() - cpu, _written() - written
    p50, p99 = statistics.median(taken), statistics.quantiles(taken, n=100)[98]
    return (
        f"{size:5} {count / seconds:10,.0f} {cpu / count * 1e6:8.1f} {written / count / 1e3:8.1f} "
        f"{p50 * 1000:8.2f} {p99 * 1000:8.2f} {max(taken) * 1000:8.1f}"
    )


def run(path: Path, sizes: Iterable[int], per_size: int) -> None:
    """Print the figures of one store, for each size of a write.

    :param per_size: the maximum number of events for each size.
    """
    engine = Engine(settings(path))
    begin = time.perf_counter()
    engine.open(True, True)
    print(f"opened in {time.perf_counter() - begin:.2f} s")
    begin, cpu = time.perf_counter(), _cpu()
    while engine.work():
        pass
    print(f"filter built in {time.perf_counter() - begin:.1f} s, {_cpu() - cpu:.1f} s of CPU time")
    print(" size   events/s   µs/event KB/event   p50 ms   p99 ms   max ms")
    start = 10**12
    for size in sizes:
        count = max(200, min(per_size, 10_000 * size))
        print(measure(engine, size, count, start), flush=True)
        start += count
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB of memory")
    engine.close()


def main() -> None:
    """Print a table for each size of the store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, action="append", help="in the store; default: 0")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="events of a write")
    parser.add_argument("--count", type=int, default=300_000, help="events for each size")
    parser.add_argument("--keep", type=Path, help="a store to use, and to make if it is missing")
    options = parser.parse_args()
    for number in options.events or [0]:
        with tempfile.TemporaryDirectory(prefix="engage-bench-") as folder:
            path = options.keep or Path(folder) / "engage.db"
            if number and not path.exists():
                make_store(path, number)
            print(f"\n{number:,} events, {os.cpu_count()} CPUs, SQLite {sqlite3.sqlite_version}")
            run(path, options.sizes, options.count)


if __name__ == "__main__":
    main()
