# SPDX-License-Identifier: Apache-2.0
"""The MongoDB storage on ``pymongo.AsyncMongoClient`` instead of motor: a plugin for the tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pymongo

import engage_plugins.mongo as plugin
from engage.api import EventStore, StorageContext, StorageFactory


def _make(options: Mapping[str, Any], context: StorageContext) -> EventStore:
    store: EventStore = plugin._make(options, context)
    store._connection.make_client = pymongo.AsyncMongoClient  # type: ignore[attr-defined]
    return store


def engage_register_storage(
    register: Callable[[str, StorageFactory, Mapping[str, Any]], None],
) -> None:
    """Register the storage ``mongo-async``."""
    register("mongo-async", _make, {})
