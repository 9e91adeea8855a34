# SPDX-License-Identifier: Apache-2.0
"""Rows of users and groups: the merge of the stored events.

The changes of a write are folded in memory (``changes.py``), compared with the stored profiles in
one look-up for each table, and written with a few statements, in the transaction that stores the
events.
"""

from __future__ import annotations

import dataclasses
import sqlite3
import sys
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import orjson

from engage.api import Event, GroupProfile, ProfileLimits, UserProfile

from ..connection import insert, is_text, look_up
from ..schema import GROUP, USER
from . import identifiers
from .changes import EncodedChange, FoldedChanges, Subject, Version, fold
from .paging import Window

#: The value of a trait that is removed. No other value begins with a space.
REMOVED: Final = b" null"

#: How many stored links are remembered: most events of a visitor then need no look-up of the link.
_MAX_KNOWN_LINKS: Final = 100_000


@dataclasses.dataclass(slots=True)
class _Row:
    """One row of ``profiles``."""

    id: int
    #: ``None``: the user does not exist yet, but has links.
    created_at: int | None = None
    updated_at: int | None = None
    traits: int = 0
    trait_bytes: int = 0
    links: int = 0
    memberships: int = 0
    #: Whether this write makes the row: then nothing else is stored of it.
    new: bool = False
    changed: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Applied:
    """The changes of a write to the profiles."""

    #: How many changes were dropped because of a limit.
    dropped: int = 0
    #: Links that are stored once the transaction is committed.
    links: Sequence[tuple[Subject, str]] = ()


class Profiles:
    """Applies the changes of events, and remembers which links are stored.

    :param limits: per user and group.
    :param declared: the traits by which users are looked up, by workspace.
    """

    def __init__(self, limits: ProfileLimits, declared: Mapping[str, Sequence[str]]) -> None:
        self._limits = limits
        self._identifiers = identifiers.declared(declared)
        self._links: OrderedDict[tuple[Subject, str], None] = OrderedDict()

    def prepare(self, db: sqlite3.Connection, *, serving: bool) -> None:
        """Make this object fit a newly opened store.

        :param serving: make the store's look-ups those of this config; otherwise use the store's.
        """
        # Another file may be at the path now.
        self._links.clear()
        if serving:
            identifiers.index(db, self._identifiers)
        else:
            self._identifiers = identifiers.indexed(db)

    def is_linked(self, workspace_id: str, user_id: str, anonymous_id: str) -> bool:
        """Return whether this link is known to be stored."""
        return ((workspace_id, USER, user_id), anonymous_id) in self._links

    def remember_links(self, applied: Applied) -> None:
        """Remember the links of a write whose transaction is committed."""
        for link in applied.links:
            self._links[link] = None
        while len(self._links) > _MAX_KNOWN_LINKS:
            self._links.popitem(last=False)

    def ensure_user(self, db: sqlite3.Connection, workspace_id: str, user_id: str, at: int) -> None:
        """Make a user exist, as an event of the time ``at`` would."""
        subject = (workspace_id, USER, user_id)
        rows = _load(db, [subject])
        _set_times(rows, FoldedChanges(seen={subject: (at, at)}))
        _store(db, rows)

    def apply(
        self, db: sqlite3.Connection, changes: Sequence[tuple[Event, Sequence[EncodedChange]]]
    ) -> Applied:
        """Apply the changes of newly stored events, given in order of arrival."""
        if not changes:
            return Applied()
        folded = fold(changes, self._links, self._identifiers)
        subjects = {subject for subject, _ in folded.links}
        subjects.update(folded.seen)
        if not subjects:
            return Applied()
        # The users, if any, whose ids are the anonymous ids of the links.
        namesakes = {(workspace, USER, name) for (workspace, _, _), name in folded.links}
        rows = _load(db, subjects, namesakes)
        for link in list(folded.links):
            (workspace, _, _), name = link
            known = rows.get((workspace, USER, name))
            if known is not None and not known.new and known.created_at is not None:
                del folded.links[link]
        _set_times(rows, folded)
        dropped = self._set_traits(db, rows, folded)
        dropped += self._set_memberships(db, rows, folded.memberships)
        over_limit = self._add_links(db, rows, folded.links)
        _store(db, {subject: row for subject, row in rows.items() if subject in subjects})
        return Applied(
            dropped + len(over_limit), [link for link in folded.links if link not in over_limit]
        )

    def _set_traits(
        self,
        db: sqlite3.Connection,
        rows: Mapping[Subject, _Row],
        folded: FoldedChanges,
    ) -> int:
        """Store the registers that win, and return how many were dropped."""
        registers = folded.traits
        values = {}
        stored = _stored(db, "traits", "trait", "size", rows, registers)
        winners, dropped = [], 0
        for (subject, trait), (version, value) in registers.items():
            row = rows[subject]
            known, before = stored.get((row.id, trait), (None, 0))
            if known is not None and known > version:
                continue
            identifies = (subject, trait) in folded.forms
            size = 0 if value is None else len(orjson.dumps(trait)) + len(value)
            if identifies and size <= self._limits.identifier_bytes:
                size = 0
            added = bool(size) - bool(before)
            if (added > 0 and row.traits >= self._limits.traits) or (
                size > before and row.trait_bytes - before + size > self._limits.trait_bytes
            ):
                dropped += 1
                continue
            row.traits += added
            row.trait_bytes += size - before
            row.changed = True
            winners.append((row.id, trait, *version, size, REMOVED if value is None else value))
            if identifies:
                values[row.id, trait] = (subject[0], folded.forms[subject, trait])
        insert(
            db,
            "INSERT OR REPLACE INTO traits "
            "(profile, trait, timestamp, message_id, origin, size, value)",
            winners,
        )
        if folded.forms:
            claims = {
                (rows[user].id, trait, value): at
                for (user, trait, value), at in folded.claims.items()
            }
            updates = identifiers.Updates(claims, values)
            identifiers.update(db, updates, {row.id for row in rows.values() if row.new})
        return dropped

    def _set_memberships(
        self,
        db: sqlite3.Connection,
        rows: Mapping[Subject, _Row],
        registers: Mapping[tuple[Subject, str], tuple[Version, bool]],
    ) -> int:
        """Store the registers that win, and return how many were dropped."""
        stored = _stored(db, "memberships", "group_id", "assigned", rows, registers)
        winners, dropped = [], 0
        for (subject, group), (version, assigned) in registers.items():
            row = rows[subject]
            known, _ = stored.get((row.id, group), (None, 0))
            if known is not None and known > version:
                continue
            if known is None and row.memberships >= self._limits.memberships:
                dropped += 1
                continue
            row.memberships += known is None
            row.changed = True
            winners.append((row.id, group, *version, assigned))
        insert(
            db,
            "INSERT OR REPLACE INTO memberships "
            "(profile, group_id, timestamp, message_id, origin, assigned)",
            winners,
        )
        return dropped

    def _add_links(
        self,
        db: sqlite3.Connection,
        rows: Mapping[Subject, _Row],
        links: Mapping[tuple[Subject, str], None],
    ) -> set[tuple[Subject, str]]:
        """Store new links, and return those that were dropped because of the limit."""
        query = (
            "SELECT l.profile, l.anonymous_id FROM {keys} k CROSS JOIN links l "
            "ON l.profile = k.column1 AND l.anonymous_id = k.column2"
        )
        old = [(rows[subject].id, name) for subject, name in links if not rows[subject].new]
        stored = set(look_up(db, query, old))
        added, over_limit = [], set()
        for subject, name in links:
            row = rows[subject]
            if (row.id, name) in stored:
                continue
            if row.links >= self._limits.links:
                over_limit.add((subject, name))
                continue
            row.links += 1
            row.changed = True
            added.append((row.id, name))
        insert(db, "INSERT INTO links (profile, anonymous_id)", added)
        return over_limit


