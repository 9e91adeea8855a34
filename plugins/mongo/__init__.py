# SPDX-License-Identifier: Apache-2.0
"""The default storage: MongoDB, durable, idempotent, ready for a sharded cluster.

======================  ================================================================
``store.py``            what the core talks to; life, readiness, the work left for later
``client.py``           the one place that names the driver's client; errors, time limits
``url.py``              the connection string
``schema.py``           collections, indexes, version, warnings about shard keys
``documents.py``        events as documents, keys that MongoDB cannot hold, ids
``writer.py``          one write: what becomes of each of its events
``events.py``           the collection of events
``profiles.py``         users and groups as registers, links, memberships
``changes.py``          changes of one write, folded, as statements of an update command
``subscriptions.py``    choices with their history
``dead_letters.py``     dead letters and their budgets
======================  ================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Any

import orjson

from engage.api import EventStore, Register, StorageContext, StorageFactory, hookimpl

__all__ = ["engage_register_storage"]


def _make(options: Mapping[str, Any], context: StorageContext) -> EventStore:
    from .store import MongoStorage

    return MongoStorage.from_options(options, context)


@hookimpl
def engage_register_storage(register: Register[StorageFactory]) -> None:
    """Bring ``mongo``."""
    schema = resources.files("engage_schemas").joinpath("plugins/mongo.json").read_bytes()
    register("mongo", _make, orjson.loads(schema))
