# SPDX-License-Identifier: Apache-2.0
"""No event is stored twice, and none is taken for a duplicate that is not stored.

The keys of the newest events are in memory and merged into a table. These tests call the engine
itself, with merges after a few events.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from engage.api import Status, StorageUnavailable
from engage.testing import event
from engage.testing.factories import TIME
from engage_plugins.sqlite import keys, merge, parts
from engage_plugins.sqlite.engine import Engine
from engage_plugins.sqlite.events import row_of
from engage_plugins.sqlite.transactions import SupersededError
from support.sqlite import file_limit, settings


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge after 20 events, in steps of a few keys, into parts of 64."""
    monkeypatch.setattr(keys, "MERGE_KEYS", (20, 40))
    monkeypatch.setattr(keys, "ALONE_KEYS", 7)
    monkeypatch.setattr(merge, "LEAST_KEYS", 3)
    monkeypatch.setattr(merge, "_SPREAD_RATE", 4)
    monkeypatch.setattr(merge, "_DELETE_RATE", 2)
    monkeypatch.setattr(parts, "BUILD_KEYS", 16)
    monkeypatch.setattr(parts, "_LEAST_CAPACITY", 64)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "engage.db"


def opened(path: Path, owner: Any = lambda: True) -> Engine:
    engine = Engine(settings(path), owner)
    engine.open(True, True)
    return engine


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    engine = opened(path)
    yield engine
    engine.close()


def write(engine: Engine, *names: object) -> list[Status]:
    """Write events; the n-th event of a store is received at ``TIME + n``."""
    rows = [row_of(event(str(name), at=int(str(name)))) for name in names]
    outcomes, _ = engine.write(rows)
    return [one.status for one in outcomes]


def write_all(engine: Engine, names: Iterable[int], size: int = 5) -> None:
    """Write new events in groups."""
    names = list(names)
    for start in range(0, len(names), size):
        group = names[start : start + size]
        assert write(engine, *group) == [Status.STORED] * len(group)


def finish(engine: Engine) -> None:
    """Do all background work that can be done, as after a pause."""
    engine._last_write = 0.0
    while engine.work():
        engine._last_write = 0.0


def stored(path: Path) -> list[str]:
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
    with contextlib.closing(sqlite3.connect(path)) as db:
        (number,) = db.execute("SELECT value FROM store WHERE name = 'merged'").fetchone()
    return int(number)


def are_duplicates(engine: Engine, names: Sequence[int]) -> bool:
    return set(write(engine, *names)) <= {Status.DUPLICATE}


# ----------------------------------------------------------------------------- duplicates
@pytest.mark.parametrize("size", [1, 7, 50])
def test_every_event_is_stored_once(engine: Engine, path: Path, size: int) -> None:
    """Whether its key is in memory, on its way, or in the table; with and without filters."""
    write_all(engine, range(200), size)
    assert 0 < merged(path) < 200
    assert engine._keys._parts.are_covered
    for turn in range(3):
        if turn == 1:
            # As after a crash.
            engine.drop()
            engine._keys.reset()
            assert are_duplicates(engine, [5])
            assert not engine._keys._parts.are_covered
        assert are_duplicates(engine, range(200))
        assert write(engine, 3, 200, 3, 199)[::2] == [Status.DUPLICATE] * 2
        finish(engine)
        assert engine._keys._parts.are_covered
    assert sorted(stored(path), key=int) == [str(number) for number in range(201)]


def test_the_table_has_the_keys_of_the_merged_events(engine: Engine, path: Path) -> None:
    write_all(engine, range(500), 3)
    finish(engine)
    expected = {key: seq for key, seq in numbers(path).items() if seq <= merged(path)}
    assert table(path) == expected
    assert len(expected) >= 480


def test_a_merge_keeps_up_with_the_writes(engine: Engine) -> None:
    for number in range(600):
        write(engine, number)
        assert len(engine._keys._merger.waiting) <= 1
    assert len(engine._keys._live) <= 20


def test_after_a_crash_the_newest_keys_are_read_again(path: Path) -> None:
    for end in range(30, 300, 7):
        engine = opened(path)
        write_all(engine, range(max(0, end - 7) if end > 30 else 0, end), 4)
        engine.drop()  # without close: nothing is saved
    engine = opened(path)
    assert are_duplicates(engine, range(end))
    engine.close()


