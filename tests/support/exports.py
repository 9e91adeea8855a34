# SPDX-License-Identifier: Apache-2.0
"""Look into the store of a config file, as ``engage export`` does, without a process for it.

``tests/cli`` tests the command. Starting a process for it takes half a second, and some tests
export after each of many steps.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import orjson

from engage.api import Record
from engage.audit import AUDIT, AuditEntry, read_entry
from engage.config import load
from engage.reading.export import RecordKind, Selection, export
from engage.registry import Registry, load_plugins
from engage.store.facade import Storage
from engage.testing.factories import all_pages

Result = TypeVar("Result")


@functools.cache
def registry() -> Registry:
    """Return the installed plugins."""
    return load_plugins()


async def read_store(
    config: Path, *kinds: RecordKind, environment: Mapping[str, str] | None = None
) -> list[list[dict[str, Any]]]:
    """Open the store of a config file and return its records of each kind.

    :param environment: for references in the config; by default that of this process.
    """
    store = registry().make_storage(load(config, environment))
    await store.open(create=False)
    try:
        return [
            [orjson.loads(record.json) async for record in export(store, kind, Selection())]
            for kind in kinds
        ]
    finally:
        await store.close()


def on_store(config: Path, work: Callable[[Any], Awaitable[Result]]) -> Result:
    """Open (and create) the store of a config file, and do something with it.

    To be called without a running event loop.
    """

    async def run() -> Result:
        store = registry().make_storage(load(config))
        await store.open(create=True)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


def records_in(config: Path, kind: str) -> list[Record]:
    """Return the records of a kind in the store of a config file, such as write keys."""

    async def read(store: Storage) -> list[Record]:
        return await all_pages(functools.partial(store.list_records, kind))

    return on_store(config, read)


def audit_of(config: Path) -> list[AuditEntry]:
    """Return the audit of a store, oldest first."""
    return [read_entry(record) for record in records_in(config, AUDIT)]


def exported(
    config: Path, kind: RecordKind = "events", *, environment: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Return the records of a kind; to be called without a running event loop."""
    [records] = asyncio.run(read_store(config, kind, environment=environment))
    return records
