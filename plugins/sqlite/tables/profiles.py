# SPDX-License-Identifier: Apache-2.0
"""Rows of users, visitors and groups: the merge of the stored events.

The changes of a write are folded in memory (``changes.py``), compared with the stored profiles in
one look-up for each table, and written with a few statements, in the transaction that stores the
events.
"""

from __future__ import annotations

import dataclasses
import sqlite3
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import orjson

from engage.api import TRUSTED, Event, ProfileLimits, Version

from ..connection import insert, look_up
from ..schema import USER
from . import identifiers, people
from .changes import KINDS, REMOVED, EncodedChange, FoldedChanges, Pair, Subject, fold

#: How many stored links are remembered: most events of a visitor then need no look-up of the link.
_MAX_KNOWN_LINKS: Final = 100_000

#: A link without an operator's decision.
_UNDECIDED: Final[tuple[Version, bool]] = ((0, "", ""), False)


@dataclasses.dataclass(slots=True)
class _Row:
    """One row of ``profiles``."""

    id: int
    #: ``None``: no event made the user exist.
    created_at: int | None = None
    updated_at: int | None = None
    traits: int = 0
    trait_bytes: int = 0
    links: int = 0
    memberships: int = 0
    #: Of a visitor.
    changed_at: int | None = None
    #: Whether this write makes the row: then nothing else is stored of it.
    new: bool = False
    changed: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Applied:
    """The changes of a write to the profiles."""

    #: How many changes were dropped because of a limit.
    dropped: int = 0
    #: Links that are stored once the transaction is committed, and when the first event that made
    #: each was received.
    links: Mapping[Pair, int] = dataclasses.field(default_factory=dict)


