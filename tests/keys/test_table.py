# SPDX-License-Identifier: Apache-2.0
"""The table of write keys follows the store, without HTTP."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Sequence
from typing import Any, cast

import orjson
import pytest

from engage.api import Record, StorageUnavailable
from engage.config import Workspace
from engage.errors import ApiError
from engage.keys import table as keys
from engage.keys.auth import Authenticator, UnknownKeyError
from engage.keys.effective import KEY, OVERRIDE
from engage.keys.table import KeyTable
from engage.monitoring import logs
from engage.store.facade import Storage
from support.pipeline import ACME, NOW, OTHER
from support.server_inprocess import Valve
from support.waiting import eventually

pytestmark = pytest.mark.virtual_time

STORED = "0123456789abcdef0123456789abcdef"


class Table(KeyTable):
    """A table with its authenticator."""

    def __init__(self, store: Any, workspaces: Sequence[Workspace] = (ACME, OTHER)) -> None:
        self.authenticator = Authenticator(workspaces)
        super().__init__(workspaces, self.authenticator, store, timeout=5)

    def code(self, key: str) -> str:
        """Return the id of a key that is accepted, or the code of the error."""
        try:
            return self.authenticator.body(key).write_key.id
        except ApiError as error:
            return error.code

    async def __aenter__(self) -> Table:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def put(store: Storage, key_id: str, kind: str = KEY, **body: Any) -> None:
    body = {"key": STORED, **body} if kind == KEY else body
    encoded = orjson.dumps(body)
    await store.put_record(Record(kind=kind, workspace_id="acme", id=key_id, body=encoded, at=NOW))


async def test_changes_are_followed(store: Storage) -> None:
    await put(store, "ios")
    async with Table(store) as table:
        assert (table.code(STORED), table.code("key-1")) == ("ios", "website")
        await put(store, "ios", disabled=True)
        await eventually(lambda: table.code(STORED) == "write_key_disabled")
        await put(store, "ios", disabled=False)
        await eventually(lambda: table.code(STORED) == "ios")
        await put(store, "website", OVERRIDE, disabled=True)
        await eventually(lambda: table.code("key-1") == "write_key_disabled")
        assert [key.id for key in table.keys] == ["website", "old", "app", "ios"]
        await store.delete_record(KEY, "acme", "ios")
        await store.delete_record(OVERRIDE, "acme", "website")
        await eventually(lambda: table.code(STORED) == "invalid_write_key")
        assert table.code("key-1") == "website"


async def test_records_are_read_again_only_after_a_change(
    store: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And now and then, in case that a version was lost."""
    lists, versions = 0, 0
    list_records = store.list_records

    async def counted_list(*args: Any, **options: Any) -> Any:
        nonlocal lists
        lists += 1
        return await list_records(*args, **options)

    async def frozen_version(kind: str) -> int:
        nonlocal versions
        versions += 1
        return 7

    monkeypatch.setattr(store, "list_records", counted_list)
    monkeypatch.setattr(store, "records_version", frozen_version)
    async with Table(store) as table:
        await eventually(lambda: versions >= 10)
        assert lists == 2
        await put(store, "ios")
        await asyncio.sleep(keys.LIST_SECONDS / 2)
        assert table.code(STORED) == "invalid_write_key"
        await asyncio.sleep(keys.LIST_SECONDS)
        assert table.code(STORED) == "ios"


async def test_the_table_stays_while_the_store_is_away(
    store: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says that it is away, and one that it is back."""
    valve = Valve("records_version")
    valve(cast("Any", store))
    await put(store, "ios")
    async with Table(store) as table:
        for error in (StorageUnavailable("away"), ZeroDivisionError("a bug of a plugin")):
            caplog.clear()
            valve.error = error
            await eventually(lambda: len(caplog.records) == 1)
            assert table.code(STORED) == "ios"
            valve.error = None
            await eventually(lambda: len(caplog.records) == 2)
            assert str(error) in caplog.records[0].getMessage()
            assert bool(caplog.records[0].exc_info) == isinstance(error, ZeroDivisionError)


async def test_at_most_1000_wait(store: Storage) -> None:
    valve = Valve("records_version")
    valve(cast("Any", store))
    async with Table(store) as table:
        valve.gate.clear()
        waiting = [asyncio.create_task(table.wait(UnknownKeyError())) for _ in range(1000)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as caught:
            await table.wait(UnknownKeyError())
        assert (caught.value.status, caught.value.code) == (503, "overloaded")
        assert caught.value.headers["Retry-After"]
        waiting[0].cancel()
        await asyncio.sleep(0)
        another = asyncio.create_task(table.wait(UnknownKeyError()))
        await asyncio.sleep(keys.GAP_SECONDS)
        valve.gate.set()
        outcomes = await asyncio.gather(*waiting, another, return_exceptions=True)
        assert isinstance(outcomes[0], asyncio.CancelledError)
        assert outcomes[1:] == [None] * 1000


async def test_who_waits_when_the_table_closes_gets_a_503(store: Storage) -> None:
    table = Table(store)
    await table.start()
    waiting = asyncio.create_task(table.wait(UnknownKeyError()))
    await asyncio.sleep(0)
    await table.close()
    await table.close()
    with pytest.raises(ApiError) as caught:
        await waiting
    assert caught.value.code == "storage_unavailable"


async def test_a_waiting_request_does_not_hold_its_decoded_body(store: Storage) -> None:
    """The traceback of the error would: its frames have the body."""

    def decode() -> None:
        body = ["x"] * 1000
        raise UnknownKeyError(body[0])

    async with Table(store) as table:
        with pytest.raises(UnknownKeyError) as caught:
            decode()
        assert caught.value.__traceback__ is not None
        await table.wait(caught.value)
        assert caught.value.__traceback__ is None


async def test_keys_of_the_store_are_masked_in_the_log(store: Storage) -> None:
    """Those that are created later, too, and those that a key of the config hides."""
    later, hidden = "f" * 32, "e" * 32
    stream = io.StringIO()
    logs.configure("info", "json", secrets=["static"], stream=stream)
    await put(store, "ios")
    await put(store, "website", key=hidden)
    async with Table(store) as table:
        await put(store, "android", key=later)
        await eventually(lambda: table.code(later) == "android")
    for text in (STORED, later, hidden, "static"):
        logging.getLogger("test").error("a library's error: %s", text, extra={"x": text})
    logs.flush()
    for text in (STORED, later, hidden, "static"):
        assert text not in stream.getvalue()
    assert stream.getvalue().count("a library's error: ***") == 4
    # The operator learns once that a key is hidden.
    assert stream.getvalue().count("the config has a key with this id") == 1


async def test_a_store_that_hangs_does_not_delay_the_start_for_long(store: Storage) -> None:
    valve = Valve("records_version")
    valve(cast("Any", store))
    valve.gate.clear()
    async with asyncio.timeout(5), Table(store) as table:
        assert not table.loaded
        assert table.code("key-1") == "storage_unavailable"
        valve.gate.set()
        await eventually(lambda: table.loaded)
        assert table.code("key-1") == "website"
