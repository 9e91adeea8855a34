# SPDX-License-Identifier: Apache-2.0
"""Read the records of a store as JSON documents, which are the same for every storage.

Times are in RFC 3339, UTC, with milliseconds. Records are streamed, one page of the store at a
time.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Final, Literal, NamedTuple

import orjson

from engage.api import (
    EngageError,
    Event,
    EventFilter,
    Kind,
    Page,
    Subject,
    render_time,
)
from engage.errors import quote
from engage.reading.scans import all_pages
from engage.store.facade import Storage

__all__ = [
    "KINDS",
    "Record",
    "RecordKind",
    "Selection",
    "as_line",
    "export",
    "render",
]

RecordKind = Literal[
    "events",
    "users",
    "visitors",
    "groups",
    "subscriptions",
    "subscription-history",
    "suppressions",
    "dead-letters",
]


class _Kind(NamedTuple):
    #: The method of the storage that scans such records.
    scan: str
    #: The filters of :class:`Selection` that apply, and the members of their JSON documents, which
    #: are attributes of the record. Events have a document of their own.
    filters: str
    members: str


_MOST: Final = "workspace since user"
_USER: Final = "workspaceId userId traits createdAt updatedAt anonymousIds groups"
_VISITOR: Final = "workspaceId anonymousId userId traits createdAt updatedAt groups"
_GROUP: Final = "workspaceId groupId traits"
_CHOICE: Final = "workspaceId userId anonymousId groupId subscribed updatedAt"
_CHANGE: Final = (
    "workspaceId userId anonymousId groupId changeId at how before after secret userAgent address"
)
_SUPPRESSION: Final = "workspaceId channel address groupId reason at lifted how sourceId"
_LETTER: Final = (
    "workspaceId id receivedAt origin writeKeyId userId anonymousId messageId reason message errors"
    " item truncated headers"
)
#: How the records of a kind are read and rendered.
KINDS: Final[Mapping[RecordKind, _Kind]] = {
    "events": _Kind("scan", "workspace since type user", ""),
    "users": _Kind("scan_users", _MOST, _USER),
    "visitors": _Kind("scan_visitors", _MOST, _VISITOR),
    "groups": _Kind("scan_groups", "workspace", _GROUP),
    "subscriptions": _Kind("scan_subscriptions", _MOST, _CHOICE),
    "subscription-history": _Kind("history", _MOST, _CHANGE),
    "suppressions": _Kind("scan_suppressions", "workspace since", _SUPPRESSION),
    "dead-letters": _Kind("scan_dead_letters", _MOST, _LETTER),
}

#: Characters that JSON allows in strings and that Unicode treats as line ends. They are escaped, so
#: that readers which split by Unicode line ends see one line for each record.
_LINE_ENDS: Final = tuple(
    (character.encode(), f"\\u{ord(character):04x}".encode()) for character in "\x85\u2028\u2029"
)

_CAPITAL: Final = re.compile("[A-Z]")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The records to export; ``None`` means any."""

    workspace: str | None = None
    #: Milliseconds since 1970 UTC, inclusive; compared with ``receivedAt`` of events and dead
    #: letters, and with ``updatedAt`` or ``at`` of other records.
    since: int | None = None
    #: Type of event.
    type: str | None = None
    user: str | None = None
    #: The cursor up to which an earlier export of the same selection has read.
    after: str | None = None
    #: Of events: go on from ``after`` without missing any, see :meth:`Storage.follow`, and call
    #: this with each cursor when the records before it were taken.
    on_cursor: Callable[[str], None] | None = None

    def includes(self, item: Any) -> bool:
        """Return whether a record matches ``since`` and ``user``, if they apply to its kind."""
        users = (None, getattr(item, "user_id", None))
        return _at(item) >= (self.since or 0) and self.user in users


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """One line of an export."""

    #: Compact UTF-8 JSON of an object, without any character that Unicode treats as a line end.
    json: bytes
    #: When it arrived or changed, in milliseconds since 1970 UTC; 0 if that is unknown.
    at: int


