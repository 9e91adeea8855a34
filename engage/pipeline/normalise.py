# SPDX-License-Identifier: Apache-2.0
"""What a payload means: a valid item → the event as it is stored.

Pure functions: what they need of the outside (the server's clock, the headers) comes in through
:class:`Arrival`. What an item may be, ``schemas/`` has said before; what is left to refuse here is
what a schema cannot say: a day that does not exist, an id that is a float, an event too large.
"""

from __future__ import annotations

import dataclasses
import os
import time
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import orjson

from engage.api import API_ORIGIN, MAX_TIME, Event, render_time
from engage.errors import ApiError, Limit, Problem, event_too_large, from_problems, quote

if TYPE_CHECKING:
    from engage.config import Limits

__all__ = [
    "Arrival",
    "Clock",
    "Envelope",
    "apply_transformed",
    "normalise",
    "parse_time",
    "uuid7",
]

#: Namespace of the message ids that are made from an ``Idempotency-Key``.
_KEYED: Final = uuid.UUID("6c1f8a0e-52d5-5a53-9d0b-3b6f2f1d7c11")

_DAY: Final = 86_400_000
_EPOCH_ORDINAL: Final = datetime(1970, 1, 1, tzinfo=UTC).toordinal()

_NOTHING: Final[Mapping[str, Any]] = {}

