# SPDX-License-Identifier: Apache-2.0
"""Rows of users and groups: the merge of the stored events.

All changes of a write are folded in memory (``changes.py``), compared with what is stored in one
look, and written with a few statements, in the transaction that stores the events.
"""

from __future__ import annotations

import dataclasses
import sqlite3
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import orjson

from engage.api import Event, ProfileLimits, identifier_value

from .changes import EncodedChange, Folded, Subject, Version, fold
from .connection import insert, look_up
from .schema import USER

#: Links that are known to be stored; remembered so that each event of a visitor need not look.
_KNOWN_LINKS: Final = 100_000


@dataclasses.dataclass(slots=True)
class _Row:
    """One row of ``profiles``."""

    id: int
    created_at: int | None = None
    updated_at: int | None = None
    traits: int = 0
    trait_bytes: int = 0
    links: int = 0
    memberships: int = 0
    #: Made by this write: nothing else is stored of it.
    new: bool = False
    changed: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Applied:
    """What a write did to the profiles."""

    #: Changes that a limit forbade.
    dropped: int = 0
    #: Links that are stored once the transaction is committed.
    links: Sequence[tuple[Subject, str]] = ()


class Profiles:
    """Applies changes; remembers which links are stored."""

    def __init__(self, limits: ProfileLimits, identifiers: Mapping[str, Sequence[str]]) -> None:
        self._limits = limits
        self._identifiers = {
            workspace: frozenset(names) for workspace, names in identifiers.items()
        }
        self._links: OrderedDict[tuple[Subject, str], None] = OrderedDict()

    def forget(self) -> None:
        """Another file may stand there now."""
        self._links.clear()

    def is_linked(self, workspace_id: str, user_id: str, anonymous_id: str) -> bool:
        """:return: whether this link is known to be stored."""
        return ((workspace_id, USER, user_id), anonymous_id) in self._links

    def remember(self, applied: Applied) -> None:
        """The transaction is committed."""
        for link in applied.links:
            self._links[link] = None
        while len(self._links) > _KNOWN_LINKS:
            self._links.popitem(last=False)

    def see(self, db: sqlite3.Connection, workspace_id: str, user_id: str, at: int) -> None:
        """Make a user exist."""
        subject = (workspace_id, USER, user_id)
        folded = Folded(seen={subject: (at, at)})
        rows = _load(db, [subject])
        _see(rows, folded)
        _store(db, rows)

    def apply(
        self, db: sqlite3.Connection, changes: Sequence[tuple[Event, Sequence[EncodedChange]]]
    ) -> Applied:
        """Apply the changes of newly stored events, given in the order of their arrival."""
        if not changes:
            return Applied()
        folded = fold(changes, self._links)
        subjects = {subject for subject, _ in folded.links}
        strangers = {(workspace, USER, name) for (workspace, _, _), name in folded.links}
        subjects.update(folded.seen)
        if not subjects:
            return Applied()
        rows = _load(db, subjects, strangers)
        for link in list(folded.links):
            (workspace, _, _), name = link
            known = rows.get((workspace, USER, name))
            if known is not None and not known.new and known.created_at is not None:
                del folded.links[link]
        _see(rows, folded)
        dropped = self._set_traits(db, rows, folded.traits)
        dropped += self._set_memberships(db, rows, folded.memberships)
        lost = self._add_links(db, rows, folded.links)
        _store(db, {subject: row for subject, row in rows.items() if subject in subjects})
        return Applied(dropped + len(lost), [link for link in folded.links if link not in lost])

    def _set_traits(
        self,
        db: sqlite3.Connection,
        rows: Mapping[Subject, _Row],
        registers: Mapping[tuple[Subject, str], tuple[Version, bytes]],
    ) -> int:
        stored = _stored(db, "traits", "trait", "size", rows, registers)
        winners, dropped = [], 0
        for (subject, trait), (version, value) in registers.items():
            row = rows[subject]
            size = len(orjson.dumps(trait)) + len(value)
            known, before = stored.get((row.id, trait), (None, 0))
            if known is not None and known > version:
                continue
            if (known is None and row.traits >= self._limits.traits) or (
                size > before and row.trait_bytes - before + size > self._limits.trait_bytes
            ):
                dropped += 1
                continue
            row.traits += known is None
            row.trait_bytes += size - before
            row.changed = True
            winners.append((row.id, trait, *version, size, value))
            if subject[1] == USER and trait in self._identifiers.get(subject[0], ()):
                _identify(db, row.id, subject[0], trait, value)
        insert(
            db,
            "INSERT OR REPLACE INTO traits "
            "(profile, trait, timestamp, message_id, origin, size, value)",
            winners,
        )
        return dropped

    def _set_memberships(
        self,
        db: sqlite3.Connection,
        rows: Mapping[Subject, _Row],
        registers: Mapping[tuple[Subject, str], tuple[Version, bool]],
    ) -> int:
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
        """:return: those that a limit forbade."""
        query = (
            "SELECT l.profile, l.anonymous_id FROM {keys} k CROSS JOIN links l "
            "ON l.profile = k.column1 AND l.anonymous_id = k.column2"
        )
        old = [(rows[subject].id, name) for subject, name in links if not rows[subject].new]
        stored = set(look_up(db, query, old))
        added, lost = [], set()
        for subject, name in links:
            row = rows[subject]
            if (row.id, name) in stored:
                continue
            if row.links >= self._limits.links:
                lost.add((subject, name))
                continue
            row.links += 1
            row.changed = True
            added.append((row.id, name))
        insert(db, "INSERT INTO links (profile, anonymous_id)", added)
        return lost

    def keep_index(self, db: sqlite3.Connection) -> None:
        """Keep the lookup table as it is: its traits are what a server declared, perhaps one that
        runs now, with another config than ours."""
        kept: dict[str, set[str]] = {}
        for workspace, trait in db.execute("SELECT workspace, trait FROM indexed"):
            kept.setdefault(workspace, set()).add(trait)
        self._identifiers = {workspace: frozenset(traits) for workspace, traits in kept.items()}

    def index(self, db: sqlite3.Connection) -> None:
        """See that the lookup table is complete for the traits that the config declares now."""
        declared = {
            (workspace, trait) for workspace, names in self._identifiers.items() for trait in names
        }
        if set(db.execute("SELECT workspace, trait FROM indexed")) == declared:
            return
        db.execute("BEGIN IMMEDIATE")
        try:
            indexed = set(db.execute("SELECT workspace, trait FROM indexed"))
            for workspace, trait in sorted(indexed - declared):
                db.execute(
                    "DELETE FROM identifiers WHERE workspace = ? AND trait = ?", (workspace, trait)
                )
                db.execute(
                    "DELETE FROM indexed WHERE workspace = ? AND trait = ?", (workspace, trait)
                )
            for workspace, trait in sorted(declared - indexed):
                found = db.execute(
                    "SELECT p.id, t.value FROM profiles p CROSS JOIN traits t "
                    "ON t.profile = p.id AND t.trait = ? WHERE p.workspace = ? AND p.kind = ?",
                    (trait, workspace, USER),
                )
                for profile, value in found:
                    _identify(db, profile, workspace, trait, value)
                db.execute("INSERT INTO indexed VALUES (?, ?)", (workspace, trait))
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise


def _load(
    db: sqlite3.Connection, subjects: Collection[Subject], others: Collection[Subject] = ()
) -> dict[Subject, _Row]:
    """:return: the rows of ``subjects``, with ids for those that are not stored yet, and those of
    ``others`` that are.
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


def _see(rows: Mapping[Subject, _Row], folded: Folded) -> None:
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
    """:return: version and value of the registers that are stored, by (profile, name)."""
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


def _identify(
    db: sqlite3.Connection, profile: int, workspace: str, trait: str, encoded: bytes
) -> None:
    value = identifier_value(trait, orjson.loads(encoded))
    if value is None:
        db.execute("DELETE FROM identifiers WHERE profile = ? AND trait = ?", (profile, trait))
    else:
        db.execute(
            "INSERT OR REPLACE INTO identifiers (profile, trait, workspace, value) "
            "VALUES (?, ?, ?, ?)",
            (profile, trait, workspace, value),
        )