def test_the_body_of_a_duplicate_is_the_stored_one(engine: Engine) -> None:
    write_all(engine, range(100))
    for number in (0, 50, 99):
        (outcome,), _ = engine.write([row_of(event(str(number), properties={"new": 1}))])
        assert outcome.status is Status.DUPLICATE
        assert outcome.stored is not None
        assert b'"new"' not in outcome.stored


def test_an_event_is_found_wherever_its_key_is(engine: Engine, path: Path) -> None:
    write_all(engine, range(100), 3)
    reader = Engine(settings(path))
    reader.open(False, False)
    for one in (engine, reader):
        for number in range(100):
            found = one.find("acme", "api", str(number))
            assert found is not None
            assert found.message_id == str(number)
        assert one.find("acme", "api", "none") is None
        assert one.find("acme", "\ud800", "none") is None
    reader.close()


# ------------------------------------------------------------------------------ retention
def test_a_deleted_event_can_be_stored_again_at_every_step(engine: Engine, path: Path) -> None:
    rng = random.Random(5)
    alive: list[int] = []
    for number in range(400):
        write(engine, number)
        alive.append(number)
        if rng.random() < 0.3 and len(alive) > 5:
            count = rng.randrange(1, 5)
            assert engine.expire(TIME + number, count, True) == count
            gone, alive = alive[:count], alive[count:]
            again = rng.choice(gone)
            # It is the oldest event now, and the next to be deleted.
            assert write(engine, again) == [Status.STORED]
            assert write(engine, again) == [Status.DUPLICATE]
            alive.insert(0, again)
        if rng.random() < 0.1:
            finish(engine)
        if rng.random() < 0.02:
            engine.drop()
            engine = opened(path)
        assert are_duplicates(engine, rng.sample(alive, min(3, len(alive))))
    assert sorted(map(int, stored(path))) == sorted(alive)
    engine.close()


def test_the_keys_of_deleted_events_are_deleted_later(engine: Engine, path: Path) -> None:
    write_all(engine, range(300))
    finish(engine)
    assert len(table(path)) == merged(path)
    assert engine.expire(TIME + 250, 1000, False) == 250
    assert len(table(path)) == merged(path)
    write_all(engine, range(300, 330))
    finish(engine)
    # Of the part that has event 251, too, they stay.
    (least,) = {min(table(path).values())}
    assert 251 - 64 * 2 < least <= 251
    assert least in parts_of(path)
    assert are_duplicates(engine, range(250, 330))
    assert write(engine, 249) == [Status.STORED]


