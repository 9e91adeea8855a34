# SPDX-License-Identifier: Apache-2.0
"""Dead letters: what is kept of a refused item, and of an event with a message id that is taken.

Pure functions: an item and the reason go in, a :class:`~engage.api.DeadLetter` comes out.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

import orjson

from engage.api import API_ORIGIN, DeadLetter, Event
from engage.errors import ApiError, Problem

if TYPE_CHECKING:
    from engage.pipeline.normalise import Arrival

__all__ = ["MAX_ITEM", "Conflict", "find_conflict", "letter_id", "letter_of"]

#: Bytes that are kept of an item from the API; a webhook delivery is kept whole.
MAX_ITEM: Final = 16 * 1024

#: Fields in which two events with one message id must agree to be the same event.
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

#: The same for webhook deliveries: the recipient may have been identified between two deliveries.
_DELIVERED: Final = tuple(name for name in _COMPARED if name not in ("userId", "anonymousId"))

#: Left out of the letter (``writeKey``) and of its id: an SDK may change them when it retries.
_VOLATILE: Final = ("writeKey", "sentAt")


@dataclasses.dataclass(frozen=True, slots=True)
class Conflict:
    """A different event is stored under this event's message id.

    The stored event stays; the later one becomes a dead letter.
    """

    #: In which the two events differ.
    fields: Sequence[str]
    code: ClassVar[str] = "message_id_conflict"

    @property
    def message(self) -> str:
        """The reason in one sentence."""
        names = ", ".join(self.fields)
        return f"another event is stored with this messageId; they differ in {names}"

    @property
    def errors(self) -> Sequence[Problem]:
        """One problem for each field."""
        message = "differs from the stored event with this messageId"
        return [Problem(f"/{field}", message) for field in self.fields]


def letter_of(
    item: Any,
    problem: ApiError | Conflict,
    arrival: Arrival,
    *,
    max_item: int | None = MAX_ITEM,
) -> DeadLetter:
    """Return the dead letter of an item.

    :param item: as received, decoded. Its ``writeKey`` is not kept.
    :param problem: why it was not stored.
    :param max_item: bytes to keep of the item; ``None`` to keep it whole.
    """
    fields: Mapping[str, Any] = item if isinstance(item, dict) else {}
    if "writeKey" in fields:
        item = {name: value for name, value in fields.items() if name != "writeKey"}
    raw = _encoded(item)
    if any(name in fields for name in _VOLATILE):
        same = _encoded({n: v for n, v in fields.items() if n not in _VOLATILE})
    else:
        same = raw
    kept = raw if max_item is None or len(raw) <= max_item else _cut(raw, max_item)
    return DeadLetter(
        id=letter_id(arrival.workspace_id, arrival.origin, same),
        workspace_id=arrival.workspace_id,
        origin=arrival.origin,
        write_key_id=arrival.write_key_id,
        user_id=_text(fields.get("userId"), 512),
        anonymous_id=_text(fields.get("anonymousId"), 512),
        message_id=_text(fields.get("messageId"), 256),
        reason=problem.code,
        message=problem.message,
        errors=[error.as_dict() for error in problem.errors],
        item=kept,
        truncated=kept is not raw,
        headers=(),
        received_at=arrival.received_at,
    )


def letter_id(workspace_id: str, origin: str, item: bytes) -> str:
    """Return a letter's id: a hash of the item, so that a retry makes the same letter again."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (workspace_id.encode(), origin.encode(), item):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()


def find_conflict(event: Event, stored: bytes) -> Conflict | None:
    """Compare an event with the event that is stored under its message id.

    :param stored: the stored event's body.
    :return: ``None`` if it is the same event, sent again.
    """
    old = orjson.loads(stored)
    new = event.document()
    # When a provider delivers an event again, its recipient may have been identified since.
    compared = _COMPARED if event.origin == API_ORIGIN else _DELIVERED
    if event.origin != API_ORIGIN and ("originalTimestamp" in old) != ("originalTimestamp" in new):
        # An event without a time has that of its delivery, or of the dead letter that kept it.
        compared = tuple(name for name in compared if name != "originalTimestamp")
    fields = [
        name
        for name in compared
        if (name in old or name in new) and _canonical(old.get(name)) != _canonical(new.get(name))
    ]
    return Conflict(fields) if fields else None


def _canonical(value: Any) -> bytes:
    # Bytes, because 1, 1.0 and True are equal in Python. An empty object counts as absent.
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS) if value != {} else b"null"


def _encoded(item: Any) -> bytes:
    try:
        return orjson.dumps(item)
    except TypeError:  # a provider or a transform can return what is not JSON
        return repr(item).encode(errors="replace")


def _cut(raw: bytes, size: int) -> bytes:
    # Never within a character.
    return raw[:size].decode(errors="ignore").encode()


def _text(value: object, limit: int) -> str | None:
    """Return the value as an id if it can be one; a refused item may hold anything."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    text = str(value)[:limit]
    return text or None
