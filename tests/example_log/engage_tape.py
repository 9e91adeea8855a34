# SPDX-License-Identifier: Apache-2.0
"""An example of a log: a file of SQLite, which several processes of one machine use."""

import asyncio
import contextlib
import json
import sqlite3
import time
import uuid
import zlib

from engage import api

SECONDS = 10  # after which a reader that does not read has lost its partitions
SCHEMA = """
CREATE TABLE IF NOT EXISTS partitions (number INTEGER PRIMARY KEY, next INTEGER);
INSERT OR IGNORE INTO partitions VALUES (0, 0), (1, 0), (2, 0), (3, 0);
CREATE TABLE IF NOT EXISTS records (partition, offset, appended_at, key, value, headers,
                                    PRIMARY KEY (partition, offset)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS dead (key, value, headers);
CREATE TABLE IF NOT EXISTS offsets (team, partition, offset, PRIMARY KEY (team, partition));
CREATE TABLE IF NOT EXISTS members (team, name, seen, PRIMARY KEY (team, name));
"""


class TapeLog(api.EventLog):
    def __init__(self, options, context):
        self.path, self.timeout = context.base_dir / options["path"], context.write_timeout
        self.limit = context.max_value_bytes
        self.turn = asyncio.Lock()  # calls take turns in the order in which they began
        self.mode = "closed"  # not a mode of SQLite: every call fails until `open`
        self.create = False

    async def open(self, *, create):
        if not create and not self.path.exists():
            raise api.StorageMissing(f"{self.path} does not exist")
        self.mode, self.create = "rw", create
        try:
            await self.check()
        except api.StorageUnavailable:
            if not create:  # otherwise a later call creates the file
                raise

    async def close(self):
        async with self.turn:
            self.mode = "closed"

    async def check(self):
        await self.run(lambda db: None)  # `transaction` takes the lock for writing

    async def append(self, records):
        small = [record for record in records if len(record.value) <= self.limit]
        async with self.turn:
            await self.run(lambda db: insert(db, small))
        return self.outcomes(records)

    async def append_dead(self, records):
        small = [record for record in records if len(record.value) <= self.limit]
        rows = [(record.key, record.value, packed(record.headers)) for record in small]
        await self.run(
            lambda db: db.executemany("INSERT INTO dead VALUES (?, ?, ?)", rows) and None
        )
        return self.outcomes(records)

    def outcomes(self, records):
        refused = api.Outcome(api.Status.REFUSED, "the record is too large for the log")
        stored = api.Outcome(api.Status.STORED)
        return [stored if len(record.value) <= self.limit else refused for record in records]

    async def ends(self):
        return await self.run(next_offsets)

    async def firsts(self):
        return await self.run(lambda db: {n: first_offset(db, n, 0) for n in next_offsets(db)})

    async def committed(self, group):
        return await self.run(lambda db: committed_offsets(db, group))

    async def backlog(self, group):
        return await self.run(lambda db: count_backlog(db, group))

    def reader(self, group, *, since=None):
        return TapeReader(self, group, since)

    async def run(self, work):
        return await asyncio.to_thread(self.transaction, work)

    def transaction(self, work):
        try:
            if self.create:
                self.path.touch(0o600)
            uri = f"{self.path.as_uri()}?mode={self.mode}"
            opened = sqlite3.connect(uri, self.timeout, isolation_level=None, uri=True)
            with contextlib.closing(opened) as db, db:
                if self.create:
                    db.executescript(SCHEMA)
                    self.create = False  # a file that disappears must not be created again
                db.execute("BEGIN IMMEDIATE")
                return work(db)  # the commit follows: the caller gets what is durable
        except (OSError, sqlite3.Error) as error:
            raise api.StorageUnavailable(f"{self.path}: {error}") from error


