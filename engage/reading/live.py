# SPDX-License-Identifier: Apache-2.0
"""The newest events and dead letters, read once a second: for all tabs of the console, and for
``engage tail``.

It reads the store only while someone looks, and ten open tabs cost the store as much as one. While
more events arrive than one read returns, it also reads the newest of each workspace that someone
looks at: one that is flooded does not hide another. A row is durable, because it was read from the
store.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

import orjson

from engage.api import (
    DeadLetter,
    Event,
    EventFilter,
    StorageUnavailable,
    begins_with,
)
from engage.monitoring.sampler import REFUSED_RECORD
from engage.monitoring.visible import LONGEST, cell, visible
from engage.reading.refused import Refused, refused_of
from engage.store.facade import Storage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["RING", "Live", "Reader", "Row", "RowFilter", "quoted", "row_of_event", "row_of_letter"]

#: Rows that are kept of a workspace.
RING: Final = 500
#: Events, and dead letters, that one read of the store returns.
PAGE: Final = 200
#: Seconds for a read. If it takes longer, the page shows that the storage does not answer.
READ_SECONDS: Final = 2.0
#: Seconds between two reads, and seconds after the last look until they stop.
INTERVAL: Final = 1.0
PATIENCE: Final = 6.0

Identity = tuple[str, ...]
_Item = TypeVar("_Item", Event, DeadLetter)
_Result = TypeVar("_Result")


class Reader(Protocol):
    """Makes the calls of the store."""

    async def read(self, call: Awaitable[_Result], *, within: float | None = None) -> _Result:
        """Await a call of the store.

        :param within: seconds that it may take; ``None``: as many as any call.
        :raises StorageUnavailable: if the store does not answer in time.
        """


class Texts(NamedTuple):
    """The texts of an event by which people look for it, as they were sent."""

    name: str | None = None
    user_id: str | None = None
    anonymous_id: str | None = None
    message_id: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the pages Live and Events."""

    #: 1, 2, … in the order in which the rows were read; 0 outside of the ring.
    n: int = 0
    #: ``stored`` or ``rejected``.
    status: str
    #: ``received_at``.
    at: int
    workspace_id: str
    origin: str
    #: The message id of an event, the id of a dead letter.
    id: str
    type: str
    name: str
    user: str
    #: The id of the write key, or the name of the webhook provider.
    key: str
    #: Part of the event on one line; for a dead letter, why it was refused.
    preview: str
    #: The others are for a page: hidden characters are escaped, and long texts are cut.
    texts: Texts
    #: What the row shows; ``None`` in a ring that does not keep it.
    item: Event | DeadLetter | None = dataclasses.field(default=None, compare=False, repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Return the row for ``live.json``."""
        shown = ("n", "status", "at", "origin", "id", "type", "name", "user", "key", "preview")
        return {name: getattr(self, name) for name in shown}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowFilter:
    """Which rows a page shows; ``""`` means any.

    A name and a user are given by their beginnings (:func:`begins_with`), or whole and in quotation
    marks.
    """

    workspace_id: str
    status: str = ""
    type: str = ""
    name: str = ""
    key: str = ""
    user: str = ""

    def matches(self, row: Row) -> bool:
        """Return whether a row is wanted."""
        return (
            row.workspace_id == self.workspace_id
            and self.status in ("", row.status)
            and self.type in ("", row.type)
            and _fits(self.name, row.name)
            and self.key in ("", row.key)
            and _fits(self.user, row.user)
        )


def quoted(typed: str) -> str | None:
    """Return the text in quotation marks; ``None`` if there are none around it."""
    whole = len(typed) > 1 and typed[0] == typed[-1] == '"'
    return typed[1:-1] if whole else None


def _fits(typed: str, text: str) -> bool:
    whole = quoted(typed)
    return begins_with(text, typed) if whole is None else text == whole


def summary(values: Any) -> str:
    """Return the beginning of an object as text for a row: ``sku A-32 · price 168.76``."""
    parts: list[str] = []
    length = 0
    for name, value in values.items() if isinstance(values, dict) else ():
        if value == "":
            continue
        text = value if isinstance(value, str) else orjson.dumps(value).decode("utf-8", "replace")
        parts.append(f"{name[:LONGEST]} {text[:LONGEST]}")
        length += len(parts[-1])
        if length > LONGEST:
            break
    return cell(" · ".join(parts))


def row_of_event(event: Event) -> Row:
    """Return the row of a stored event."""
    document: Mapping[str, Any] = {}
    with contextlib.suppress(ValueError):
        document = event.document()
    shown = document.get("properties") or document.get("traits")
    if event.type == "group":
        shown = {"groupId": document.get("groupId"), **(document.get("traits") or {})}
    elif event.type == "alias":
        shown = {"previousId": document.get("previousId")}
    return Row(
        status="stored",
        at=event.received_at,
        workspace_id=event.workspace_id,
        origin=event.origin,
        id=event.message_id,
        type=event.type,
        name=cell(event.name or ""),
        user=cell(event.user_id or event.anonymous_id or ""),
        key=visible(document.get("writeKeyId") or event.origin),
        preview=summary(shown),
        texts=Texts(event.name, event.user_id, event.anonymous_id, event.message_id),
        item=event,
    )


def row_of_letter(letter: DeadLetter) -> Row:
    """Return the row of a dead letter."""
    document: Any = None
    if not letter.truncated:
        with contextlib.suppress(ValueError):
            document = orjson.loads(letter.item)
    given = document if isinstance(document, dict) else {}
    kind = letter.operation if letter.operation != "batch" else None
    kind = kind or given.get("type")
    name = given.get("event") or given.get("name")
    name = name if isinstance(name, str) else None
    return Row(
        status="rejected",
        at=letter.received_at,
        workspace_id=letter.workspace_id,
        origin=letter.origin,
        id=letter.id,
        type=cell(kind) if isinstance(kind, str) else "",
        name=cell(name or ""),
        user=cell(letter.user_id or letter.anonymous_id or ""),
        key=visible(letter.write_key_id or letter.origin),
        preview=cell(letter.message),
        texts=Texts(name, letter.user_id, letter.anonymous_id, letter.message_id),
        item=letter,
    )


class _Ring:
    """The newest rows of one workspace."""

    def __init__(self) -> None:
        self.rows: collections.deque[Row] = collections.deque(maxlen=RING)
        #: The events and letters that were read last, oldest first; others are new.
        self.events: dict[Identity, None] = {}
        self.letters: dict[Identity, None] = {}
        #: When someone looked last.
        self.looked = -PATIENCE
        #: Whether it has been read, and whether it was in the last read of the store.
        self.primed = self.complete = False
        #: n of the newest row when more came than one read returns.
        self.gap = 0


class Live:
    """The rings of the newest rows, one for each workspace, and the task that fills them.

    :param clock: the time in seconds, for the pauses.
    :param keep_items: whether rows keep whole events; the console needs the memory otherwise.
    """

    def __init__(
        self,
        store: Storage,
        reader: Reader,
        *,
        clock: Callable[[], float] = time.monotonic,
        keep_items: bool = False,
    ) -> None:
        self._keep_items = keep_items
        self._store = store
        self._reader = reader
        self._clock = clock
        #: By workspace.
        self._rings: collections.defaultdict[str, _Ring] = collections.defaultdict(_Ring)
        #: What the last reads of all workspaces returned.
        self._newest: set[Identity] = set()
        #: The number of the newest row; rows with a greater one come later.
        self.last = 0
        self._polled = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._refused: list[Refused] = []
        #: Changes when :meth:`refused` does.
        self.refused_version = -1
        #: How often the store was read.
        self.polls = 0
        #: Why the store could not be read the last time; ``None``: it could.
        self.error: str | None = None

    async def look(self, workspace_id: str) -> None:
        """Note that someone looks: the ring is filled, and kept up to date for some seconds."""
        ring = self._rings[workspace_id]
        ring.looked = self._clock()
        if self._task is None or self._task.done() or not (ring.complete or self.error):
            await self._poll()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop reading. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    def rows(self, row_filter: RowFilter, after: int = 0) -> list[Row]:
        """Return the rows that are wanted, newest first.

        :param after: only rows with a greater ``n``.
        """
        rows = self._rings[row_filter.workspace_id].rows
        matches = [row for row in rows if row.n > after and row_filter.matches(row)]
        return sorted(matches, key=lambda row: (row.at, row.n), reverse=True)

    def has_gap(self, workspace_id: str, after: int) -> bool:
        """Return whether more events came since a row than there are rows of.

        :param after: the number of a row.
        """
        return self._rings[workspace_id].gap > after

    def refused(self, workspace_id: str) -> list[Refused]:
        """Return the last refused requests of a workspace, and those of no known one."""
        return [row for row in self._refused if row.workspace_id in ("", workspace_id)]

    def oldest(self, workspace_id: str) -> int | None:
        """Return ``at`` of the oldest row; ``None`` if there is none."""
        return min((row.at for row in self._rings[workspace_id].rows), default=None)

    def _is_watched(self, ring: _Ring) -> bool:
        return self._clock() - ring.looked < PATIENCE

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL)
            if not any(map(self._is_watched, self._rings.values())):
                return
            await self._poll()

    async def _poll(self) -> None:
        async with self._polled:
            self.polls += 1
            try:
                newest = await self._read(None)
                # A full page that has nothing of the page before lacks some: those of a quiet
                # workspace may be among them.
                more = any(len(page) >= PAGE and self._newest.isdisjoint(page) for page in newest)
                for workspace_id, ring in list(self._rings.items()):
                    if not self._is_watched(ring):
                        ring.complete = False
                    elif more or not ring.complete:
                        self._add(workspace_id, ring, *await self._read(workspace_id))
                    else:
                        self._add(workspace_id, ring, *newest)
                self._newest = {identity for page in newest for identity in page}
                await self._read_refused()
            except StorageUnavailable as error:
                self.error = str(error)
                return
            self.error = None

    async def _read(
        self, workspace_id: str | None
    ) -> tuple[dict[Identity, Event], dict[Identity, DeadLetter]]:
        store, criteria = self._store, EventFilter(workspace_id=workspace_id)
        page = await self._reader.read(store.recent(criteria, limit=PAGE), within=READ_SECONDS)
        events: dict[Identity, Event] = {event.identity: event for event in page.items}
        call = store.recent_dead_letters(workspace_id, limit=PAGE)
        kept = await self._reader.read(call, within=READ_SECONDS)
        return events, {("letter", letter.workspace_id, letter.id): letter for letter in kept.items}

    async def _read_refused(self) -> None:
        store = self._store
        version = await self._reader.read(
            store.records_version(REFUSED_RECORD), within=READ_SECONDS
        )
        if version != self.refused_version:
            page = await self._reader.read(store.list_records(REFUSED_RECORD, limit=100))
            self._refused = refused_of(page.items)
            self.refused_version = version

    def _add(
        self,
        workspace_id: str,
        ring: _Ring,
        events: dict[Identity, Event],
        letters: dict[Identity, DeadLetter],
    ) -> None:
        stored = [row_of_event(event) for event in _new(ring.events, events, workspace_id)]
        rejected = [row_of_letter(letter) for letter in _new(ring.letters, letters, workspace_id)]
        # Of rows with one time, the last one stored is the newest.
        rows = sorted(rejected + stored, key=lambda row: row.at)
        for row in rows:
            self.last += 1
            item = row.item if self._keep_items else None
            ring.rows.append(dataclasses.replace(row, n=self.last, item=item))
        if ring.primed and PAGE in (len(stored), len(rejected)):
            ring.gap = self.last
        ring.primed = ring.complete = True


def _new(
    seen: dict[Identity, None], items: dict[Identity, _Item], workspace_id: str
) -> list[_Item]:
    """Return the items of a workspace that were not seen yet, oldest first, and remember them.

    :param items: newest first.
    """
    new = {
        key: item
        for key, item in reversed(items.items())
        if key not in seen and item.workspace_id == workspace_id
    }
    seen.update(dict.fromkeys(new))
    # A page never reaches back beyond these.
    for key in list(seen)[: -2 * PAGE]:
        del seen[key]
    return list(new.values())
