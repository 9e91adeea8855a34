# SPDX-License-Identifier: Apache-2.0
"""Turns a valid item into the event that is stored.

Pure functions: everything from outside (the server's clock, the headers) comes in through
:class:`Arrival`. Items are validated against ``schemas/`` before. This module refuses only what a
schema cannot express: a day that does not exist, an id that is a float, an event that is too large.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import orjson

from engage.api import API_ORIGIN, MAX_TIME, Event, engage_mark, render_time
from engage.api.times import parse_time
from engage.errors import ApiError, Limit, Problem, event_too_large, from_problems
from engage.ids import idempotent_id, uuid7
from engage.times import parse_field

if TYPE_CHECKING:
    from engage.config import Limits
    from engage.keys.limits import Rules

__all__ = [
    "WRITE_KEY",
    "Arrival",
    "Envelope",
    "apply_transformed",
    "dropped_traits",
    "normalise",
    "weight_of",
    "without_hash",
    "without_write_keys",
]

#: Part of an event, as JSON, that may have a write key in it.
WRITE_KEY: Final = b'"writeKey"'

_EMPTY: Final[Mapping[str, Any]] = {}

#: Fields in which ``null`` counts as absent.
_NULLABLE: Final = (
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
    """The fields of a batch that apply to all its items."""

    #: RFC 3339; ``None`` if what was sent is not a valid time.
    sent_at: str | None = None
    #: Without ``userHash``.
    context: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    #: That of its context, as sent. It is a credential, so it is never stored.
    user_hash: Any = None
    integrations: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """The facts that all events of one request share."""

    workspace_id: str
    #: ``None`` for a webhook delivery.
    write_key_id: str | None
    #: Milliseconds since 1970 UTC.
    received_at: int
    #: Maximum size of an event when stored.
    event_limit: Limit
    origin: str = API_ORIGIN
    #: ``api`` or ``webhook:<provider>``.
    source: str = "api"
    envelope: Envelope | None = None
    #: Those of the write key; ``None``: it has none.
    rules: Rules | None = None
    #: Whether the items are events as they were to be stored, or of a delivery: their
    #: ``context.engage`` is the server's.
    restored: bool = False
    #: The header ``Idempotency-Key``.
    idempotency_key: str | None = None
    #: Whether to correct the client's clock by ``sentAt``. A provider's clock is not corrected.
    correct_clock: bool = True
    #: ``received_at`` as text, as it is stored; set by ``__post_init__``.
    received: str = dataclasses.field(init=False, default="")

    @classmethod
    def of_delivery(
        cls,
        workspace_id: str,
        provider: str,
        *,
        received_at: int,
        limits: Limits,
        rules: Rules | None = None,
    ) -> Arrival:
        """Return the arrival of a webhook delivery: its origin is the provider.

        :param received_at: milliseconds since 1970 UTC.
        :param limits: has the size limit for events of webhooks.
        :param rules: those of the provider.
        """
        return cls(
            workspace_id=workspace_id,
            write_key_id=None,
            received_at=received_at,
            event_limit=Limit(limits.webhook_event_bytes, "limits.webhook_event_bytes"),
            origin=provider,
            source=f"webhook:{provider}",
            rules=rules,
            restored=True,
            correct_clock=False,
        )

    def __post_init__(self) -> None:
        object.__setattr__(self, "received", render_time(self.received_at))


def normalise(item: Mapping[str, Any], kind: str, arrival: Arrival, index: int = 0) -> Event:
    """Return the event to store for an item.

    :param item: an item that is valid by the schema ``kind``; it is not changed.
    :param kind: the event's type.
    :param index: the item's index in its batch.
    :raises ApiError: 400 ``invalid_payload``, 413 ``event_too_large``.
    """
    document = dict(item)
    document.pop("writeKey", None)
    document["type"] = kind
    _drop_nulls(document)
    user_id: str | None = document.get("userId")
    if type(user_id) is not str or not user_id:
        user_id = _id(document, "userId")
    anonymous_id: str | None = document.get("anonymousId")
    if type(anonymous_id) is not str or not anonymous_id:
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
    context = document.get("context")
    if context and ("userHash" in context or "engage" in context):
        hidden = ("userHash",) if arrival.restored else ("userHash", "engage")
        context = {name: context[name] for name in context if name not in hidden}
        document["context"] = context
    if arrival.rules is not None:
        _apply(arrival.rules, document, kind, user_id)
    if kind == "identify":
        inherited = document.get("context", _EMPTY).get("traits")
        if inherited and type(inherited) is dict:
            document["traits"] = {**inherited, **document.get("traits", _EMPTY)}

    message_id = document.get("messageId")
    if not message_id:
        message_id = document["messageId"] = _message_id(arrival, index)
    timestamp, document["timestamp"] = _timestamp(document, arrival)
    document["receivedAt"] = arrival.received
    document["workspaceId"] = arrival.workspace_id
    if arrival.write_key_id is not None:
        document["writeKeyId"] = arrival.write_key_id
    else:
        document.pop("writeKeyId", None)
    document["source"] = arrival.source
    try:
        body = orjson.dumps(document)
        if WRITE_KEY in body:
            document = without_write_keys(document)
            body = orjson.dumps(document)
    except TypeError as error:  # a provider can return values that JSON cannot represent
        raise ApiError("invalid_payload", f"the event cannot be stored as JSON: {error}") from None
    if len(body) > arrival.event_limit.bytes:
        raise _too_large(document, body, arrival.event_limit)
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
        weight=weight_of(kind, document) if kind == "identify" or kind == "group" else 1,
    )


def apply_transformed(event: Event, document: dict[str, Any], limit: Limit) -> Event:
    """Return the event with the document that a transform returned.

    The fields that the server sets keep their values: message id, workspace, write key id, time of
    arrival and source.

    :param document: a document that is valid by the schema of its type; it is changed.
    :param limit: the maximum size of the event when stored.
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
        timestamp = min(parse_field(document, "timestamp"), event.received_at)
        if timestamp < 0:
            timestamp = event.received_at
        document["timestamp"] = render_time(timestamp)
    for field in ("originalTimestamp", "sentAt"):
        if document.get(field) not in (None, before.get(field)):
            parse_field(document, field)
    body = orjson.dumps(document)
    if WRITE_KEY in body:
        document = without_write_keys(document)
        body = orjson.dumps(document)
    if len(body) > limit.bytes:
        raise _too_large(document, body, limit)
    name = document.get("event" if kind == "track" else "name")
    return dataclasses.replace(
        event,
        type=kind,
        user_id=user_id,
        anonymous_id=anonymous_id,
        name=name if kind in ("track", "page", "screen") else None,
        timestamp=timestamp,
        body=body,
        weight=weight_of(kind, document),
    )


