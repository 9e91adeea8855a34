# SPDX-License-Identifier: Apache-2.0
"""Events as documents that people can query, and back, unchanged.

An event is a document with its own fields; ``timestamp`` and ``receivedAt`` are dates. What the
storage adds begins with ``_``:

==========  ================================================================================
``_id``     ``<workspace>:<origin>:<message id>``
``_seq``    an ObjectId that grows with each event that a process writes: order of arrival
``_name``   ``event`` of a track call, ``name`` of a page or screen; absent if there is none
``_mark``   which write stored it; only until its changes are known to be durable
``_raw``    the event as JSON, only if some server could not give it back from its fields
==========  ================================================================================

Keys that MongoDB cannot hold or address are percent-encoded: ``.`` is ``%2E``, a leading ``$``
``%24``, NUL ``%00``, ``%`` itself ``%25``, space at an end ``%20`` (some servers trim paths), the
empty key ``%``, and ``_`` at the beginning of a field of the event ``%5F``.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote

import bson
import orjson
from bson.binary import Binary
from bson.datetime_ms import DatetimeMS
from bson.errors import InvalidBSON, InvalidDocument
from bson.objectid import ObjectId

from engage.api import Event, render_time

#: What MongoDB takes as one document.
MOST_BYTES: Final = 16 * 1024 * 1024

#: What is escaped within a key. ``_id`` itself, because FerretDB makes it an object's first key.
_ODD: Final = re.compile(r"[.%\x00]|^\$|^\s+|\s+(?![\s\S])|^_id(?![\s\S])")
#: Keys that need no escape, so that each is looked at once. Bounded.
_PLAIN_KEYS: Final[set[str]] = set()
_MOST_PLAIN: Final = 10_000


class UnstorableError(Exception):
    """This event can never be stored; the message is for the client, without its values."""


# ---------------------------------------------------------------------------------------- keys, ids
def escape_key(key: str) -> str:
    """:return: ``key`` as MongoDB can hold and address it; reversible."""
    return _ODD.sub(_percent, key) if key else "%"


def _percent(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode())


def unescape_key(key: str) -> str:
    """Undo :func:`escape_key`."""
    if "%" not in key:
        return key
    return "" if key == "%" else unquote(key)


def _is_odd(value: Any) -> bool:
    """Whether a key anywhere in ``value``, an object or a list, must be escaped."""
    level = [value]
    for container in level:  # which grows
        if type(container) is dict:
            if not container.keys() <= _PLAIN_KEYS and _any_odd(container.keys() - _PLAIN_KEYS):
                return True
            container = container.values()
        for inner in container:
            kind = type(inner)
            if kind is dict or kind is list:
                level.append(inner)
    return False


def _any_odd(keys: set[str]) -> bool:
    for key in keys:
        if not key or _ODD.search(key) is not None:
            return True
        if len(_PLAIN_KEYS) < _MOST_PLAIN and len(key) <= 64:
            _PLAIN_KEYS.add(key)
    return False


def _escaped(value: Any) -> Any:
    if isinstance(value, dict):
        return {escape_key(key): _escaped(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_escaped(inner) for inner in value]
    return value


def _unescaped(value: Any) -> Any:
    if isinstance(value, dict):
        return {unescape_key(key): _unescaped(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_unescaped(inner) for inner in value]
    # Not the driver's own class for 64 bits.
    return int(value) if isinstance(value, bson.Int64) else value


def escape(value: Any) -> Any:
    """:return: a JSON value with every key escaped; ``value`` itself if there is nothing to do."""
    return _escaped(value) if isinstance(value, dict | list) and _is_odd(value) else value


def unescape(value: Any) -> Any:
    """Undo :func:`escape`."""
    return _unescaped(value)


def is_text(text: str) -> bool:
    """:return: whether it can be written as UTF-8 at all: only then can it be stored."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _part(text: str) -> str:
    """A workspace id or an origin within an id; neither has a colon, but nothing may collide."""
    return text.replace("%", "%25").replace(":", "%3A") if "%" in text or ":" in text else text


def event_id(workspace_id: str, origin: str, message_id: str) -> str:
    """:return: the ``_id`` of an event; different for different identities."""
    return f"{_part(workspace_id)}:{_part(origin)}:{message_id}"


def own_id(workspace_id: str, name: str) -> str:
    """:return: the ``_id`` of what a workspace has by one name: a user, a group, a dead letter."""
    return f"{_part(workspace_id)}:{name}"


def pair_id(workspace_id: str, user_id: str, other: str) -> str:
    """:return: the ``_id`` of a link or a membership."""
    return f"{_part(workspace_id)}:{len(user_id)}:{user_id}:{other}"


def in_workspace(workspace_id: str | None) -> dict[str, Any]:
    """:return: a condition on ``_id``: within one workspace (any: ``None``)."""
    if workspace_id is None:
        return {}
    return {"$gte": f"{_part(workspace_id)}:", "$lt": f"{_part(workspace_id)};"}


