# SPDX-License-Identifier: Apache-2.0
"""The embedded storage: everything in one SQLite file, durable, several processes on it.

==================  ==================================================================
``store.py``        what the core talks to; asynchronous, holds no SQL
``lanes.py``        the threads in which SQLite is called
``engine.py``       the one writer: transactions, failure and recovery, the WAL
``reading.py``      the reader: pages, lookups
``events.py``       rows of events           ``profiles.py``  rows of users and groups
``choices.py``      rows of subscriptions    ``letters.py``   rows of dead letters
``connection.py``   opening the file; SQLite's errors in our words
``tables.py``       the tables and their version
==================  ==================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any

import orjson

from engage.api import EventStore, StorageContext, StorageFactory, hookimpl

__all__ = ["engage_register_storage"]


def _make(options: Mapping[str, Any], context: StorageContext) -> EventStore:
    from .store import SqliteStorage

    return SqliteStorage.from_options(options, context)


@hookimpl
def engage_register_storage(
    register: Callable[[str, StorageFactory, Mapping[str, Any]], None],
) -> None:
    """Bring ``sqlite``."""
    schema = resources.files("engage_schemas").joinpath("plugins/sqlite.json").read_bytes()
    register("sqlite", _make, orjson.loads(schema))
