# SPDX-License-Identifier: Apache-2.0
"""Makes events, dead letters, records and counters for the suites, and reads stores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import orjson

from engage.api import (
    API_ORIGIN,
    Count,
    CountSum,
    DeadLetter,
    Event,
    EventFilter,
    Kind,
    Page,
    Record,
    Status,
    Subject,
    SubscriptionChange,
    Suppression,
    UserProfile,
)
from engage.store.facade import Storage

#: The workspace of an event, unless another one is given.
WORKSPACE: Final = "acme"
#: Workspace id → the traits by which users are looked up, in the context of each storage.
IDENTIFIERS: Final[Mapping[str, Sequence[str]]] = {
    WORKSPACE: ("email", "phone"),
    "other": ("email", "code"),
}
#: 2025-01-01 in milliseconds.
TIME: Final = 1_735_689_600_000

#: Strings that a careless storage confuses with each other, or loses.
AWKWARD: Final = (
    "a",
    "A",
    "a ",
    "a:",
    ":a",
    "a:b",
    "a:b:c",
    "b:a",
    "api:a",
    "acme:api:a",
    "a\x00",
    "a\x00b",
    "a\x00c",
    "\x00",
    "\x00a",
    "$a",
    "$set",
    "a.b",
    "a.c",
    ".",
    "__proto__",
    "constructor",
    "%00",
    "%",
    "_",
    "é",  # one code point
    "e\u0301",  # two code points that look the same
    "ß",
    "ss",
    "\u202e",
    "\ufeff",
    "\uffff",
    "😀",
    "1",
    "01",
    "null",
    '"]',
    "x" * 255,
    "x" * 256,
)

Item = TypeVar("Item")


def event(
    message_id: str,
    *,
    type: str = "track",
    user_id: str | None = None,
    anonymous_id: str | None = None,
    at: int = 0,
    received: int | None = None,
    workspace: str = WORKSPACE,
    origin: str = API_ORIGIN,
    **fields: Any,
) -> Event:
    """Return an event as the server would make it.

    :param at: the timestamp, in milliseconds after :data:`TIME`.
    :param received: the time of receipt, in milliseconds after :data:`TIME`; by default ``at``.
    :param fields: more fields of the stored document (``traits``, ``groupId``, …).
    """
    if user_id is None and anonymous_id is None:
        anonymous_id = "visitor"
    received = at if received is None else received
    document = {
        "type": type,
        "messageId": message_id,
        "userId": user_id,
        "anonymousId": anonymous_id,
        "workspaceId": workspace,
        **fields,
    }
    if type == "track":
        document.setdefault("event", "Clicked")
    body = orjson.dumps({name: value for name, value in document.items() if value is not None})
    return Event(
        workspace_id=workspace,
        origin=origin,
        message_id=message_id,
        type=type,
        user_id=user_id,
        anonymous_id=anonymous_id,
        name=document.get("event"),
        received_at=TIME + received,
        timestamp=TIME + at,
        body=body,
    )


def identify(message_id: str, user_id: str, at: int = 0, /, **fields: Any) -> Event:
    """Return an identify event.

    :param fields: as of :func:`event`, such as ``traits={…}``.
    """
    return event(message_id, type="identify", user_id=user_id, at=at, **fields)


def user(name: str) -> Subject:
    """Return the subject of a user id."""
    return Subject(Kind.USER, name)


def visitor(name: str) -> Subject:
    """Return the subject of an anonymous id."""
    return Subject(Kind.VISITOR, name)


def change(
    name: str,
    *,
    user_id: str = "u",
    anonymous_id: str | None = None,
    workspace: str = WORKSPACE,
    at: int = 0,
    dated: bool = False,
    source: Mapping[str, str] | None = None,
    **choices: bool,
) -> SubscriptionChange:
    """Return a change of subscriptions.

    :param name: the id.
    :param anonymous_id: of the visitor that chose, instead of a user.
    :param at: milliseconds after :data:`TIME`.
    :param dated: see :attr:`SubscriptionChange.dated`.
    :param source: other fields, such as ``how`` and ``secret``.
    :param choices: group id → subscribed.
    """
    return SubscriptionChange(
        id=name,
        workspace_id=workspace,
        subject=user(user_id) if anonymous_id is None else visitor(anonymous_id),
        choices=choices,
        at=TIME + at,
        dated=dated,
        **{"how": "api", **(source or {})},
    )


def suppression(
    address: str = "a@b.c", *, at: int = 0, workspace: str = WORKSPACE, **fields: Any
) -> Suppression:
    """Return a suppression.

    :param at: milliseconds after :data:`TIME`.
    """
    values = {"channel": "email", "reason": "complaint", **fields}
    return Suppression(workspace_id=workspace, address=address, at=TIME + at, **values)


def letter(name: str, **fields: Any) -> DeadLetter:
    """Return a dead letter.

    :param name: the id.
    :param fields: fields of :class:`~engage.api.DeadLetter` that differ from the defaults.
    """
    values: dict[str, Any] = {
        "id": name,
        "workspace_id": WORKSPACE,
        "origin": API_ORIGIN,
        "write_key_id": "website",
        "user_id": None,
        "anonymous_id": "visitor",
        "message_id": "m",
        "reason": "invalid_payload",
        "message": "userId: too long",
        "errors": [{"pointer": "/userId", "message": "too long"}],
        "item": b'{"userId": 1}',
        "truncated": False,
        "headers": [],
        "received_at": TIME,
    }
    return DeadLetter(**{**values, **fields})


def record(name: str, workspace_id: str = WORKSPACE, **fields: Any) -> Record:
    """Return a record.

    :param name: the id.
    :param fields: fields of :class:`~engage.api.Record` that differ from the defaults.
    """
    values: dict[str, Any] = {"kind": "key", "body": b"{}", "at": TIME, **fields}
    return Record(id=name, workspace_id=workspace_id, **values)


def count(value: int, *, minute: int = 0, **fields: Any) -> Count:
    """Return a register of a counter.

    :param minute: when the step began, in minutes after :data:`TIME`.
    :param fields: fields of :class:`~engage.api.Count` that differ from the defaults.
    """
    values: dict[str, Any] = {
        "step": 60,
        "at": TIME + minute * 60_000,
        "process": "p",
        "name": "events",
        "workspace_id": WORKSPACE,
        "labels": ("website", "track", "stored"),
    }
    return Count(value=value, **{**values, **fields})


def canonical(event: Event) -> tuple[Any, ...]:
    """Return an event in a form to compare: everything except the order of keys."""
    return (
        event.identity,
        event.type,
        event.user_id,
        event.anonymous_id,
        event.name,
        event.received_at,
        event.timestamp,
        orjson.dumps(event.document(), option=orjson.OPT_SORT_KEYS),
    )


async def store_all(store: Storage, *events: Event) -> None:
    """Write events, and check that each of them is new."""
    outcomes = await store.write(events)
    assert [outcome.status for outcome in outcomes] == [Status.STORED] * len(events)


async def all_pages(
    scan: Callable[..., Any], *arguments: Any, limit: int = 100, after: str | None = None
) -> list[Any]:
    """Return the items of all pages of a scan.

    :param limit: the maximum number of items of one page.
    :param after: the cursor to start from.
    """
    items: list[Any] = []
    while True:
        page: Page[Any] = await scan(*arguments, after=after, limit=limit)
        assert len(page.items) <= limit
        items += page.items
        after = page.cursor
        if after is None:
            return items


async def all_recent(
    read: Callable[..., Any], *arguments: Any, limit: int = 100, before: str | None = None
) -> list[Any]:
    """Return the items of all pages of a method that returns the newest first.

    :param limit: the maximum number of items of one page.
    :param before: the cursor to start from.
    """

    async def page(*arguments: Any, after: str | None, limit: int) -> Any:
        return await read(*arguments, before=after, limit=limit)

    return await all_pages(page, *arguments, limit=limit, after=before)


async def sums(store: Storage, *, limit: int = 1000, **arguments: Any) -> list[CountSum]:
    """Return all sums; by default those of all minutes."""
    options: dict[str, Any] = {"since": 0, "until": TIME + 10**9, **arguments}
    step = options.pop("step", 60)
    counts: list[CountSum] = await all_pages(
        lambda after, limit: store.counts(step, after=after, limit=limit, **options), limit=limit
    )
    return counts


async def unproven(store: Any) -> list[Any]:
    """Return the choices that are not those of the last record of their subject and group."""
    last = {
        (record.workspace_id, record.subject, record.group_id): record.after
        for record in await all_pages(store.history, None, None)
    }
    return [
        state
        for state in await all_pages(store.scan_subscriptions, None)
        if last.get((state.workspace_id, state.subject, state.group_id)) is not state.subscribed
    ]


async def profile_of(store: Any, user_id: str, workspace_id: str = WORKSPACE) -> UserProfile:
    """Return the profile of a user, and check that there is one."""
    profile: UserProfile | None = await store.profile(workspace_id, user_id)
    assert profile is not None
    return profile


async def ids(store: Storage, *, limit: int = 100, **fields: Any) -> list[str]:
    """Return the message ids of all events that match, in order of arrival.

    :param fields: fields of :class:`~engage.api.EventFilter`.
    """
    events = await all_pages(store.scan, EventFilter(**fields), limit=limit)
    return [event.message_id for event in events]
