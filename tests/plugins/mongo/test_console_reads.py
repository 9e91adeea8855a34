# SPDX-License-Identifier: Apache-2.0
"""What the MongoDB storage promises beyond the suite about newest events, records and counters."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pymongo
import pymongo.errors
import pytest

from engage.api import (
    EventFilter,
    StorageUnavailable,
)
from engage.testing import WORKSPACE, event, identify
from engage.testing.factories import TIME, count, record, store_all
from engage_plugins.mongo import counts, schema
from engage_plugins.mongo import stored_events as events
from engage_plugins.mongo.store import MongoStorage
from support import mongo

pytestmark = pytest.mark.mongo

#: The kind of server on which several connections may change one document.
ATOMIC = mongo.kinds()[-1]


@pytest.fixture(params=mongo.kinds())
def url(request: pytest.FixtureRequest) -> str:
    return mongo.shared(request.param).url()


@pytest.fixture
def db(url: str) -> Iterator[Any]:
    """The database, through the driver."""
    client: Any = pymongo.MongoClient(url)
    with client:
        yield client.get_default_database()


def on_store(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Give the test an opened store, as its parameter ``store``."""

    @functools.wraps(test)
    async def run(*, tmp_path: Path, url: str, **fixtures: Any) -> None:
        async with mongo.opened(tmp_path, url) as store:
            await test(store=store, **fixtures)

    given = inspect.signature(test).parameters
    names = {"tmp_path", "url", *given} - {"store"}
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, kind) for name in sorted(names)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


async def newest(
    store: MongoStorage, limit: int, **fields: Any
) -> tuple[list[str], list[int], list[str]]:
    """Return the message ids, the sizes of the pages, and the cursors."""
    found: list[str] = []
    sizes: list[int] = []
    cursors: list[str] = []
    before: str | None = None
    while True:
        page = await store.recent(EventFilter(**fields), before=before, limit=limit)
        found += [one.message_id for one in page.items]
        sizes.append(len(page.items))
        if page.cursor is None:
            return found, sizes, cursors
        before = page.cursor
        cursors.append(before)


