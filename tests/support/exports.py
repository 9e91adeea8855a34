# SPDX-License-Identifier: Apache-2.0
"""Export the store of a config file as ``engage export`` does, without starting a process for it.

``tests/cli`` tests the command. Starting a process for it takes half a second, and some tests
export after each of many steps.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from engage.config import load
from engage.registry import Registry, load_plugins
from engage.upkeep.export import Kind, Selection, export


@functools.cache
def registry() -> Registry:
    """Return the installed plugins."""
    return load_plugins()


async def read_store(
    config: Path, *kinds: Kind, environment: Mapping[str, str] | None = None
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


def exported(
    config: Path, kind: Kind = "events", *, environment: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Return the records of a kind; to be called without a running event loop."""
    [records] = asyncio.run(read_store(config, kind, environment=environment))
    return records
