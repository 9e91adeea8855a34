# SPDX-License-Identifier: Apache-2.0
"""Looks for damage in the documents that only this storage can see."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from typing import Any

from bson.objectid import ObjectId

from engage.api import ERASED, Kind, StoreProblem, identifier_value

from .connection import Connection
from .documents import (
    decode_event,
    decode_value,
    escape_key,
    event_id,
    pair_id,
    path_id,
    scoped_id,
    subject_id,
    subject_of,
)
from .paging import STEP, read_page
from .schema import (
    DEAD_LETTERS,
    EVENTS,
    HISTORY,
    LINKS,
    MEMBERSHIPS,
    PLACES,
    SUBSCRIPTIONS,
    SUPPRESSIONS,
    VISITOR_MEMBERSHIPS,
)
from .stored_events import ERASED_TYPE

_Document = Mapping[str, Any]
#: Yields what is wrong with a document.
_Check = Callable[[_Document], Iterator[str]]


class Verification:
    """Looks for problems.

    :param declared: workspace id → the traits by which its users are looked up.
    """

    def __init__(self, connection: Connection, declared: Mapping[str, Collection[str]]) -> None:
        self._connection = connection
        self._declared = declared

    async def problems(self) -> AsyncIterator[StoreProblem | int]:
        """Yield what is wrong with the documents of each collection."""
        checks: dict[str, _Check] = {
            EVENTS: _event,
            LINKS: _pair(Kind.USER, "anonymousId"),
            MEMBERSHIPS: _pair(Kind.USER, "groupId"),
            VISITOR_MEMBERSHIPS: _pair(Kind.VISITOR, "groupId"),
            SUBSCRIPTIONS: _choices,
            HISTORY: _change,
            SUPPRESSIONS: _suppression,
            DEAD_LETTERS: _letter,
            **{place.subjects: self._profile(kind, place.name) for kind, place in PLACES.items()},
        }
        for collection, check in checks.items():
            after: Any = None
            while True:
                query = {} if after is None else {"_id": {"$gt": after}}
                with self._connection.calling(scan=True) as db:
                    cursor = db[collection].find(query).sort([("_id", 1)])
                    documents, last = await read_page(cursor, STEP, _sized)
                yield len(documents)
                for document in documents:
                    for message in _problems(check, document):
                        text = f"{document['_id']!r} {message}"
                        yield StoreProblem(what=collection, message=text)
                if last is None:
                    break
                after = last["_id"]

    def _profile(self, kind: Kind, name: str) -> _Check:
        """Return the check of a user, visitor or group."""

        def check(document: _Document) -> Iterator[str]:
            workspace = document["workspaceId"]
            yield from _named(name)(document)
            for field in ("createdAt", "updatedAt"):
                if field in document or "firstChoiceAt" not in document:
                    int(document[field])
            traits = document.get("traits", {}) if kind is not Kind.GROUP else {}
            for trait in self._declared.get(workspace, ()):
                register = traits.get(escape_key(trait))
                if register is None:
                    continue
                value = None if "x" in register else identifier_value(trait, decode_value(register))
                form = None if value is None else scoped_id(workspace, value)
                if register.get("i") != form:
                    yield f"is not found by its {trait!r}"

        return check

    async def unfinished(self) -> Collection[tuple[str, str]]:
        """Return those whose changes or choices are not applied or recorded yet."""
        people: set[tuple[str, str]] = set()
        fields = {"workspaceId": 1, "userId": 1, "anonymousId": 1}
        with self._connection.calling(scan=True) as db:
            for collection, mark in ((EVENTS, "_mark"), (SUBSCRIPTIONS, "pending")):
                async for stored in db[collection].find({mark: {"$exists": True}}, fields):
                    names = (stored.get("userId"), stored.get("anonymousId"))
                    people |= {(stored["workspaceId"], name) for name in names if name is not None}
        return people


def _problems(check: _Check, document: _Document) -> Iterator[str]:
    try:
        yield from check(document)
    except Exception as error:
        yield f"cannot be read ({type(error).__name__})"


def _event(document: _Document) -> Iterator[str]:
    if document["type"] == ERASED_TYPE:
        if document["_raw"][: len(ERASED)] not in (b"", ERASED) or "messageId" in document:
            yield "is erased, but not all of it"
    else:
        event = decode_event(document)
        if document["_id"] != event_id(event.workspace_id, event.origin, document["messageId"]):
            yield "has the _id of another event"
    if not isinstance(document["_seq"], ObjectId):
        yield "has no place in the order of arrival"


def _named(name: str) -> _Check:
    """Return the check of a document whose ``_id`` is its workspace and a name."""

    def check(document: _Document) -> Iterator[str]:
        if document["_id"] != scoped_id(document["workspaceId"], document[name]):
            yield f"has another {name}"

    return check


def _pair(kind: Kind, name: str) -> _Check:
    """Return the check of a link or a membership."""

    def check(document: _Document) -> Iterator[str]:
        workspace, owner = document["workspaceId"], document[kind.value]
        start = len(scoped_id(workspace, ""))
        if document["_id"] != pair_id(workspace, owner[start:], document[name]):
            yield f"has another {kind.value} or {name}"

    return check


def _choices(document: _Document) -> Iterator[str]:
    if document["_id"] != subject_id(document["workspaceId"], subject_of(document)):
        yield "are another's"


def _change(document: _Document) -> Iterator[str]:
    if document.get("erased"):
        return  # Only the ``_id`` has the id of the change.
    key = scoped_id(document["workspaceId"], document["changeId"])
    # Two can have changed with one id at the same moment.
    if document["_id"] != key and not document["_id"].startswith(f"{key}\0"):
        yield "would be applied again"


def _suppression(document: _Document) -> Iterator[str]:
    parts = ("workspaceId", "channel", "address", "groupId", "reason")
    if document["_id"] != path_id(*(document[name] for name in parts)):
        yield "is not found by its address"


def _letter(document: _Document) -> Iterator[str]:
    yield from _named("id")(document)
    if not isinstance(document["_seq"], ObjectId):
        yield "has no place in the order of arrival"


def _sized(document: _Document) -> tuple[_Document, int]:
    return document, 0
