# SPDX-License-Identifier: Apache-2.0
"""An example of a storage: events only, each a row of one table."""

import asyncio
import contextlib
import dataclasses
import sqlite3

from engage import api

FIELDS = [field.name for field in dataclasses.fields(api.Event)]
COLUMNS = ", ".join(FIELDS)
TABLE = f"""CREATE TABLE IF NOT EXISTS events (number INTEGER PRIMARY KEY AUTOINCREMENT, {COLUMNS},
            UNIQUE (workspace_id, origin, message_id))"""
INSERT = f"INSERT OR IGNORE INTO events ({COLUMNS}) VALUES ({', '.join('?' * len(FIELDS))})"
SELECT = f"SELECT number, {COLUMNS} FROM events WHERE "
IDENTITY = "workspace_id = ? AND origin = ? AND message_id = ?"
EXPIRE = """DELETE FROM events WHERE number IN (SELECT number FROM events WHERE received_at < ?
            ORDER BY received_at LIMIT ?) AND (? OR (SELECT max(received_at) FROM events) >= ?)"""


class LedgerStore(api.EventStore):
    def __init__(self, options, context):
        self.path, self.timeout = context.base_dir / options["path"], context.write_timeout
        self.is_open = False

    async def open(self, *, create):
        if not create and not self.path.exists():
            raise api.StorageMissing(f"there is no {self.path}")
        self.is_open = True
        await self.run(lambda db: db.execute(TABLE), create=create)

    async def close(self):
        self.is_open = False

    async def check(self):
        await self.run(lambda db: None)  # it could be locked for writing: see `transaction`

    async def write(self, events):
        return await self.run(lambda db: [store(db, event) for event in events])

    async def find(self, workspace_id, origin, message_id):
        found = await self.run(lambda db: select(db, IDENTITY, workspace_id, origin, message_id))
        return found[0][1] if found else None

    async def scan(self, wanted, *, after, limit):
        where, values = "number > ? AND received_at >= ?", [int(after or 0), wanted.since or 0]
        for column in ("workspace_id", "type", "user_id"):
            if (value := getattr(wanted, column)) is not None:
                where, values = f"{where} AND {column} = ?", [*values, value]
        where = f"{where} ORDER BY number LIMIT ?"
        found = await self.run(lambda db: select(db, where, *values, limit))
        more = len(found) == limit
        return api.Page([event for _, event in found], str(found[-1][0]) if more else None)

    async def expire(self, before, *, limit, force=False):
        values = (before, limit, force, before)
        return await self.run(lambda db: db.execute(EXPIRE, values).rowcount)

    async def run(self, work, *, create=False):
        return await asyncio.to_thread(self.transaction, work, create)

    def transaction(self, work, create):
        if not self.is_open:
            raise api.StorageUnavailable("the store is closed")
        try:
            if create:
                self.path.touch(0o600)
            # mode=rw: a file that has gone must not come back empty.
            uri = f"{self.path.as_uri()}?mode=rw"
            opened = sqlite3.connect(uri, self.timeout, isolation_level=None, uri=True)
            with contextlib.closing(opened) as db:
                db.execute("BEGIN IMMEDIATE")
                result = work(db)
                db.execute("COMMIT")  # durable: it returns when the file is synced
                return result
        except (OSError, sqlite3.Error) as error:
            raise api.StorageUnavailable(f"{self.path}: {error}") from error


def select(db, where, *values):
    with contextlib.suppress(UnicodeEncodeError):  # what is not text was never stored
        rows = db.execute(SELECT + where, values).fetchall()
        return [(number, api.Event(**dict(zip(FIELDS, row, strict=True)))) for number, *row in rows]
    return []


def store(db, event):
    try:
        row = [getattr(event, name) for name in FIELDS]
        if db.execute(INSERT, row).rowcount:
            return api.Outcome(api.Status.STORED)
    except UnicodeEncodeError:  # refused alone: its neighbours are stored
        return api.Outcome(api.Status.REFUSED, "an id is not Unicode text")
    (_, stored), *_ = select(db, IDENTITY, *event.identity)
    return api.Outcome(api.Status.DUPLICATE, stored=stored.body)


@api.hookimpl
def engage_register_storage(register):
    options = {"properties": {"path": {"type": "string", "minLength": 1}}, "required": ["path"]}
    register("ledger", LedgerStore, {**options, "type": "object", "additionalProperties": False})
