# SPDX-License-Identifier: Apache-2.0
"""The PostgreSQL storage while the server, its settings or the network fail."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from engage.api import ForeignCursor, Status, StorageUnavailable
from engage.testing import event, identify
from engage.testing.factories import ids, record, store_all
from engage.testing.harness import eventually
from support import postgres
from support.postgres import PostgresServer, make_store, opened
from support.tcp_proxy import TcpProxy

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server of this module."""
    with postgres.own() as made:
        yield made


async def failed(call: Any, text: str, *, seconds: float = 8) -> None:
    """Check that a call fails with an outage, in time."""
    start = time.monotonic()
    with pytest.raises(StorageUnavailable, match=text):
        await call
    assert time.monotonic() - start < seconds


async def until(server: PostgresServer, query: str) -> None:
    """Wait until a query says ``t``."""
    while await asyncio.to_thread(server.psql, query) != "t":  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def created(server: PostgresServer, **options: Any) -> dict[str, Any]:
    """Return the options of a store that exists: creating it may take longer than a limit."""
    made = server.options(**options)
    async with opened(made):
        return made


WAITS = "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"


async def test_a_server_that_is_stopped(server: PostgresServer) -> None:
    async with opened(await created(server), write_timeout=2) as store:
        await store_all(store, event("before"))
        server.signal(signal.SIGSTOP)
        try:
            calls = [store.write([event("during")]), store.check(), store.find("acme", "api", "m")]
            await asyncio.gather(*(failed(call, "no answer within 2 s") for call in calls))
            await failed(store.write([event("during")]), "no answer")
        finally:
            server.signal(signal.SIGCONT)
        await eventually(store.check, StorageUnavailable)
        await eventually(lambda: store.write([event("during")]), StorageUnavailable)
        assert sorted(await ids(store)) == ["before", "during"]


async def test_a_server_that_is_killed(server: PostgresServer) -> None:
    async with opened(server.options()) as store:
        await store_all(store, event("before"))
        await asyncio.to_thread(server.kill)
        await failed(store.write([event("during")]), "no server answers|closed|failed")
        await failed(make_store(server.options()).open(create=False), "no server answers")
        await asyncio.to_thread(server.start)
        outcomes = await eventually(
            lambda: store.write([event("before"), event("after")]), StorageUnavailable
        )
        assert [outcome.status for outcome in outcomes] == [Status.DUPLICATE, Status.STORED]


async def test_a_server_that_is_read_only(server: PostgresServer) -> None:
    async with opened(server.options()) as store:
        await store_all(store, event("before"))
        server.set(default_transaction_read_only="on")
        try:
            await asyncio.sleep(0.5)
            await failed(store.write([event("during")]), "read-only")
            await failed(store.check(), "read-only")
            assert await ids(store) == ["before"]
        finally:
            server.set(default_transaction_read_only="")
        await eventually(store.check, StorageUnavailable)


async def test_a_role_without_connections_and_rights(server: PostgresServer) -> None:
    server.psql("CREATE ROLE app LOGIN CONNECTION LIMIT 0")
    options = {**server.options(), "url": server.url("app")}
    async with opened(options, write_timeout=3) as store:
        await failed(store.check(), "no connection left")
        server.psql("ALTER ROLE app CONNECTION LIMIT -1")
        await failed(store.check(), "the role lacks a permission")
        server.psql(f"CREATE SCHEMA {options['schema']} AUTHORIZATION app")
        await store.check()
        await store_all(store, event("m"))
        page = await store.follow(after=None, limit=9)
        assert [event.message_id for event in page.items] == ["m"]


async def test_all_connections_are_busy(server: PostgresServer) -> None:
    async with opened(await created(server, pool_size=2), write_timeout=1) as store:
        pool = store._pool
        async with pool.borrowed(), pool.borrowed():
            await failed(store.check(), "all connections are busy")
        await store.check()


async def test_an_answer_that_is_lost_in_the_middle_of_a_commit(server: PostgresServer) -> None:
    with TcpProxy(("127.0.0.1", server.port)) as proxy:
        options = {**server.options(), "url": server.url(port=proxy.port)}
        async with opened(options) as store:
            await store.check()
            server.set(synchronous_standby_names="missing")
            try:
                writes = [
                    asyncio.ensure_future(store.write([identify("m", "u", traits={"n": 1})])),
                    asyncio.ensure_future(store.put_record(record("r"), expected_version=0)),
                ]
                await until(server, WAITS)
                await asyncio.sleep(0.2)
                proxy.cut()
                answers = await asyncio.gather(*writes, return_exceptions=True)
                assert [type(answer) for answer in answers] == [StorageUnavailable] * 2
            finally:
                server.set(synchronous_standby_names="")
            (outcome,) = await eventually(lambda: store.write([event("m")]), StorageUnavailable)
            assert outcome.status is Status.DUPLICATE
            assert await ids(store) == ["m"]
            assert (await store.profile("acme", "u")).traits == {"n": 1}


async def test_a_standby_that_is_missing(server: PostgresServer) -> None:
    """No event and no duplicate is acknowledged, even if an operator cancels the wait."""
    async with opened(await created(server), write_timeout=1.5) as store:
        await store_all(store, event("before"))
        server.set(synchronous_standby_names="missing")
        try:
            await failed(store.write([event("before")]), "no answer within 1.5 s")
            await failed(store.write([event("m")]), "no answer within 1.5 s")
            await failed(store.check(), "no answer")
            cancel = "SELECT bool_or(pg_cancel_backend(pid)) FROM pg_stat_activity WHERE "
            server.psql(f"{cancel} wait_event = 'SyncRep'")
            writing = asyncio.ensure_future(store.write([event("cancelled")]))
            await until(server, f"{cancel} wait_event = 'SyncRep'")
            await failed(writing, "a standby may not have what was written")
        finally:
            server.set(synchronous_standby_names="")
        names = ["before", "m", "cancelled"]
        outcomes = await eventually(lambda: store.write([*map(event, names)]), StorageUnavailable)
        assert {outcome.status for outcome in outcomes} == {Status.DUPLICATE}