async def export(
    store: Storage,
    kind: RecordKind,
    selection: Selection,
    left_out: Callable[[str], None] | None = None,
) -> AsyncGenerator[Record, None]:
    """Read the records of one kind.

    :param store: an open store.
    :param left_out: called with one line for each record that cannot be written as JSON, as a
        program that writes to the log or to the store can make it; by default, that is an error.
    :return: the records; events, dead letters and the history in order of arrival.
    :raises StorageUnavailable: as :func:`all_pages`.
    """
    async for item in _items(store, kind, selection):
        try:
            record = render(kind, item)
        except Exception as error:
            if left_out is None:
                raise
            ids = ("workspace_id", "origin", "message_id", "id", "user_id", "group_id")
            parts = [f"{n} {quote(str(v))}" for n in ids if (v := getattr(item, n, None))]
            left_out(f"{', '.join(parts)}: {type(error).__name__}: {error}")
        else:
            yield record


def render(kind: RecordKind, item: Any) -> Record:
    """Return the line of a record; any exception means that it cannot be written as JSON."""
    return _record(item, _members(kind))


@functools.cache
def _members(kind: RecordKind) -> dict[str, str]:
    names = KINDS[kind].members.split()
    return {name: _CAPITAL.sub(r"_\g<0>", name).lower() for name in names}


async def _items(store: Storage, kind: RecordKind, chosen: Selection) -> AsyncGenerator[Any, None]:
    if kind == "users" and chosen.workspace and chosen.user:
        profile = await store.profile(chosen.workspace, chosen.user)
        if profile is not None and chosen.includes(profile):
            yield profile
        return
    first: Any = chosen.workspace
    if kind == "events":
        first = EventFilter(
            workspace_id=first, since=chosen.since, type=chosen.type, user_id=chosen.user
        )
    scan = functools.partial(getattr(store, KINDS[kind].scan), first)
    if chosen.on_cursor is not None:
        scan = functools.partial(_follow, store, first, chosen.on_cursor)
    if kind == "subscription-history":
        whose = None if chosen.user is None else Subject(Kind.USER, chosen.user)
        scan = functools.partial(scan, whose, since=chosen.since or 0)
    async for item in all_pages(scan, chosen.after):
        if chosen.includes(item):
            yield item


async def _follow(
    store: Storage,
    criteria: EventFilter,
    on_cursor: Callable[[str], None],
    *,
    after: str | None,
    limit: int,
) -> Page[Event]:
    if after is not None:
        on_cursor(after)
    page = await store.follow(after=after, since=criteria.since, limit=limit)
    if page is None:
        raise EngageError("the configured storage does not promise an order to go on from")
    if page.cursor == after:
        return page
    return Page([event for event in page.items if criteria.matches(event)], page.cursor)


def _at(item: Any) -> int:
    names = ("received_at", "updated_at", "at")
    return next((at for name in names if (at := getattr(item, name, 0))), 0)


def _record(item: Any, members: Mapping[str, str]) -> Record:
    # The normaliser has added all fields of an event and formatted its times.
    document = item.document() if isinstance(item, Event) else {}
    for name, attribute in members.items():
        value = getattr(item, attribute)
        if name == "at" or name.endswith("At"):
            value = render_time(value)
        elif isinstance(value, bytes):
            try:
                value = value.decode()
            except UnicodeDecodeError:  # JSON cannot contain it.
                name, value = f"{name}Base64", base64.b64encode(value).decode()
        document[name] = value
    # Keys are sorted, because a storage need not keep their order.
    line = orjson.dumps(document, default=dict, option=orjson.OPT_SORT_KEYS)
    return Record(as_line(line), _at(item))


def as_line(document: bytes) -> bytes:
    """Return compact JSON without any character that Unicode treats as a line end."""
    for character, escaped in _LINE_ENDS:
        document = document.replace(character, escaped)
    return document