# -------------------------------------------------------------------------------------------- times
class Sequencer:
    """Gives ``_seq``: microseconds (7 bytes) that grow with each call, and 5 random bytes of the
    process, so that no two processes ever give the same."""

    def __init__(self) -> None:
        self._last = 0
        self._process = os.urandom(5)

    def __call__(self, after: ObjectId | None = None) -> ObjectId:
        """:param after: the result is greater, whatever the clock of the process that gave it."""
        if after is not None:
            self._last = max(self._last, int.from_bytes(after.binary[:7], "big"))
        self._last = max(self._last + 1, time.time_ns() // 1000)
        return ObjectId(self._last.to_bytes(7, "big") + self._process)


# ------------------------------------------------------------------------------------------- values
def needs_raw(encoded: bytes) -> bool:
    """Whether compact JSON may hold ``-0.0``, of which some servers lose the sign."""
    return b"-0.0" in encoded


def encode_value(value: Any) -> dict[str, Any]:
    """:return: ``v`` of a register, and ``j`` beside it where BSON may not do."""
    if isinstance(value, dict | list | float):
        encoded = orjson.dumps(value)
        if needs_raw(encoded):
            return {"v": escape(value), "j": encoded.decode()}
        return {"v": escape(value)}
    return {"v": value}


def decode_value(register: Mapping[str, Any]) -> Any:
    """Undo :func:`encode_value`."""
    if "j" in register:
        return orjson.loads(register["j"])
    return unescape(register["v"])


# ------------------------------------------------------------------------------------------- events
def encode_event(event: Event, key: str, seq: ObjectId, mark: str | None) -> bytes:
    """:return: the event as BSON.

    :raises UnstorableError: it can never be stored.
    """
    try:
        body = event.document()
        document: dict[str, Any] = {"_id": key, "_seq": seq}
        if event.name is not None:
            document["_name"] = event.name
        if mark is not None:
            document["_mark"] = mark
        own: dict[str, Any] = {
            "type": event.type,
            "messageId": event.message_id,
            "workspaceId": event.workspace_id,
            "userId": event.user_id,
            "anonymousId": event.anonymous_id,
            "timestamp": render_time(event.timestamp),
            "receivedAt": render_time(event.received_at),
        }
        exact = own.items() <= body.items() or all(body.get(name) == own[name] for name in own)
        if not exact or needs_raw(event.body):
            document["_raw"] = Binary(event.body)
        # What begins with _ is ours. One look for all names; one escape too many does no harm.
        if _is_odd(body) or "\0_" in "\0" + "\0".join(body):
            body = _escaped(body)
            body = {f"%5F{name[1:]}" if name[0] == "_" else name: body[name] for name in body}
        document.update(body)
        if not exact:
            for name, value in own.items():
                if value is not None:
                    document[name] = value
                elif document.get(name) is not None:
                    del document[name]
        document["timestamp"] = DatetimeMS(event.timestamp)
        document["receivedAt"] = DatetimeMS(event.received_at)
        encoded = bson.encode(document)
    except (InvalidDocument, InvalidBSON, OverflowError, UnicodeError, ValueError) as error:
        raise UnstorableError("the storage cannot hold a value of this event") from error
    except RecursionError as error:
        raise UnstorableError("nested too deeply for the storage") from error
    if len(encoded) > MOST_BYTES:
        raise UnstorableError("too large for the storage (16 MiB)")
    return encoded


def decode_event(document: Mapping[str, Any]) -> Event:
    """:return: the event of a document that :func:`encode_event` made."""
    raw = document.get("_raw")
    if raw is not None:
        body = bytes(raw)
    else:
        fields = {name: value for name, value in document.items() if name[0] != "_"}
        for name in ("timestamp", "receivedAt"):
            fields[name] = render_time(int(document[name]))
        body = orjson.dumps(fields)
        if b"%" in body:
            body = orjson.dumps(_unescaped(fields))
    _, origin, message_id = document["_id"].split(":", 2)
    return Event(
        workspace_id=document["workspaceId"],
        origin=origin.replace("%3A", ":").replace("%25", "%"),
        message_id=message_id,
        type=document["type"],
        user_id=document.get("userId"),
        anonymous_id=document.get("anonymousId"),
        name=document.get("_name"),
        received_at=int(document["receivedAt"]),
        timestamp=int(document["timestamp"]),
        body=body,
    )


def page_after(cursor: str) -> tuple[DatetimeMS, ObjectId]:
    """:return: the place in the order of arrival that a cursor names.

    :raises ValueError: it is not a cursor.
    """
    received, _, seq = cursor.partition(".")
    if not re.fullmatch(r"-?[0-9]{1,16}", received) or not ObjectId.is_valid(seq):
        raise ValueError("not a cursor of this storage")
    return DatetimeMS(int(received)), ObjectId(seq)


def cursor_of(document: Mapping[str, Any]) -> str:
    """:return: the cursor after this document."""
    return f"{int(document['receivedAt'])}.{document['_seq']}"
