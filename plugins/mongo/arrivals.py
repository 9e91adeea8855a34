# SPDX-License-Identifier: Apache-2.0
"""The journal of arrivals: events in an order to which others are only added at the end.

An event has its place (``receivedAt``, ``_seq``) before its insert ends, and a process may stop in
between: an event can appear behind the place that a reader has reached. So who follows the events
reads the collection ``arrivals``. Its entries are numbered 1, 2, 3 …: who has read the last one, as
a majority has it, inserts the next, and the unique ``_id`` decides. Once a second, each process
enters the events that it acknowledged since, as *runs*: values of ``_seq``, which a process gives
in order. Entry 0 says where the journal began; what is older is read in the order of arrival.

Each process has a document in ``meta``, which it keeps fresh. It covers what the process may have
acknowledged and not entered: none of these events has a lower ``_seq`` than its ``before``, or a
lower time of receipt than its ``since``. If it is the same for 30 seconds, another process enters
what it finds, and deletes it. A process inserts and acknowledges nothing while its document is
older than ten: so one that was stopped makes a new one first. An event may be entered twice, and
none is left out.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import operator
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import orjson
from bson.datetime_ms import DatetimeMS
from bson.objectid import ObjectId
from pymongo.errors import DuplicateKeyError
from pymongo.read_concern import ReadConcern

from engage.api import MAX_TIME, Event, ForeignCursor, Page, StorageUnavailable
from engage.store.tables import MAX_PAGE_BYTES

from .connection import BATCH, MAX_ATTEMPTS, Connection
from .documents import Sequencer, below, decode_event
from .paging import ARRIVAL, arrived_after, cursor_of, parse_cursor
from .schema import ARRIVALS, EVENTS, META
from .stored_events import ERASED_TYPE

#: Seconds between two updates of the document of a process. After twice as long it must be updated
#: before anything is acknowledged, and after six times as long another process enters what is
#: missing.
BEAT: Final = 5.0
#: Milliseconds: before its document was updated, of which a process may receive events without
#: another update; and between the events of two entries that one query reads.
_LATE: Final = 60_000
#: Seconds in which the clocks of hosts may differ: events of that time when the journal began may
#: be read twice.
_SKEW: Final = 300
#: Seconds since an event was inserted in which a duplicate of it is entered: a crash may have cut
#: off its own entry.
_RECENT: Final = 3600
#: What a cursor has instead of the number of an entry while it reads what is older than entry 0.
_BEFORE: Final = -1


@dataclasses.dataclass(slots=True, eq=False)
class Run:
    """Events of one process, by their ``_seq``, with their times of receipt in milliseconds."""

    #: None of them has a lower ``_seq``.
    first: ObjectId
    last: ObjectId | None = None
    since: int = MAX_TIME
    until: int = 0
    count: int = 0

    def add(self, seq: ObjectId, at: int) -> None:
        """Add an event with a later ``_seq``."""
        self.last, self.count = seq, self.count + 1
        self.since, self.until = min(self.since, at), max(self.until, at)


def runs_of(events: Iterable[tuple[ObjectId, int]]) -> list[Run]:
    """Return the runs of events: one for each process.

    :param events: ``_seq`` and time of receipt.
    """
    runs: dict[bytes, Run] = {}
    for seq, at in sorted(events):
        runs.setdefault(_process_of(seq), Run(seq)).add(seq, at)
    return [*runs.values()]


class Arrivals:
    """Enters events, and reads them in the order of their entries."""

    def __init__(self, connection: Connection, sequence: Sequencer) -> None:
        self._connection = connection
        self._sequence = sequence
        #: The events that are being inserted, and those whose insert ended and that are not in the
        #: journal yet, with when they may be entered.
        self._running: list[Run] = []
        self._ended: list[tuple[float, Run]] = []
        #: When the document of this process was updated, and what it says of times of receipt.
        self._beat = float("-inf")
        self._since = 0
        self._before = _first_of(0)
        self._is_registered = False
        #: When to look for documents of dead processes next.
        self._look_at = float("-inf")
        #: Whether to enter what dead processes left: commands that only read do not.
        self.keeps = False
        #: The documents of other processes, and when each was first seen as it is.
        self._others: dict[str, tuple[Mapping[str, Any], float]] = {}

    async def create(self) -> None:
        """Begin the journal if there is none."""
        until = time.time_ns() // 1000 + _SKEW * 1_000_000
        with self._connection.calling() as db:
            if await db[EVENTS].find_one({}, {"_id": 1}) is None:
                until = 0
            begun = {"_id": 0, "store": os.urandom(8).hex(), "until": _first_of(until)}
            # Another process may have begun it, at this moment or before.
            with contextlib.suppress(DuplicateKeyError):
                await db[ARRIVALS].insert_one(begun)

    # ------------------------------------------------------------------------------- entering
    async def begin(self, run: Run) -> None:
        """Announce that events will be inserted. To be called within :meth:`Connection.calling`."""
        self._running.append(run)
        try:
            if run.since < self._since or time.monotonic() > self._beat + 2 * BEAT:
                await self._update()
        except BaseException:
            self._running.remove(run)
            raise

    async def end(self, run: Run, duplicates: Iterable[tuple[ObjectId, int]]) -> None:
        """Have the events entered that were inserted, and those that were stored before. To be
        called within :meth:`Connection.calling`, before they are acknowledged."""
        least = _first_of(time.time_ns() // 1000 - _RECENT * 1_000_000)
        recent = [pair for pair in duplicates if pair[0] > least and not self._has_entered(pair[0])]
        self._running.remove(run)
        self._ended += [(0.0, ended) for ended in (run, *runs_of(recent)) if ended.count]
        if time.monotonic() > self._beat + 2 * BEAT:
            await self._update()

    def _has_entered(self, seq: ObjectId) -> bool:
        """Return whether the process that gave an event its place is known to have entered it."""
        if (process := _process_of(seq)) == self._sequence.process:
            return seq < self._before
        other, _ = self._others.get(_name_of(process), (None, 0.0))
        return other is not None and seq < other["before"]

    def fail(self, run: Run) -> None:
        """Have the events entered later that were perhaps inserted: the driver may insert them
        until the time of the call is over."""
        if run in self._running:
            self._running.remove(run)
            self._ended.append((time.monotonic() + 2 * self._connection.timeout, run))

    async def enter(self) -> None:
        """Enter the events that were acknowledged, and those of processes that died. To be called
        within :meth:`Connection.calling`, at least every :data:`BEAT` seconds."""
        now = time.monotonic()
        await self._enter(now)
        if self._is_registered and now > self._beat + BEAT:
            await self._update()
        if now > self._look_at and (self.keeps or self._is_registered):
            self._look_at = now + BEAT
            await self._look_for_dead()

    async def close(self) -> None:
        """Enter the rest, so that no other process has to."""
        await self._enter(float("inf"))
        if self._is_registered:
            self._is_registered, self._beat = False, float("-inf")
            await self._connection.db[META].delete_one({"_id": self._name})

    async def _enter(self, until: float) -> None:
        """Enter the events that may be entered before a time."""
        runs = [run for at, run in self._ended if at <= until]
        await self._insert(runs)
        # Not before: the document of this process covers what the journal does not have.
        entered = {*runs}
        self._ended = [ended for ended in self._ended if ended[1] not in entered]
        self._before = self._least()

    async def _insert(self, runs: Sequence[Run]) -> None:
        for start in range(0, len(runs), BATCH):
            part = runs[start : start + BATCH]
            entry = {
                "at": DatetimeMS(time.time_ns() // 1_000_000),
                "count": sum(run.count for run in part),
                "since": DatetimeMS(min(run.since for run in part)),
                "until": DatetimeMS(max(run.until for run in part)),
                "runs": [{"first": run.first, "last": run.last} for run in part],
            }
            for _ in range(MAX_ATTEMPTS):
                number = await self._newest() + 1
                try:
                    await self._connection.db[ARRIVALS].insert_one({"_id": number, **entry})
                except DuplicateKeyError:
                    continue  # Another process was faster.
                break
            else:
                raise StorageUnavailable("too many processes add to the journal of arrivals")

    @property
    def _journal(self) -> Any:
        """The collection as a majority has it: what a failover undoes is not read."""
        return self._connection.db[ARRIVALS].with_options(read_concern=ReadConcern("majority"))

    @property
    def _name(self) -> str:
        return _name_of(self._sequence.process)

    @property
    def _left(self) -> list[Run]:
        """The events that are not entered."""
        return [*self._running, *(run for _, run in self._ended)]

    def _least(self) -> ObjectId:
        """Return the lowest ``_seq`` that an event of this process has which is not entered."""
        mine = (run.first for run in self._left if _process_of(run.first) == self._sequence.process)
        return min(mine, default=self._sequence())

    async def _update(self) -> None:
        """Write what this process may have acknowledged and not entered."""
        started = time.monotonic()
        own = self._left
        since = min([time.time_ns() // 1_000_000 - _LATE, *(run.since for run in own)])
        before = self._least()
        fields = {"since": DatetimeMS(since), "before": before}
        statement = {
            "q": {"_id": self._name},
            "u": {"$set": fields, "$inc": {"beat": 1}},
            "upsert": True,
        }
        await self._connection.update(META, [statement])
        self._beat, self._since, self._before = started, since, before
        self._is_registered = True

    async def _look_for_dead(self) -> None:
        """Enter what processes have left that no longer update their documents."""
        now = time.monotonic()
        query = {"_id": below("writer")}
        writers = {item["_id"]: item async for item in self._connection.db[META].find(query)}
        writers.pop(self._name, None)
        earlier, self._others = self._others, {}
        for name, writer in writers.items():
            before, at = earlier.get(name, (None, now))
            self._others[name] = (writer, at if before == writer else now)
            if before == writer and now > at + 6 * BEAT:
                await self._take_over(writer)

    async def _take_over(self, dead: Mapping[str, Any]) -> None:
        db, same = self._connection.db, {"_id": dead["_id"], "beat": dead["beat"]}
        # Another process that looks at the same moment goes on only if this one dies as well.
        mine = await db[META].update_one(same, {"$inc": {"beat": 1}})
        if not mine.matched_count:
            return
        process = bytes.fromhex(dead["_id"].removeprefix("writer:"))
        query = {"receivedAt": {"$gte": dead["since"]}, "_seq": {"$gte": dead["before"]}}
        left = [
            (event["_seq"], int(event["receivedAt"]))
            async for event in db[EVENTS].find(query, {"_id": 0, "_seq": 1, "receivedAt": 1})
            if _process_of(event["_seq"]) == process
        ]
        await self._insert(runs_of(left))
        await db[META].delete_one({**same, "beat": dead["beat"] + 1})

    async def expire(self, before: int) -> None:
        """Delete those of the oldest entries whose events have expired, but not the last one. To be
        called within :meth:`Connection.calling`."""
        kept = {"_id": {"$gt": 0, "$lt": await self._newest()}}
        cursor = self._connection.db[ARRIVALS].find(kept, {"until": 1}).sort([("_id", 1)])
        oldest = await cursor.limit(BATCH).to_list(None)
        if old := [entry["_id"] for entry in oldest if int(entry["until"]) < before]:
            await self._connection.db[ARRIVALS].delete_many({"_id": {"$in": old}})

    # -------------------------------------------------------------------------------- reading
    async def page(self, after: str | None, since: int | None, limit: int) -> Page[Event]:
        """Return a page of events; see :meth:`Storage.follow`."""
        of, number, place = _parse(after)
        with self._connection.calling(scan=True):
            begun, store = await self._identify()
            if of not in (None, store):
                raise ForeignCursor("the place is one of another store, or from before a restore")
            late = {} if since is None else {"$gte": DatetimeMS(since)}
            if number == _BEFORE:
                query: dict[str, Any] = {"_seq": {"$lte": begun["until"]}}
                query |= {"receivedAt": late} if late else {}
                events, last = await self._read(arrived_after(query, place), limit)
                if last is not None:
                    return Page(events, _cursor(store, _BEFORE, cursor_of(last)))
                return Page(events, _cursor(store, 0, None))
            condition = {"_id": {"$gt": number}, **({"until": late} if late else {})}
            cursor = self._journal.find(condition).sort([("_id", 1)]).limit(BATCH)
            entries = await cursor.to_list(None)
            if not entries:
                if await self._newest() < number:
                    raise ForeignCursor("the store was restored: it does not have this place")
                return Page((), _cursor(store, number, None))
            if entries[0]["_id"] > number + 1:
                place = None  # The entry that it was in has expired.
            part = _together(entries, limit)
            events, last = await self._read_entries(part, place, limit)
            if last is not None and len(part) > 1:
                # They are large: those of the first entry may be too many already.
                part = part[:1]
                events, last = await self._read_entries(part, place, limit)
            if last is None:
                return Page(events, _cursor(store, part[-1]["_id"], None))
            return Page(events, _cursor(store, part[0]["_id"] - 1, cursor_of(last)))

    async def _identify(self) -> tuple[Mapping[str, Any], str]:
        """Return entry 0, and what identifies the store: a restored one has another collection."""
        db = self._connection.db
        begun = await self._journal.find_one({"_id": 0})
        if begun is None:
            raise StorageUnavailable("the store has no journal of arrivals: start `engage serve`")
        reply = await db.command({"listCollections": 1, "filter": {"name": ARRIVALS}})
        info = [collection.get("info", {}) for collection in reply["cursor"]["firstBatch"]]
        same = [bytes(item["uuid"]).hex() for item in info if "uuid" in item]
        return begun, "-".join((begun["store"], *same))

    async def _newest(self) -> int:
        """Return the number of the last entry."""
        cursor = self._journal.find({}, {"_id": 1}).sort([("_id", -1)]).limit(1)
        (newest,) = await cursor.to_list(None)
        return int(newest["_id"])

    async def _read_entries(
        self, entries: Sequence[Mapping[str, Any]], place: str | None, limit: int
    ) -> tuple[list[Event], Mapping[str, Any] | None]:
        """Read the events of entries."""
        received = {
            "$gte": min((entry["since"] for entry in entries), key=int),
            "$lte": max((entry["until"] for entry in entries), key=int),
        }
        runs = [run for entry in entries for run in entry["runs"]]
        seqs = {"$gte": min(run["first"] for run in runs), "$lte": max(run["last"] for run in runs)}
        query = arrived_after({"receivedAt": received, "_seq": seqs}, place)
        return await self._read(query, limit, _Runs(runs))

    async def _read(
        self, query: Mapping[str, Any], limit: int, runs: _Runs | None = None
    ) -> tuple[list[Event], Mapping[str, Any] | None]:
        """Read events in the order of arrival, without those that were erased.

        :param runs: those that are wanted.
        :return: the events, and the last document if there are more.
        """
        events: list[Event] = []
        last, size = None, 0
        cursor = self._connection.db[EVENTS].find(query).sort(ARRIVAL)
        try:
            async for document in cursor.batch_size(max(2, min(limit, BATCH))):
                if runs is not None and document["_seq"] not in runs:
                    continue
                if len(events) >= limit or size > MAX_PAGE_BYTES:
                    return events, last
                event, last = decode_event(document), document
                size += len(event.body)
                if event.type != ERASED_TYPE:
                    events.append(event)
        finally:
            await cursor.close()
        return events, None


class _Runs:
    """Tells whether an event is in one of some runs."""

    def __init__(self, runs: Iterable[Mapping[str, ObjectId]]) -> None:
        #: Process → its runs, without overlaps.
        self._of: dict[bytes, list[tuple[ObjectId, ObjectId]]] = {}
        for run in sorted(runs, key=operator.itemgetter("first")):
            mine = self._of.setdefault(_process_of(run["first"]), [])
            first, last = run["first"], run["last"]
            if mine and first <= mine[-1][1]:
                first, last = mine[-1][0], max(last, mine.pop()[1])
            mine.append((first, last))

    def __contains__(self, seq: ObjectId) -> bool:
        runs = self._of.get(_process_of(seq), [])
        at = bisect.bisect_right(runs, seq, key=operator.itemgetter(0))
        return at > 0 and seq <= runs[at - 1][1]


def _process_of(seq: ObjectId) -> bytes:
    return seq.binary[7:]


def _name_of(process: bytes) -> str:
    return f"writer:{process.hex()}"


def _first_of(at: int) -> ObjectId:
    """Return a ``_seq`` that is less than those of a time in microseconds."""
    return ObjectId(at.to_bytes(7, "big") + bytes(5))


def _together(entries: Sequence[Mapping[str, Any]], limit: int) -> Sequence[Mapping[str, Any]]:
    """Return the first entries whose events one page and one query can have; at least one."""
    count, since, until = 0, int(entries[0]["since"]), int(entries[0]["until"])
    for index, entry in enumerate(entries):
        count += entry["count"]
        first, last = int(entry["since"]), int(entry["until"])
        if index and (count > limit or first > until + _LATE or last < since - _LATE):
            return entries[:index]
        since, until = min(since, first), max(until, last)
    return entries


def _cursor(store: str, number: int, place: str | None) -> str:
    return orjson.dumps([store, number, place]).decode()


def _parse(cursor: str | None) -> tuple[str | None, int, str | None]:
    """Return the store of a cursor, the last entry that was read, and the place in the next one.

    :raises ValueError: if it is not a cursor.
    """
    if cursor is None:
        return None, _BEFORE, None
    values = orjson.loads(cursor)
    if not isinstance(values, list) or [type(value) for value in values[:2]] != [str, int]:
        raise ValueError("not a cursor of this storage")
    store, number, place = values
    if place is not None:
        parse_cursor(place)
    return store, number, place