async def test_a_server_that_may_lose_events_is_refused(
    server: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.set(fsync="off")
    try:
        await until(server, "SELECT current_setting('fsync') = 'off'")
        await failed(make_store(server.options()).open(create=False), "fsync = off")
        async with opened(server.options(allow_weak_durability=True)) as store:
            await store_all(store, event("m"))
            assert "fsync = off" in caplog.text
    finally:
        server.set(fsync="")


async def test_synchronous_commit_of_the_role_does_not_count(server: PostgresServer) -> None:
    server.psql("CREATE ROLE hasty SUPERUSER LOGIN")
    server.psql("ALTER ROLE hasty SET synchronous_commit = off")
    async with opened(
        {**await created(server), "url": server.url("hasty")}, write_timeout=2
    ) as store:
        await store.check()
        server.set(synchronous_standby_names="missing")
        try:
            await failed(store.write([event("m")]), "no answer within 2 s")
        finally:
            server.set(synchronous_standby_names="")


# ------------------------------------------------------------------------------------- following
async def test_a_place_is_final_while_a_transaction_is_open(server: PostgresServer) -> None:
    """A follower waits for a write that has its number, but not for another program."""
    from engage.store.events import EVENTS, row_of
    from engage.store.tables import Add
    from engage_plugins.postgres.steps import Run

    options = server.options()
    async with opened(options) as store, opened(options) as other:
        await store_all(store, event("a"))
        first = await store.follow(after=None, limit=9)
        assert [event.message_id for event in first.items] == ["a"]
        async with store._pool.borrowed() as db:
            await store._pool.begin(db, ())
            await Run(db).execute(Add(EVENTS, [row_of(event("late"))]))
            await store_all(other, event("early"))
            page = await other.follow(after=first.cursor, limit=9)
            assert (page.items, page.cursor) == ([], first.cursor)
            assert await ids(other) == ["a", "early"]
            await store._pool.commit(db, wrote=True)
        async with other._pool.borrowed() as db:
            await db.execute("BEGIN; SELECT pg_current_xact_id()")
            start = time.monotonic()
            page = await store.follow(after=first.cursor, limit=9)
            assert time.monotonic() - start < 0.9
            assert [event.message_id for event in page.items] == ["late", "early"]


async def test_what_a_stopped_process_left_is_ended(server: PostgresServer) -> None:
    options = await created(server)
    async with opened(options, write_timeout=1) as store, opened(options) as other:
        async with store._pool.borrowed() as db:
            await store._pool.begin(db, None)
            # As if this process could not end it by itself.
            start = time.monotonic()
            await other.write([event("m")])
            assert 0.5 < time.monotonic() - start < 10
        await store.check()


async def test_a_restored_store_is_another_one(server: PostgresServer) -> None:
    options = server.options()
    async with opened(options) as store:
        await store_all(store, *(event(f"m{number}") for number in range(5)))
        page = await store.follow(after=None, limit=9)
        back_up, restore = store.backup_commands()
        assert options["schema"] in back_up
    where = f"--dbname={server.url()}"
    dump = f"--file={server.folder / 'engage.dump'}"
    server.program("pg_dump", "--format=custom", f"--schema={options['schema']}", dump, where)
    assert "pg_restore --exit-on-error" in restore
    server.psql("CREATE DATABASE restored")
    target = f"postgresql://postgres@127.0.0.1:{server.port}/restored"
    server.program(
        "pg_restore", "--exit-on-error", f"--dbname={target}", str(server.folder / "engage.dump")
    )
    store = make_store({**options, "url": target})
    await store.open(create=False)
    assert len(await ids(store)) == 5
    await failed(store.follow(after=page.cursor, limit=9), "the store was restored")
    await store.close()
    async with opened({**options, "url": target}) as store:
        with pytest.raises(ForeignCursor):
            await store.follow(after=page.cursor, limit=9)
        assert len((await store.follow(after=None, limit=9)).items) == 5
        (outcome,) = await store.write([event("m1")])
        assert outcome.status is Status.DUPLICATE


# ---------------------------------------------------------------------------------------- opening
async def test_tables_that_are_not_ours_are_refused(server: PostgresServer) -> None:
    from engage.api import StorageIncompatible

    options = server.options()
    server.psql(f"CREATE SCHEMA {options['schema']}")
    server.psql(f"CREATE TABLE {options['schema']}.store (id int)")
    with pytest.raises(StorageIncompatible, match="not one of engage"):
        await make_store(options).open(create=True)
    options = server.options()
    async with opened(options):
        server.psql(f"UPDATE {options['schema']}.store SET value = 9 WHERE name = 'min_reader'")
    with pytest.raises(StorageIncompatible, match="newer version"):
        await make_store(options).open(create=True)


async def test_a_store_that_was_there_is_not_created_again(server: PostgresServer) -> None:
    store = make_store(server.options(), had_store=True)
    await store.open(create=True)
    await failed(store.check(), "may come back")
    await store.close()


async def test_no_message_has_the_password(server: PostgresServer) -> None:
    url = "postgresql://engage:secret@127.0.0.1:1/there"
    store = make_store({"url": url}, write_timeout=2)
    with pytest.raises(StorageUnavailable) as raised:
        await store.open(create=False)
    assert "127.0.0.1:1/there" in str(raised.value)
    assert "secret" not in f"{raised.value} {store.backup_commands()}"
