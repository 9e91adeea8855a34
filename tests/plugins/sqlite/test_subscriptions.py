# SPDX-License-Identifier: Apache-2.0
"""Subscription changes that change nothing do not make the store grow."""

from __future__ import annotations

import dataclasses
import sqlite3
from contextlib import closing
from pathlib import Path

from engage.store.choices import MAX_IDLE
from engage.store.keys import key_of
from engage.testing.factories import WORKSPACE, change, user
from engage_plugins.sqlite.store import SqliteStorage


async def test_changes_without_effect_are_bounded_for_each_user(
    tmp_path: Path, store: SqliteStorage
) -> None:
    def rows() -> int:
        with closing(sqlite3.connect(tmp_path / "engage.db")) as db:
            (count,) = db.execute("SELECT count(*) FROM changes").fetchone()
            return int(count)

    for name in ("u", "v"):
        await store.apply(change(f"on {name}", user_id=name, a=True))
    assert rows() == 2
    for number in range(200):
        await store.apply(change(f"idle {number}", a=True))
        assert rows() == 2 + min(number + 1, MAX_IDLE)
    await store.apply(change("idle", user_id="v", a=True))
    assert rows() == 2 + MAX_IDLE + 1
    # The latest are remembered, the others are not.
    await store.apply(change("off", a=False))
    assert dict(await store.apply(change(f"idle {200 - MAX_IDLE}", a=True))) == {"a": False}
    assert dict(await store.apply(change(f"idle {199 - MAX_IDLE}", a=True))) == {"a": True}


async def test_the_bytes_of_erased_choices_are_gone(tmp_path: Path, store: SqliteStorage) -> None:
    source = {"secret": "0a1b2c3d", "user_agent": "Mozilla/5.0", "address": "192.0.2.1"}
    for number in range(120):
        name = ("ann-xyz", f"u{number}")[number % 2]
        await store.apply(change(f"{name} {number}", user_id=name, source=source, a=number < 40))
    # Their pages become free.
    many = {f"group-{number}": True for number in range(400)}
    await store.apply(dataclasses.replace(change("many", user_id="ann-xyz"), choices=many))
    texts = [b"ann-xyz", key_of(WORKSPACE, "ann-xyz")]

    def there() -> list[bool]:
        files = b"".join((tmp_path / f"engage.db{end}").read_bytes() for end in ("", "-wal"))
        return [text in files for text in texts]

    await store.settle()
    assert there() == [True, True]
    subject = user("ann-xyz")
    assert await store.erase_choices(WORKSPACE, subject, "x-1") == (401, 402)
    await store.erase_profile(WORKSPACE, *subject)
    assert await store.settle()
    assert there() == [False, False]
    # The changes are known nevertheless, those without effect as well.
    for number in (0, 40, 118):
        assert await store.apply(change(f"ann-xyz {number}", user_id="ann-xyz", a=True)) == {}
