# SPDX-License-Identifier: Apache-2.0
"""SQLite engines whose keys are merged after a few events, and what their files have.

``small_merges`` in ``tests/plugins/sqlite/conftest.py`` makes the merges that small.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path

from engage.api import Status
from engage.testing import event
from engage_plugins.sqlite.engine import Engine
from support import sqlite
from support.sqlite import settings


def opened(path: Path) -> Engine:
    """Open (and create) a store as its writer."""
    engine = Engine(settings(path))
    engine.open(True, True)
    return engine


def write(engine: Engine, *names: object) -> list[Status]:
    """Write events; the n-th event of a store is received at ``TIME + n``."""
    events = [event(str(name), at=int(str(name))) for name in names]
    return [one.status for one in sqlite.write(engine, *events)]


def write_all(engine: Engine, names: Iterable[int], size: int = 5) -> None:
    """Write new events in groups."""
    names = list(names)
    for start in range(0, len(names), size):
        group = names[start : start + size]
        assert write(engine, *group) == [Status.STORED] * len(group)


def finish(engine: Engine) -> None:
    """Do all background work that can be done."""
    while engine.work():
        pass


def are_duplicates(engine: Engine, names: Sequence[int]) -> bool:
    """Write events, and return whether all of them are stored already."""
    return set(write(engine, *names)) <= {Status.DUPLICATE}


def forget(engine: Engine) -> None:
    """Let the engine forget its keys and its connection, as after a crash."""
    engine.drop()
    engine.keys.reset()


def stored(path: Path) -> list[str]:
    """Return the message ids of the stored events, in the order of their numbers."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        return [one for (one,) in db.execute("SELECT message_id FROM events ORDER BY seq")]


def table(path: Path) -> dict[bytes, int]:
    """Return the table of keys."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        return dict(db.execute("SELECT key, max(seq) FROM event_keys GROUP BY key"))


def parts_of(path: Path) -> dict[int, list[int]]:
    """Return the numbers of the events of each part."""
    found: dict[int, list[int]] = {}
    with contextlib.closing(sqlite3.connect(path)) as db:
        for part, number in db.execute("SELECT part, seq FROM event_keys ORDER BY part, seq"):
            found.setdefault(part, []).append(number)
    return found


def numbers(path: Path) -> dict[bytes, int]:
    """Return the keys and numbers of the stored events."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        return dict(db.execute("SELECT key, seq FROM events"))


def merged(path: Path) -> int:
    """Return the number up to which the keys of all events are in the table."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        (number,) = db.execute("SELECT value FROM store WHERE name = 'merged'").fetchone()
    return int(number)


def epoch(path: Path) -> int:
    """Return the number that each writer changes when it takes the store over."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        (number,) = db.execute("SELECT value FROM store WHERE name = 'epoch'").fetchone()
    return int(number)


def backup(path: Path, copy: Path) -> None:
    """Copy the content of a store into another file, with SQLite's own means."""
    with (
        contextlib.closing(sqlite3.connect(path)) as db,
        contextlib.closing(sqlite3.connect(copy)) as other,
    ):
        db.backup(other)


def restore(path: Path, copy: Path) -> None:
    """Replace the content of a store by that of a copy."""
    backup(copy, path)
