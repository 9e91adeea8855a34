# SPDX-License-Identifier: Apache-2.0
"""``engage verify`` on SQLite: each kind of damage is found, and none in a healthy store."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engage.api import StorageUnavailable
from engage.testing.factories import TIME
from engage.testing.storage.histories import everything
from engage.verify import Report
from engage_plugins.sqlite.keys import saved
from engage_plugins.sqlite.writer.operations import MISSED, Operation
from engage_plugins.sqlite.writer.writer import Writer
from support.sqlite import make
from support.verifying import damage, fill, healthy, small, verified

TESTS = Path(__file__).resolve().parents[2]
USER = "(SELECT id FROM profiles WHERE workspace = 'acme' AND kind = 0 AND name = 'ann')"
VISITOR = "(SELECT id FROM profiles WHERE workspace = 'acme' AND kind = 2 AND name = 'a-1')"

#: Name → what it is found as, and the statements that do it.
DAMAGE: dict[str, tuple[str, list[str]]] = {
    "an event is deleted": ("numbers of events", ["DELETE FROM events WHERE message_id = 'seen'"]),
    "the newest event is deleted": (
        "numbers of events",
        ["DELETE FROM events WHERE seq = (SELECT max(seq) FROM events)"],
    ),
    "an event is not JSON": ("events", ["UPDATE events SET body = '{' WHERE message_id = 'seen'"]),
    "an event is not valid": (
        "events",
        [
            'UPDATE events SET body = replace(CAST(body AS TEXT), \'"event":"Clicked"\', '
            "'\"event\":\"\"'), name = '' WHERE message_id = 'seen'"
        ],
    ),
    "an event has another user": (
        "events",
        ["UPDATE events SET user_id = 'bob' WHERE message_id = 'seen'"],
    ),
    "an event has another time": (
        "events",
        ["UPDATE events SET received_at = received_at + 1 WHERE message_id = 'seen'"],
    ),
    "an event is stored twice": (
        "keys",
        [
            "CREATE TEMP TABLE t AS SELECT * FROM events WHERE message_id = 'seen'",
            "UPDATE t SET seq = (SELECT max(seq) + 1 FROM events)",
            "INSERT INTO events SELECT * FROM t",
        ],
    ),
    "an erased event has its content": (
        "events",
        ["UPDATE events SET type = 'erased', message_id = '' WHERE message_id = 'seen'"],
    ),
    "an erased event has its body": (
        "events",
        [
            "UPDATE events SET type = 'erased', message_id = '', user_id = NULL, "
            "anonymous_id = NULL WHERE message_id = 'seen'"
        ],
    ),
    "a number could be given again": (
        "numbers of events",
        ["UPDATE sqlite_sequence SET seq = 0 WHERE name = 'events'"],
    ),
    "an event has the key of another": (
        "keys",
        ["UPDATE events SET key = zeroblob(16) WHERE message_id = 'seen'"],
    ),
    "a key is missing": (
        "keys",
        ["DELETE FROM event_keys WHERE seq = (SELECT max(seq) FROM event_keys)"],
    ),
    "a key leads to another event": (
        "keys",
        [
            "UPDATE event_keys SET seq = (SELECT min(seq) FROM event_keys) "
            "WHERE seq = (SELECT max(seq) FROM event_keys)"
        ],
    ),
    "a trait is changed": (
        "users",
        [f"UPDATE traits SET value = '\"free\"' WHERE profile = {USER} AND trait = 'plan'"],
    ),
    "a trait has an earlier time": (
        "users",
        [f"UPDATE traits SET timestamp = timestamp - 1 WHERE profile = {USER} AND trait = 'plan'"],
    ),
    "a trait is lost": (
        "users",
        [f"DELETE FROM traits WHERE profile = {USER} AND trait = 'plan'"],
    ),
    "a trait of no event": (
        "users",
        [f"INSERT INTO traits SELECT {USER}, 'x', {TIME + 900_000}, 'm', 'api', 5, '1'"],
    ),
    "a membership is lost": ("users", [f"DELETE FROM memberships WHERE profile = {USER}"]),
    "a membership has ended": ("users", ["UPDATE memberships SET assigned = 0"]),
    "a user is lost": ("users", ["DELETE FROM profiles WHERE kind = 0 AND name = 'ann'"]),
    "a user of no event": (
        "users",
        [
            "INSERT INTO profiles (workspace, kind, name, created_at, updated_at, traits, "
            "trait_bytes, links, memberships) VALUES "
            f"('acme', 0, 'eve', {TIME + 900_000}, {TIME + 900_000}, 0, 0, 0, 0)"
        ],
    ),
    "a user was created later": (
        "users",
        ["UPDATE profiles SET created_at = created_at + 1 WHERE name = 'ann'"],
    ),
    "a visitor is lost": (
        "visitors",
        [
            *(f"DELETE FROM {one} WHERE profile = {VISITOR}" for one in ("traits", "identifiers")),
            "DELETE FROM profiles WHERE kind = 2 AND name = 'a-1'",
            "UPDATE visitor_totals SET count = count - 1",
        ],
    ),
    "a visitor's trait is changed": (
        "visitors",
        [f"UPDATE traits SET value = '2' WHERE profile = {VISITOR} AND trait = 'n'"],
    ),
    "a group's trait is changed": (
        "groups",
        ["UPDATE traits SET value = '9' WHERE trait = 'size'"],
    ),
    "a link is lost": ("links", [f"DELETE FROM links WHERE profile = {USER}"]),
    "a link has another version": (
        "links",
        [f"UPDATE links SET received_at = received_at + 1 WHERE profile = {USER}"],
    ),
    "a link does not count": ("links", [f"UPDATE links SET undone = 1 WHERE profile = {USER}"]),
    "an identifier is lost": ("identifiers", [f"DELETE FROM identifiers WHERE profile = {USER}"]),
    "an identifier has another value": (
        "identifiers",
        [f"UPDATE identifiers SET value = 'x@y.z' WHERE profile = {USER}"],
    ),
    "a counter of a limit is wrong": (
        "counters of profiles",
        ["UPDATE profiles SET traits = 7 WHERE name = 'ann'"],
    ),
    "the number of visitors is wrong": (
        "visitor_totals",
        ["UPDATE visitor_totals SET count = count + 1"],
    ),
    "a budget is wrong": ("dead letters", ["UPDATE letter_totals SET size = size + 1"]),
    "the letter of a conflict is lost": (
        "dead letters",
        ["DELETE FROM letters WHERE reason = 'message_id_conflict'"],
    ),
    "the letter of a conflict is cut": (
        "conflicts",
        ["UPDATE letters SET truncated = 1 WHERE reason = 'message_id_conflict'"],
    ),
    "a choice is reversed": ("choices", ["UPDATE choices SET subscribed = 1 - subscribed"]),
    "a choice is lost": ("choices", ["DELETE FROM choices"]),
    "a record is lost": ("choices", ["DELETE FROM history"]),
    "a change is forgotten": ("changes", ["DELETE FROM changes"]),
    "a suppressed address cannot be found": (
        "suppressions",
        ["UPDATE suppressions SET address = 'A@b.c'"],
    ),
}


async def verified_after(
    folder: Path, change: Callable[[Path], None], *, repair: bool = False
) -> Report:
    """Verify a store that was closed, changed and opened again.

    :param repair: repair it, and return what is still wrong.
    """
    store = make(folder)
    await store.open(create=True)
    await small(store)
    await store.close()
    change(folder / "engage.db")
    store = make(folder)
    await store.open(create=True)
    try:
        report = await verified(store, repair=repair)
        if repair:
            assert report.repaired.total() >= 1, report.different
            report = await verified(store)
        return report
    finally:
        await store.close()


@pytest.mark.parametrize("name", DAMAGE)
async def test_damage_is_found(small_merges: None, tmp_path: Path, name: str) -> None:
    what, statements = DAMAGE[name]
    report = await verified_after(tmp_path, lambda path: damage(path, statements))
    assert what in report.different, (report.different, report.differences)


@pytest.mark.parametrize(
    "name",
    [
        one
        for one, (what, _) in DAMAGE.items()
        if what in ("users", "visitors", "groups", "links") and one != "a user is lost"
    ],
)
async def test_damage_of_people_is_repaired(small_merges: None, tmp_path: Path, name: str) -> None:
    _, statements = DAMAGE[name]
    healthy(await verified_after(tmp_path, lambda path: damage(path, statements), repair=True))


async def test_nothing_is_repaired_while_there_are_rows_of_nobody(tmp_path: Path) -> None:
    """A new user could get the number of the one that was lost, and those rows with it."""
    _, statements = DAMAGE["a user is lost"]
    store = make(tmp_path)
    await store.open(create=True)
    await small(store)
    damage(tmp_path / "engage.db", statements)
    report = await verified(store, repair=True)
    await store.close()
    assert report.different.keys() >= {"users", "traits", "links"}
    assert not report.repaired


_KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from engage.verify import run
from support.sqlite import make
from support.verifying import verified

run._STEP = 2

async def main() -> None:
    store = make(Path(sys.argv[1]))
    await store.open(create=True)
    rebuild, calls = store.rebuild, iter(range(int(sys.argv[2])))

    async def killed(*arguments):
        if next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        await rebuild(*arguments)

    store.rebuild = killed
    await verified(store, repair=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("calls", [1, 2, 5])
async def test_a_repair_that_is_killed_is_done_by_the_next_one(tmp_path: Path, calls: int) -> None:
    store = make(tmp_path)
    await store.open(create=True)
    await small(store)
    before = await everything(store)
    await store.close()
    damage(tmp_path / "engage.db", ["UPDATE traits SET value = '9'", "DELETE FROM memberships"])
    command = [sys.executable, "-c", _KILLED, str(tmp_path), str(calls)]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    done = await asyncio.to_thread(subprocess.run, command, env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    store = make(tmp_path)
    await store.open(create=True)
    assert (await verified(store, repair=True)).repaired
    healthy(await verified(store))
    assert await everything(store) == before
    await store.close()


async def test_a_damaged_page_is_found(tmp_path: Path) -> None:
    def overwrite(path: Path) -> None:
        with contextlib.closing(sqlite3.connect(path)) as db:
            db.execute("PRAGMA writable_schema = ON")
            (root,) = db.execute(
                "SELECT rootpage FROM sqlite_master WHERE name = 'events_received'"
            ).fetchone()
        with path.open("r+b") as file:
            file.seek(4096 * (root - 1) + 8 + 40)
            file.write(bytes(2000))

    report = await verified_after(tmp_path, overwrite)
    assert "file" in report.different


async def test_a_filter_without_a_key_is_found(small_merges: None, tmp_path: Path) -> None:
    def forget(path: Path) -> None:
        file = f"{path}-keys"
        found = saved.read(file)
        assert found is not None
        head, (keys, numbers, *filters) = found
        saved.write(file, head, [keys, numbers, *(_emptied(one) for one in filters)])

    report = await verified_after(tmp_path, forget)
    assert "keys" in report.different


def _emptied(bloom: bytes) -> bytes:
    # The first eight bytes are the number of hashes.
    return bloom[:8] + bytes(len(bloom) - 8)


@pytest.mark.parametrize("seed", range(4))
async def test_a_healthy_store_has_no_differences(
    small_merges: None, tmp_path: Path, seed: int
) -> None:
    store = make(tmp_path)
    await store.open(create=True)
    await fill(store, seed=seed)
    healthy(await verified(store))
    await store.close()
    again = make(tmp_path)
    await again.open(create=False)
    healthy(await verified(again))
    await again.close()


async def test_the_file_is_not_changed(tmp_path: Path) -> None:
    store = make(tmp_path)
    await store.open(create=True)
    await small(store)

    def contents() -> list[Any]:
        with contextlib.closing(sqlite3.connect(tmp_path / "engage.db")) as db:
            tables = db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
            return [
                db.execute(f"SELECT * FROM {name}").fetchall()
                for (name,) in tables
                if name != "store"
            ]

    before = contents()
    healthy(await verified(store))
    assert contents() == before
    await store.close()


async def test_keys_that_cannot_be_looked_at_are_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(tmp_path)
    await store.open(create=True)
    await small(store)
    call = Writer.call

    async def refuse(self: Writer, operation: Operation[Any], *arguments: Any) -> Any:
        if operation is MISSED:
            raise StorageUnavailable("only its owner may write to it")
        return await call(self, operation, *arguments)

    monkeypatch.setattr(Writer, "call", refuse)
    report = await verified(store)
    monkeypatch.undo()
    assert report.failures == ["keys: only its owner may write to it"]
    assert report.differences == []
    await store.close()