# ------------------------------------------------------------------------------- newest events
@on_store
async def test_newest_events_come_in_the_reverse_of_the_order_of_arrival(
    store: MongoStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through windows of any size, also where many events have one time."""
    batch = [
        event(
            f"{number:03}",
            type=("track", "page", "identify")[number % 3],
            user_id=f"u{number % 5}",
            workspace=("acme", "other")[number % 2],
            origin=("api", "stripe", "a.b$")[number % 3],
            received=number // 7,
        )
        for number in range(40)
    ]
    await store_all(store, *batch)
    filters: Sequence[dict[str, Any]] = (
        {},
        {"workspace_id": "acme"},
        {"type": "page"},
        {"user_id": "u3"},
        {"workspace_id": "acme", "user_id": "u3"},
        {"workspace_id": "acme", "user_id": "u3", "type": "track", "origin": "api"},
        {"name": "Clicked"},
        {"origin": "stripe"},
        {"origin": "a.b$"},
        {"origin": "a.b"},
        {"workspace_id": "other", "origin": "stripe"},
        {"since": TIME + 1, "until": TIME + 4},
        {"type": "page", "since": TIME + 1, "until": TIME + 4},
        {"since": -(10**30), "until": 10**30},
        {"workspace_id": "nobody"},
        {"name": "\x00"},
        {"origin": "\x00"},
        {"user_id": "\ud800"},
    )
    for windows, of_user in (((1000,), 100), ((3, 10, 20), 0), ((7,), 3)):
        monkeypatch.setattr(events, "_WINDOWS", windows)
        monkeypatch.setattr(events, "_MAX_OF_USER", of_user)
        for fields in filters:
            wanted = [one.message_id for one in batch if EventFilter(**fields).matches(one)]
            for limit in (5, 500):
                assert (await newest(store, limit, **fields))[0] == wanted[::-1], fields
            page = await store.scan(EventFilter(**fields), after=None, limit=500)
            assert [one.message_id for one in page.items] == wanted


@on_store
async def test_a_call_looks_at_a_bounded_number_of_events(
    store: MongoStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cursor is where it stopped."""
    monkeypatch.setattr(events, "_WINDOWS", (2, 3))
    await store_all(store, event("rare", type="page"))
    await store_all(store, *(event(str(number), at=1 + number) for number in range(12)))
    found, sizes, cursors = await newest(store, 10, type="page")
    assert (found, sizes) == (["rare"], [0, 0, 1])
    assert [int(cursor.partition(".")[0]) - TIME for cursor in cursors] == [8, 3]


@on_store
async def test_all_events_of_a_user_with_few_are_found_at_once(
    store: MongoStorage, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many others arrived later, unless the index is missing."""
    monkeypatch.setattr(events, "_WINDOWS", (2, 3))
    await store_all(store, event("1", user_id="ada"), event("2", user_id="ada", at=1))
    await store_all(store, *(event(f"o{number}", at=2 + number) for number in range(12)))
    ada = {"workspace_id": WORKSPACE, "user_id": "ada"}
    assert (await newest(store, 10, **ada))[:2] == (["2", "1"], [2])
    db.events.drop_index(schema.index_name(schema.BY_USER))
    assert (await newest(store, 10, **ada))[0] == ["2", "1"]


@on_store
async def test_what_was_found_in_time_is_returned(
    store: MongoStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow server: the second window is not read in time."""
    monkeypatch.setattr(events, "_WINDOWS", (2, 100))
    monkeypatch.setattr(store._events, "_nth", slow := _Slow(store._events._nth))
    await store_all(store, *(event(str(number), at=number) for number in range(12)))
    page = await store.recent(EventFilter(type="track"), limit=5)
    assert [one.message_id for one in page.items] == ["11", "10"]
    slow.calls = -100
    rest = await store.recent(EventFilter(type="track"), before=page.cursor, limit=5)
    assert [one.message_id for one in rest.items] == ["9", "8", "7", "6", "5"]
    slow.calls = 1
    with pytest.raises(StorageUnavailable):
        await store.recent(EventFilter(type="track"), limit=5)


class _Slow:
    """The second call is not answered in time."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.calls = 0

    async def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        if self.calls == 2:
            raise pymongo.errors.ExecutionTimeout("operation exceeded time limit", 50)
        return await self._call(*arguments)


@on_store
async def test_an_invalid_cursor_is_an_error_of_the_caller(store: MongoStorage) -> None:
    for cursor in ("", "1", "1.x", "1.6", "x.0660db9d360fa5a05c3460a5", "\x00", "[]", '["a"]', "{"):
        with pytest.raises(ValueError, match=r".+"):
            await store.recent(EventFilter(), before=cursor, limit=1)
        with pytest.raises(ValueError, match=r".+"):
            await store.scan(EventFilter(), after=cursor, limit=1)
        with pytest.raises(ValueError, match=r".+"):
            await store.recent_dead_letters(None, before=cursor, limit=1)
        with pytest.raises(ValueError, match=r".+"):
            await store.list_records("key", after=cursor, limit=1)
        with pytest.raises(ValueError, match=r".+"):
            await store.scan_subscriptions(None, after=cursor, limit=1)
        with pytest.raises(ValueError, match=r".+"):
            await store.history(None, None, after=cursor, limit=1)


# ------------------------------------------------------------------------------------ records
async def test_all_who_expect_no_version_succeed(tmp_path: Path) -> None:
    url = mongo.shared(ATOMIC).url()
    async with mongo.opened(tmp_path, url) as one, mongo.opened(tmp_path, url) as other:
        versions = await asyncio.gather(
            *(store.put_record(record("new")) for store in (one, other) * 10)
        )
        assert sorted(map(int, filter(None, versions))) == list(range(1, 21))
        assert await other.records_version("key") == 20


@on_store
async def test_a_crash_between_a_write_and_the_version_does_no_harm(
    store: MongoStorage, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller has no answer; the next write of the kind increments the number."""
    await store.put_record(record("a"))

    async def crash(*arguments: Any) -> None:
        raise pymongo.errors.NetworkTimeout("cut off")

    with monkeypatch.context() as patch:
        patch.setattr(store._connection, "update", crash)
        with pytest.raises(StorageUnavailable):
            await store.put_record(record("b"))
    assert await store.records_version("key") == 1
    assert [item.id for item in (await store.list_records("key", limit=9)).items] == ["a", "b"]
    assert await store.put_record(record("b"), expected_version=0) is None
    assert await store.put_record(record("b")) == 2
    assert await store.records_version("key") == 2


# ----------------------------------------------------------------------------------- counters
@on_store
async def test_a_page_of_sums_reads_a_bounded_number_of_registers(
    store: MongoStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum is never cut off."""
    monkeypatch.setattr(counts, "MAX_ROWS", 10)
    written = [
        count(1, minute=minute, process=f"p{process}")
        for minute in range(5)
        for process in (range(4) if minute else range(13))
    ]
    await store.put_counts(written)
    sizes, totals = [], []
    after: str | None = None
    while True:
        page = await store.counts(60, since=0, until=2 * TIME, after=after, limit=100)
        sizes.append(len(page.items))
        totals += [item.total for item in page.items]
        if (after := page.cursor) is None:
            break
    assert totals == [13, 4, 4, 4, 4]
    assert sizes == [1, 2, 2]


@on_store
async def test_many_registers_are_written_more_than_once(store: MongoStorage) -> None:
    """FerretDB would hang at 100 statements of one command, of any collection."""
    for value in range(3):
        users = [f"u{number}" for number in range(120)]
        await store_all(
            store, *(identify(f"{user}-{value}", user, traits={"n": value}) for user in users)
        )
    for value in range(3):
        await store.put_counts([count(value, labels=(f"{number}",)) for number in range(250)])
    page = await store.counts(60, since=0, until=2 * TIME, limit=1000)
    assert [item.total for item in page.items] == [2] * 250


@on_store
async def test_counters_that_cannot_be_stored_are_an_error_of_the_caller(
    store: MongoStorage,
) -> None:
    for fields in ({"at": -60_000}, {"at": 10**14}, {"process": "\ud800"}, {"labels": ("\ud800",)}):
        with pytest.raises(ValueError, match=r"cannot be stored|surrogate"):
            await store.put_counts([count(1, **fields)])
    for value in (-1, 2**63):
        with pytest.raises(ValueError, match="cannot be stored"):
            await store.put_counts([count(value)])
    await store.put_counts([])
    assert list((await store.scan_counts(after=None, limit=9)).items) == []
