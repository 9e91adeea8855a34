# SPDX-License-Identifier: Apache-2.0
"""An example of a storage: the changes of all plans in a file, and their result in memory."""

import asyncio
import contextlib
import secrets
import sqlite3
import threading
import time

import msgspec

from engage import api
from engage.store.events import STORE
from engage.store.facade import TABLES, Storage
from engage.store.memory import MemoryTables
from engage.store.tables import Add, Delete, Pages, Put

LEDGER = "CREATE TABLE IF NOT EXISTS ledger (number INTEGER PRIMARY KEY, changes BLOB NOT NULL)"
CHANGES = {step.__name__: step for step in (Add, Put, Delete)}


class LedgerStore(Storage):
    isolated = True  # one process at a time, and one plan after the other

    def __init__(self, options, context):
        self.path, self.context = context.base_dir / options["path"], context
        self.lock, self.is_open = threading.Lock(), False
        self.forget()

    def forget(self):
        self.tables, self.number = MemoryTables(), 0  # the last entry that they have

    async def open(self, *, create):
        if not self.path.exists():
            if self.context.had_store:
                raise api.StorageUnavailable(f"{self.path} was there, and may come back")
            if not create:
                raise api.StorageMissing(f"{self.path} does not exist")
            self.path.touch(0o600)
        self.is_open, self.creates = True, create
        await self.check()

    async def close(self):
        self.is_open = False

    async def check(self):
        await self.run(nothing)

    async def run(self, plan, *args):
        return await asyncio.to_thread(self.transact, plan, *args)

    async def read(self, plan, *args):
        return await asyncio.to_thread(self.transact, plan, *args)

    def transact(self, plan, *args):
        """Run a plan when the changes of all other processes are known."""
        if not self.is_open:
            raise api.StorageUnavailable("the storage is not open")
        end = time.monotonic() + self.context.write_timeout
        if not self.lock.acquire(timeout=self.context.write_timeout):
            raise api.StorageUnavailable(f"{self.path} is busy")
        try:
            left = max(0, end - time.monotonic())
            uri = f"{self.path.as_uri()}?mode=rw"
            opened = sqlite3.connect(uri, left, isolation_level=None, uri=True)
            with contextlib.closing(opened) as db, db:
                db.execute("BEGIN IMMEDIATE")  # one process at a time
                if self.creates:
                    db.execute(LEDGER)
                self.catch_up(db)
                if not self.number:
                    self.append(db, begin())
                return self.append(db, plan(*args))  # the commit follows
        except BaseException as error:
            self.forget()  # the tables may have what the file does not have
            if isinstance(error, OSError | sqlite3.Error):
                raise api.StorageUnavailable(f"{self.path}: {error}") from error
            raise
        finally:
            self.lock.release()

    def catch_up(self, db):
        """Make the changes of new entries."""
        new = db.execute("SELECT number, changes FROM ledger WHERE number > ?", (self.number,))
        for self.number, changes in new:
            self.tables.execute(again(msgspec.msgpack.decode(changes)), self.context)

    def append(self, db, steps):
        """Execute the steps of a plan, and make an entry of what it changes."""
        changes = []
        result = self.tables.execute(recorded(steps, changes), self.context)
        if changes:
            self.number += 1
            entry = (self.number, msgspec.msgpack.encode(changes))
            db.execute("INSERT INTO ledger VALUES (?, ?)", entry)
        return result


def recorded(steps, changes):
    """Yield the steps of a plan, and keep those that change something."""
    answer = None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as end:
            return end.value
        if isinstance(step, Delete) and isinstance(step.keys, Pages):
            page = yield step.keys
            step = Delete(step.table, [row[: step.table.key] for row in page.rows])
        if isinstance(step, (Add, Put, Delete)):
            table, rows = step
            changes.append((type(step).__name__, table.name, [*rows]))
        answer = yield step


def again(changes):
    for name, table, rows in changes:
        yield CHANGES[name](TABLES[table], [tuple(row) for row in rows])


def begin():
    # Another number for each store: a cursor of another one does not fit.
    yield Put(STORE, [("incarnation", secrets.randbits(62))])


def nothing():
    yield from ()


@api.hookimpl
def engage_register_storage(register):
    options = {"properties": {"path": {"type": "string", "minLength": 1}}, "required": ["path"]}
    register("ledger", LedgerStore, {**options, "type": "object", "additionalProperties": False})
