# SPDX-License-Identifier: Apache-2.0
"""SQLite stores that other processes can write to, helper processes, and writes without a pause."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from engage.api import Status, StorageContext
from engage.config import load as load_config
from engage.server.child import Setup
from engage.server.keepers import HelperKeeper
from engage.testing import event
from engage.testing.factories import ids
from engage_plugins.sqlite.store import SqliteStorage
from support.exactly_once import check_exactly_once
from support.nursery import nursery
from support.sqlite import config_file


def make(
    tmp_path: Path,
    writer: str = "process",
    *,
    timeout: float = 30,
    path: str = "engage.db",
    identifiers: tuple[str, ...] = (),
    supervised: bool = False,
) -> SqliteStorage:
    """Make a storage; open it afterwards.

    :param identifiers: traits of the workspace ``acme``: part of the settings of a writer.
    :param supervised: whether a :func:`helper` writes, and no thread of this process.
    """
    context = StorageContext(
        base_dir=tmp_path,
        identifiers={"acme": identifiers},
        write_timeout=timeout,
        supervised=supervised,
    )
    return SqliteStorage.from_options(
        {"writer": writer, "path": path, "min_free_bytes": 0}, context
    )


@contextlib.asynccontextmanager
async def opened(store: SqliteStorage) -> AsyncIterator[SqliteStorage]:
    """Open a storage (and create its store), and close it at the end."""
    await store.open(create=True)
    try:
        yield store
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def helper(
    tmp_path: Path, *, write_timeout: float = 30, fork: bool = True
) -> AsyncIterator[None]:
    """Keep the helper process of a store running, as a server does.

    :param fork: whether it is forked. A library that is preloaded works in a new interpreter only.
    """
    config = load_config(config_file(tmp_path, "helper"))
    # Tests stop the process for a while.
    server = dataclasses.replace(config.server, hang_timeout=600)
    config = dataclasses.replace(config, server=server)
    run = make(tmp_path, timeout=write_timeout).helper()
    keeper = HelperKeeper(Setup(config, 0, True, (), helper=run))
    with pytest.MonkeyPatch.context() as patch:
        if fork:
            patch.setattr(asyncio, "create_subprocess_exec", nursery().fork_child)
        keeping = asyncio.create_task(keeper.run())
        try:
            yield
        finally:
            keeper.stop()
            await keeping


@contextlib.asynccontextmanager
async def helped(tmp_path: Path) -> AsyncIterator[SqliteStorage]:
    """Open the store of a helper process that is kept running."""
    async with (
        helper(tmp_path),
        opened(make(tmp_path, supervised=True)) as store,
    ):
        yield store


def pid_of(store: SqliteStorage) -> int:
    """Return the id of the process of the writer that a storage is connected to; 0: none now."""
    channel = store._writer._channel
    return 0 if channel is None else int(channel.welcome.pid)


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


class Load:
    """Writes events without a pause, and counts those that were acknowledged."""

    def __init__(self, store: SqliteStorage, name: str) -> None:
        self.acknowledged: list[str] = []
        self._store = store
        self._name = name
        self._stopping = False

    async def run(self) -> None:
        """Write until :meth:`stop` is called."""
        number = 0
        while not self._stopping:
            name = f"{self._name}-{number}"
            (outcome,) = await self._store.write([event(name)])
            # What a writer stored before it was killed is a duplicate when it is sent again.
            assert outcome.status in (Status.STORED, Status.DUPLICATE)
            self.acknowledged.append(name)
            number += 1

    def stop(self) -> None:
        """End after the write that is being made."""
        self._stopping = True


@contextlib.asynccontextmanager
async def load(*stores: SqliteStorage) -> AsyncIterator[None]:
    """Write to stores inside of the context. No write may fail, and none may be lost."""
    loads = [Load(store, str(number)) for number, store in enumerate(stores)]
    tasks = [asyncio.ensure_future(one.run()) for one in loads]

    async def more() -> None:
        counts = [len(one.acknowledged) for one in loads]
        await until(
            lambda: (
                any(task.done() for task in tasks)
                or all(
                    len(one.acknowledged) > count + 5
                    for one, count in zip(loads, counts, strict=True)
                )
            )
        )

    try:
        await more()
        yield
        # They go on after the last disturbance.
        await more()
    finally:
        for load in loads:
            load.stop()
        await asyncio.gather(*tasks)
    stored = await ids(stores[0], limit=1000)
    acknowledged = {name for one in loads for name in one.acknowledged}
    check_exactly_once(stored, acknowledged, acknowledged)
