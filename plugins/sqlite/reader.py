# SPDX-License-Identifier: Apache-2.0
"""The reading connection: separate from the writing one, so that reading never waits for writing.

Each method is one call of the function that knows the table.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence

from engage.api import (
    BudgetUse,
    Count,
    CountSum,
    DeadLetter,
    Event,
    EventFilter,
    GroupProfile,
    Record,
    SubscriptionRecord,
    SubscriptionState,
    UserProfile,
)

from .connection import (
    Session,
    Settings,
    is_lock_error,
    is_text,
    key_of,
    translating_errors,
)
from .schema import require_current, require_readable
from .tables import counts, dead_letters, events, identifiers, profiles, records, subscriptions


class Reader(Session):
    """Reads. Each method sees one state of the store, and holds nothing when it returns."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, readonly=True)

    @contextlib.contextmanager
    def _snapshot(self) -> Iterator[sqlite3.Connection]:
        with translating_errors(self.settings.path):
            try:
                db = self.connection()
                db.execute("BEGIN")
                require_readable(db)
                yield db
            except sqlite3.Error as error:
                if not is_lock_error(error):
                    self.drop()
                raise
            finally:
                if self._db is not None and self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    def prepare(self, db: sqlite3.Connection) -> None:
        super().prepare(db)
        require_current(db, self.settings.path)

    def open(self) -> None:
        """Open the store; see :meth:`EventStore.open`."""
        with translating_errors(self.settings.path, opening=True):
            self.connection()

    def find(self, workspace_id: str, origin: str, message_id: str) -> Event | None:
        """Return the event of this identity, or ``None``."""
        if not is_text(workspace_id + origin + message_id):
            return None
        with self._snapshot() as db:
            return events.find(db, key_of(workspace_id, origin, message_id))

    def scan(
        self, wanted: EventFilter, after: int | None, limit: int
    ) -> tuple[list[Event], int | None]:
        """Return a page of events, and its cursor."""
        with self._snapshot() as db:
            return events.scan(db, wanted, after, limit)

    def recent(
        self, wanted: EventFilter, before: int | None, limit: int
    ) -> tuple[list[Event], int | None]:
        """Return a page of events, newest first, and its cursor."""
        with self._snapshot() as db:
            return events.recent(db, wanted, before, limit)

    def profile(self, workspace_id: str, user_id: str) -> UserProfile | None:
        """Return a user, or ``None``."""
        with self._snapshot() as db:
            return profiles.find(db, workspace_id, user_id)

    def find_users(
        self, workspace_id: str, trait: str, values: Sequence[str]
    ) -> dict[str, list[str]]:
        """Return the users who have one of these values."""
        with self._snapshot() as db:
            return identifiers.find_users(db, workspace_id, trait, values)

    def holders(
        self, workspace_id: str, trait: str, value: str, after: tuple[int, int] | None, limit: int
    ) -> tuple[list[str], tuple[int, int] | None]:
        """Return a page of the users who have a value, and its cursor."""
        with self._snapshot() as db:
            return identifiers.holders(db, workspace_id, trait, value, after, limit)

    def scan_users(
        self, workspace_id: str | None, after: int | None, limit: int
    ) -> tuple[list[UserProfile], int | None]:
        """Return a page of users, and its cursor."""
        with self._snapshot() as db:
            return profiles.scan_users(db, workspace_id, after, limit)

    def scan_groups(
        self, workspace_id: str | None, after: int | None, limit: int
    ) -> tuple[list[GroupProfile], int | None]:
        """Return a page of groups, and its cursor."""
        with self._snapshot() as db:
            return profiles.scan_groups(db, workspace_id, after, limit)

    def state(self, workspace_id: str, user_id: str) -> dict[str, bool]:
        """Return the choices of a user."""
        with self._snapshot() as db:
            return subscriptions.state(db, workspace_id, user_id)

    def scan_subscriptions(
        self, workspace_id: str | None, after: int | None, limit: int
    ) -> tuple[list[SubscriptionState], int | None]:
        """Return a page of current choices, and its cursor."""
        with self._snapshot() as db:
            return subscriptions.scan(db, workspace_id, after, limit)

    def history(
        self, workspace_id: str | None, user_id: str | None, after: int | None, limit: int
    ) -> tuple[list[SubscriptionRecord], int | None]:
        """Return a page of audit records, and its cursor."""
        with self._snapshot() as db:
            return subscriptions.history(db, workspace_id, user_id, after, limit)

    def budget_use(self) -> list[BudgetUse]:
        """Return how much of each budget of dead letters is used."""
        with self._snapshot() as db:
            return dead_letters.use(db)

    def scan_dead_letters(
        self, workspace_id: str | None, after: int | None, limit: int
    ) -> tuple[list[DeadLetter], int | None]:
        """Return a page of dead letters, and its cursor."""
        with self._snapshot() as db:
            return dead_letters.scan(db, workspace_id, after, limit)

    def recent_dead_letters(
        self, workspace_id: str | None, before: int | None, limit: int
    ) -> tuple[list[DeadLetter], int | None]:
        """Return a page of dead letters, newest first, and its cursor."""
        with self._snapshot() as db:
            return dead_letters.recent(db, workspace_id, before, limit)

    def dead_letter(self, workspace_id: str, letter_id: str) -> DeadLetter | None:
        """Return a dead letter, or ``None``."""
        with self._snapshot() as db:
            return dead_letters.find(db, workspace_id, letter_id)

    def record(self, kind: str, workspace_id: str, record_id: str) -> Record | None:
        """Return a record, or ``None``."""
        with self._snapshot() as db:
            return records.get(db, kind, workspace_id, record_id)

    def scan_records(
        self,
        kind: str | None,
        workspace_id: str | None,
        reverse: bool,
        after: records.Place | None,
        limit: int,
    ) -> tuple[list[Record], records.Place | None]:
        """Return a page of records, and where it ends."""
        with self._snapshot() as db:
            return records.scan(db, kind, workspace_id, reverse, after, limit)

    def records_version(self, kind: str) -> int:
        """Return how often records of a kind were written or deleted."""
        with self._snapshot() as db:
            return records.version(db, kind)

    def count_sums(
        self,
        step: int,
        since: int,
        until: int,
        names: Sequence[str] | None,
        workspace_id: str | None,
        after: counts.Place | None,
        limit: int,
    ) -> tuple[list[CountSum], counts.Place | None]:
        """Return a page of the sums of counters, and where it ends."""
        with self._snapshot() as db:
            return counts.sums(db, step, since, until, names, workspace_id, after, limit)

    def scan_counts(
        self, after: counts.Register | None, limit: int
    ) -> tuple[list[Count], counts.Register | None]:
        """Return a page of registers of counters, and where it ends."""
        with self._snapshot() as db:
            return counts.scan(db, after, limit)
