# SPDX-License-Identifier: Apache-2.0
"""Python imports this first where its folder is in PYTHONPATH: small limits for SQLite stores."""

from __future__ import annotations

import os
import sqlite3

from engage_plugins.sqlite import checkpoint, connection
from engage_plugins.sqlite.keys import keys

checkpoint.CHECKPOINT_BYTES = 400_000
checkpoint.REST_BYTES = 80_000
checkpoint.FORCED_CHECKPOINT_BYTES = 1_200_000
checkpoint.KEPT_WAL_BYTES = 100_000
checkpoint.CHECKPOINT_PAUSE = 0.0
keys.MERGE_KEYS = (200, 400)

if "WITHOUT_SYNC" in os.environ:
    connect = connection.connect

    def connect_without_sync(*arguments: object, **options: object) -> sqlite3.Connection:
        db: sqlite3.Connection = connect(*arguments, **options)
        db.execute("PRAGMA synchronous = NORMAL")
        return db

    connection.connect = connect_without_sync
