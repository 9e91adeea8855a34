# SPDX-License-Identifier: Apache-2.0
"""The values of identifier traits, such as e-mail addresses, and when they were claimed.

The table ``identifiers`` holds the current values of the declared traits in the form in which they
are looked up, and when each user first had its value; ``indexed`` names the traits for which it is
complete. The table ``claims`` holds when each user first had each earlier value.
"""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Collection, Container, Mapping, Sequence

import orjson

from engage.api import MAX_CLAIMS, identifier_value

from ..connection import insert, look_up
from ..schema import GROUP, require_readable

#: Workspace id → the traits by which its users are looked up.
Declared = Mapping[str, Collection[str]]


def declared(identifiers: Mapping[str, Sequence[str]]) -> Declared:
    """Return the traits that the config declares, for fast look-ups."""
    return {workspace: frozenset(traits) for workspace, traits in identifiers.items()}


def indexed(db: sqlite3.Connection) -> Declared:
    """Return the traits for which the table is complete: those that a server declared, which may
    run now with another config than this process."""
    found: dict[str, set[str]] = {}
    for workspace, trait in db.execute("SELECT workspace, trait FROM indexed"):
        found.setdefault(workspace, set()).add(trait)
    return found


def index(db: sqlite3.Connection, declared: Declared) -> None:
    """Make the table complete for the declared traits, and remove the others from it."""
    wanted = {(workspace, trait) for workspace, traits in declared.items() for trait in traits}
    if set(db.execute("SELECT workspace, trait FROM indexed")) == wanted:
        return
    db.execute("BEGIN IMMEDIATE")
    try:
        require_readable(db)
        existing = set(db.execute("SELECT workspace, trait FROM indexed"))
        for workspace, trait in sorted(existing - wanted):
            # The claims stay, in case that the trait is declared again.
            db.execute(
                "INSERT INTO claims SELECT profile, trait, value, claimed_at FROM identifiers i "
                "WHERE workspace = ? AND trait = ? AND (SELECT count(*) FROM claims c "
                f"WHERE c.profile = i.profile AND c.trait = i.trait) < {MAX_CLAIMS} "
                "ON CONFLICT (profile, trait, value) DO UPDATE "
                "SET received_at = min(received_at, excluded.received_at)",
                (workspace, trait),
            )
            for table in ("identifiers", "indexed"):
                db.execute(
                    f"DELETE FROM {table} WHERE workspace = ? AND trait = ?", (workspace, trait)
                )
        for workspace, trait in sorted(wanted - existing):
            found = db.execute(
                "SELECT p.id, p.kind, t.value FROM profiles p CROSS JOIN traits t "
                "ON t.profile = p.id AND t.trait = ? WHERE p.workspace = ? AND p.kind <> ?",
                (trait, workspace, GROUP),
            )
            for profile, kind, encoded in found:
                value = identifier_value(trait, orjson.loads(encoded))
                if value is not None:
                    # Without a claim, it was set before claims were recorded: 0 is older than all.
                    db.execute(
                        "INSERT OR REPLACE INTO identifiers "
                        "(profile, trait, workspace, value, kind, claimed_at) "
                        "SELECT ?1, ?2, ?3, ?4, ?5, coalesce((SELECT received_at FROM claims "
                        "WHERE profile = ?1 AND trait = ?2 AND value = ?4), 0)",
                        (profile, trait, workspace, value, kind),
                    )
            db.execute("INSERT INTO indexed VALUES (?, ?)", (workspace, trait))
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


@dataclasses.dataclass(frozen=True, slots=True)
class Updates:
    """The changes of one write to declared identifier traits. Users and visitors are given by their
    numbers."""

    #: (user, trait, value) → least time of receipt, in order of arrival.
    claims: Mapping[tuple[int, str, str], int]
    #: (user, trait) → workspace, kind, and the value that the trait has now: ``None`` if no user
    #: can be looked up by it.
    values: Mapping[tuple[int, str], tuple[str, int, str | None]]


