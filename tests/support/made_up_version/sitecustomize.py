# SPDX-License-Identifier: Apache-2.0
"""Python imports this first where its folder is in PYTHONPATH: a made-up next version of engage.

Earlier versions cannot read the SQLite stores that it has brought up to date.
"""

from __future__ import annotations

import engage

# Before the import of what reads it.
engage.__version__ = "9.0.0"

from engage_plugins.sqlite import schema  # noqa: E402

schema.VERSION += 1
schema.MIN_READER = schema.VERSION
schema.MIGRATIONS = {**schema.MIGRATIONS, schema.VERSION: ("CREATE TABLE added (name TEXT)",)}