class Profiles:
    """Applies the changes of events, and remembers which links are stored.

    :param limits: per user, visitor and group.
    :param declared: the traits by which users are looked up, by workspace.
    """

    def __init__(self, limits: ProfileLimits, declared: Mapping[str, Sequence[str]]) -> None:
        self._limits = limits
        #: Kind → traits, bytes of traits, memberships.
        self._most = {number: limits.of(kind) for kind, number in KINDS.items()}
        self._identifiers = identifiers.declared(declared)
        self._links: OrderedDict[Pair, int] = OrderedDict()
        #: Where :func:`people.make_room` continues.
        self._searched: dict[tuple[str, bool], int | None] = {}

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

    def is_linked(self, workspace_id: str, user_id: str, anonymous_id: str, at: int) -> bool:
        """Return whether this link is known to be stored with an event received before ``at``."""
        return self._links.get(((workspace_id, USER, user_id), anonymous_id), at) < at

    def forget_links(self) -> None:
        """Forget the links that are remembered: some are erased."""
        self._links.clear()

    def remember_links(self, applied: Applied) -> None:
        """Remember the links of a write whose transaction is committed."""
        self._links.update(applied.links)
        while len(self._links) > _MAX_KNOWN_LINKS:
            self._links.popitem(last=False)

    def apply(
        self, db: sqlite3.Connection, changes: Sequence[tuple[Event, Sequence[EncodedChange]]]
    ) -> Applied:
        """Apply the changes of newly stored events, given in order of arrival."""
        if not changes:
            return Applied()
        folded = fold(changes, self._links, self._identifiers)
        subjects = {subject for subject, _ in (*folded.links, *folded.decisions)}
        subjects.update(folded.seen)
        if not subjects:
            return Applied()
        rows = _load(db, subjects)
        dropped = self._limit_visitors(db, rows, folded) if folded.visited else 0
        _set_times(rows, folded)
        dropped += self._set_traits(db, rows, folded)
        dropped += self._set_memberships(db, rows, folded.memberships)
        stored, over_limit = self._set_links(db, rows, folded)
        _store(db, rows)
        return Applied(dropped + over_limit, stored)

    def _limit_visitors(
        self, db: sqlite3.Connection, rows: dict[Subject, _Row], folded: FoldedChanges
    ) -> int:
        """Count new visitors, and leave out those that have no room; return how many."""
        new = [visitor for visitor in folded.visited if rows[visitor].new]
        query = (
            "SELECT t.workspace, t.count FROM {keys} k CROSS JOIN visitor_totals t "
            "ON t.workspace = k.column1"
        )
        totals = Counter(dict(look_up(db, query, {(workspace,) for workspace, *_ in new})))
        late = []
        for visitor in new:
            if totals[visitor[0]] >= self._limits.visitors:
                late.append(visitor)
            else:
                totals[visitor[0]] += 1
        over_limit = set()
        for workspace in {workspace for workspace, *_ in late}:
            mine = [one for one in late if one[0] == workspace]
            # Nobody gives way whom this write changes or links.
            kept = {name for *_, name in rows}.union(name for _, name in folded.links)
            room = people.make_room(db, workspace, len(mine), kept, self._searched)
            over_limit.update(mine[room:])
        insert(db, "INSERT OR REPLACE INTO visitor_totals (workspace, count)", [*totals.items()])
        for visitor in over_limit:
            del rows[visitor], folded.seen[visitor]
        if over_limit:
            registers: list[dict[Any, Any]] = [folded.traits, folded.memberships]
            for register in (*registers, folded.claims, folded.forms):
                for key in [key for key in register if key[0] in over_limit]:
                    del register[key]
        return len(over_limit)

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
            most, most_bytes, _ = self._most[subject[1]]
            known, before = stored.get((row.id, trait), (None, 0))
            if known is not None and known > version:
                continue
            identifies = (subject, trait) in folded.forms
            size = 0 if value is None else len(orjson.dumps(trait)) + len(value)
            if (identifies or trait.startswith(TRUSTED)) and size <= self._limits.identifier_bytes:
                size = 0
            added = bool(size) - bool(before)
            if (added > 0 and row.traits >= most) or (
                size > before and row.trait_bytes - before + size > most_bytes
            ):
                dropped += 1
                continue
            row.traits += added
            row.trait_bytes += size - before
            row.changed = True
            winners.append((row.id, trait, *version, size, REMOVED if value is None else value))
            if identifies:
                values[row.id, trait] = (*subject[:2], folded.forms[subject, trait])
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
            if known is None and row.memberships >= self._most[subject[1]][2]:
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

    def _set_links(
        self, db: sqlite3.Connection, rows: Mapping[Subject, _Row], folded: FoldedChanges
    ) -> tuple[dict[Pair, int], int]:
        """Store links and decisions.

        :return: links that are stored, with when the first event was received; and how many were
            dropped because of the limit.
        """
        query = (
            "SELECT l.profile, l.anonymous_id, l.received_at, l.message_id, l.origin, "
            "l.decided_at, l.decision_id, l.decision_origin, l.undone "
            "FROM {keys} k CROSS JOIN links l "
            "ON l.profile = k.column1 AND l.anonymous_id = k.column2"
        )
        pairs = {**folded.links, **folded.decisions}
        old = [(rows[subject].id, name) for subject, name in pairs if not rows[subject].new]
        stored = {
            row[:2]: (None if row[2] is None else row[2:5], (row[5:8], bool(row[8])))
            for row in look_up(db, query, old)
        }
        changed, kept, dropped = [], {}, 0
        for pair in pairs:
            subject, name = pair
            row, made = rows[subject], folded.links.get(pair)
            first, decision = known = stored.get((row.id, name), (None, _UNDECIDED))
            if made is not None and first is None and row.links >= self._limits.links:
                made = None
                dropped += 1
            if made is not None:
                if first is None:
                    first = made
                    row.links += 1
                    row.changed = True
                first = min(first, made)
                kept[pair] = first[0]
            decision = max(decision, folded.decisions.get(pair, decision))
            if (first, decision) != known:
                version, undone = decision
                least = first or (None, "", "")
                changed.append((row.id, name, subject[0], *least, *version, undone))
        insert(
            db,
            "INSERT OR REPLACE INTO links (profile, anonymous_id, workspace, received_at, "
            "message_id, origin, decided_at, decision_id, decision_origin, undone)",
            changed,
        )
        return kept, dropped


# --------------------------------------------------------------------------------------- writing
def _load(db: sqlite3.Connection, subjects: Collection[Subject]) -> dict[Subject, _Row]:
    """Return the rows of ``subjects``, new ones for those that are not stored yet."""
    query = (
        "SELECT p.workspace, p.kind, p.name, p.id, p.created_at, p.updated_at, p.traits, "
        "p.trait_bytes, p.links, p.memberships, p.changed_at FROM {keys} k CROSS JOIN profiles p "
        "ON p.workspace = k.column1 AND p.kind = k.column2 AND p.name = k.column3"
    )
    rows = {(row[0], row[1], row[2]): _Row(*row[3:]) for row in look_up(db, query, subjects)}
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
    for subject, at in folded.visited.items():
        if subject in rows and at > (rows[subject].changed_at or 0):
            rows[subject].changed_at, rows[subject].changed = at, True


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
        "trait_bytes, links, memberships, changed_at)",
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
                row.changed_at,
            )
            for subject, row in rows.items()
            if row.changed
        ],
        "ON CONFLICT (id) DO UPDATE SET created_at = excluded.created_at, "
        "updated_at = excluded.updated_at, traits = excluded.traits, "
        "trait_bytes = excluded.trait_bytes, links = excluded.links, "
        "memberships = excluded.memberships, changed_at = excluded.changed_at",
    )
