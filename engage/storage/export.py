# SPDX-License-Identifier: Apache-2.0
"""What a store holds, as JSON documents: the same whatever the storage.

Times are RFC 3339, UTC, with milliseconds. Everything streams: one page of the store at a time.
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
    Event,
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

__all__ = ["KINDS", "Kind", "Record", "Selection", "all_pages", "export"]

Kind = Literal["events", "users", "groups", "subscriptions", "dead-letters"]
#: What can be exported, and by which filters.
KINDS: Final[Mapping[Kind, frozenset[str]]] = {
    "events": frozenset({"workspace", "since", "type", "user"}),
    "users": frozenset({"workspace", "since", "user"}),
    "groups": frozenset({"workspace"}),
    "subscriptions": frozenset({"workspace", "since", "user"}),
    "dead-letters": frozenset({"workspace", "since", "user"}),
}

_PAGE: Final = 500
#: Plain characters in JSON, but line ends to Unicode: readers that split lines by it must not err.
_LINE_ENDS: Final = tuple(
    (character.encode(), f"\\u{ord(character):04x}".encode()) for character in "\x85\u2028\u2029"
)

Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which records; ``None`` means any."""

    workspace: str | None = None
    #: Milliseconds since 1970 UTC, inclusive: ``receivedAt``, or ``updatedAt`` where there is none.
    since: int | None = None
    #: Type of event.
    type: str | None = None
    user: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """One line of an export."""

    #: Compact UTF-8 JSON of an object: one line, whatever is taken for a line end.
    json: bytes
    #: When it arrived or was changed, milliseconds since 1970 UTC; 0 where that is unknown.
    at: int


async def all_pages(
    read: Callable[[str | None], Awaitable[Page[Item]]],
) -> AsyncGenerator[Item, None]:
    """Follow a scan from its first page to its last.

    :param read: gets a cursor, ``None`` for the first page.
    """
    cursor: str | None = None
    while True:
        page = await read(cursor)
        for item in page.items:
            yield item
        if page.cursor is None or (not page.items and page.cursor == cursor):
            return
        cursor = page.cursor


async def export(
    store: EventStore, kind: Kind, selection: Selection
) -> AsyncGenerator[Record, None]:
    """Read records of one kind.

    :param store: open.
    :raises EngageError: the storage does not keep such records.
    """
    workspace, since, user = selection.workspace, selection.since, selection.user
    if kind == "events":
        wanted = EventFilter(workspace_id=workspace, since=since, type=selection.type, user_id=user)
        async for event in all_pages(lambda after: store.scan(wanted, after=after, limit=_PAGE)):
            yield _event(event)
    elif kind == "users":
        profiles = _capable(store, ProfileStore, "profiles")  # type: ignore[type-abstract]
        if workspace is not None and user is not None:
            one = await profiles.profile(workspace, user)
            found = [one] if one is not None and one.updated_at >= (since or 0) else []
            for profile in found:
                yield _user(profile)
            return
        async for profile in all_pages(
            lambda after: profiles.scan_users(workspace, after=after, limit=_PAGE)
        ):
            if profile.updated_at >= (since or 0) and user in (None, profile.user_id):
                yield _user(profile)
    elif kind == "groups":
        profiles = _capable(store, ProfileStore, "profiles")  # type: ignore[type-abstract]
        async for group in all_pages(
            lambda after: profiles.scan_groups(workspace, after=after, limit=_PAGE)
        ):
            yield _group(group)
    elif kind == "subscriptions":
        choices = _capable(store, SubscriptionStore, "subscriptions")  # type: ignore[type-abstract]
        async for state in all_pages(
            lambda after: choices.scan_subscriptions(workspace, after=after, limit=_PAGE)
        ):
            if state.updated_at >= (since or 0) and user in (None, state.user_id):
                yield _subscription(state)
    else:
        letters = _capable(store, DeadLetterStore, "dead letters")  # type: ignore[type-abstract]
        async for letter in all_pages(
            lambda after: letters.scan_dead_letters(workspace, after=after, limit=_PAGE)
        ):
            if letter.received_at >= (since or 0) and user in (None, letter.user_id):
                yield _dead_letter(letter)


# ------------------------------------------------------------------------------------- internals
def _capable(store: EventStore, interface: type[Item], what: str) -> Item:
    if not isinstance(store, interface):
        raise EngageError(f"the configured storage keeps no {what}")
    return store


def _record(document: Mapping[str, Any], at: int) -> Record:
    # Sorted, as a storage need not keep the order of keys.
    line = orjson.dumps(document, option=orjson.OPT_SORT_KEYS)
    for character, escaped in _LINE_ENDS:
        line = line.replace(character, escaped)
    return Record(line, at)


def _event(event: Event) -> Record:
    # The normaliser has given it all its fields, and its times their form.
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
        # An item that is no text cannot stand in JSON as it is.
        **_text_or_base64("item", letter.item),
        "truncated": letter.truncated,
        "headers": headers,
    }
    return _record(document, letter.received_at)