def test_each_part_has_the_keys_of_successive_events(engine: Engine, path: Path) -> None:
    """So a merge changes a few pages only, however many events are stored."""
    write_all(engine, range(2000), 10)
    finish(engine)
    found = parts_of(path)
    assert [one for part in found.values() for one in part] == list(range(1, merged(path) + 1))
    assert all(part == numbers[0] for part, numbers in found.items())
    sizes = [len(numbers) for numbers in found.values()]
    # A merge is not divided, so a part may have fewer than it has room for.
    assert all(max(64, sum(sizes[:n]) // 4) - 40 < size for n, size in enumerate(sizes[:-1]))
    assert all(size <= max(64, sum(sizes[:n]) // 4) for n, size in enumerate(sizes))
    assert 8 < len(sizes) < 20
    engine.drop()
    engine._keys.reset()
    write_all(engine, range(2000, 2600), 10)
    assert are_duplicates(engine, range(0, 2600, 50))
    found = parts_of(path)
    assert [one for part in found.values() for one in part] == list(range(1, merged(path) + 1))


def test_a_part_is_deleted_even_if_the_writer_is_replaced_meanwhile(path: Path) -> None:
    engine = opened(path)
    write_all(engine, range(600))
    finish(engine)
    before = parts_of(path)
    assert engine.expire(TIME + 500, 1000, False) == 500
    write_all(engine, range(600, 640))
    for closes in (True, False):
        finish_one = engine._keys.merge_due_alone()
        assert finish_one
        engine._last_write = 0.0
        engine.work()
        if closes:
            engine.close()
        engine.drop()
        engine = opened(path)
        assert are_duplicates(engine, range(500, 640))
    write_all(engine, range(640, 700))
    finish(engine)
    after = parts_of(path)
    assert min(after) > 100
    assert set(before) - set(after) == {part for part in before if part < min(after)}
    assert are_duplicates(engine, range(500, 700))
    assert write(engine, 3) == [Status.STORED]
    engine.close()


def test_a_key_may_be_in_several_parts(engine: Engine, path: Path) -> None:
    """Its event was deleted and stored again; the newest number counts."""
    for turn in range(4):
        write_all(engine, [0])
        write_all(engine, range(1 + 100 * turn, 101 + 100 * turn))
        finish(engine)
        for _ in range(2):
            assert are_duplicates(engine, [0])
            found = engine.find("acme", "api", "0")
            assert found is not None
            reader = Engine(settings(path))
            reader.open(False, False)
            assert reader.find("acme", "api", "0") == found
            reader.close()
            engine.drop()
            engine._keys.reset()
        with contextlib.closing(sqlite3.connect(path)) as db, db:
            db.execute("DELETE FROM events WHERE message_id = '0'")
        assert engine.find("acme", "api", "0") is None
    key = row_of(event("0"))[0]
    with contextlib.closing(sqlite3.connect(path)) as db:
        query = "SELECT count(DISTINCT part) FROM event_keys WHERE key = ?"
        assert db.execute(query, (key,)).fetchone()[0] > 1


def test_a_few_filters_cover_all_parts(path: Path) -> None:
    engine = opened(path)
    most = 0
    for start in range(0, 3000, 10):
        write_all(engine, range(start, start + 10), 10)
        engine._last_write = 0.0
        for _ in range(8):
            engine.work()
        most = max(most, len(engine._keys._parts._filters))
        assert engine._keys._parts.are_covered
        if start % 250 == 0:
            assert are_duplicates(engine, range(0, start, 50))
    assert most == 5
    for _ in range(2):
        finish(engine)
        assert len(engine._keys._parts) > 8
        assert len(engine._keys._parts._filters) < 5
        # Nearly all new events are recognised without a look-up.
        keys = {row_of(event(str(number)))[0] for number in range(3000)}
        known = {key for _, key in engine._keys._parts.that_may_contain(keys)}
        assert known >= set(table(path))
        others = {row_of(event(f"other {number}"))[0] for number in range(3000)}
        assert len(engine._keys._parts.that_may_contain(others)) < 200
        engine.close()
        engine = opened(path)
    engine.close()


def test_a_part_is_covered_as_soon_as_it_is_read(path: Path) -> None:
    engine = opened(path)
    write_all(engine, range(1000))
    finish(engine)
    engine.drop()
    engine = opened(path)
    left = len(engine._keys._parts)
    assert len(engine._keys._parts._unfiltered) == left
    seen = set()
    reopened = False
    while not engine._keys._parts.are_covered:
        engine._keys.build_filter(engine.connection())
        seen.add(len(engine._keys._parts._unfiltered))
        assert are_duplicates(engine, range(0, 1000, 100))
        if len(seen) == 4 and not reopened:
            reopened = True
            # What is built is saved, and building goes on with the rest.
            engine.close()
            engine = opened(path)
            assert len(engine._keys._parts._unfiltered) in seen
    assert seen == set(range(left + 1))
    engine.close()


def test_the_filter_follows_retention(engine: Engine, path: Path) -> None:
    """Its size depends on the number of events that are stored, not of those that ever were."""
    for start in range(0, 3000, 100):
        write_all(engine, range(start, start + 100))
        engine.expire(TIME + start, 1000, True)
        finish(engine)
        assert len(engine._keys._parts) < 6
    assert len(table(path)) < 400
    assert are_duplicates(engine, range(2900, 3000))


# ---------------------------------------------------------- other contents, other writers
def backup(path: Path, copy: Path) -> None:
    with (
        contextlib.closing(sqlite3.connect(path)) as db,
        contextlib.closing(sqlite3.connect(copy)) as other,
    ):
        db.backup(other)


def restore(path: Path, copy: Path) -> None:
    backup(copy, path)


def test_a_backup_may_be_restored_into_the_live_file(
    engine: Engine, path: Path, tmp_path: Path
) -> None:
    """What the restored store does not have is new, and what it has is a duplicate."""
    for kept in (10, 35, 130):
        write_all(engine, range(kept - 10, kept))
        copy = tmp_path / f"{kept}.db"
        backup(path, copy)
        write_all(engine, range(1000, 1060))
        restore(path, copy)
        assert are_duplicates(engine, range(kept - 10, kept))
        assert write(engine, 1000, kept - 1, 1059) == [
            Status.STORED,
            Status.DUPLICATE,
            Status.STORED,
        ]
        restore(path, copy)


def test_a_backup_from_before_a_merge_may_be_restored_after_it(
    engine: Engine, path: Path, tmp_path: Path
) -> None:
    """Both have the same events, but not the same table of keys."""
    write_all(engine, range(45), 45)
    backup(path, tmp_path / "before.db")
    before = merged(path)
    finish(engine)
    assert merged(path) > before
    restore(path, tmp_path / "before.db")
    assert are_duplicates(engine, range(45))
    # In the middle of a merge, too.
    restore(path, tmp_path / "before.db")
    write_all(engine, range(45, 46))
    backup(path, tmp_path / "before.db")
    for _ in range(3):
        engine._last_write = 0.0
        engine.work()
    restore(path, tmp_path / "before.db")
    finish(engine)
    engine.drop()
    assert are_duplicates(engine, range(46))


def test_a_copy_may_replace_the_file(engine: Engine, path: Path, tmp_path: Path) -> None:
    write_all(engine, range(30))
    backup(path, tmp_path / "copy.db")
    write_all(engine, range(30, 60))
    for end in ("", "-wal", "-shm"):
        path.with_name(path.name + end).unlink(missing_ok=True)
    shutil.copy(tmp_path / "copy.db", path)
    assert are_duplicates(engine, range(30))
    assert write(engine, 59) == [Status.STORED]
    assert len(stored(path)) == 31


def test_two_writers_take_turns(path: Path) -> None:
    """It is slow, but nothing is stored twice: a lock file may be deleted."""
    first, second = opened(path), opened(path)
    for number in range(200):
        assert write(first, number) == [Status.STORED]
        assert write(second, number) == [Status.DUPLICATE]
        one = (first, second)[number % 3 == 0]
        assert write(one, 1000 + number) == [Status.STORED]
        one._last_write = 0.0
        one.work()
    assert are_duplicates(first, range(200))
    assert are_duplicates(second, range(1000, 1200))
    assert len(stored(path)) == 400
    first.close()
    second.close()


def test_a_writer_that_was_superseded_writes_nothing(path: Path) -> None:
    owners = {"first"}
    first = opened(path, lambda: "first" in owners)
    write_all(first, range(10))
    owners.clear()
    second = opened(path)
    write_all(second, range(10, 20))
    for call in (lambda: write(first, 20), first.check, lambda: write(first, 20)):
        with contextlib.suppress(SupersededError):
            call()
    with pytest.raises(SupersededError, match="another process writes to it"):
        write(first, 20)
    assert len(stored(path)) == 20
    write_all(second, range(20, 30))
    first.close()
    second.close()


def test_other_changes_do_not_need_the_store_to_be_taken_over(path: Path) -> None:
    """A command beside the server, such as one that adds a write key, costs the server nothing."""
    server, command = opened(path), Engine(settings(path))
    command.open(False, False)
    write_all(server, range(30))
    epoch = server._keys._epoch
    command.check()
    command.expire(TIME + 3, 10, True)
    assert write(server, 29, 1, 30) == [Status.DUPLICATE, Status.STORED, Status.STORED]
    assert server._keys._epoch == epoch
    command.close()
    server.close()


# ------------------------------------------------------------------------------- failures
class Failing:
    """A connection whose statements can fail."""

    def __init__(self, db: sqlite3.Connection, prefix: str, *, after: bool) -> None:
        self._db, self._prefix, self._after, self.failures = db, prefix, after, 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)

    def execute(self, statement: str, *arguments: Any) -> Any:
        fails = statement.startswith(self._prefix) and self.failures > 0
        if fails and not self._after:
            self.failures -= 1
            raise sqlite3.OperationalError("failed")
        result = self._db.execute(statement, *arguments)
        if fails:
            self.failures -= 1
            raise sqlite3.OperationalError("failed")
        return result


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("events", [5, 30, 47])
def test_a_commit_that_fails_may_have_succeeded(
    engine: Engine, path: Path, events: int, after: bool
) -> None:
    write_all(engine, range(events))
    engine._db = Failing(engine._db, "COMMIT", after=after)
    with contextlib.suppress(StorageUnavailable):
        write(engine, 1000, 1001)
    assert ("1000" in stored(path)) in ({True} if after else {False, True})
    expected = Status.DUPLICATE if "1000" in stored(path) else Status.STORED
    assert write(engine, 1000, 0) == [expected, Status.DUPLICATE]
    assert stored(path).count("1000") == 1
    write_all(engine, range(events, events + 50))
    assert are_duplicates(engine, [*range(events + 50), 1000])


def test_a_write_is_made_again_without_the_step_that_failed(engine: Engine, path: Path) -> None:
    write_all(engine, range(20), 20)
    assert engine._keys._merger.waiting
    while True:
        failing = Failing(engine._db, "INSERT INTO event_keys", after=False)
        engine._db = failing
        write_all(engine, [int(stored(path)[-1]) + 1])
        if not failing.failures:
            break
        engine._db = failing._db
    assert engine._keys._merger.is_pausing
    assert engine._keys.merge_due(1000) == 0
    engine._keys._merger._not_before = 0.0
    write_all(engine, range(200, 300))
    assert merged(path) > 100
    assert set(table(path)) >= {key for key, seq in numbers(path).items() if seq <= merged(path)}
    assert are_duplicates(engine, range(20))


def test_a_write_that_fails_leaves_no_keys(engine: Engine) -> None:
    """Other events get its numbers."""
    write_all(engine, range(10))
    engine._db = Failing(engine._db, "INSERT INTO events", after=True)
    with pytest.raises(StorageUnavailable):
        write(engine, 10, 11)
    assert write(engine, 12, 13) == [Status.STORED] * 2
    assert set(engine._keys._live) == {row_of(event(str(n)))[0] for n in (*range(10), 12, 13)}
    assert write(engine, 10, 11) == [Status.STORED] * 2


def test_a_row_with_another_key_is_not_a_duplicate(engine: Engine) -> None:
    write_all(engine, range(10))
    engine._keys._live[row_of(event("10"))[0]] = 3
    assert write(engine, 10) == [Status.STORED]


def test_writes_stop_when_merging_fails_for_long(
    engine: Engine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(*_: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(merge.Merger, "step", step)
        number = 4 * 20
        write_all(engine, range(number), 1)
        with pytest.raises(StorageUnavailable, match="cannot be moved into the table"):
            write(engine, number)
        engine.check()
        assert engine.expire(TIME + 2, 1, True) == 1
    engine._keys._merger._not_before = 0.0
    write_all(engine, range(number, 300))
    assert merged(path) > 200
    assert are_duplicates(engine, range(1, 300))


def test_a_full_disk_in_a_merge_loses_nothing(path: Path) -> None:
    engine = opened(path)
    acknowledged: list[int] = []
    for size in range(60_000, 400_000, 20_000):
        with file_limit(size):
            for number in range(len(acknowledged), len(acknowledged) + 40):
                try:
                    write(engine, number)
                except StorageUnavailable:
                    break
                acknowledged.append(number)
                engine._last_write = 0.0
                engine.work()
        engine._keys._merger._not_before = 0.0
    assert len(acknowledged) > 100
    names = [int(one) for one in stored(path)]
    assert len(set(names)) == len(names)
    assert set(acknowledged) <= set(names)
    assert are_duplicates(engine, acknowledged)
    engine.close()


# --------------------------------------------------------------------------------- filter
def saved(path: Path) -> Path:
    return path.with_name("engage.db-keys")


def closed(path: Path) -> None:
    """Make a store with a saved filter."""
    engine = opened(path)
    write_all(engine, range(150))
    finish(engine)
    engine.close()


def test_what_is_in_memory_is_saved_when_the_store_is_closed(path: Path) -> None:
    closed(path)
    assert saved(path).stat().st_mode & 0o777 == 0o600
    engine = opened(path)
    assert engine._keys._parts.are_covered
    expected = {key for key, seq in numbers(path).items() if seq > merged(path)}
    assert set(engine._keys._live) == expected
    assert expected
    assert are_duplicates(engine, range(150))
    write_all(engine, range(150, 400))
    engine.drop()
    # Killed: what was saved is older.
    engine = opened(path)
    assert not engine._keys._parts.are_covered
    assert are_duplicates(engine, range(400))
    engine.close()


def test_a_saved_file_does_not_fit_another_content(path: Path, tmp_path: Path) -> None:
    engine = opened(path)
    write_all(engine, range(50))
    backup(path, tmp_path / "before.db")
    write_all(engine, range(50, 150))
    finish(engine)
    engine.close()
    restore(path, tmp_path / "before.db")
    engine = opened(path)
    assert not engine._keys._parts.are_covered
    assert are_duplicates(engine, range(50))
    assert write(engine, 149) == [Status.STORED]
    engine.close()


@pytest.mark.parametrize("what", ["cut", "changed", "empty", "foreign", "folder", "version"])
def test_a_saved_file_that_does_not_fit_is_not_used(
    path: Path, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed(path)
    content = saved(path).read_bytes()
    if what == "cut":
        saved(path).write_bytes(content[:-1])
    elif what == "changed":
        saved(path).write_bytes(content[:-20] + bytes([content[-20] ^ 1]) + content[-19:])
    elif what == "empty":
        saved(path).write_bytes(b"")
    elif what == "foreign":
        (tmp_path / "other").mkdir()
        closed(tmp_path / "other/engage.db")
        saved(tmp_path / "other/engage.db").replace(saved(path))
    elif what == "folder":
        saved(path).unlink()
        saved(path).mkdir()
    else:
        monkeypatch.setattr(parts, "VERSION", "0")
    engine = opened(path)
    assert not engine._keys._parts.are_covered
    assert are_duplicates(engine, range(150))
    engine.close()


def test_the_filter_is_built_while_keys_are_merged(path: Path) -> None:
    engine = opened(path)
    write_all(engine, range(300))
    engine.drop()
    engine = opened(path)
    assert not engine._keys._parts.are_covered
    number = 300
    while not engine._keys._parts.are_covered:
        write_all(engine, [number])
        number += 1
        engine.work()
    assert number > 310
    assert are_duplicates(engine, range(number))
    engine.close()


# ------------------------------------------------- rare orders of what happens to a store
def test_keys_are_saved_in_the_order_of_their_numbers(path: Path) -> None:
    """Also the key of a deleted event that was stored again while it was in memory.

    The next writer freezes them in this order, and everything up to the last number of what it
    froze counts as merged.
    """
    engine = opened(path)
    write_all(engine, range(19), 1)
    write_all(engine, range(19, 24))
    engine._keys._merger._pause, engine._keys._merger._not_before = 1.0, float("inf")
    write_all(engine, range(24, 39), 15)
    engine.write([row_of(event("39", at=-1000))])
    assert engine.expire(TIME - 500, 1, True) == 1
    write_all(engine, range(40, 42))
    assert write(engine, 39) == [Status.STORED]
    engine.close()
    engine = opened(path)
    finish(engine)
    found = table(path)
    assert all(found.get(key) == seq for key, seq in numbers(path).items() if seq <= merged(path))
    engine.drop()
    engine = opened(path)
    assert are_duplicates(engine, [*range(39), 40, 41, 39])
    engine.close()


def test_a_part_is_forgotten_when_its_transaction_is_committed(
    engine: Engine, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backup from before a deletion looks like the store if nothing was committed since."""
    write_all(engine, range(400))
    number = 400
    while not engine._keys.plan_due(5):
        write_all(engine, [number])
        number += 1
    finish(engine)
    assert len(engine._keys._parts) > 2
    backup(path, tmp_path / "same.db")
    assert engine.expire(TIME + 300, 1000, False) == 300

    def merge_due(*_: Any) -> int:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(engine._keys, "merge_due", merge_due)
        with pytest.raises(StorageUnavailable):
            write(engine, *range(5000, 5005))
    restore(path, tmp_path / "same.db")
    assert are_duplicates(engine, range(300))
    assert len(stored(path)) == number


def test_a_filter_is_built_from_the_content_that_is_known(path: Path, tmp_path: Path) -> None:
    """Not from another content that is in the file for a moment."""
    engine = opened(path)
    write_all(engine, range(30))
    finish(engine)
    backup(path, tmp_path / "other.db")
    write_all(engine, range(30, 300))
    finish(engine)
    engine.drop()
    engine = opened(path)
    backup(path, tmp_path / "same.db")
    restore(path, tmp_path / "other.db")
    assert not engine.work()
    restore(path, tmp_path / "same.db")
    finish(engine)
    assert engine._keys._parts.are_covered
    assert are_duplicates(engine, range(300))
    assert len(stored(path)) == 300
    engine.close()


def test_a_part_is_not_begun_twice(path: Path) -> None:
    """A crash in the first merge of a part, and a gap in the numbers as large as a part."""
    engine = opened(path)
    write_all(engine, range(600))
    finish(engine)
    first = merged(path) + 1
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        (key,) = db.execute("SELECT key FROM events WHERE seq = ?", (first,)).fetchone()
        db.execute("INSERT INTO event_keys VALUES (?, ?, ?)", (first, key, first))
        db.execute("UPDATE sqlite_sequence SET seq = seq + 1000 WHERE name = 'events'")
    engine.drop()
    engine = opened(path)
    write_all(engine, range(1000, 1100))
    finish(engine)
    begun = engine._keys._parts._parts
    assert len(set(begun)) == len(begun)
    engine.drop()
    engine = opened(path)
    assert are_duplicates(engine, [*range(600), *range(1000, 1100)])
    engine.close()
