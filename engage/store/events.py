# SPDX-License-Identifier: Apache-2.0
"""Events, each identity once, and the marks of those that were erased."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import Any, Final

from engage.api import (
    EVENT_TYPES,
    Event,
    EventFilter,
    ForeignCursor,
    Outcome,
    Page,
    Status,
    StorageUnavailable,
    changes_of,
)
from engage.store.changes import EncodedChange, apply, encode
from engage.store.erasures import NEWEST, covered, mark_of
from engage.store.keys import (
    is_text,
)
from engage.store.pages import cursor_of, place_of
from engage.store.people import Wrong, forget
from engage.store.profiles import KNOWN_LINKS, USER, Person
from engage.store.tables import (
    MAX_ROWS,
    Add,
    Context,
    Delete,
    Executor,
    Get,
    Key,
    Pages,
    Place,
    Put,
    Recall,
    Row,
    Steps,
    Table,
    nothing,
    plan,
)

#: What erasing and expiry need of an event: it is read without the body.
HEADS: Final = Table(
    "events",
    {
        **dict.fromkeys(
            (
                *("workspace", "origin", "message_id"),
                *("type", "user_id", "anonymous_id", "name"),
            ),
            str,
        ),
        "received_at": int,
    },
    key=3,
    indexes=(("received_at",),),
    arrival=True,
    followed=True,
)
#: An erased event leaves a row with its mark as the body. It is found by the key of the event, but
#: an executor need not return that.
EVENTS: Final = dataclasses.replace(HEADS, types={**HEADS.types, "timestamp": int, "body": bytes})
#: Numbers of the store itself. ``incarnation`` is another one for each store, also for one that is
#: restored: the same place in two of them has other events behind it.
STORE: Final = Table("store", {"name": str, "value": int}, key=1)
#: The type of the row that an erased event leaves.
ERASED_TYPE: Final = "erased"

#: The outcome of every newly stored event: one object, because there are many of them.
STORED: Final = Outcome(Status.STORED)

#: Databases limit the size of a value; no event comes near this one.
_MAX_BYTES: Final = 256 * 1024 * 1024
_INTEGERS: Final = range(-(2**63), 2**63)
#: The types of events that may change more than a link.
_CHANGING: Final = frozenset({"identify", "group", "alias"})

_TYPE, _USER_ID, _ANONYMOUS_ID, _RECEIVED_AT, _BODY = map(
    EVENTS.columns.index, ("type", "user_id", "anonymous_id", "received_at", "body")
)

#: An event, and the changes that it makes.
Changing = tuple[Event, Sequence[EncodedChange]]

_values: Final = attrgetter("workspace_id", *EVENTS.columns[1:])
_received: Final = itemgetter(_RECEIVED_AT)


class UnstorableError(Exception):
    """This event can never be stored; the message is the reason, for the client."""


def row_of(event: Event) -> Row:
    """Return the row of an event.

    :raises UnstorableError: if no store can have one of the values.
    """
    row: Row = _values(event)
    try:
        # One call for all: a lone surrogate in any of them is one in the whole.
        "".join(filter(None, row[:7])).encode()
    except UnicodeEncodeError:
        raise UnstorableError("a text contains a lone surrogate, not a character") from None
    if event.received_at not in _INTEGERS or event.timestamp not in _INTEGERS:
        raise UnstorableError("a time does not fit in 64 bits")
    if len(event.body) > _MAX_BYTES:
        raise UnstorableError(f"the event is longer than {_MAX_BYTES} bytes")
    return row


def event_of(row: Row) -> Event:
    """Return the event of a row."""
    workspace, origin, message_id, type_, user_id, visitor, name, received_at, at, body, *_ = row
    return Event(
        workspace_id=workspace,
        origin=origin,
        message_id=message_id,
        type=type_,
        user_id=user_id,
        anonymous_id=visitor,
        name=name,
        received_at=received_at,
        timestamp=at,
        body=body,
    )


def changing(event: Event) -> Changing:
    """Return an event with its changes.

    :raises UnstorableError: if the body does not fit the type.
    """
    try:
        return event, [encode(change) for change in changes_of(event)]
    except Exception:
        # The sender made the body: an error in it must not affect the other events.
        raise UnstorableError("the event's body does not fit its type") from None


def _named(rows: Sequence[Row]) -> set[Key]:
    """Return the people and groups that events may change."""
    named: set[Key] = set()
    for row in rows:
        space, user, visitor = row[0], row[_USER_ID], row[_ANONYMOUS_ID]
        changes = row[_TYPE] in _CHANGING
        if changes or None not in (user, visitor):
            named.update((space, name) for name in (user, visitor) if name is not None)
        if row[_TYPE] == "group":
            named.add((space, "groups", ""))  # The id is in the body.
        if changes and user is None:
            named.add((space, "visitors", ""))  # They are counted.
    return named


@plan(locks=_named)
def write(rows: Sequence[Row]) -> Steps[tuple[dict[int, Outcome], int]]:
    """Store those of some events that are new, and apply their changes.

    Each event is examined by itself: one that cannot be stored does not affect the others. Of two
    events with one identity, the first is stored, and the other is a duplicate of it.

    :return: index → outcome, of those that are not newly stored, and how many changes of profiles
        were dropped.
    """
    newest = (yield Recall(NEWEST)).get(NEWEST)
    erased = newest is None or min(map(_received, rows), default=newest) < newest
    if erased:
        rows = yield from _without_erased(rows)
    others: dict[int, Outcome] = {}
    first: dict[Key, Row] = {}
    # None: at most a link. It is usually known, so the changes are computed when they are needed.
    changes: dict[Key, Changing | None] = {}
    for index, row in enumerate(rows):
        key = row[:3]
        if key in first:
            continue
        if row[_TYPE] in _CHANGING:
            try:
                changes[key] = changing(event_of(row))
            except UnstorableError as reason:
                others[index] = Outcome(Status.REFUSED, str(reason))
                continue
        elif row[_USER_ID] is not None and row[_ANONYMOUS_ID] is not None:
            changes[key] = None
        first[key] = row
    stored: dict[Key, Row] = yield Add(EVENTS, first.values())
    if stored or erased or len(first) + len(others) < len(rows):
        _add_duplicates(others, rows, first, stored)
    if not changes:
        return others, 0
    cached = yield Recall(KNOWN_LINKS)
    changed = []
    for key, change in changes.items():
        if key in stored:
            continue
        if change is None:
            row = first[key]
            link, at = ((row[0], USER, row[_USER_ID]), row[_ANONYMOUS_ID]), row[_RECEIVED_AT]
            if cached.get(link, at) < at:
                continue
            change = changing(event_of(row))
        changed.append(change)
    return others, (yield from apply(changed)) if changed else 0


def _add_duplicates(
    others: dict[int, Outcome], rows: Sequence[Row], first: dict[Key, Row], stored: dict[Key, Row]
) -> None:
    """Add the outcomes of duplicates: of events that were stored before, and of earlier rows."""
    met: set[Key] = set()
    for index, row in enumerate(rows):
        if index not in others:
            key = row[: EVENTS.key]
            if key in stored:
                others[index] = Outcome(Status.DUPLICATE, stored=stored[key][-1])
            elif key in met or row[_TYPE] == ERASED_TYPE:
                others[index] = Outcome(Status.DUPLICATE, stored=first[key][_BODY])
            met.add(key)


def _without_erased(rows: Sequence[Row]) -> Steps[Sequence[Row]]:
    """Return rows with the marks of those events that an erasure covers in their place."""
    gone = yield from covered(
        [(row[0], row[_USER_ID], row[_ANONYMOUS_ID], row[_RECEIVED_AT]) for row in rows]
    )
    key = (yield Context()).erasures_key
    return [
        _erased(row[:3], row[_RECEIVED_AT], mark_of(event_of(row), key)) if erased else row
        for row, erased in zip(rows, gone, strict=True)
    ]


def _erased(key: Key, received_at: int, mark: bytes) -> Row:
    """Return the row that an erased event leaves."""
    return (*key, ERASED_TYPE, None, None, None, received_at, 0, mark)


@plan()
def find(workspace_id: str, origin: str, message_id: str) -> Steps[Event | None]:
    """Return the event of an identity."""
    rows = yield Get(EVENTS, [(workspace_id, origin, message_id)])
    events = map(event_of, rows.values())
    return next((event for event in events if event.type != ERASED_TYPE), None)


@plan()
def scan(criteria: EventFilter, after: str | None, limit: int, reverse: bool) -> Steps[Page[Event]]:
    """Return a page in the order of arrival, or newest first."""
    types = [x for x in EVENT_TYPES if criteria.type in (None, x)]  # None is an erased event.
    one_of: dict[Any, Sequence[str]] = {"type": types}
    if criteria.ids is not None:
        one_of["user_id", "anonymous_id"] = [*filter(is_text, criteria.ids)]
    equal = {name: getattr(criteria, name) for name in ("user_id", "name", "origin")}
    page = yield Pages(
        EVENTS,
        limit,
        equal=_given(workspace=criteria.workspace_id, **equal),
        one_of=one_of,
        least=_given(received_at=criteria.since),
        below=_given(received_at=criteria.until),
        begins=criteria.begins,
        after=_place_of(after),
        reverse=reverse,
        most=MAX_ROWS,
    )
    events = [*map(event_of, page.rows)]
    if criteria.begins or criteria.ids is not None:
        events = [*filter(criteria.matches, events)]
    return Page(events, str(page.place[0]) if page.more else None)


@plan()
def follow(after: str | None, since: int | None, limit: int) -> Steps[Page[Event]]:
    """Return a page in the order of arrival; see :meth:`~engage.store.facade.Storage.follow`.

    Only for an executor with one writer: it gives numbers in the order in which events are visible.
    """
    stored = yield Get(STORE, [("incarnation",)])
    if not stored:
        raise StorageUnavailable(
            "nothing has written to the store since the upgrade: start a server"
        )
    incarnation = stored["incarnation",][-1]
    its, number = place_of(after, int, int) or (incarnation, 0)
    if its != incarnation:
        raise ForeignCursor("the place is one of another store, or from before a restore")
    place = None if after is None else (number,)
    least = _given(received_at=since) if after is None else {}
    page = yield Pages(EVENTS, limit, least=least, after=place)
    events = [event_of(row) for row in page.rows if row[_TYPE] != ERASED_TYPE]
    return Page(events, cursor_of((incarnation, *(page.place or (0,)))))


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _place_of(cursor: str | None) -> Place | None:
    if cursor is None:
        return None
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
        raise ValueError("not a cursor of this store")
    return (int(cursor),)


@plan(frees=True, locks=nothing)
def expire(before: int, limit: int, force: bool) -> Steps[int]:
    """Delete the oldest events, and return how many; see :meth:`Events.expire`."""
    if not force:
        newest = yield Pages(HEADS, 1, by=("received_at",), reverse=True)
        if any(row[-1] < before for row in newest.rows):
            return 0
    oldest = Pages(HEADS, limit, by=("received_at",), high=before)
    deleted: int = yield Delete(HEADS, oldest)
    return deleted


@plan(frees=True, overwrites=True)
def erase(identities: Sequence[tuple[str, str, str]], marks: Sequence[bytes]) -> Steps[int]:
    """Leave marks in place of events, and return how many events there were."""
    stored = yield Get(HEADS, identities)
    rows = [
        _erased(key, stored[key][-1], mark)
        for key, mark in dict(zip(identities, marks, strict=True)).items()
        if key in stored and stored[key][_TYPE] != ERASED_TYPE
    ]
    yield Put(EVENTS, rows)
    return len(rows)


@plan()
def reapply(rows: Sequence[Row]) -> Steps[None]:
    """Apply the changes of stored events again, but not of those that an erasure covers."""
    left = yield from _without_erased(rows)
    yield from apply([changing(event_of(row)) for row in left if row[_TYPE] != ERASED_TYPE])


@plan()
def rebuild(person: Person, wrong: Wrong, events: Sequence[tuple[str, str, str]]) -> Steps[None]:
    """Delete what no event made of somebody, and apply events again; see :meth:`Events.rebuild`."""
    yield from forget(person, wrong)
    stored = yield Get(EVENTS, events)
    left = [event_of(row) for row in stored.values() if row[_TYPE] != ERASED_TYPE]
    yield from apply([*map(changing, left)])


# --------------------------------------------------------------------------------------- storage
class Events(Executor):
    """Writing, finding, reading and expiring events."""

    #: How many changes were dropped since this process opened the store.
    dropped_changes: int = 0

    async def write(self, events: Sequence[Event]) -> Sequence[Outcome]:
        """Store events, and return when they are durable.

        It is idempotent by :attr:`Event.identity`, across processes and hosts, by a unique key in
        the store. If two of ``events`` have one identity, the first is stored. It is not atomic:
        after an exception, the caller may write the whole batch again.

        It applies the changes (:func:`~engage.api.changes_of`) of each newly stored event before
        it returns. It never applies those of a refused event or a duplicate, but it completes the
        changes of the *stored* event if a crash had interrupted them.

        :return: one outcome for each event, in their order.
        :raises StorageUnavailable: if at least one event is not durable.
        """
        outcomes = [STORED] * len(events)
        rows: list[Row] = []
        indexes: list[int] = []
        for index, event in enumerate(events):
            try:
                rows.append(row_of(event))
                indexes.append(index)
            except UnstorableError as reason:
                outcomes[index] = Outcome(Status.REFUSED, str(reason))
        others, dropped = await self.run(write, rows) if rows else ({}, 0)
        self.dropped_changes += dropped
        for at, outcome in others.items():
            outcomes[indexes[at]] = outcome
        return outcomes

    async def find(self, workspace_id: str, origin: str, message_id: str) -> Event | None:
        """Return the event that is stored under this identity, or ``None``."""
        if not is_text(workspace_id, origin, message_id):
            return None
        return await self.read(find, workspace_id, origin, message_id)

    async def scan(self, criteria: EventFilter, *, after: str | None, limit: int) -> Page[Event]:
        """Return one page of events, in order of arrival (within a write, in their order).

        Every event that was acknowledged before the first page was read is returned exactly once.
        The cursor is opaque, survives a restart, and holds no lock between pages.

        :param after: the cursor of the previous page; ``None`` for the first page.
        :param limit: the maximum number of items.
        """
        return await self.read(scan, criteria, after, limit, False)

    async def recent(
        self, criteria: EventFilter, *, before: str | None = None, limit: int
    ) -> Page[Event]:
        """Return one page of events, newest first (the reverse of the order of arrival).

        One call looks at a bounded number of events and takes a bounded time: a page with a
        cursor may have fewer items than ``limit``, or none. The cursor is a place in the order of
        arrival: another filter may continue there.

        :param before: the cursor of the previous page; ``None`` for the newest events.
        :param limit: the maximum number of items.
        """
        return await self.read(scan, criteria, before, limit, True)

    async def follow(
        self, *, after: str | None, since: int | None = None, limit: int
    ) -> Page[Event]:
        """Return one page of events in an order to which others are only added at the end.

        :meth:`scan` may pass an event whose write ends later. This does not: an event that is
        acknowledged after a page was read is behind the cursor of that page, however many processes
        write, also if one of them is stopped or killed. An event may be returned twice after a
        fault. An event is returned at the latest two seconds after it was acknowledged, or 40 after
        its process was killed.

        :param after: the cursor of a page of any process, maybe long ago; ``None``: from the first
            event on.
        :param since: if ``after`` is ``None``, events that were received earlier (milliseconds
            since 1970 UTC) may be left out.
        :param limit: the maximum number of items.
        :return: a page always has a cursor. The end is reached when it is ``after`` and there are
            no items.
        :raises ForeignCursor: if the cursor is not one of this store.
        :raises ValueError: if it is not a cursor.
        """
        return await self.read(follow, after, since, limit)

    async def expire(self, before: int, *, limit: int, force: bool = False) -> int:
        """Delete events with ``received_at`` below ``before`` (milliseconds), oldest first.

        :param limit: the maximum number of events, so that one call never stalls writes.
        :param force: delete even if the newest event is below ``before`` too. Otherwise nothing is
            deleted in that case, because the clock may have jumped.
        :return: how many events were deleted.
        """
        return await self.run(expire, before, limit, force)

    async def erase_events(self, events: Sequence[Event], marks: Sequence[bytes]) -> int:
        """Erase events, at most 500, and return how many were stored.

        Only the identity, the time of receipt and the mark are kept, and expire with it. Nothing is
        found or scanned under the identity any more, but an event that has it is a duplicate, of
        which :attr:`Outcome.stored` is always the mark. The changes that it made stay.

        :param marks: one for each event, of at most 128 bytes, which begins with :data:`ERASED` or
            is empty. The core compares it with what arrives later. An event that is erased already
            keeps its own.
        """
        return await self.run(erase, [event.identity for event in events], marks)

    async def reapply(self, events: Sequence[Event]) -> None:
        """Apply the changes of stored events again: an erased profile had them."""
        await self.run(reapply, [*map(row_of, events)])

    async def rebuild(
        self, person: Person, wrong: Wrong, events: Sequence[tuple[str, str, str]]
    ) -> None:
        """Delete what no event made of a user, visitor or group, unless it was changed meanwhile,
        and apply the changes of events again that are stored. Choices and their times stay.

        :param events: their identities, at most a thousand; others of the person in other calls.
        """
        await self.run(rebuild, person, wrong, events)
