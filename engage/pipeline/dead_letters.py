# SPDX-License-Identifier: Apache-2.0
"""What is kept of an event that was refused, and when a duplicate is none.

Pure: an item and an error → a :class:`~engage.api.DeadLetter`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import orjson

from engage.api import API_ORIGIN, DeadLetter, Event
from engage.errors import ApiError, Problem

if TYPE_CHECKING:
    from engage.pipeline.normalise import Arrival

__all__ = ["MAX_ITEM", "conflict_error", "differences", "letter_id", "letter_of"]

#: Of an item that came through the API so many bytes are kept; of a delivery everything.
MAX_ITEM: Final = 16 * 1024

#: What must be equal in two events with one message id, or the second is another event.
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

#: The same of a webhook delivery, whose recipient may have been identified since.
_DELIVERED: Final = tuple(name for name in _COMPARED if name not in ("userId", "anonymousId"))

#: Never kept, and never part of a letter's id: an SDK that sends an item again may change them.
_VOLATILE: Final = ("writeKey", "sentAt")


def letter_of(
    item: Any,
    error: ApiError,
    arrival: Arrival,
    *,
    max_item: int | None = MAX_ITEM,
) -> DeadLetter:
    """Make the dead letter of a refused item.

    :param item: as received, decoded; its ``writeKey`` is not kept.
    :param max_item: bytes that are kept of it; ``None``: all.
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
        reason=error.code,
        message=error.message,
        errors=[problem.as_dict() for problem in error.errors],
        item=kept,
        truncated=kept is not raw,
        headers=(),
        received_at=arrival.received_at,
    )


def letter_id(workspace_id: str, origin: str, item: bytes) -> str:
    """:return: the hash that makes a retry the same letter; over length-prefixed parts."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (workspace_id.encode(), origin.encode(), item):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()


def differences(event: Event, stored: bytes) -> list[str]:
    """Compare an event with the one that is stored under its identity.

    :param stored: the stored event's body.
    :return: names of the fields in which they differ; empty: it is the same event, sent again.
    """
    old = orjson.loads(stored)
    new = event.document()
    # A provider that delivers an event again need not find its recipient as unknown as before.
    compared = _COMPARED if event.origin == API_ORIGIN else _DELIVERED
    if event.origin != API_ORIGIN and ("originalTimestamp" in old) != ("originalTimestamp" in new):
        # Without a time of its own it has that of its delivery, or of the letter kept of it.
        compared = tuple(name for name in compared if name != "originalTimestamp")
    return [
        name
        for name in compared
        if (name in old or name in new) and _canonical(old.get(name)) != _canonical(new.get(name))
    ]


def conflict_error(fields: Sequence[str]) -> ApiError:
    """:return: what the dead letter of a newcomer says; nobody is answered with it."""
    return ApiError(
        "message_id_conflict",
        f"another event with this messageId is stored; they differ in {', '.join(fields)}",
        errors=[
            Problem(f"/{field}", "differs from the stored event with this messageId")
            for field in fields
        ],
        status=200,
    )


def _canonical(value: Any) -> bytes:
    # As bytes, because in Python 1, 1.0 and True are equal. An empty object is as none.
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS) if value != {} else b"null"


def _encoded(item: Any) -> bytes:
    try:
        return orjson.dumps(item)
    except TypeError:  # not JSON: a provider or a transform can make it
        return repr(item).encode(errors="replace")


def _cut(raw: bytes, size: int) -> bytes:
    # Not within a character.
    return raw[:size].decode(errors="ignore").encode()


def _text(value: object, limit: int) -> str | None:
    """:return: an id as far as it is one: this is what was refused, it may be anything."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    text = str(value)[:limit]
    return text or None
