# SPDX-License-Identifier: Apache-2.0
"""The embedded storage: everything in one SQLite file, durable, shared by several processes.

=====================  ================================================================
``store.py``           what the core calls: asynchronous, without SQL
``worker_thread.py``   a thread that calls SQLite
``engine.py``          what is written: a transaction for each operation
``transactions.py``    the writing connection: opening, transactions, failures, recovery
``keys.py``            which events are stored, by their keys; which writer may write
``merge.py``           moves keys from memory into their table, in small steps
``parts.py``           the parts of that table, and the filters that recognise most new events
``saved.py``           the file that keeps keys and filters for the next start
``checkpoint.py``      copies the write-ahead log into the file
``reader.py``          the reading connection: a snapshot for each call
``batch.py``           the events of one write, and what becomes of each
``events.py``          rows of events
``profiles.py``        rows of users and groups
``identifiers.py``     users by the value of a trait
``changes.py``         the profile changes of one write, folded
``subscriptions.py``   rows of subscription choices and their history
``dead_letters.py``    rows of dead letters, and their budgets
``records.py``         rows of records, and the version of each kind
``counts.py``          rows of counters
``paging.py``          pages of a table
``connection.py``      opening the file; SQLite's errors as errors of engage
``schema.py``          the tables and their version
``migration.py``       brings the store of an earlier version up to date
=====================  ================================================================

One process makes all writes of a host:

========================  =============================================================
``writer.py``             what the storage calls for all writes
``writer_client.py``      finds or starts the process, and sends it requests
``writer_link.py``        the client's connection to it
``writer_start.py``       starting the process
``writer_process.py``     the process: its signals, its user, its log
``writer_server.py``      the loop of the process
``writer_turns.py``       the requests of all clients, in turns
``writer_connection.py``  a client, as the loop sees it
``writer_socket.py``      its listening socket
``writer_host.py``        runs operations on the engine, with the settings that apply
``writer_thread.py``      a thread that writes instead of the process
``process_usage.py``      its memory and processor time, for the metrics
``lock.py``               the lock that makes one process the writer
``protocol.py``           the messages
``operations.py``         the requests: their names and types
========================  =============================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Any

import orjson

from engage.api import ConfigError, EventStore, Register, StorageContext, StorageFactory, hookimpl

__all__ = ["engage_register_storage"]

#: The oldest SQLite that takes more than 999 values in a statement.
_MIN_VERSION = (3, 32, 0)


def _make(options: Mapping[str, Any], context: StorageContext) -> EventStore:
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
