# SPDX-License-Identifier: Apache-2.0
"""What the executor of plans does without transactions: what it sends, in which order, and what
happens if another caller is first."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import hypothesis
import pymongo
import pytest
from hypothesis import strategies as st

from engage.api import StorageContext, StorageUnavailable
from engage.store.memory import MemoryTables
from engage.store.records import RECORDS
from engage.store.tables import Pages, Put, Steps, plan
from engage.testing import WORKSPACE, letter
from engage.testing.factories import TIME, record, suppression
from engage_plugins.mongo import schema, steps
from engage_plugins.mongo.connection import Connection
from engage_plugins.mongo.documents import Sequencer, path_id
from engage_plugins.mongo.profiles import Cache
from engage_plugins.mongo.tables import FORMS, Form
from support import executors, mongo
from support.mongo_proxy import LOSE_REPLY, Proxy

pytestmark = pytest.mark.mongo

#: The commands of the driver itself.
_OWN = ("isMaster", "ismaster", "endSessions")


_TABLES = (executors.PLAIN, executors.MARKS)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with Proxy(mongo.shared(mongo.proxied_kind()).address) as made:
        yield made


@pytest.fixture
def url(proxy: Proxy) -> str:
    name = mongo.shared(mongo.proxied_kind()).url().rpartition("/")[2].partition("?")[0]
    return proxy.url(name)


@pytest.fixture
def db(url: str) -> Iterator[Any]:
    """The database, through the driver."""
    client: Any
    with pymongo.MongoClient(url) as client:
        yield client.get_default_database()


def another(db: Any, *names: str, times: int = 1) -> Callable[[str, Mapping[str, Any]], None]:
    """Return a rule: another caller changes records before some commands on them are done."""
    left, lock = [None] * times, threading.Lock()

    def rule(name: str, command: Mapping[str, Any]) -> None:
        # Its own commands are none of these.
        if name not in names or command[name] != schema.RECORDS:
            return
        with lock:
            if not left:
                return
            left.pop()
            done = db.command(
                {
                    "findAndModify": schema.RECORDS,
                    "query": {"id": "a"},
                    "update": {"$inc": {"version": 1}},
                }
            )
            assert done["lastErrorObject"]["updatedExisting"]

    return rule


async def test_a_plan_is_run_again_if_another_caller_is_first(
    tmp_path: Path, url: str, proxy: Proxy, db: Any
) -> None:
    async with mongo.opened(tmp_path, url) as store:
        assert await store.put_record(record("a")) == 1
        proxy.rule = another(db, "update", times=3)
        assert await store.put_record(record("a", body=b'{"n":2}')) == 5
        # The attempts before have sent nothing else.
        assert await store.records_version("key") == 2
        proxy.rule = another(db, "update")
        assert await store.put_record(record("a"), expected_version=5) is None
        assert await store.records_version("key") == 2
        # What was only read must be the same too.
        proxy.rule = another(db, "update")
        assert await store.put_record(record("a"), expected_version=7) == 8
        proxy.rule = another(db, "update", times=1000)
        with pytest.raises(StorageUnavailable, match="too many callers"):
            await store.put_record(record("a"))
        proxy.rule = None
        assert await store.records_version("key") == 3


async def test_a_record_that_is_changed_meanwhile_does_not_expire(
    tmp_path: Path, url: str, proxy: Proxy, db: Any
) -> None:
    async with mongo.opened(tmp_path, url) as store:
        for number, name in enumerate("abc"):
            await store.put_record(record(name, at=TIME + number))
        await store.put_record(record("c", at=TIME))
        proxy.rule = another(db, "delete")
        await store.expire_records("key", TIME + 9, limit=9)
        assert [document["id"] for document in db[schema.RECORDS].find()] == ["a"]
        proxy.rule = another(db, "delete")
        assert await store.delete_record("key", WORKSPACE, "a")
        assert not await store.delete_record("key", WORKSPACE, "a")


async def test_a_plan_is_not_run_again_after_a_lost_answer(
    tmp_path: Path, url: str, proxy: Proxy, db: Any
) -> None:
    async with mongo.opened(tmp_path, f"{url}&retryWrites=false") as store:
        assert await store.put_record(record("a")) == 1
        lost: list[str] = []

        def lose(name: str, command: Mapping[str, Any]) -> str | None:
            if name == "update" and command[name] == schema.RECORDS and not lost:
                lost.append(name)
                return LOSE_REPLY
            return None

        proxy.rule = lose
        with pytest.raises(StorageUnavailable):
            await store.put_record(record("a"))
        assert db[schema.RECORDS].find_one()["version"] == 2


async def test_a_plan_costs_few_commands(tmp_path: Path, url: str, proxy: Proxy, db: Any) -> None:
    async with mongo.opened(tmp_path, url) as store:

        async def commands(call: Any) -> list[str]:
            proxy.seen.clear()
            await call
            return [name for name in proxy.seen if name not in _OWN]

        new = [letter(f"{number}") for number in range(300)]
        # Which are there, and how much of the budget is used.
        assert await commands(store.put(new[:200])) == ["find", "find", "insert"]
        # The budget is known, and letters that are there are written again.
        assert sorted(await commands(store.put(new))) == ["find", "insert", "update"]
        assert await commands(store.remove(WORKSPACE, [one.id for one in new])) == [
            "find",
            "delete",
        ]
        many = [suppression(f"{number}@b.c") for number in range(100)]
        assert await commands(store.suppress(many[1:])) == ["insert"]
        assert await commands(store.suppress(many)) == ["insert", "update"]
        addresses = [("email", one.address) for one in many]
        assert await commands(store.suppressions(WORKSPACE, addresses)) == ["find"]
        assert await commands(store.put_record(record("a"))) == ["insert", "update"]
        # It is known what this process wrote last.
        assert await commands(store.put_record(record("a"))) == ["update", "update"]
        async with mongo.opened(tmp_path, url) as other:
            assert await other.put_record(record("a"), expected_version=2) == 3
        known = ["update", "find", "update", "update"]
        assert await commands(store.put_record(record("a"))) == known
        assert await commands(store.delete_record("key", WORKSPACE, "a")) == ["delete", "update"]
        assert await commands(store.delete_record("key", WORKSPACE, "a")) == ["find"]


class Mongo:
    """MongoDB's executor, over tables that no plan of engage has."""

    def __init__(self, runner: asyncio.Runner, connection: Connection) -> None:
        self._runner = runner
        self._connection = connection
        self._steps = steps.Steps(
            connection, executors.CONTEXT, Sequencer(), Cache(connection, most=10)
        )
        #: Makes the steps that are executed once more, if they have to be run again.
        self.again: Any = None

    def execute(self, wanted: Steps[Any], context: StorageContext) -> Any:
        assert context is executors.CONTEXT
        attempts = [wanted]
        made: Any = lambda: attempts.pop() if attempts else self.again()  # noqa: E731
        return self._runner.run(self._steps.run(made))

    def empty(self) -> None:
        """Delete everything."""

        async def delete() -> None:
            for table in _TABLES:
                await self._connection.db[table.name].delete_many({})

        self._runner.run(delete())


