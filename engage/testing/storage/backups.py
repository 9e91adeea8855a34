# SPDX-License-Identifier: Apache-2.0
"""The promises of a :class:`~engage.api.BackupStore`."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from engage.api import (
    Backup,
    BackupStore,
    EventFilter,
    Status,
    StorageError,
    StorageIncompatible,
    StorageMissing,
    StorageUnavailable,
)
from engage.store.facade import Storage

from ..factories import event, identify, profile_of, record, store_all
from .harness import Bench, on_store

SECRET = "secret-" * 20
EVENTS = [event("a"), identify("i", "ann", 1, traits={"plan": "pro"}), event("b", at=2)]


async def _nothing(store: Storage, backup: Backup) -> None:
    """Change nothing in a restored store."""


async def back_up(store: BackupStore, target: Path) -> Backup:
    """Write a backup without the records of the kind ``link``."""
    parts: list[tuple[int, int]] = []

    def on_bytes(done: int, total: int) -> None:
        parts.append((done, total))

    made = await asyncio.to_thread(store.back_up, target, without=["link"], on_bytes=on_bytes)
    assert parts == sorted(parts)
    assert parts[-1][0] == parts[-1][1] > 0
    return made


async def restore(
    store: BackupStore,
    source: Path,
    prepare: Callable[[Storage, Backup], Awaitable[None]] = _nothing,
) -> Backup:
    """Make a store of a backup."""

    def make() -> Backup:
        return store.restore(source, prepare=prepare, on_bytes=lambda done, total: None)

    return await asyncio.to_thread(make)


def another(bench: Bench) -> Callable[[], Any]:
    """Return what makes storages of a store that does not exist yet."""
    folder = bench.context.base_dir / "other"
    folder.mkdir()
    return bench.elsewhere(folder)


async def _backed_up(bench: Bench) -> Any:
    """Return an opened storage, or skip the test if it cannot back itself up."""
    store = await bench.open()
    if not isinstance(store, BackupStore):
        pytest.skip("this storage cannot back itself up")
    return store


class BackupTests:
    """``back_up`` and ``restore``."""

    @on_store
    async def test_a_backup_has_one_state_of_the_whole_store(self, bench: Bench) -> None:
        store = await _backed_up(bench)
        folder = bench.context.base_dir
        await store_all(store, *EVENTS)
        await store.put_record(record("kept"))
        body = b'{"of":"%s"}' % SECRET.encode()
        await store.put_record(record(SECRET, kind="link", body=body))
        await store.put_record(record("gone", kind="link", body=body))
        await store.delete_record("link", record("gone").workspace_id, "gone")
        before = time.time_ns() // 1_000_000
        made = await back_up(store, folder / "backup")
        await store_all(store, event("later", at=3))
        assert before <= made.made_at <= time.time_ns() // 1_000_000
        assert made.events == 3
        assert made.size == (folder / "backup").stat().st_size
        if os.name == "posix":
            assert (folder / "backup").stat().st_mode & 0o777 == 0o600
        assert SECRET.encode() not in (folder / "backup").read_bytes()

        new = another(bench)
        results: list[Any] = []

        async def prepare(restored: Storage, backup: Backup) -> None:
            results.append((backup, await restored.write([EVENTS[0], event("own", at=4)])))

        assert await restore(new(), folder / "backup", prepare) == made
        ((backup, outcomes),) = results
        assert backup == made
        assert [outcome.status for outcome in outcomes] == [Status.DUPLICATE, Status.STORED]
        restored = new()
        await restored.open(create=True)
        page = await restored.scan(EventFilter(), after=None, limit=10)
        assert list(page.items) == [*EVENTS, event("own", at=4)]
        outcomes = await restored.write(EVENTS)
        assert {outcome.status for outcome in outcomes} == {Status.DUPLICATE}
        assert (await profile_of(restored, "ann")).traits == {"plan": "pro"}
        kinds = [record.kind for record in (await restored.list_records(None, limit=10)).items]
        assert kinds == ["key"]

    @on_store
    async def test_neither_a_file_nor_a_store_is_replaced(self, bench: Bench) -> None:
        store = await _backed_up(bench)
        folder = bench.context.base_dir
        await store_all(store, *EVENTS)
        await back_up(store, folder / "backup")
        content = (folder / "backup").read_bytes()
        with pytest.raises(StorageUnavailable):
            await back_up(store, folder / "backup")
        assert (folder / "backup").read_bytes() == content
        await store_all(store, event("later", at=3))
        await store.close()
        with pytest.raises(StorageUnavailable):
            await restore(store, folder / "backup")
        store = await bench.open()
        assert len((await store.scan(EventFilter(), after=None, limit=10)).items) == 4

    @on_store
    async def test_a_failed_restore_leaves_no_store(self, bench: Bench) -> None:
        store = await _backed_up(bench)
        folder = bench.context.base_dir
        await store_all(store, *EVENTS)
        await back_up(store, folder / "backup")
        whole = (folder / "backup").read_bytes()
        (folder / "truncated").write_bytes(whole[: len(whole) // 2])
        (folder / "empty").write_bytes(b"")
        (folder / "foreign").write_bytes(os.urandom(len(whole)))

        async def refuse(restored: Storage, backup: Backup) -> None:
            raise StorageUnavailable("refused")

        new = another(bench)
        for name in ("truncated", "empty", "foreign"):
            with pytest.raises(StorageIncompatible):
                await restore(new(), folder / name)
        with pytest.raises(StorageError):
            await restore(new(), folder / "missing")
        with pytest.raises(StorageUnavailable, match="refused"):
            await restore(new(), folder / "backup", refuse)
        with pytest.raises(StorageMissing):
            await new().open(create=False)
        await restore(new(), folder / "backup")
        await new().open(create=False)
