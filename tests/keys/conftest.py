# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests of write keys."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tornado.ioloop import IOLoop

from engage.api import RecordStore
from support.sqlite import config_file, open_store


@pytest.fixture
def store(tmp_path: Path, io_loop: IOLoop) -> Iterator[RecordStore]:
    """Return an opened SQLite store."""
    stack = contextlib.AsyncExitStack()
    opening = stack.enter_async_context(open_store(config_file(tmp_path)))
    store = io_loop.run_sync(lambda: opening)
    assert isinstance(store, RecordStore)
    yield store
    io_loop.run_sync(stack.aclose)
