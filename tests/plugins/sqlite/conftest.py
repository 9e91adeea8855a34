# SPDX-License-Identifier: Apache-2.0
"""An open store, and engines whose keys are merged after a few events."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tornado.ioloop import IOLoop

from engage_plugins.sqlite import engine as engine_module
from engage_plugins.sqlite.engine import Engine
from engage_plugins.sqlite.keys import event_keys as keys
from engage_plugins.sqlite.keys import merge, parts
from engage_plugins.sqlite.store import SqliteStorage
from support.sqlite import make
from support.sqlite_keys import opened


@pytest.fixture
def store(tmp_path: Path, io_loop: IOLoop) -> Iterator[SqliteStorage]:
    """A new store that is open for writing."""
    store = make(tmp_path)
    io_loop.run_sync(lambda: store.open(create=True))
    yield store
    io_loop.run_sync(store.close)


@pytest.fixture
def small_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge after 20 events and without a pause, in steps of a few keys, into parts of 64."""
    monkeypatch.setattr(engine_module, "IDLE", -1)
    monkeypatch.setattr(keys, "MERGE_KEYS", 20)
    monkeypatch.setattr(keys, "ALONE_KEYS", 7)
    monkeypatch.setattr(merge, "LEAST_KEYS", 3)
    monkeypatch.setattr(merge, "_BUCKET_RATE", 4)
    monkeypatch.setattr(merge, "_DELETE_RATE", 2)
    monkeypatch.setattr(parts, "BUILD_KEYS", 16)
    monkeypatch.setattr(parts, "_LEAST_CAPACITY", 64)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of the store."""
    return tmp_path / "engage.db"


@pytest.fixture
def engine(small_merges: None, path: Path) -> Iterator[Engine]:
    """The writer of a new store."""
    engine = opened(path)
    yield engine
    engine.close()
