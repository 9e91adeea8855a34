# SPDX-License-Identifier: Apache-2.0
"""The storage on PostgreSQL: durable, for any number of processes and hosts.

====================  =================================================================
``store.py``          the interface that the core calls: opening, plans, following events
``connections.py``    connections that a call borrows; time limits, errors, durability
``steps.py``          the steps of plans as statements of SQL
``pages.py``          a page of a table
``tables.py``         the tables of plans, as they are in the database
``schema.py``         creating the tables, their version, and which store they are
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


def _make(options: Mapping[str, Any], context: StorageContext) -> Storage:
    try:
        from .store import PostgresStorage
    except ModuleNotFoundError as error:
        if error.name != "asyncpg":
            raise
        raise ConfigError("it needs: pip install engage-server[postgres]") from None
    return PostgresStorage(options, context)


@hookimpl
def engage_register_storage(register: Register[StorageFactory]) -> None:
    """Register ``postgres``."""
    schema = resources.files("engage_schemas").joinpath("plugins/postgres.json").read_bytes()
    register("postgres", _make, orjson.loads(schema))
