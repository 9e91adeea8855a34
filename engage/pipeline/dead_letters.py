# SPDX-License-Identifier: Apache-2.0
"""Makes dead letters: the records of refused items and of conflicts.

An event is a conflict if another event is stored with its message id. Pure functions: an item and
the reason go in, a :class:`~engage.api.DeadLetter` comes out.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

import orjson

from engage.api import API_ORIGIN, CONFLICT, DAY_MS, DeadLetter, Event
from engage.api.json_values import CUT
from engage.api.times import parse_time
from engage.errors import ApiError, Problem
from engage.ids import idempotent_id
from engage.pipeline.decode import Faulty
from engage.pipeline.normalise import WRITE_KEY, dropped_traits, without_hash, without_write_keys

if TYPE_CHECKING:
    from engage.pipeline.normalise import Arrival

__all__ = [
    "MAX_ITEM",
    "Conflict",
    "envelope_of",
    "find_conflict",
    "letter_id",
    "letter_of",
    "letter_of_conflict",
]

#: Maximum number of bytes kept of a refused item, and of :attr:`DeadLetter.envelope`. A conflict,
#: which is acknowledged, and a webhook delivery are kept whole.
MAX_ITEM: Final = 16 * 1024
#: The envelope of a single event: nothing applied to it that is not in it.
_NO_ENVELOPE: Final = b"{}"
#: The same if the user of the event was verified.
_VERIFIED: Final = b'{"verified":true}'

#: Fields that must be equal in two events with the same message id, or they are a conflict.
_COMPARED: Final = (
    "type",
    "userId",
    "anonymousId",
    "groupId",
    "previousId",
    "event",
    "name",
    "traits",
    "properties",
    "originalTimestamp",
)

#: The same for events of webhooks, whose recipient may be identified between two deliveries.
_COMPARED_IN_DELIVERIES: Final = tuple(
    name for name in _COMPARED if name not in ("userId", "anonymousId")
)

#: Milliseconds by which the times of two events may differ, if nothing else does. An SDK stamps the
#: time of a call, so an application that repeats a call with a message id of its own, which it does
#: within minutes or hours, sends another time. An id that comes a day later is rather one that is
#: used again by mistake. Segment, whose API this is, takes equal ids of 24 hours for one event.
_SAME_TIME: Final = DAY_MS

#: Fields that the id of a letter does not depend on, because an SDK may change them in a retry.
_VOLATILE: Final = ("sentAt",)


@dataclasses.dataclass(frozen=True, slots=True)
class Conflict:
    """A different event is stored under this event's message id, or was until it was erased.

    The stored event stays; the later one becomes a dead letter.
    """

    #: The names of the fields in which the two events differ; none if the other one was erased.
    fields: Sequence[str]
    code: ClassVar[str] = CONFLICT

    @property
    def message(self) -> str:
        """The reason in one sentence."""
        names = ", ".join(self.fields)
        if not names:
            return "another user's or visitor's event had this messageId until it was erased"
        return f"another event is stored with this messageId; they differ in {names}"

    @property
    def errors(self) -> Sequence[Problem]:
        """One problem for each field."""
        message = "differs from the stored event with this messageId"
        return [Problem(f"/{field}", message) for field in self.fields]


def envelope_of(arrival: Arrival) -> bytes | None:
    """Return what applied to all items of a request, as :attr:`DeadLetter.envelope` has it.

    :return: compact JSON without write keys; ``None`` if it is longer than :data:`MAX_ITEM`.
    """
    envelope = arrival.envelope
    verified = arrival.rules is not None and bool(arrival.rules.identity)
    if envelope is None:
        return _VERIFIED if verified else _NO_ENVELOPE
    document: dict[str, Any] = {"verified": True} if verified else {}
    if envelope.context:
        document["context"] = envelope.context
    if envelope.integrations:
        document["integrations"] = envelope.integrations
    if envelope.sent_at is not None:
        document["sentAt"] = envelope.sent_at
    raw = orjson.dumps(document)
    if WRITE_KEY in raw:
        raw = orjson.dumps(without_write_keys(document))
    return raw if len(raw) <= MAX_ITEM else None


def letter_of(
    item: Any,
    problem: ApiError,
    arrival: Arrival,
    operation: str,
    envelope: bytes | None,
    index: int = 0,
) -> DeadLetter:
    """Return the dead letter of a refused item, with its first :data:`MAX_ITEM` bytes.

    :param item: the decoded item as received. Members named ``writeKey`` are not kept, nor
        ``context.userHash``.
    :param problem: why it was refused.
    :param operation: the type of the route; ``batch`` if the item has its ``type``.
    :param envelope: of the request, see :func:`envelope_of`.
    :param index: the item's index in its batch.
    """
    if type(item) is Faulty:
        item = item.value
    if isinstance(item, dict):
        without_hash(item := dict(item))
    fields: Mapping[str, Any] = item if isinstance(item, dict) else {}
    raw = _encoded(item)
    if WRITE_KEY in raw:
        item = without_write_keys(item)
        fields = item if isinstance(item, dict) else {}
        raw = _encoded(item)
    if any(name in fields for name in _VOLATILE):
        same = _encoded({n: v for n, v in fields.items() if n not in _VOLATILE})
    else:
        same = raw
    kept = raw if len(raw) <= MAX_ITEM else _cut(raw, MAX_ITEM)
    key = arrival.idempotency_key
    if key and envelope is not None and not fields.get("messageId"):
        given = idempotent_id(arrival.workspace_id, key, index)
        envelope = orjson.dumps({**orjson.loads(envelope), "messageId": given})
    return DeadLetter(
        id=letter_id(arrival.workspace_id, arrival.origin, same),
        workspace_id=arrival.workspace_id,
        origin=arrival.origin,
        write_key_id=arrival.write_key_id,
        user_id=_text(fields.get("userId")),
        anonymous_id=_text(fields.get("anonymousId")),
        message_id=_text(fields.get("messageId"), 256),
        reason=problem.code,
        message=problem.message,
        errors=[error.as_dict() for error in problem.errors],
        item=kept,
        truncated=kept is not raw or CUT in raw,
        headers=(),
        received_at=arrival.received_at,
        operation=operation,
        envelope=envelope,
    )


def letter_of_conflict(
    item: Mapping[str, Any], event: Event, conflict: Conflict, arrival: Arrival
) -> DeadLetter:
    """Return the dead letter of a conflict: the event as it would be stored, whole.

    The event is acknowledged, so its letter must not be mistaken for another one. The id covers the
    facts that are not in the item as received: the type of the route, the message id from an
    ``Idempotency-Key``, and the envelope of a batch. No refused item has the same id. As an item of
    a batch, it has its ``type``; its ``sentAt``, which differs in each retry, is in the envelope.

    :param item: the decoded item as received.
    :param event: the event of the item, after the transforms.
    """
    document = event.document()
    own = item.get("timestamp")
    if own is not None:  # as sent: the corrected one differs in each retry
        document["timestamp"] = own
    elif (
        item.get("originalTimestamp") is not None or document["timestamp"] == document["receivedAt"]
    ):
        del document["timestamp"]
    del document["receivedAt"]
    volatile = {name: document.pop(name) for name in _VOLATILE if name in document}
    # Sorted, because the type of the route has another place than a type in the item.
    same = orjson.dumps(document, option=orjson.OPT_SORT_KEYS)
    return DeadLetter(
        id=letter_id(
            event.workspace_id, event.origin, b"conflict", event.message_id.encode(), same
        ),
        workspace_id=event.workspace_id,
        origin=event.origin,
        write_key_id=arrival.write_key_id,
        user_id=_text(event.user_id),
        anonymous_id=_text(event.anonymous_id),
        message_id=_text(event.message_id, 256),
        reason=conflict.code,
        message=conflict.message,
        errors=[error.as_dict() for error in conflict.errors],
        item=orjson.dumps(document),
        truncated=False,
        headers=(),
        received_at=event.received_at,
        operation="batch",
        envelope=orjson.dumps(volatile),
    )


def letter_id(workspace_id: str, origin: str, *parts: bytes) -> str:
    """Return the id of a letter: a hash, so that a retry of the item makes no second letter.

    :param parts: what the letter is made of, without the fields that may change in a retry: for a
        refused item or a delivery, one part.
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in (workspace_id.encode(), origin.encode(), *parts):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()


