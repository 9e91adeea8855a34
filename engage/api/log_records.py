# SPDX-License-Identifier: Apache-2.0
"""The format of the records of a log, for engage and for any other reader of the log.

======  ============================================================================================
key     The workspace, ``:``, and the user id, or else the anonymous id. All events of a user are in
        one partition, in their order. A dead letter has its own id instead.
value   An event: its body, compact JSON as in the store and in ``engage export``. A dead letter: a
        JSON object with the fields of :class:`DeadLetter`; bytes are in Base64.
header  ``engage``: the kind and the version of the format, such as ``event/1`` or ``letter/1``.
header  ``meta``, of an event: a JSON object with the fields that its body does not have, or has
        in another form: ``origin``, ``receivedAt`` and ``timestamp`` (milliseconds since 1970
        UTC), and ``type``, ``messageId``, ``workspaceId``, ``userId``, ``anonymousId`` and
        ``name``, as text. ``restated`` is true, or absent: see
        :attr:`engage.api.TranslatedEvent.restated`.
======  ============================================================================================

A reader ignores members of ``meta`` and of a letter that it does not know. A change that would
mislead older readers increases the version.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Final

import msgspec
import orjson

from engage.api.dead_letters import DeadLetter
from engage.api.events import Event
from engage.api.times import MAX_TIME

__all__ = [
    "DamagedRecord",
    "LogRecord",
    "UnknownRecord",
    "UnloggableEvent",
    "is_restated",
    "record_of",
    "unpack",
]

#: The header with the kind and the version, and the versions that this engage reads.
KIND: Final = "engage"
META: Final = "meta"
EVENT: Final = b"event/1"
LETTER: Final = b"letter/1"


class UnloggableEvent(ValueError):
    """The event cannot be a record: a text contains a lone surrogate, which is not a character."""


class DamagedRecord(ValueError):
    """A record has a known version, and nevertheless cannot be read."""


class UnknownRecord(ValueError):
    """A newer version of engage, or another program, wrote the record."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogRecord:
    """A record as it is in the log."""

    #: Records with the same key keep their order.
    key: bytes
    value: bytes
    headers: Mapping[str, bytes]

    @property
    def size(self) -> int:
        """Bytes of key, value and headers."""
        return (
            len(self.key)
            + len(self.value)
            + sum(len(name) + len(value) for name, value in self.headers.items())
        )


def record_of(item: Event | DeadLetter, *, restated: bool = False) -> LogRecord:
    """Return an event or a dead letter as a record.

    :param restated: whether the event is a duplicate, and not a conflict, although it differs from
        the stored event with its message id.
    :raises UnloggableEvent: if it cannot be one.
    """
    try:
        if isinstance(item, Event):
            subject = item.user_id if item.user_id is not None else item.anonymous_id
            meta = {
                "origin": item.origin,
                "receivedAt": item.received_at,
                "timestamp": item.timestamp,
                "type": item.type,
                "messageId": item.message_id,
                "workspaceId": item.workspace_id,
                "userId": item.user_id,
                "anonymousId": item.anonymous_id,
                "name": item.name,
            }
            if restated:
                meta["restated"] = True
            return LogRecord(
                key=f"{item.workspace_id}:{subject}".encode(),
                value=item.body,
                headers={KIND: EVENT, META: orjson.dumps(meta)},
            )
        return LogRecord(
            key=f"{item.workspace_id}:{item.id}".encode(),
            value=msgspec.json.encode(item),
            headers={KIND: LETTER},
        )
    except (UnicodeEncodeError, orjson.JSONEncodeError) as error:
        raise UnloggableEvent("a text contains a lone surrogate, not a character") from error


def unpack(record: LogRecord) -> Event | DeadLetter:
    """Return the event or dead letter in a record.

    :raises UnknownRecord: if its kind or its version is not known.
    :raises DamagedRecord: if it cannot be read.
    """
    kind = record.headers.get(KIND)
    try:
        if kind == EVENT:
            return _event(record.value, record.headers[META])
        if kind == LETTER:
            return _letter(record.value)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise DamagedRecord(f"{type(error).__name__}: {error}") from error
    raise UnknownRecord(f"a record of the kind {kind!r}")


def is_restated(record: LogRecord) -> bool:
    """Return whether the event in a record is never a conflict: see :func:`record_of`.

    :param record: one that :func:`unpack` can read.
    """
    meta = record.headers.get(META, b"")
    # Few records have it, so most are not decoded a second time.
    if b'"restated"' not in meta:
        return False
    return bytes(msgspec.json.decode(meta, type=_Restated).restated) == b"true"


class _Restated(msgspec.Struct):
    """That member of ``meta`` alone, because :func:`unpack` does not look at unknown ones."""

    restated: msgspec.Raw = msgspec.Raw()


_Time = Annotated[int, msgspec.Meta(ge=0, le=MAX_TIME)]


class _Meta(msgspec.Struct, rename="camel"):
    """The members of the header ``meta`` that an event has as fields."""

    origin: str
    type: str
    message_id: str
    workspace_id: str
    received_at: _Time
    timestamp: _Time
    user_id: str | None = None
    anonymous_id: str | None = None
    name: str | None = None


def _event(body: bytes, meta: bytes) -> Event:
    fields = msgspec.structs.asdict(msgspec.json.decode(meta, type=_Meta))
    if type(orjson.loads(body)) is not dict:
        raise TypeError("the body is not a JSON object")
    return Event(body=body, **fields)


def _letter(value: bytes) -> DeadLetter:
    letter = msgspec.json.decode(value, type=DeadLetter)
    if not 0 <= letter.received_at <= MAX_TIME:
        raise ValueError("received_at is not a valid time")
    return letter
