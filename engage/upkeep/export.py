# SPDX-License-Identifier: Apache-2.0
"""Read the records of a store as JSON documents, which are the same for every storage.

Times are in RFC 3339, UTC, with milliseconds. Records are streamed, one page of the store at a
time.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import functools
import shlex
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar

import orjson

from engage.api import (
    DeadLetter,
    DeadLetterStore,
    EngageError,
    Event,
    EventFilter,
    EventStore,
    GroupProfile,
    Page,
    ProfileStore,
    StorageUnavailable,
    SubscriptionState,
    SubscriptionStore,
    UserProfile,
    render_time,
)
from engage.errors import quote

__all__ = ["KINDS", "PAGE", "Kind", "Record", "Selection", "all_pages", "export"]

Kind = Literal["events", "users", "groups", "subscriptions", "dead-letters"]
#: Kind of record → the filters of :class:`Selection` that apply to it.
KINDS: Final[Mapping[Kind, frozenset[str]]] = {
    "events": frozenset({"workspace", "since", "type", "user"}),
    "users": frozenset({"workspace", "since", "user"}),
    "groups": frozenset({"workspace"}),
    "subscriptions": frozenset({"workspace", "since", "user"}),
    "dead-letters": frozenset({"workspace", "since", "user"}),
}

#: Records that one call of a storage returns or deletes: it answers soon, and the cost of a call is
#: small beside that of so many records.
PAGE: Final = 500
#: Records of the largest page of a scan. Pages grow to it, because a call can cost as much as all
#: records: FerretDB reads and sorts the whole collection for each.
MAX_PAGE: Final = 8000
#: How often a page is tried before a scan ends, and the seconds in between.
ATTEMPTS: Final = 4
PAUSE: Final = 1.0
#: Characters that JSON allows in strings and that Unicode treats as line ends. They are escaped, so
#: that readers which split by Unicode line ends see one line for each record.
_LINE_ENDS: Final = tuple(
    (character.encode(), f"\\u{ord(character):04x}".encode()) for character in "\x85\u2028\u2029"
)

Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The records to export; ``None`` means any."""

    workspace: str | None = None
    #: Milliseconds since 1970 UTC, inclusive; compared with ``receivedAt`` of events and dead
    #: letters, and with ``updatedAt`` of other records.
    since: int | None = None
    #: Type of event.
    type: str | None = None
    user: str | None = None
    #: The cursor up to which an earlier export of the same selection has read.
    after: str | None = None

    def includes(
        self, item: Event | UserProfile | GroupProfile | SubscriptionState | DeadLetter
    ) -> bool:
        """Return whether a record matches ``since`` and ``user``; groups have neither."""
        if isinstance(item, GroupProfile):
            return True
        at = item.received_at if isinstance(item, Event | DeadLetter) else item.updated_at
        return at >= (self.since or 0) and self.user in (None, item.user_id)


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """One line of an export."""

    #: Compact UTF-8 JSON of an object, without any character that Unicode treats as a line end.
    json: bytes
    #: When it arrived or changed, in milliseconds since 1970 UTC; 0 if that is unknown.
    at: int