def find_conflict(event: Event, stored: bytes) -> Conflict | None:
    """Compare an event with the event that is stored under its message id.

    A trait that was removed from either is not compared: whether it is protected may change between
    two attempts of a client. Nor is a time that differs by at most a day, unless something else
    differs too.

    :param stored: the body of the stored event.
    :return: the conflict, or ``None`` if both are the same event (a duplicate).
    """
    old = orjson.loads(stored)
    new = event.document()
    if dropped := dropped_traits(old) | dropped_traits(new):
        for document in (old, new):
            if isinstance(traits := document.get("traits"), dict):
                document["traits"] = {name: traits[name] for name in traits if name not in dropped}
    compared = _COMPARED if event.origin == API_ORIGIN else _COMPARED_IN_DELIVERIES
    if event.origin != API_ORIGIN and ("originalTimestamp" in old) != ("originalTimestamp" in new):
        # An event without a time gets the time of its delivery, or that of the dead letter from
        # which it is retried.
        compared = tuple(name for name in compared if name != "originalTimestamp")
    fields = [
        name
        for name in compared
        if (name in old or name in new) and _canonical(old.get(name)) != _canonical(new.get(name))
    ]
    if fields == ["originalTimestamp"]:
        was, now = (
            parse_time(document.get("originalTimestamp", document.get("timestamp", "")))
            for document in (old, new)
        )
        if was is not None and now is not None and abs(now - was) <= _SAME_TIME:
            return None
    return Conflict(fields) if fields else None


def _canonical(value: Any) -> bytes:
    # Compared as bytes, because 1, 1.0 and True are equal in Python. {} counts as absent.
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS) if value != {} else b"null"


def _encoded(item: Any) -> bytes:
    try:
        return orjson.dumps(item)
    except TypeError:  # a provider can return values that JSON cannot represent
        return repr(item).encode(errors="replace")


def _cut(raw: bytes, size: int) -> bytes:
    # Never in the middle of a character.
    return raw[:size].decode(errors="ignore").encode()


def _text(value: object, limit: int = 512) -> str | None:
    """Return a value as an id, if it can be one: a refused item can contain anything."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    text = str(value)[:limit]
    return text or None