class TapeReader(api.LogReader):
    def __init__(self, log, group, since):
        self.log, self.group, self.since = log, group, since
        self.name = uuid.uuid4().hex
        self.opened = False
        self.offsets = {}  # partition → where this reader continues
        self.paused = set()

    async def open(self):
        self.opened = True
        await self.run(self.partitions)

    async def close(self):
        if self.opened:
            with contextlib.suppress(api.StorageUnavailable):
                leave = "DELETE FROM members WHERE team = ? AND name = ?"
                await self.run(lambda db: db.execute(leave, (self.group, self.name)) and None)
            self.opened = False

    async def read(self, *, max_records, max_bytes, wait):
        end = time.monotonic() + wait
        while True:
            batch, offsets = await self.run(lambda db: self.take(db, max_records, max_bytes))
            self.offsets = offsets  # only now: a call that is cancelled has read nothing
            if batch.records or batch.gaps or time.monotonic() >= end:
                return batch
            await asyncio.sleep(0.05)

    async def commit(self, offsets):
        def work(db):
            mine = self.partitions(db)  # another reader may have the others by now
            rows = [(self.group, number, offset) for number, offset in offsets.items()]
            rows = [row for row in rows if row[1] in mine]
            db.executemany("INSERT OR REPLACE INTO offsets VALUES (?, ?, ?)", rows)

        await self.run(work)

    async def rewind(self):
        await self.run(lambda db: None)
        self.offsets = {}

    def pause(self, partitions):
        self.paused.update(partitions)

    async def run(self, work):
        if not self.opened:
            raise api.StorageUnavailable("the reader is not open")
        return await self.log.run(work)

    def partitions(self, db):
        now = time.time()
        db.execute("INSERT OR REPLACE INTO members VALUES (?, ?, ?)", (self.group, self.name, now))
        db.execute("DELETE FROM members WHERE seen < ?", (now - SECONDS,))
        query = "SELECT name FROM members WHERE team = ? ORDER BY name"
        names = [name for (name,) in db.execute(query, (self.group,))]
        return [n for n in next_offsets(db) if names[n % len(names)] == self.name]

    def take(self, db, max_records, max_bytes):
        found, gaps, offsets = [], {}, {}
        committed = committed_offsets(db, self.group)
        for number in self.partitions(db):
            if number in self.paused:
                continue
            first = first_offset(db, number, 0)
            offset = self.offsets.get(number, committed.get(number))
            if offset is None:
                offset = first if self.since is None else first_offset(db, number, self.since)
            elif offset < first:
                gaps[number], offset = (offset, first), first
            offsets[number] = offset
            query = "SELECT * FROM records WHERE partition = ? AND offset >= ? ORDER BY offset"
            for _, at, appended_at, key, value, headers in db.execute(query, (number, offset)):
                record = api.LogRecord(key=key, value=value, headers=unpacked(headers))
                max_bytes -= record.size
                if len(found) == max_records or (found and max_bytes < 0):
                    break
                found.append(
                    api.ReadRecord(
                        partition=number, offset=at, appended_at=appended_at, record=record
                    )
                )
                offsets[number] = at + 1
        return api.Batch(records=found, gaps=gaps), offsets


def insert(db, records):
    offsets, now = next_offsets(db), time.time_ns() // 1_000_000
    for record in records:
        number = zlib.crc32(record.key) % len(offsets)  # the same in every process
        row = (number, offsets[number], now, record.key, record.value, packed(record.headers))
        db.execute("INSERT INTO records VALUES (?, ?, ?, ?, ?, ?)", row)
        offsets[number] += 1
    ends = [(offset, number) for number, offset in offsets.items()]
    db.executemany("UPDATE partitions SET next = ? WHERE number = ?", ends)


def next_offsets(db):
    return dict(db.execute("SELECT number, next FROM partitions"))


def first_offset(db, number, since):
    query = "SELECT min(offset) FROM records WHERE partition = ? AND appended_at >= ?"
    (offset,) = db.execute(query, (number, since)).fetchone()
    return next_offsets(db)[number] if offset is None else offset


def committed_offsets(db, group):
    return dict(db.execute("SELECT partition, offset FROM offsets WHERE team = ?", (group,)))


def count_backlog(db, group):
    committed, count, times, gaps = committed_offsets(db, group), 0, [], {}
    for number, end in next_offsets(db).items():
        first = first_offset(db, number, 0)
        offset = committed.get(number, first)
        if offset < first:
            gaps[number], offset = (offset, first), first
        count += end - offset
        query = "SELECT appended_at FROM records WHERE partition = ? AND offset >= ? LIMIT 1"
        times += [at for (at,) in db.execute(query, (number, offset))]
    oldest = min(times, default=None)
    return api.Backlog(records=count, oldest_at=oldest, retention=None, gaps=gaps)


def packed(headers):
    return json.dumps({name: value.decode("latin-1") for name, value in headers.items()})


def unpacked(headers):
    return {name: value.encode("latin-1") for name, value in json.loads(headers).items()}


@api.hookimpl
def engage_register_log(register):
    options = {"properties": {"path": {"type": "string", "minLength": 1}}, "required": ["path"]}
    register("tape", TapeLog, {**options, "type": "object", "additionalProperties": False})