# --------------------------------------------------------------------------------------- writing
def _load(
    db: sqlite3.Connection, subjects: Collection[Subject], others: Collection[Subject] = ()
) -> dict[Subject, _Row]:
    """Return the rows of ``subjects``, new ones for those that are not stored yet, and the rows of
    those ``others`` that are stored.
    """
    query = (
        "SELECT p.workspace, p.kind, p.name, p.id, p.created_at, p.updated_at, p.traits, "
        "p.trait_bytes, p.links, p.memberships FROM {keys} k CROSS JOIN profiles p "
        "ON p.workspace = k.column1 AND p.kind = k.column2 AND p.name = k.column3"
    )
    rows = {
        (row[0], row[1], row[2]): _Row(*row[3:]) for row in look_up(db, query, {*subjects, *others})
    }
    missing = [subject for subject in subjects if subject not in rows]
    if missing:
        (last,) = db.execute("SELECT max(id) FROM profiles").fetchone()
        for number, subject in enumerate(missing, (last or 0) + 1):
            rows[subject] = _Row(number, new=True, changed=True)
    return rows


def _set_times(rows: Mapping[Subject, _Row], folded: FoldedChanges) -> None:
    for subject, (first, last) in folded.seen.items():
        row = rows[subject]
        if row.created_at is None or row.updated_at is None:
            row.created_at, row.updated_at, row.changed = first, last, True
        elif first < row.created_at or last > row.updated_at:
            row.created_at = min(first, row.created_at)
            row.updated_at = max(last, row.updated_at)
            row.changed = True


