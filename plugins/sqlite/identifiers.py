# SPDX-License-Identifier: Apache-2.0
"""The traits by which users are looked up: ``indexed`` names those for which ``identifiers`` is
complete. A server makes it so for the traits that its config declares."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence

import orjson

from engage.api import MAX_CLAIMS, identifier_value
from engage.store.profiles import GROUP

from .schema import require_readable


def indexed(db: sqlite3.Connection) -> Mapping[str, Sequence[str]]:
    """Return the traits for which the table is complete: those that a server declared, which may
    run now with another config than this process."""
    traits: dict[str, list[str]] = {}
    for workspace, trait in db.execute("SELECT workspace, trait FROM indexed"):
        traits.setdefault(workspace, []).append(trait)
    return traits


def index(db: sqlite3.Connection, declared: Mapping[str, Sequence[str]]) -> None:
    """Make the table complete for the declared traits, and remove the others from it."""
    pairs = {(workspace, trait) for workspace, traits in declared.items() for trait in traits}
    if set(db.execute("SELECT workspace, trait FROM indexed")) == pairs:
        return
    db.execute("BEGIN IMMEDIATE")
    try:
        require_readable(db)
        existing = set(db.execute("SELECT workspace, trait FROM indexed"))
        for workspace, trait in sorted(existing - pairs):
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
        for workspace, trait in sorted(pairs - existing):
            rows = db.execute(
                "SELECT p.id, p.kind, t.value FROM profiles p CROSS JOIN traits t "
                "ON t.profile = p.id AND t.trait = ? WHERE p.workspace = ? AND p.kind <> ?",
                (trait, workspace, GROUP),
            )
            for profile, kind, encoded in rows:
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
