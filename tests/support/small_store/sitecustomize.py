# SPDX-License-Identifier: Apache-2.0
"""Python imports this first where its folder is in PYTHONPATH: small limits for SQLite stores.

The variable ``FLAW`` names a flaw that they also have, which a test must find.
"""

from __future__ import annotations

import os
import sqlite3

from engage_plugins.sqlite import backup, checkpoint, connection, schema
from engage_plugins.sqlite.keys import event_keys as keys

checkpoint.CHECKPOINT_BYTES = 400_000
checkpoint.REST_BYTES = 80_000
checkpoint.FORCED_CHECKPOINT_BYTES = 1_200_000
checkpoint.KEPT_WAL_BYTES = 100_000
checkpoint.CHECKPOINT_PAUSE = 0.0
keys.MERGE_KEYS = 200

FLAW = os.environ.get("FLAW")

if FLAW == "store without syncs":
    connect = connection.connect

    def connect_without_sync(*arguments: object, **options: object) -> sqlite3.Connection:
        db: sqlite3.Connection = connect(*arguments, **options)
        db.execute("PRAGMA synchronous = NORMAL")
        return db

    connection.connect = connect_without_sync

if FLAW == "backup without syncs":
    backup.sync = lambda descriptor: None

if FLAW == "migration in parts":
    first, *rest = schema.MIGRATIONS[0]
    schema.MIGRATIONS = {**schema.MIGRATIONS, 0: (first, "COMMIT", "BEGIN IMMEDIATE", *rest)}
