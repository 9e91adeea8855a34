# SPDX-License-Identifier: Apache-2.0
"""The embedded storage: everything in one SQLite file, durable, several processes on it.

==================  ==================================================================
``store.py``        what the core talks to; asynchronous, holds no SQL
``worker_thread.py``        the threads in which SQLite is called
``writer.py``      who writes: a thread, and under load a process (``writer_process.py``)
``engine.py``       the one writer: transactions, failure and recovery, the WAL
``reader.py``      the reader: lookups, scans  ``paging.py``  pages of a table
``events.py``       rows of events           ``profiles.py``  rows of users and groups
``changes.py``      the changes of one write, before they meet the rows
``subscriptions.py``      rows of subscriptions    ``dead_letters.py``   rows of dead letters
``connection.py``   opening the file; SQLite's errors in our words
``schema.py``       the tables and their version
==================  ==================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Any

import orjson

from engage.api import ConfigError, EventStore, Register, StorageContext, StorageFactory, hookimpl

__all__ = ["engage_register_storage"]

#: The first that takes more than 999 values in a statement.
_OLDEST = (3, 32, 0)


def _make(options: Mapping[str, Any], context: StorageContext) -> EventStore:
    """
    :raises ConfigError: this Python has a SQLite that is too old.
    """
    import sqlite3

    from .store import SqliteStorage

    if sqlite3.sqlite_version_info < _OLDEST:
        needed = ".".join(map(str, _OLDEST))
        raise ConfigError(f"needs SQLite {needed}; this Python has {sqlite3.sqlite_version}")
    return SqliteStorage.from_options(options, context)


@hookimpl
def engage_register_storage(register: Register[StorageFactory]) -> None:
    """Bring ``sqlite``."""
    schema = resources.files("engage_schemas").joinpath("plugins/sqlite.json").read_bytes()
    register("sqlite", _make, orjson.loads(schema))
