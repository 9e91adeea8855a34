# SPDX-License-Identifier: Apache-2.0
"""An example of a storage: it keeps events only, each as a row of one table."""

import asyncio
import contextlib
import operator
import sqlite3

from engage import api

FIELDS = ("workspace_id", "origin", "message_id", "type", "user_id", "anonymous_id", "name")
FIELDS += ("received_at", "timestamp", "body")  # a later version of engage may add others
COLUMNS = ", ".join(FIELDS)
TABLE = f"""CREATE TABLE IF NOT EXISTS events (number INTEGER PRIMARY KEY AUTOINCREMENT,
            {COLUMNS}, UNIQUE (workspace_id, origin, message_id))"""
INSERT = f"INSERT OR IGNORE INTO events ({COLUMNS}) VALUES (?{', ?' * (len(FIELDS) - 1)})"
SELECT = f"SELECT number, {COLUMNS} FROM events"
FIND = f"{SELECT} WHERE workspace_id = ? AND origin = ? AND message_id = ?"
SCAN = f"""{SELECT} WHERE number > ? AND workspace_id = ifnull(?, workspace_id)
          AND received_at >= ifnull(?, received_at) AND type = ifnull(?, type)
          AND user_id IS ifnull(?, user_id) ORDER BY number LIMIT ?"""
EXPIRE = """DELETE FROM events WHERE number IN (SELECT number FROM events WHERE received_at < ?
            ORDER BY received_at LIMIT ?) AND (? OR (SELECT max(received_at) FROM events) >= ?)"""


class LedgerStore(api.EventStore):
    def __init__(self, options, context):
        self.path, self.timeout = context.base_dir / options["path"], context.write_timeout
        self.mode = "closed"  # not a mode of SQLite: every call fails until `open`

    async def open(self, *, create):
        if not create and not self.path.exists():
            raise api.StorageMissing(f"{self.path} does not exist")
        self.mode = "rw"  # a file that disappears must not be created again
        await self.run(lambda db: db.execute(TABLE), create=create)

    async def close(self):
        self.mode = "closed"

    async def check(self):
        await self.run(lambda db: None)  # `transaction` takes the lock for writing

    async def write(self, events):
        return await self.run(lambda db: [store(db, event) for event in events])

    async def find(self, workspace_id, origin, message_id):
        found = await self.run(lambda db: select(db, FIND, workspace_id, origin, message_id))
        return found[0][1] if found else None

    async def scan(self, wanted, *, after, limit):
        asked = (wanted.workspace_id, wanted.since, wanted.type, wanted.user_id)
        values = (int(after or 0), *asked, limit)  # engage filters by the other fields itself
        found = await self.run(lambda db: select(db, SCAN, *values))
        more = str(found[-1][0]) if len(found) == limit else None
        return api.Page([event for _, event in found], more)

    async def expire(self, before, *, limit, force=False):
        values = (before, limit, force, before)
        return await self.run(lambda db: db.execute(EXPIRE, values).rowcount)

    async def run(self, work, *, create=False):
        return await asyncio.to_thread(self.transaction, work, create)

    def transaction(self, work, create):
        try:
            if create:
                self.path.touch(0o600)
            uri = f"{self.path.as_uri()}?mode={self.mode}"
            opened = sqlite3.connect(uri, self.timeout, isolation_level=None, uri=True)
            with contextlib.closing(opened) as db, db:
                db.execute("BEGIN IMMEDIATE")
                return work(db)  # the commit follows: the caller gets what is durable
        except (OSError, sqlite3.Error) as error:
            raise api.StorageUnavailable(f"{self.path}: {error}") from error


def select(db, query, *values):
    with contextlib.suppress(UnicodeEncodeError):  # such an id was never stored
        rows = db.execute(query, values)
        return [(number, api.Event(**dict(zip(FIELDS, row, strict=True)))) for number, *row in rows]
    return []


def store(db, event):
    try:
        if db.execute(INSERT, operator.attrgetter(*FIELDS)(event)).rowcount:
            return api.Outcome(api.Status.STORED)
    except UnicodeEncodeError:  # refused alone: the others are stored
        return api.Outcome(api.Status.REFUSED, "an id is not Unicode text")
    (_, stored), *_ = select(db, FIND, *event.identity)
    return api.Outcome(api.Status.DUPLICATE, stored=stored.body)


@api.hookimpl
def engage_register_storage(register):
    options = {"properties": {"path": {"type": "string", "minLength": 1}}, "required": ["path"]}
    register("ledger", LedgerStore, {**options, "type": "object", "additionalProperties": False})
