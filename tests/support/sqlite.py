# SPDX-License-Identifier: Apache-2.0
"""SQLite storages for tests, and a disk that is full."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engage.api import Event, StorageContext, StorageUnavailable
from engage.testing import event
from engage.testing.factories import store_all
from engage_plugins.sqlite.store import SqliteStorage


def make(tmp_path: Path, *, timeout: float = 30, **options: Any) -> SqliteStorage:
    context = StorageContext(
        base_dir=tmp_path, identifiers={"acme": ["email"]}, write_timeout=timeout
    )
    return SqliteStorage.from_options(options, context)


def large(name: str) -> Event:
    return event(name, properties={"text": "x" * 50_000})


@contextlib.contextmanager
def file_limit(size: int) -> Iterator[None]:
    """No file of this process may grow beyond; for root, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def until_full(store: SqliteStorage) -> list[str]:
    """Write until there is no more room; what was acknowledged."""
    acknowledged: list[str] = []
    failures = 0
    for number in range(2000):
        try:
            await store_all(store, large(str(number)))
            acknowledged.append(str(number))
            failures = 0
        except StorageUnavailable as error:
            if "no answer within" in str(error):
                continue
            # A log that may not grow starts anew once it is copied: the first is not the last.
            failures += 1
            if failures == 5:
                return acknowledged
    raise AssertionError("it never became full")
