# SPDX-License-Identifier: Apache-2.0
"""The reader: a connection of its own, so that reading never waits for writing."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any, Final

import orjson

from engage.api import (
    DeadLetter,
    Event,
    EventFilter,
    GroupProfile,
    SubscriptionRecord,
    SubscriptionState,
    UserProfile,
)

from . import dead_letters, events, subscriptions
from .connection import Session, Settings, in_our_words, is_text, primary_code
from .paging import Window
from .schema import GROUP, USER

#: Most users that are found for one value.
_MOST_USERS: Final = 100


class Reader(Session):
    """Reads; each method sees one state of the store and holds nothing when it returns."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, readonly=True)

    @contextlib.contextmanager
    def _snapshot(self) -> Iterator[sqlite3.Connection]:
        with in_our_words(self.settings.path):
            try:
                db = self.connection()
                db.execute("BEGIN")
                yield db
            except sqlite3.Error as error:
                if primary_code(error) not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                    self.drop()
                raise
            finally:
                if self._db is not None and self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    # ---------------------------------------------------------------------------- events
    def find(self, workspace_id: str, origin: str, message_id: str) -> Event | None:
        """See :meth:`EventStore.find`."""
        with self._snapshot() as db:
            return events.find(db, workspace_id, origin, message_id)

    def scan(
        self, wanted: EventFilter, after: int | None, limit: int
    ) -> tuple[list[Event], int | None]:
        """See :meth:`EventStore.scan`."""
        with self._snapshot() as db:
            return events.scan(db, wanted, after, limit)

    # -------------------------------------------------------------------------- profiles
    def profile(self, workspace_id: str, user_id: str) -> UserProfile | None:
        """See :meth:`ProfileStore.profile`."""
        if not is_text(user_id):
            return None
        with self._snapshot() as db:
            row = db.execute(
                "SELECT id, workspace, name, created_at, updated_at FROM profiles "
                "WHERE workspace = ? AND kind = ? AND name = ? AND created_at IS NOT NULL",
                (workspace_id, USER, user_id),
            ).fetchone()
            return None if row is None else _user(db, row)

    def find_users(
        self, workspace_id: str, trait: str, values: Sequence[str]
    ) -> dict[str, list[str]]:
        """See :meth:`ProfileStore.find_users`."""
        found = {}
        with self._snapshot() as db:
            for value in filter(is_text, values):
                users = db.execute(
                    "SELECT p.name FROM identifiers i CROSS JOIN profiles p ON p.id = i.profile "
                    "WHERE i.workspace = ? AND i.trait = ? AND i.value = ? "
                    "ORDER BY p.created_at, p.name LIMIT ?",
                    (workspace_id, trait, value, _MOST_USERS),
                ).fetchall()
                if users:
                    found[value] = [name for (name,) in users]
        return found

    def scan_users(
        self, workspace_id: str | None, after: int | None, limit: int
    ) -> tuple[list[UserProfile], int | None]:
        """See :meth:`ProfileStore.scan_users`."""
        with self._snapshot() as db:
            window, rows = _profiles(db, USER, workspace_id, after)
            return window.page(rows, lambda row: (_user(db, row[:5]), row[5]), limit)

    def scan_groups(
        self, workspace_id: str | None, after: int | None, limit: int
    ) -> tuple[list[GroupProfile], int | None]:
        """See :meth:`ProfileStore.scan_groups`."""
        with self._snapshot() as db:
            window, rows = _profiles(db, GROUP, workspace_id, after)
            return window.page(rows, lambda row: (_group(db, row), row[5]), limit)

    # ---------------------------------------------------- subscriptions and dead letters
    def state(self, workspace_id: str, user_id: str) -> dict[str, bool]:
        """See :meth:`SubscriptionStore.state`."""
        with self._snapshot() as db:
            return subscriptions.state(db, workspace_id, user_id)

    def scan_subscriptions(
        self, workspace_id: str | None, after: int | None, limit: int
    ) -> tuple[list[SubscriptionState], int | None]:
        """See :meth:`SubscriptionStore.scan_subscriptions`."""
        with self._snapshot() as db:
            return subscriptions.scan(db, workspace_id, after, limit)

    def history(
        self, workspace_id: str | None, user_id: str | None, after: int | None, limit: int
    ) -> tuple[list[SubscriptionRecord], int | None]:
        """See :meth:`SubscriptionStore.history`."""
        with self._snapshot() as db:
            return subscriptions.history(db, workspace_id, user_id, after, limit)

    def scan_dead_letters(
        self, workspace_id: str | None, after: int | None, limit: int
    ) -> tuple[list[DeadLetter], int | None]:
        """See :meth:`DeadLetterStore.scan_dead_letters`."""
        with self._snapshot() as db:
            return dead_letters.scan(db, workspace_id, after, limit)


def _profiles(
    db: sqlite3.Connection, kind: int, workspace_id: str | None, after: int | None
) -> tuple[Window, Iterator[Any]]:
    window = Window(db, "profiles", "id", after)
    condition = "" if workspace_id is None else "AND +workspace = :workspace"
    rows = db.execute(
        "SELECT id, workspace, name, created_at, updated_at, trait_bytes FROM profiles WHERE "
        "id > :after AND id <= :last AND kind = :kind AND created_at IS NOT NULL "
        f"{condition} ORDER BY id",
        {"after": window.after, "last": window.last, "kind": kind, "workspace": workspace_id},
    )
    return window, rows


def _group(db: sqlite3.Connection, row: Sequence[Any]) -> GroupProfile:
    return GroupProfile(workspace_id=row[1], group_id=row[2], traits=_traits(db, row[0]))


def _user(db: sqlite3.Connection, row: Sequence[Any]) -> UserProfile:
    number, workspace, name, created_at, updated_at = row
    links = db.execute(
        "SELECT anonymous_id FROM links WHERE profile = ? ORDER BY anonymous_id", (number,)
    )
    groups = db.execute(
        "SELECT group_id FROM memberships WHERE profile = ? AND assigned ORDER BY group_id",
        (number,),
    )
    return UserProfile(
        workspace_id=workspace,
        user_id=name,
        traits=_traits(db, number),
        created_at=created_at,
        updated_at=updated_at,
        anonymous_ids=[one for (one,) in links],
        groups=[one for (one,) in groups],
    )


def _traits(db: sqlite3.Connection, profile: int) -> dict[str, Any]:
    rows = db.execute(
        "SELECT trait, value FROM traits WHERE profile = ? ORDER BY trait", (profile,)
    )
    return {trait: orjson.loads(value) for trait, value in rows}
