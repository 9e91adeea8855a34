# SPDX-License-Identifier: Apache-2.0
"""Users by the value of an identifier trait, such as an e-mail address.

The table ``identifiers`` holds the current values of the declared traits in the form in which they
are looked up; ``indexed`` names the traits for which it is complete.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import orjson

from engage.api import identifier_value

from .connection import is_text
from .schema import USER

#: Maximum number of users that are returned for one value; the interface defines it.
_MAX_USERS: Final = 100

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
            for profile, value in found:
                store(db, profile, workspace, trait, value)
            db.execute("INSERT INTO indexed VALUES (?, ?)", (workspace, trait))
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def store(db: sqlite3.Connection, profile: int, workspace: str, trait: str, encoded: bytes) -> None:
    """Store the current value of a declared trait, so that the user is found by it.

    :param profile: the number of the user.
    :param encoded: the value as JSON; one that is not an identifier removes the entry.
    """
    value = identifier_value(trait, orjson.loads(encoded))
    if value is None:
        db.execute("DELETE FROM identifiers WHERE profile = ? AND trait = ?", (profile, trait))
    else:
        db.execute(
            "INSERT OR REPLACE INTO identifiers (profile, trait, workspace, value) "
            "VALUES (?, ?, ?, ?)",
            (profile, trait, workspace, value),
        )


def find_users(
    db: sqlite3.Connection, workspace_id: str, trait: str, values: Sequence[str]
) -> dict[str, list[str]]:
    """Return the users who have one of these values: value → user ids, oldest first."""
    found = {}
    for value in filter(is_text, values):
        users = db.execute(
            "SELECT p.name FROM identifiers i CROSS JOIN profiles p ON p.id = i.profile "
            "WHERE i.workspace = ? AND i.trait = ? AND i.value = ? "
            "ORDER BY p.created_at, p.name LIMIT ?",
            (workspace_id, trait, value, _MAX_USERS),
        ).fetchall()
        if users:
            found[value] = [name for (name,) in users]
    return found