#: Optional fields of which ``null`` means absent.
_OPTIONAL: Final = (
    "userId",
    "anonymousId",
    "groupId",
    "previousId",
    "context",
    "integrations",
    "traits",
    "properties",
    "name",
    "category",
    "assigned",
    "sentAt",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What a batch says for all its items."""

    #: As sent; unparsable is as absent.
    sent_at: str | None = None
    context: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    integrations: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """What all events of one request have in common."""

    workspace_id: str
    #: ``None`` for a webhook delivery.
    write_key_id: str | None
    #: Milliseconds since 1970 UTC.
    received_at: int
    #: Of an event when stored.
    event_limit: Limit
    origin: str = API_ORIGIN
    #: ``api`` or ``webhook:<provider>``.
    source: str = "api"
    envelope: Envelope | None = None
    #: The header ``Idempotency-Key``.
    idempotency_key: str | None = None
    #: Whether the client's clock is corrected by ``sentAt``; a provider's is not.
    correct_clock: bool = True
    #: ``received_at`` as it is stored; made here.
    received: str = dataclasses.field(init=False, default="")

    @classmethod
    def of_delivery(
        cls, workspace_id: str, provider: str, *, received_at: int, limits: Limits
    ) -> Arrival:
        """:return: that of a webhook delivery: the provider is the origin, its clock is right."""
        return cls(
            workspace_id=workspace_id,
            write_key_id=None,
            received_at=received_at,
            event_limit=Limit(limits.webhook_event_bytes, "limits.webhook_event_bytes"),
            origin=provider,
            source=f"webhook:{provider}",
            correct_clock=False,
        )

    def __post_init__(self) -> None:
        object.__setattr__(self, "received", render_time(self.received_at))


class Clock:
    """Milliseconds since 1970 UTC, never decreasing within a process."""

    def __init__(self, now: Any = time.time_ns) -> None:
        self._now = now
        self._last = 0

    def __call__(self) -> int:
        """:return: now, or what was returned last when the system's clock went back."""
        now: int = self._now() // 1_000_000
        if now > self._last:
            self._last = now
        return self._last


def normalise(item: Mapping[str, Any], kind: str, arrival: Arrival, index: int = 0) -> Event:
    """Make the event that is stored.

    :param item: valid by the schema ``kind``; it is not changed.
    :param kind: the event's type.
    :param index: the item's place in its batch.
    :raises ApiError: 400 ``invalid_payload``, 413 ``event_too_large``.
    """
    document = dict(item)
    document.pop("writeKey", None)
    document["type"] = kind
    _drop_nulls(document)
    user_id = _id(document, "userId")
    anonymous_id = _id(document, "anonymousId")
    if "groupId" in document:
        _id(document, "groupId")
    if "previousId" in document:
        _id(document, "previousId")
    name: str | None
    if kind == "track":
        name = document["event"]
    else:
        name = document.get("name") if kind == "page" or kind == "screen" else None
    envelope = arrival.envelope
    if envelope is not None:
        _merge(document, "context", envelope.context)
        _merge(document, "integrations", envelope.integrations)
    if kind == "identify":
        inherited = document.get("context", _NOTHING).get("traits")
        if inherited and type(inherited) is dict:
            document["traits"] = {**inherited, **document.get("traits", _NOTHING)}

    message_id = document.get("messageId")
    if not message_id:
        message_id = document["messageId"] = _message_id(arrival, index)
    timestamp = _timestamp(document, arrival)
    document["timestamp"] = (
        arrival.received if timestamp == arrival.received_at else render_time(timestamp)
    )
    document["receivedAt"] = arrival.received
    document["workspaceId"] = arrival.workspace_id
    if arrival.write_key_id is not None:
        document["writeKeyId"] = arrival.write_key_id
    else:
        document.pop("writeKeyId", None)
    document["source"] = arrival.source
    try:
        body = orjson.dumps(document)
    except TypeError as error:  # what JSON text cannot say, a provider or a transform can make
        raise ApiError("invalid_payload", f"the event cannot be stored as JSON: {error}") from None
    if len(body) > arrival.event_limit.bytes:
        raise event_too_large(len(body), arrival.event_limit)
    return Event(
        workspace_id=arrival.workspace_id,
        origin=arrival.origin,
        message_id=message_id,
        type=kind,
        user_id=user_id,
        anonymous_id=anonymous_id,
        name=name,
        received_at=arrival.received_at,
        timestamp=timestamp,
        body=body,
    )


def apply_transformed(event: Event, document: dict[str, Any], limit: Limit) -> Event:
    """Return the event with the document that a transform returned.

    :param document: valid by the schema of its type. What the server decided is put back: message
        id, workspace, write key id, time of arrival and source.
    :param limit: of the event when stored.
    :raises ApiError: as :func:`normalise`.
    """
    before = event.document()
    document.pop("writeKey", None)
    for field in ("messageId", "workspaceId", "writeKeyId", "receivedAt", "source"):
        if field in before:
            document[field] = before[field]
        else:
            document.pop(field, None)
    _drop_nulls(document)
    kind = document["type"]
    user_id = _id(document, "userId")
    anonymous_id = _id(document, "anonymousId")
    for field in ("groupId", "previousId"):
        if field in document:
            _id(document, field)
    timestamp = event.timestamp
    if document.get("timestamp") is None:
        document["timestamp"] = before["timestamp"]
    elif document["timestamp"] != before["timestamp"]:
        timestamp = min(_parse(document, "timestamp"), event.received_at)
        if timestamp < 0:
            timestamp = event.received_at
        document["timestamp"] = render_time(timestamp)
    body = orjson.dumps(document)
    if len(body) > limit.bytes:
        raise event_too_large(len(body), limit)
    name = document.get("event" if kind == "track" else "name")
    return dataclasses.replace(
        event,
        type=kind,
        user_id=user_id,
        anonymous_id=anonymous_id,
        name=name if kind in ("track", "page", "screen") else None,
        timestamp=timestamp,
        body=body,
    )


# ------------------------------------------------------------------------------------------- parts
def _drop_nulls(document: dict[str, Any]) -> None:
    if None in document.values():
        for field in _OPTIONAL:
            if field in document and document[field] is None:
                del document[field]


def _id(document: dict[str, Any], field: str) -> str | None:
    """Make an id a string; the empty one is absent."""
    value = document.get(field)
    if type(value) is str:
        if value:
            return value
        del document[field]
        return None
    if value is None:
        return None
    if type(value) is int:
        text = document[field] = str(value)
        return text
    # JSON Schema takes 1.0 for an integer.
    raise from_problems([Problem(f"/{field}", f"must be a string or an integer, not {value!r}")])


def _merge(document: dict[str, Any], field: str, common: Mapping[str, Any]) -> None:
    if common:
        own = document.get(field)
        document[field] = {**common, **own} if own else dict(common)


def _message_id(arrival: Arrival, index: int) -> str:
    key = arrival.idempotency_key
    if not key:
        return uuid7(arrival.received_at)
    workspace = arrival.workspace_id
    # Lengths first: different parts never make the same name.
    return str(uuid.uuid5(_KEYED, f"{len(workspace)}:{workspace}{len(key)}:{key}{index}"))


def uuid7(milliseconds: int) -> str:
    """:return: a new UUID of version 7 (RFC 9562): it begins with the time, the rest is random."""
    value = (milliseconds & 0xFFFFFFFFFFFF) << 80 | int.from_bytes(os.urandom(10), "big")
    value = value & ~(0xF << 76) & ~(0x3 << 62) | 0x7 << 76 | 0x2 << 62
    text = f"{value:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


# -------------------------------------------------------------------------------------------- time
def _timestamp(document: dict[str, Any], arrival: Arrival) -> int:
    """:return: when it happened, by the server's clock; sets ``originalTimestamp``."""
    received_at = arrival.received_at
    sent: int | None = None
    if "sentAt" in document:
        sent = _parse(document, "sentAt")
    elif arrival.envelope is not None and arrival.envelope.sent_at is not None:
        sent = parse_time(arrival.envelope.sent_at)
        if sent is not None:
            document["sentAt"] = arrival.envelope.sent_at
    original: int | None = None
    if document.get("timestamp") is not None:
        original = _parse(document, "timestamp")
    if document.get("originalTimestamp") is not None:
        # When both are sent the earlier is when it happened: RudderStack's node SDK puts a call's
        # explicit time into ``timestamp``, and the time of the call into the other. A provider that
        # sends both has corrected the clock in ``timestamp`` itself.
        other = _parse(document, "originalTimestamp")
        if original is None or (arrival.correct_clock and other < original):
            original = other
    elif original is not None:
        document["originalTimestamp"] = document["timestamp"]
    else:
        document.pop("originalTimestamp", None)
        return received_at
    result = original
    if sent is not None and arrival.correct_clock:
        result = received_at - (sent - original)
        if not 0 <= result <= MAX_TIME:
            result = original
    return min(result, received_at) if result >= 0 else received_at


def _parse(document: Mapping[str, Any], field: str) -> int:
    """:raises ApiError: 400 ``invalid_payload``."""
    value = document[field]
    milliseconds = parse_time(value)
    if milliseconds is None:
        rule = "must be an existing time in the years 1 to 9999 (UTC)"
        raise from_problems([Problem(f"/{field}", f'{rule}, not "{quote(str(value))}"')])
    return milliseconds


def parse_time(text: str) -> int | None:
    """Read an RFC 3339 time, as the schemas describe it (the form is not looked at again).

    :return: milliseconds since 1970 UTC, rounded down (negative before); ``None``: there is no such
        time, or it is outside the years 1 to 9999 in UTC. The second 60 is read as 59.999.
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        text = text.upper()  # a lower-case z is not known to fromisoformat
        leap = text[17:19] == "60"
        if leap:
            end = 19
            while text[end : end + 1] in _FRACTION:
                end += 1
            text = text[:17] + "59.999" + text[end:]
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            return None
    offset = moment.utcoffset()
    if offset is None:
        return None
    days = moment.toordinal() - _EPOCH_ORDINAL
    seconds = moment.hour * 3600 + moment.minute * 60 + moment.second
    milliseconds = days * _DAY + seconds * 1000 + moment.microsecond // 1000
    if offset:
        milliseconds -= (offset.days * 86400 + offset.seconds) * 1000
    return milliseconds if _FIRST_OF_ALL <= milliseconds <= MAX_TIME else None


_FRACTION: Final = frozenset(".0123456789")
#: The first millisecond of the year 1.
_FIRST_OF_ALL: Final = (1 - _EPOCH_ORDINAL) * _DAY