def without_hash(item: dict[str, Any]) -> None:
    """Remove ``context.userHash`` in place; the context itself is not changed."""
    context = item.get("context")
    if type(context) is dict and "userHash" in context:
        item["context"] = {name: context[name] for name in context if name != "userHash"}


def dropped_traits(document: Mapping[str, Any]) -> set[str]:
    """Return the names of the protected traits that were removed from an event."""
    names = engage_mark(document).get("droppedTraits")
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


# ------------------------------------------------------------------------------------------- parts
def _apply(rules: Rules, document: dict[str, Any], kind: str, user_id: str | None) -> None:
    """Apply the rules of who sent an event, and note it in ``context.engage``."""
    if user_id and rules.identity:
        mark = {**engage_mark(document), "verified": True}
        document["context"] = {**document.get("context", _EMPTY), "engage": mark}
    if rules.protected:
        _drop_protected(document, rules.protected)
    if rules.trusted:
        _vouch(document, kind, rules.trusted)


def _drop_protected(document: dict[str, Any], protected: frozenset[str]) -> None:
    """Remove traits that the key of an event may not set, and name them in ``context.engage``."""
    context = document.get("context", _EMPTY)
    if "traits" not in document and "traits" not in context:
        return
    context = dict(context)
    dropped: set[str] = set()
    for holder in (document, context):
        traits = holder.get("traits")
        if type(traits) is dict and (named := traits.keys() & protected):
            holder["traits"] = {name: traits[name] for name in traits if name not in named}
            dropped |= named
    if dropped:
        dropped |= dropped_traits(document)
        mark = {**engage_mark(document), "droppedTraits": sorted(dropped)}
        document["context"] = {**context, "engage": mark}


