# SPDX-License-Identifier: Apache-2.0
"""Users by the value of an identifier trait, such as an e-mail address.

The table ``identifiers`` holds the current values of the declared traits in the form in which they
are looked up; ``indexed`` names the traits for which it is complete. The table ``claims`` holds
when each user first had each value, and ``identifiers`` repeats it for the current value.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Container, Mapping, Sequence
from typing import Final

import orjson

from engage.api import identifier_value

from .connection import insert, is_text, look_up
from .schema import USER, version_of

#: Maximum number of users that are returned for one value; the interface defines it.
_MAX_USERS: Final = 100

#: Maximum number of claims that are stored for a trait of a user. Without it, anyone who has a
#: write key could make them grow without bound. A person has fewer addresses.
MAX_CLAIMS: Final = 100

#: Less than every claim.
_BEFORE_ALL: Final = -(2**63)

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
        existing = set(db.execute("SELECT workspace, trait FROM indexed"))
        for workspace, trait in sorted(existing - wanted):
            for table in ("identifiers", "indexed"):
                db.execute(
                    f"DELETE FROM {table} WHERE workspace = ? AND trait = ?", (workspace, trait)
                )
        for workspace, trait in sorted(wanted - existing):
            found = db.execute(
                "SELECT p.id, t.value FROM profiles p CROSS JOIN traits t "
                "ON t.profile = p.id AND t.trait = ? WHERE p.workspace = ? AND p.kind = ?",
                (trait, workspace, USER),
            )
            for profile, encoded in found:
                value = identifier_value(trait, orjson.loads(encoded))
                if value is not None:
                    # No claims were recorded so far: all of these users are older than later ones.
                    claim = (profile, trait, value)
                    db.execute(
                        "INSERT INTO claims VALUES (?, ?, ?, 0) ON CONFLICT DO NOTHING", claim
                    )
                    store(db, profile, workspace, trait, encoded, {})
            db.execute("INSERT INTO indexed VALUES (?, ?)", (workspace, trait))
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def claim(
    db: sqlite3.Connection, claims: Mapping[tuple[int, str, str], int], new: Container[int]
) -> None:
    """Store claims: of several for one value of a user, the least time stays.

    A user keeps the first :data:`MAX_CLAIMS` of a trait. Later ones are left out.

    :param claims: (number of the user, trait, value) → time of receipt.
    :param new: the numbers of the users of whom nothing is stored yet.
    """
    query = (
        "SELECT c.profile, c.trait, c.value, c.received_at FROM {keys} k CROSS JOIN claims c "
        "ON c.profile = k.column1 AND c.trait = k.column2 AND c.value = k.column3"
    )
    old = [key for key in claims if key[0] not in new]
    stored = {(row[0], row[1], row[2]): row[3] for row in look_up(db, query, old)}
    counts = _counts(db, {key[:2] for key in old if key not in stored})
    todo = []
    for key, at in claims.items():
        if key in stored:
            if at >= stored[key]:
                continue
        else:
            count = counts.get(key[:2], 0)
            if count >= MAX_CLAIMS:
                continue
            counts[key[:2]] = count + 1
        todo.append((*key, at))
    insert(
        db,
        "INSERT INTO claims (profile, trait, value, received_at)",
        todo,
        "ON CONFLICT (profile, trait, value) DO UPDATE SET received_at = excluded.received_at",
    )
    # A user that has the value now. That is rare, because events usually arrive in order.
    for profile, trait, value, at in todo:
        if (profile, trait, value) in stored:
            db.execute(
                "UPDATE identifiers SET claimed_at = ? "
                "WHERE profile = ? AND trait = ? AND value = ?",
                (at, profile, trait, value),
            )


def _counts(
    db: sqlite3.Connection, users: Collection[tuple[int, str]]
) -> dict[tuple[int, str], int]:
    """Return how many claims are stored: (number of the user, trait) → at most the maximum."""
    query = (
        "SELECT column1, column2, (SELECT count(*) FROM (SELECT 1 FROM claims "
        f"WHERE profile = column1 AND trait = column2 LIMIT {MAX_CLAIMS})) FROM {{keys}}"
    )
    return {(profile, trait): count for profile, trait, count in look_up(db, query, users)}


def store(
    db: sqlite3.Connection,
    profile: int,
    workspace: str,
    trait: str,
    encoded: bytes | None,
    claims: Mapping[tuple[int, str, str], int],
) -> None:
    """Store the current value of a declared trait, so that the user is found by it.

    Its claim must be stored already. If it was left out, because the user has too many, the value
    counts as claimed when it was received, until the user has another one.

    :param profile: the number of the user.
    :param claims: what was given to :func:`claim`.
    :param encoded: the value as JSON; ``None``, or a value by which no user can be looked up,
        removes the entry.
    """
    value = None if encoded is None else identifier_value(trait, orjson.loads(encoded))
    if value is None:
        db.execute("DELETE FROM identifiers WHERE profile = ? AND trait = ?", (profile, trait))
    else:
        db.execute(
            "INSERT OR REPLACE INTO identifiers (profile, trait, workspace, value, claimed_at) "
            "SELECT ?1, ?2, ?3, ?4, coalesce("
            "(SELECT received_at FROM claims WHERE profile = ?1 AND trait = ?2 AND value = ?4), "
            "(SELECT claimed_at FROM identifiers WHERE profile = ?1 AND trait = ?2 AND value = ?4),"
            " ?5)",
            (profile, trait, workspace, value, claims.get((profile, trait, value), 0)),
        )


def find_users(
    db: sqlite3.Connection, workspace_id: str, trait: str, values: Sequence[str]
) -> dict[str, list[str]]:
    """Return the users who have one of these values: value → user ids, oldest claim first."""
    claimed = _claimed(db)
    found = {}
    for value in filter(is_text, values):
        users = db.execute(
            "SELECT p.name FROM identifiers i CROSS JOIN profiles p ON p.id = i.profile "
            "WHERE i.workspace = ? AND i.trait = ? AND i.value = ? "
            f"ORDER BY {claimed}, i.profile LIMIT ?",
            (workspace_id, trait, value, _MAX_USERS),
        ).fetchall()
        if users:
            found[value] = [name for (name,) in users]
    return found


def holders(
    db: sqlite3.Connection,
    workspace_id: str,
    trait: str,
    value: str,
    after: tuple[int, int] | None,
    limit: int,
) -> tuple[list[str], tuple[int, int] | None]:
    """Return a page of the users who have a value, oldest claim first, and its cursor."""
    if not is_text(value):
        return [], None
    claimed = _claimed(db)
    rows = db.execute(
        f"SELECT p.name, {claimed}, i.profile FROM identifiers i "
        "CROSS JOIN profiles p ON p.id = i.profile "
        "WHERE i.workspace = ? AND i.trait = ? AND i.value = ? "
        f"AND ({claimed}, i.profile) > (?, ?) ORDER BY {claimed}, i.profile LIMIT ?",
        (workspace_id, trait, value, *(after or (_BEFORE_ALL, 0)), limit),
    ).fetchall()
    last = rows[-1][1:] if len(rows) == limit else None
    return [name for name, *_ in rows], last


def _claimed(db: sqlite3.Connection) -> str:
    """Return the column with the claim. A command may read a store that has none."""
    return "i.claimed_at" if version_of(db) >= 2 else "i.profile * 0"