def update(db: sqlite3.Connection, updates: Updates, new: Container[int]) -> None:
    """Store the current values and the claims.

    The claim of the current value is in ``identifiers``, and moves to ``claims`` when the user gets
    another value: most users never do, and cost no row of ``claims``. A user keeps the first
    :data:`MAX_CLAIMS` of a trait, the current value included. A later value counts as claimed when
    it was received, until the user has another one.

    :param new: the numbers of the users of whom nothing is stored yet.
    """
    claims, values = updates.claims, updates.values
    query = (
        "SELECT i.profile, i.trait, i.value, i.claimed_at FROM {keys} k CROSS JOIN identifiers i "
        "ON i.profile = k.column1 AND i.trait = k.column2"
    )
    old = {key for key in values if key[0] not in new}
    old.update(claim[:2] for claim in claims if claim[0] not in new)
    before = {(row[0], row[1]): (row[2], row[3]) for row in look_up(db, query, old)}
    # By trait of a user, the claims of values that are not the current one.
    others: dict[tuple[int, str], dict[str, int]] = {}
    for (profile, trait, value), at in claims.items():
        known = before.get((profile, trait))
        if known is None or known[0] != value:
            others.setdefault((profile, trait), {})[value] = at
        elif at < known[1]:
            # That is rare, because events usually arrive in order.
            before[profile, trait] = (value, at)
            db.execute(
                "UPDATE identifiers SET claimed_at = ? WHERE profile = ? AND trait = ?",
                (at, profile, trait),
            )
    now = {}
    for key, subject in values.items():
        if (before[key][0] if key in before else None) != subject[2]:
            now[key] = subject
            others.setdefault(key, {})
    if others:
        _update(db, others, before, now, new)


def _update(
    db: sqlite3.Connection,
    others: Mapping[tuple[int, str], Mapping[str, int]],
    before: Mapping[tuple[int, str], tuple[str, int]],
    now: Mapping[tuple[int, str], tuple[str, int, str | None]],
    new: Container[int],
) -> None:
    """Store the claims of other values than the current ones, and the current values that change.

    :param others: (user, trait) → value → least time of receipt.
    :param before: (user, trait) → the value so far, and its claim.
    :param now: (user, trait) → workspace, kind and value, if the value changes.
    """
    # The value so far was claimed first.
    claimed = {
        key: {before[key][0]: before[key][1], **found} if key in before else found
        for key, found in others.items()
    }
    query = (
        "SELECT c.profile, c.trait, c.value, c.received_at FROM {keys} k CROSS JOIN claims c "
        "ON c.profile = k.column1 AND c.trait = k.column2 AND c.value = k.column3"
    )
    old = [(*key, value) for key, found in claimed.items() if key[0] not in new for value in found]
    stored = {(row[0], row[1], row[2]): row[3] for row in look_up(db, query, old)}
    counts = _counts(db, {one[:2] for one in old if one not in stored})
    todo, current, gone = [], [], []
    for key, found in claimed.items():
        count = counts.get(key, 0)
        value = now[key][-1] if key in now else before.get(key, (None, 0))[0]
        for other, at in found.items():
            known = stored.get((*key, other))
            kept = known is not None or count < MAX_CLAIMS
            count += kept and known is None
            if other != value and kept and (known is None or at < known):
                todo.append((*key, other, at))
        if key not in now:
            continue
        if value is None:
            gone.append(key)
        else:
            at = min(found[value], stored.get((*key, value), found[value]))
            current.append((*key, *now[key], at))
    insert(
        db,
        "INSERT INTO claims (profile, trait, value, received_at)",
        todo,
        "ON CONFLICT (profile, trait, value) DO UPDATE SET received_at = excluded.received_at",
    )
    insert(
        db,
        "INSERT OR REPLACE INTO identifiers (profile, trait, workspace, kind, value, claimed_at)",
        current,
    )
    for key in gone:
        db.execute("DELETE FROM identifiers WHERE profile = ? AND trait = ?", key)


def _counts(
    db: sqlite3.Connection, users: Collection[tuple[int, str]]
) -> dict[tuple[int, str], int]:
    """Return how many claims are stored: (number of the user, trait) → at most the maximum."""
    query = (
        "SELECT column1, column2, (SELECT count(*) FROM (SELECT 1 FROM claims "
        f"WHERE profile = column1 AND trait = column2 LIMIT {MAX_CLAIMS})) FROM {{keys}}"
    )
    return {(profile, trait): count for profile, trait, count in look_up(db, query, users)}