@contextlib.contextmanager
def executor(url: str) -> Iterator[Mongo]:
    connection = Connection(url, driver="pymongo", allow_weak=False, timeout=60)

    async def connect() -> None:
        connection.connect()
        with connection.calling():
            await connection.recognise()

    with asyncio.Runner() as runner:
        runner.run(connect())
        try:
            yield Mongo(runner, connection)
        finally:
            runner.run(connection.close())


@pytest.mark.parametrize("kind", mongo.kinds())
def test_the_executor_returns_what_the_one_in_memory_does(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forms = [Form(one.name, lambda *key: path_id(*map(str, key))) for one in _TABLES]
    forms[0] = dataclasses.replace(forms[0], guard="value")
    for table, form in zip(_TABLES, forms, strict=True):
        monkeypatch.setitem(FORMS, table.name, form)
    if not mongo.can(kind, "code-point-order"):
        monkeypatch.setitem(executors.VALUES, "a", st.sampled_from(["", "a", "a\0", "\uffff"]))

    @hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
    @hypothesis.given(st.sampled_from(_TABLES).flatmap(executors.examples))
    def compare(example: Any) -> None:
        plans, wanted = example
        real.empty()
        sides = executors.Side(MemoryTables()), executors.Side(real)
        for made, fails in plans:
            # It refuses a page of what the plan has written.
            made = [one for one in made if not isinstance(one, Pages)]
            answers: list[Any] = []
            real.again = functools.partial(executors.plan, made, fails=fails)
            for side in sides:
                try:
                    found = side.execute(executors.plan(made, fails=fails))
                    answers.append([*map(sorted_rows, found)])
                except executors.ToldError:
                    answers.append("failed")
            assert answers[0] == answers[1], made
            for page in (*wanted, *(Pages(table, 3) for table in _TABLES)):
                expected, got = (executors.rows_of(page.table, side.follow(page)) for side in sides)
                assert got == expected, page

    with executor(mongo.shared(kind).url()) as real:
        compare()


def sorted_rows(answer: Any) -> Any:
    """Return what a step returned; the rows under a prefix have any order."""
    if not isinstance(answer, dict):
        return answer
    return {
        key: sorted(value, key=repr) if isinstance(value, list) else value
        for key, value in answer.items()
    }


@plan()
def put_and_list() -> Steps[int]:
    """Do what this executor does not do."""
    yield Put(RECORDS, [("a", "b", "c", b"{}", 1, 1)])
    page = yield Pages(RECORDS, 9)
    return len(page.rows)


async def test_a_page_of_what_was_written_is_refused(tmp_path: Path, url: str, db: Any) -> None:
    async with mongo.opened(tmp_path, url) as store:
        with pytest.raises(NotImplementedError, match="written"):
            await store.run(put_and_list)
        assert db[schema.RECORDS].find_one() is None