def _vouch(document: dict[str, Any], kind: str, identifiers: frozenset[str]) -> None:
    """Note in ``context.engage`` which identifiers the sender of an event vouches for; for a
    visitor, also that it vouches for none."""
    context, mark, names = document.get("context", _EMPTY), engage_mark(document), list[str]()
    if "foundBy" in mark:  # Anyone may have claimed to be this user.
        return
    if kind == "identify":
        inherited = context.get("traits")
        sets = {*document.get("traits", _EMPTY), *(inherited if type(inherited) is dict else ())}
        names = sorted(identifiers & sets)
    if names or (kind in ("identify", "group") and "userId" not in document):
        mark = {**mark, "trusted": names}
        document["context"] = {**context, "engage": mark}


def _drop_nulls(document: dict[str, Any]) -> None:
    if None in document.values():
        for field in _NULLABLE:
            if field in document and document[field] is None:
                del document[field]


def _id(document: dict[str, Any], field: str) -> str | None:
    """Convert an id to a string in place and return it; an empty one counts as absent."""
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
    # JSON Schema accepts 1.0 as an integer.
    raise from_problems([Problem(f"/{field}", f"must be a string or an integer, not {value!r}")])


def _too_large(document: Mapping[str, Any], body: bytes, limit: Limit) -> ApiError:
    # Clients of Dittofeed attach files to an event.
    files = len(orjson.dumps(document["files"])) if "files" in document else 0
    return event_too_large(len(body), limit, files)


def weight_of(kind: str, document: Mapping[str, Any]) -> int:
    """Return the cost of writing an event: see :attr:`engage.api.Event.weight`."""
    if kind == "identify" or kind == "group":
        membership = 2 if kind == "group" else 0
        return 1 + membership + len(document.get("traits", _EMPTY))
    return 1


def _merge(document: dict[str, Any], field: str, common: Mapping[str, Any]) -> None:
    if common:
        own = document.get(field)
        document[field] = {**common, **own} if own else dict(common)


def _message_id(arrival: Arrival, index: int) -> str:
    key = arrival.idempotency_key
    return idempotent_id(arrival.workspace_id, key, index) if key else uuid7(arrival.received_at)


def without_write_keys(value: Any) -> Any:
    """Return a JSON value without the members named ``writeKey``, at any depth.

    A write key is not part of an event: stored events are exported, and shown to more people than
    may send events.
    """
    if isinstance(value, Mapping):
        return {
            name: without_write_keys(inner) for name, inner in value.items() if name != "writeKey"
        }
    return [without_write_keys(inner) for inner in value] if isinstance(value, list) else value


# -------------------------------------------------------------------------------------------- time
def _timestamp(document: dict[str, Any], arrival: Arrival) -> tuple[int, str]:
    """Return when the event happened by the server's clock; set ``originalTimestamp``.

    :return: milliseconds since 1970 UTC, and the same as text.
    """
    received_at = arrival.received_at
    sent: int | None = None
    if "sentAt" in document:
        sent = parse_field(document, "sentAt")
    elif arrival.envelope is not None and arrival.envelope.sent_at is not None:
        sent = parse_time(arrival.envelope.sent_at)
        if sent is not None:
            document["sentAt"] = arrival.envelope.sent_at
    original: int | None = None
    text: Any = document.get("timestamp")
    if text is not None:
        original = parse_field(document, "timestamp")
        text = document["timestamp"]
    if document.get("originalTimestamp") is not None:
        # If both are sent, the earlier one is when the event happened: RudderStack's Node SDK puts
        # the explicit time of a call into ``timestamp``, and the time of the call into
        # ``originalTimestamp``. A provider that sends both has corrected ``timestamp`` already.
        other = parse_field(document, "originalTimestamp")
        if original is None or (arrival.correct_clock and other < original):
            original = other
            text = document["originalTimestamp"]
    elif original is not None:
        document["originalTimestamp"] = text
    else:
        document.pop("originalTimestamp", None)
        return received_at, arrival.received
    result = original
    if sent is not None and arrival.correct_clock:
        result = received_at - (sent - original)
        if not 0 <= result <= MAX_TIME:
            result = original
    if not 0 <= result < received_at:
        return received_at, arrival.received
    # Most times are as render_time writes them. No other valid form has 24 characters, except with
    # lower-case letters or a leap second.
    rendered = len(text) == 24 and text[10] == "T" and text[23] == "Z" and text[17] != "6"
    return result, text if rendered and result == original else render_time(result)
