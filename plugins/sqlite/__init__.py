# SPDX-License-Identifier: Apache-2.0
"""The embedded storage: everything in one SQLite file, durable, shared by several processes.

====================  =================================================================
``store.py``          the interface that the core calls: asynchronous, without SQL
``reader.py``         the reading connection: a snapshot for each call
``worker_thread.py``  a thread that calls SQLite
``writer/``           the one process that makes all writes of a host
``engine.py``         the operations of the writer: a transaction for each
``steps.py``          the steps of plans as statements of SQL
``pages.py``          a page of a table
``tables.py``         the tables of plans, as they are in the file
``transactions.py``   the writing connection: opening, transactions, failures, recovery
``backup.py``         one file with all of a store, and a store made of one
``checkpoint.py``     copies the write-ahead log into the file
``keys/``             which events are stored, by their keys
``identifiers.py``    the traits by which users and visitors are looked up
``connection.py``     opening the file; SQLite's errors as errors of engage
``verification.py``   damage that only this storage can see
``schema.py``         the tables and their version
====================  =================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Any

import orjson

from engage.api import ConfigError, Register, StorageContext, hookimpl
from engage.store.facade import Storage, StorageFactory

__all__ = ["engage_register_storage"]

#: The oldest SQLite that takes more than 999 values in a statement.
_MIN_VERSION = (3, 32, 0)


def _make(options: Mapping[str, Any], context: StorageContext) -> Storage:
    """Make the storage.

    :raises ConfigError: if the SQLite of this Python is too old.
    """
    import sqlite3

    from .store import SqliteStorage

    if sqlite3.sqlite_version_info < _MIN_VERSION:
        needed = ".".join(map(str, _MIN_VERSION))
        raise ConfigError(f"SQLite {needed} is required; this Python has {sqlite3.sqlite_version}")
    return SqliteStorage.from_options(options, context)


@hookimpl
def engage_register_storage(register: Register[StorageFactory]) -> None:
    """Register ``sqlite``."""
    schema = resources.files("engage_schemas").joinpath("plugins/sqlite.json").read_bytes()
    register("sqlite", _make, orjson.loads(schema))