def _stored(
    db: sqlite3.Connection,
    table: str,
    name: str,
    value: str,
    rows: Mapping[Subject, _Row],
    registers: Mapping[tuple[Subject, str], Any],
) -> dict[tuple[int, str], tuple[Version, int]]:
    """Return the registers that are stored: (profile, name) → version and value."""
    query = (
        f"SELECT r.profile, r.{name}, r.timestamp, r.message_id, r.origin, r.{value} "
        f"FROM {{keys}} k CROSS JOIN {table} r "
        f"ON r.profile = k.column1 AND r.{name} = k.column2"
    )
    keys = [(rows[subject].id, one) for subject, one in registers if not rows[subject].new]
    return {
        (row[0], row[1]): ((row[2], row[3], row[4]), row[5]) for row in look_up(db, query, keys)
    }


def _store(db: sqlite3.Connection, rows: Mapping[Subject, _Row]) -> None:
    insert(
        db,
        "INSERT INTO profiles (id, workspace, kind, name, created_at, updated_at, traits, "
        "trait_bytes, links, memberships)",
        [
            (
                row.id,
                *subject,
                row.created_at,
                row.updated_at,
                row.traits,
                row.trait_bytes,
                row.links,
                row.memberships,
            )
            for subject, row in rows.items()
            if row.changed
        ],
        "ON CONFLICT (id) DO UPDATE SET created_at = excluded.created_at, "
        "updated_at = excluded.updated_at, traits = excluded.traits, "
        "trait_bytes = excluded.trait_bytes, links = excluded.links, "
        "memberships = excluded.memberships",
    )


# --------------------------------------------------------------------------------------- reading
def find(db: sqlite3.Connection, workspace_id: str, user_id: str) -> UserProfile | None:
    """Return a user, or ``None`` if the user does not exist."""
    if not is_text(user_id):
        return None
    row = db.execute(
        "SELECT id, workspace, name, created_at, updated_at FROM profiles "
        "WHERE workspace = ? AND kind = ? AND name = ? AND created_at IS NOT NULL",
        (workspace_id, USER, user_id),
    ).fetchone()
    return None if row is None else _user(db, row)


def users_beginning(
    db: sqlite3.Connection, workspace_id: str, trait: str | None, text: str, limit: int
) -> list[str]:
    """Return the ids of users of which the id, or an identifier, has a beginning."""
    rows = db.execute(
        "SELECT name FROM profiles WHERE workspace = ? AND kind = ? AND name >= ? AND name < ? "
        "ORDER BY name LIMIT ?"
        if trait is None
        else "SELECT p.name FROM identifiers i CROSS JOIN profiles p ON p.id = i.profile "
        "WHERE i.workspace = ? AND i.trait = ? AND i.value >= ? AND i.value < ? "
        "ORDER BY i.value LIMIT ?",
        (workspace_id, USER if trait is None else trait, text, text + chr(sys.maxunicode), limit),
    )
    return [name for (name,) in rows]


def scan_users(
    db: sqlite3.Connection, workspace_id: str | None, after: int | None, limit: int
) -> tuple[list[UserProfile], int | None]:
    """Return a page of users, and its cursor."""
    window, rows = _scan(db, USER, workspace_id, after)
    return window.page(rows, lambda row: (_user(db, row[:5]), row[5]), limit)


def scan_groups(
    db: sqlite3.Connection, workspace_id: str | None, after: int | None, limit: int
) -> tuple[list[GroupProfile], int | None]:
    """Return a page of groups, and its cursor."""
    window, rows = _scan(db, GROUP, workspace_id, after)
    return window.page(rows, lambda row: (_group(db, row), row[5]), limit)


def _scan(
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
    traits, _ = _traits(db, row[0])
    return GroupProfile(workspace_id=row[1], group_id=row[2], traits=traits)


def _user(db: sqlite3.Connection, row: Sequence[Any]) -> UserProfile:
    number, workspace, name, created_at, updated_at = row
    links = db.execute(
        "SELECT anonymous_id FROM links WHERE profile = ? ORDER BY anonymous_id", (number,)
    )
    groups = db.execute(
        "SELECT group_id FROM memberships WHERE profile = ? AND assigned ORDER BY group_id",
        (number,),
    )
    traits, times = _traits(db, number)
    return UserProfile(
        workspace_id=workspace,
        user_id=name,
        traits=traits,
        created_at=created_at,
        updated_at=updated_at,
        anonymous_ids=[one for (one,) in links],
        groups=[one for (one,) in groups],
        trait_times=times,
    )


def _traits(db: sqlite3.Connection, profile: int) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the traits of a profile, and when each was set."""
    rows = db.execute(
        "SELECT trait, value, timestamp FROM traits WHERE profile = ? AND value <> ?"
        " ORDER BY trait",
        (profile, REMOVED),
    ).fetchall()
    return (
        {trait: orjson.loads(value) for trait, value, _ in rows},
        {trait: timestamp for trait, _, timestamp in rows},
    )
