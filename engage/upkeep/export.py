# SPDX-License-Identifier: Apache-2.0
"""Read the records of a store as JSON documents, which are the same for every storage.

Times are in RFC 3339, UTC, with milliseconds. Records are streamed, one page of the store at a
time.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar

import orjson

from engage.api import (
    DeadLetter,
    DeadLetterStore,
    EngageError,
    EventFilter,
    EventStore,
    GroupProfile,
    Page,
    ProfileStore,
    SubscriptionState,
    SubscriptionStore,
    UserProfile,
    render_time,
)

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

    def includes(self, at: int, user_id: str | None) -> bool:
        """Return whether a record matches ``since`` and ``user``.

        :param at: when the record arrived or changed, in milliseconds since 1970 UTC.
        :param user_id: the user of the record.
        """
        return at >= (self.since or 0) and self.user in (None, user_id)


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """One line of an export."""

    #: Compact UTF-8 JSON of an object, without any character that Unicode treats as a line end.
    json: bytes
    #: When it arrived or changed, in milliseconds since 1970 UTC; 0 if that is unknown.
    at: int


async def all_pages(
    read: Callable[[str | None], Awaitable[Page[Item]]],
) -> AsyncGenerator[Item, None]:
    """Yield the items of a scan, from its first page to its last.

    :param read: reads the page after a cursor; the cursor of the first page is ``None``.
    """
    cursor: str | None = None
    while True:
        page = await read(cursor)
        for item in page.items:
            yield item
        if page.cursor is None or (not page.items and page.cursor == cursor):
            return
        cursor = page.cursor


def export(store: EventStore, kind: Kind, selection: Selection) -> AsyncGenerator[Record, None]:
    """Read the records of one kind.

    :param store: an open store.
    :return: the records; events and dead letters in order of arrival.
    :raises EngageError: if the storage does not store such records.
    """
    return _READERS[kind](store, selection)


# ----------------------------------------------------------------------------------- one per kind
async def _events(store: EventStore, wanted: Selection) -> AsyncGenerator[Record, None]:
    matching = EventFilter(
        workspace_id=wanted.workspace, since=wanted.since, type=wanted.type, user_id=wanted.user
    )
    async for event in all_pages(lambda after: store.scan(matching, after=after, limit=PAGE)):
        # The normaliser has added all its fields and formatted its times.
        yield _record(event.document(), event.received_at)


async def _users(store: EventStore, wanted: Selection) -> AsyncGenerator[Record, None]:
    if not isinstance(store, ProfileStore):
        raise _lacking("profiles")
    if wanted.workspace is not None and wanted.user is not None:
        profile = await store.profile(wanted.workspace, wanted.user)
        if profile is not None and wanted.includes(profile.updated_at, profile.user_id):
            yield _user(profile)
        return
    async for profile in all_pages(
        lambda after: store.scan_users(wanted.workspace, after=after, limit=PAGE)
    ):
        if wanted.includes(profile.updated_at, profile.user_id):
            yield _user(profile)


async def _groups(store: EventStore, wanted: Selection) -> AsyncGenerator[Record, None]:
    if not isinstance(store, ProfileStore):
        raise _lacking("profiles")
    async for group in all_pages(
        lambda after: store.scan_groups(wanted.workspace, after=after, limit=PAGE)
    ):
        yield _group(group)


async def _subscriptions(store: EventStore, wanted: Selection) -> AsyncGenerator[Record, None]:
    if not isinstance(store, SubscriptionStore):
        raise _lacking("subscriptions")
    async for state in all_pages(
        lambda after: store.scan_subscriptions(wanted.workspace, after=after, limit=PAGE)
    ):
        if wanted.includes(state.updated_at, state.user_id):
            yield _subscription(state)


async def _dead_letters(store: EventStore, wanted: Selection) -> AsyncGenerator[Record, None]:
    if not isinstance(store, DeadLetterStore):
        raise _lacking("dead letters")
    async for letter in all_pages(
        lambda after: store.scan_dead_letters(wanted.workspace, after=after, limit=PAGE)
    ):
        if wanted.includes(letter.received_at, letter.user_id):
            yield _dead_letter(letter)


_READERS: Final[Mapping[Kind, Callable[[EventStore, Selection], AsyncGenerator[Record, None]]]] = {
    "events": _events,
    "users": _users,
    "groups": _groups,
    "subscriptions": _subscriptions,
    "dead-letters": _dead_letters,
}


def _lacking(what: str) -> EngageError:
    return EngageError(f"the configured storage does not store {what}")


# ------------------------------------------------------------------------------ records as JSON
def _record(document: Mapping[str, Any], at: int) -> Record:
    # Keys are sorted, because a storage need not keep their order.
    line = orjson.dumps(document, option=orjson.OPT_SORT_KEYS)
    for character, escaped in _LINE_ENDS:
        line = line.replace(character, escaped)
    return Record(line, at)


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