async def all_pages(
    read: Callable[..., Awaitable[Page[Item]]],
    cursor: str | None = None,
    *,
    attempts: int = ATTEMPTS,
) -> AsyncGenerator[Item, None]:
    """Yield the items of a scan, from its first page to its last.

    A page that cannot be read is tried again with a quarter of its size.

    :param read: a method that scans: it reads the page after a cursor, with at most so many items.
    :param cursor: where the scan goes on; ``None``: it begins.
    :param attempts: how often a page is tried.
    :raises StorageUnavailable: if a page cannot be read; it names the cursor of the page before.
    """
    limit, most, failures = PAGE, MAX_PAGE, 0
    while True:
        try:
            page = await read(after=cursor, limit=limit)
        except StorageUnavailable as error:
            failures += 1
            if failures == attempts:
                read_up_to = "" if cursor is None else f"; read up to {shlex.quote(cursor)}"
                raise StorageUnavailable(f"{error}{read_up_to}") from error
            limit = max(limit // 4, 1)
            most = max(limit, PAGE)
            await asyncio.sleep(PAUSE)
            continue
        for item in page.items:
            yield item
        if page.cursor is None or (not page.items and page.cursor == cursor):
            return
        cursor = page.cursor
        limit, failures = min(2 * limit, most), 0


async def export(
    store: EventStore,
    kind: Kind,
    selection: Selection,
    left_out: Callable[[str], None] | None = None,
) -> AsyncGenerator[Record, None]:
    """Read the records of one kind.

    :param store: an open store.
    :param left_out: called with one line for each record that cannot be written as JSON, as a
        program that writes to the log or to the store can make it; by default, that is an error.
    :return: the records; events and dead letters in order of arrival.
    :raises EngageError: if the storage does not store such records.
    :raises StorageUnavailable: as :func:`all_pages`.
    """
    async for item in _items(store, kind, selection):
        try:
            record = _KINDS[kind][-1](item)
        except Exception as error:
            if left_out is None:
                raise
            names = ("workspace_id", "origin", "message_id", "id", "user_id", "group_id")
            parts = [f"{n} {quote(str(v))}" for n in names if (v := getattr(item, n, None))]
            left_out(f"{', '.join(parts)}: {type(error).__name__}: {error}")
        else:
            yield record


async def _items(store: EventStore, kind: Kind, wanted: Selection) -> AsyncGenerator[Any, None]:
    protocol, noun, method, _ = _KINDS[kind]
    if not isinstance(store, protocol):
        raise EngageError(f"the configured storage does not store {noun}")
    if isinstance(store, ProfileStore) and kind == "users" and wanted.workspace and wanted.user:
        profile = await store.profile(wanted.workspace, wanted.user)
        if profile is not None and wanted.includes(profile):
            yield profile
        return
    first: Any = wanted.workspace
    if kind == "events":
        first = EventFilter(
            workspace_id=first, since=wanted.since, type=wanted.type, user_id=wanted.user
        )
    async for item in all_pages(functools.partial(getattr(store, method), first), wanted.after):
        if wanted.includes(item):
            yield item


# ------------------------------------------------------------------------------ records as JSON
def _record(document: Mapping[str, Any], at: int) -> Record:
    # Keys are sorted, because a storage need not keep their order.
    line = orjson.dumps(document, option=orjson.OPT_SORT_KEYS)
    for character, escaped in _LINE_ENDS:
        line = line.replace(character, escaped)
    return Record(line, at)


def _event(event: Event) -> Record:
    # The normaliser has added all its fields and formatted its times.
    return _record(event.document(), event.received_at)


def _user(profile: UserProfile) -> Record:
    document = {
        "workspaceId": profile.workspace_id,
        "userId": profile.user_id,
        "traits": dict(profile.traits),
        "createdAt": render_time(profile.created_at),
        "updatedAt": render_time(profile.updated_at),
        "anonymousIds": sorted(profile.anonymous_ids),
        "groups": sorted(profile.groups),
    }
    return _record(document, profile.updated_at)


def _group(profile: GroupProfile) -> Record:
    document = {
        "workspaceId": profile.workspace_id,
        "groupId": profile.group_id,
        "traits": dict(profile.traits),
    }
    return _record(document, 0)


def _subscription(state: SubscriptionState) -> Record:
    document = {
        "workspaceId": state.workspace_id,
        "userId": state.user_id,
        "groupId": state.group_id,
        "subscribed": state.subscribed,
        "updatedAt": render_time(state.updated_at),
    }
    return _record(document, state.updated_at)


def _text_or_base64(name: str, data: bytes) -> dict[str, str]:
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}Base64": base64.b64encode(data).decode()}


def _dead_letter(letter: DeadLetter) -> Record:
    headers: Sequence[Sequence[str]] = [list(pair) for pair in letter.headers]
    document = {
        "workspaceId": letter.workspace_id,
        "id": letter.id,
        "receivedAt": render_time(letter.received_at),
        "origin": letter.origin,
        "writeKeyId": letter.write_key_id,
        "userId": letter.user_id,
        "anonymousId": letter.anonymous_id,
        "messageId": letter.message_id,
        "reason": letter.reason,
        "message": letter.message,
        "errors": [dict(error) for error in letter.errors],
        # JSON cannot contain an item that is not text.
        **_text_or_base64("item", letter.item),
        "truncated": letter.truncated,
        "headers": headers,
    }
    return _record(document, letter.received_at)


#: Kind of record → the interface of a storage that has them, their name, its method that scans
#: them, and the function that renders one.
_KINDS: Final[Mapping[Kind, tuple[type, str, str, Callable[[Any], Record]]]] = {
    "events": (EventStore, "events", "scan", _event),
    "users": (ProfileStore, "profiles", "scan_users", _user),
    "groups": (ProfileStore, "profiles", "scan_groups", _group),
    "subscriptions": (SubscriptionStore, "subscriptions", "scan_subscriptions", _subscription),
    "dead-letters": (DeadLetterStore, "dead letters", "scan_dead_letters", _dead_letter),
}
