# SPDX-License-Identifier: Apache-2.0
"""The default storage: MongoDB, durable, idempotent, ready for a sharded cluster.

====================  =================================================================
``store.py``          the interface that the core calls: opening, readiness, the work left for later
``writer.py``         storing events with their changes, and completing writes that a crash cut off
``stored_events.py``  the collection of events
``arrivals.py``       the journal of arrivals: an order of events that is final
``changes.py``        the plan that applies the changes of events: its steps as queries and updates
``profiles.py``       what a process remembers of profiles, and deleting them
``people_steps.py``   plans that read profiles: their steps as queries
``identifiers.py``    the values by which users and visitors are found, and since when each has one
``choices.py``        subscription choices and their history, and the upgrade of version 1
``steps.py``          plans: their steps as queries and updates
``tables.py``         how the rows of plans are documents, or sums over documents
``counts.py``         counters per minute and hour
``paging.py``         pages of a collection, and its oldest documents
``documents.py``      events as documents, keys that MongoDB cannot hold, ids
``connection.py``     the only module that names the driver's client: errors, time limits
``url.py``            the connection string
``verification.py``   damage that only this storage can see
``schema.py``         preparing the store: collections, indexes, version, shard keys
====================  =================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Any

import orjson

from engage.api import Register, StorageContext, hookimpl
from engage.store.facade import Storage, StorageFactory

__all__ = ["engage_register_storage"]


def _make(options: Mapping[str, Any], context: StorageContext) -> Storage:
    from .store import MongoStorage

    return MongoStorage.from_options(options, context)


@hookimpl
def engage_register_storage(register: Register[StorageFactory]) -> None:
    """Register ``mongo``."""
    schema = resources.files("engage_schemas").joinpath("plugins/mongo.json").read_bytes()
    register("mongo", _make, orjson.loads(schema))
