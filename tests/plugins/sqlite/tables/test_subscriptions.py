# SPDX-License-Identifier: Apache-2.0
"""Subscription changes that change nothing do not make the store grow."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from engage.api import Kind, Subject, SubscriptionChange
from engage_plugins.sqlite.store import SqliteStorage
from engage_plugins.sqlite.tables.subscriptions import MAX_IDLE


def change(name: str, user: str = "u", **choices: bool) -> SubscriptionChange:
    return SubscriptionChange(
        id=name,
        workspace_id="acme",
        subject=Subject(Kind.USER, user),
        choices=choices,
        at=1,
        how="api",
    )


async def test_changes_without_effect_are_bounded_for_each_user(
    tmp_path: Path, store: SqliteStorage
) -> None:
    def rows() -> int:
        with closing(sqlite3.connect(tmp_path / "engage.db")) as db:
            (count,) = db.execute("SELECT count(*) FROM changes").fetchone()
            return int(count)

    for user in ("u", "v"):
        await store.apply(change(f"on {user}", user, a=True))
    assert rows() == 2
    for number in range(200):
        await store.apply(change(f"idle {number}", a=True))
        assert rows() == 2 + min(number + 1, MAX_IDLE)
    await store.apply(change("idle", "v", a=True))
    assert rows() == 2 + MAX_IDLE + 1
    # The latest are remembered, the others are not.
    await store.apply(change("off", a=False))
    assert dict(await store.apply(change(f"idle {200 - MAX_IDLE}", a=True))) == {"a": False}
    assert dict(await store.apply(change(f"idle {199 - MAX_IDLE}", a=True))) == {"a": True}
