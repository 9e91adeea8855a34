# SPDX-License-Identifier: Apache-2.0
"""Events as documents that people can query, and back, unchanged.

The document of an event has the event's fields; ``timestamp`` and ``receivedAt`` are dates. The
fields that the storage adds begin with ``_``:

==========  ================================================================================
``_id``     ``<workspace>:<origin>:<message id>``
``_seq``    an ObjectId that grows with each event that a process writes: the order of arrival
``_name``   ``event`` of a track call, ``name`` of a page or screen; absent if the event has none
``_mark``   the write that stored it; only until its changes are known to be durable
``_raw``    the event as JSON, only if some server could not return it unchanged from its fields
==========  ================================================================================

Keys that MongoDB cannot store or address are percent-encoded: ``.`` is ``%2E``, a leading ``$``
``%24``, NUL ``%00``, ``%`` itself ``%25``, a space at either end ``%20`` (some servers trim paths),
the empty key ``%``, and ``_`` at the beginning of a field of the event ``%5F``.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote

import bson
import orjson
from bson.binary import Binary
from bson.datetime_ms import DatetimeMS
from bson.errors import InvalidBSON, InvalidDocument
from bson.objectid import ObjectId

from engage.api import MAX_TIME, REMOVED, Event, Kind, Subject, Version, render_time
from engage.store.events import UnstorableError

#: Maximum size of a document in MongoDB.
MAX_BYTES: Final = 16 * 1024 * 1024

#: The characters that are escaped in a key. ``_id`` as a whole, because FerretDB makes it an
#: object's first key.
_SPECIAL: Final = re.compile(r"[.%\x00]|^\$|^\s+|\s+(?![\s\S])|^_id(?![\s\S])")
#: A bounded cache of keys that need no escape, so that a common key is examined once.
_PLAIN_KEYS: Final[set[str]] = set()
_MAX_PLAIN_KEYS: Final = 10_000


#: The types of values that are read as they were stored.
_UNCHANGED: Final = frozenset({str, int, bool})

#: The version of a link that was stored before links had versions.
OLDEST: Final[Version] = (-(2**63), "", "")
#: The version of a link that no event made.
NEVER: Final[Version] = (MAX_TIME, "", "")


# ---------------------------------------------------------------------------------------- keys, ids
def escape_key(key: str) -> str:
    """Return a key in a form that MongoDB can store and address; :func:`unescape_key` undoes it."""
    if key in _PLAIN_KEYS:
        return key
    return _SPECIAL.sub(_percent, key) if key else "%"


def identifier_field(trait: str) -> str:
    """Return the field that has an identifier in the form that is looked up."""
    return f"traits.{escape_key(trait)}.i"


def _percent(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode())


def unescape_key(key: str) -> str:
    """Return the key that :func:`escape_key` made this form of."""
    if "%" not in key:
        return key
    return "" if key == "%" else unquote(key)


def _needs_escape(value: Any) -> bool:
    """Return whether a key anywhere in ``value``, an object or a list, must be escaped."""
    level = [value]
    for container in level:  # The list grows during the loop.
        if type(container) is dict:
            if not container.keys() <= _PLAIN_KEYS and _any_special(container.keys() - _PLAIN_KEYS):
                return True
            container = container.values()
        for inner in container:
            kind = type(inner)
            if kind is dict or kind is list:
                level.append(inner)
    return False


def _any_special(keys: set[str]) -> bool:
    for key in keys:
        if not key or _SPECIAL.search(key) is not None:
            return True
        if len(_PLAIN_KEYS) < _MAX_PLAIN_KEYS and len(key) <= 64:
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
    # The driver reads 64-bit integers as a class of its own.
    return int(value) if isinstance(value, bson.Int64) else value


def escape(value: Any) -> Any:
    """Return a JSON value with every key escaped; ``value`` itself if nothing must be escaped."""
    return _escaped(value) if isinstance(value, dict | list) and _needs_escape(value) else value


def unescape(value: Any) -> Any:
    """Return the JSON value that :func:`escape` made this form of."""
    return _unescaped(value)


def is_text(text: str) -> bool:
    """Return whether a string can be stored: one with a lone surrogate cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _part(text: str) -> str:
    """Return a text as a part of an ``_id``. With the escape, different parts never give the same
    ``_id``; a workspace id and an origin contain no colon today."""
    return text.replace("%", "%25").replace(":", "%3A") if "%" in text or ":" in text else text


def event_id(workspace_id: str, origin: str, message_id: str) -> str:
    """Return the ``_id`` of an event; different identities have different ones."""
    return f"{_part(workspace_id)}:{_part(origin)}:{message_id}"


def scoped_id(workspace_id: str, name: str) -> str:
    """Return the ``_id`` of a thing with one name in a workspace: a user, a dead letter …"""
    return f"{_part(workspace_id)}:{name}"


def subject_id(workspace_id: str, subject: Subject) -> str:
    """Return the ``_id`` of what a user or a visitor has once. No text makes one the other: in the
    part of the workspace, digits follow each ``%``."""
    mark = "" if subject.kind is Kind.USER else "%"
    return f"{_part(workspace_id)}{mark}:{subject.id}"


def subject_of(document: Mapping[str, Any]) -> Subject:
    """Return the user or visitor whose id a document has."""
    if "userId" in document:
        return Subject(Kind.USER, document["userId"])
    return Subject(Kind.VISITOR, document["anonymousId"])


def pair_id(workspace_id: str, user_id: str, other: str) -> str:
    """Return the ``_id`` of a link or a membership."""
    return f"{_part(workspace_id)}:{len(user_id)}:{user_id}:{other}"


def path_id(*parts: str) -> str:
    """Return the ``_id`` of a thing with several names, of which the first is the workspace."""
    return ":".join(map(_part, parts))


def in_workspace(workspace_id: str | None) -> dict[str, Any]:
    """Return a condition on ``_id``: within a workspace, or any if it is ``None``."""
    return {} if workspace_id is None else below(_part(workspace_id))


def with_visitors(workspace_id: str) -> dict[str, Any]:
    """Return a query for the documents of a workspace that have a :func:`subject_id`."""
    part = _part(workspace_id)
    return {"_id": {"$gte": f"{part}%:", "$lt": f"{part};"}, "workspaceId": workspace_id}


def below(path: str) -> dict[str, Any]:
    """Return a condition on ``_id``: it begins with the parts of another one, and has more."""
    return {"$gte": f"{path}:", "$lt": f"{path};"}


def of_origin(workspace_id: str | None, origin: str) -> dict[str, Any]:
    """Return a condition on the ``_id`` of an event: within an origin.

    :param workspace_id: ``None``: of any workspace.
    """
    workspace = "[^:]*" if workspace_id is None else re.escape(_part(workspace_id))
    # The server takes no NUL in an expression.
    return {"$regex": f"^{workspace}:{re.escape(_part(origin))}:".replace("\0", r"\x00")}


def any_of(ids: Sequence[str]) -> Any:
    """Return a condition: equal to one of these ids. For a single id it is the plain value, which
    every server answers from an index."""
    return ids[0] if len(ids) == 1 else {"$in": list(ids)}


# -------------------------------------------------------------------------------------------- times
class Sequencer:
    """Makes values of ``_seq``: microseconds (7 bytes), greater with each call, and 5 random bytes
    of the process, so that two processes never make the same value."""

    def __init__(self) -> None:
        self._last = 0
        self.process = os.urandom(5)

    def __call__(self, after: ObjectId | None = None) -> ObjectId:
        """Return the next value.

        :param after: the value is greater than this one, which another process may have made with
            another clock.
        """
        if after is not None:
            self._last = max(self._last, int.from_bytes(after.binary[:7], "big"))
        self._last = max(self._last + 1, time.time_ns() // 1000)
        return ObjectId(self._last.to_bytes(7, "big") + self.process)


# ------------------------------------------------------------------------------------------- values
def needs_raw(encoded: bytes) -> bool:
    """Return whether compact JSON may contain ``-0.0``, of which some servers lose the sign."""
    return b"-0.0" in encoded


def encode_value(value: Any) -> dict[str, Any]:
    """Return ``v`` of a register, and ``j`` beside it where BSON may not keep the value."""
    if isinstance(value, dict | list | float):
        encoded = orjson.dumps(value)
        if needs_raw(encoded):
            return {"v": escape(value), "j": encoded.decode()}
        return {"v": escape(value)}
    return {"v": value}


def decode_value(register: Mapping[str, Any]) -> Any:
    """Return the value that :func:`encode_value` encoded."""
    if "j" in register:
        return orjson.loads(register["j"])
    return unescape(register["v"])


def version_of(register: Mapping[str, Any]) -> Version:
    """Return the version of a stored register."""
    return (int(register["t"]), register["m"], register["o"])


def link_version(document: Mapping[str, Any]) -> Version | None:
    """Return the version of a stored link; ``None`` if it is a decision only."""
    first = document.get("first")
    version = OLDEST if first is None else version_of(first)
    return None if version == NEVER else version


def trait_value(register: Mapping[str, Any]) -> Any:
    """Return the value of a trait; :data:`REMOVED` if it is removed."""
    value = register["v"]
    # Most are. No other type is always what it was, and a removed trait has none of them.
    if type(value) in _UNCHANGED:
        return value
    return REMOVED if "x" in register else decode_value(register)


# ------------------------------------------------------------------------------------------- events
def encode_event(event: Event, key: str, seq: ObjectId, mark: str | None) -> bytes:
    """Return an event as BSON.

    :param key: the ``_id``.
    :param mark: the mark of the write, if the event changes profiles.
    :raises UnstorableError: if it can never be stored.
    """
    try:
        body = event.document()
        document: dict[str, Any] = {"_id": key, "_seq": seq}
        if event.name is not None:
            document["_name"] = event.name
        if mark is not None:
            document["_mark"] = mark
        timestamp, received_at = render_time(event.timestamp), render_time(event.received_at)
        exact = (
            body.get("type") == event.type
            and body.get("messageId") == event.message_id
            and body.get("workspaceId") == event.workspace_id
            and body.get("userId") == event.user_id
            and body.get("anonymousId") == event.anonymous_id
            and body.get("timestamp") == timestamp
            and body.get("receivedAt") == received_at
        )
        if not exact or needs_raw(event.body):
            document["_raw"] = Binary(event.body)
        # Names that begin with _ are the storage's. One search for all names is fast; escaping a
        # body that does not need it does no harm.
        if _needs_escape(body) or "\0_" in "\0" + "\0".join(body):
            body = _escaped(body)
            body = {f"%5F{name[1:]}" if name[0] == "_" else name: body[name] for name in body}
        document.update(body)
        if not exact:
            own = {
                "type": event.type,
                "messageId": event.message_id,
                "workspaceId": event.workspace_id,
                "userId": event.user_id,
                "anonymousId": event.anonymous_id,
            }
            for name, value in own.items():
                if value is not None:
                    document[name] = value
                elif document.get(name) is not None:
                    del document[name]
        document["timestamp"] = DatetimeMS(event.timestamp)
        document["receivedAt"] = DatetimeMS(event.received_at)
        encoded = bson.encode(document)
    except (InvalidDocument, InvalidBSON, OverflowError, UnicodeError, ValueError) as error:
        raise UnstorableError("the storage cannot store a value of this event") from error
    except RecursionError as error:
        raise UnstorableError("nested too deeply for the storage") from error
    if len(encoded) > MAX_BYTES:
        raise UnstorableError("too large for the storage (16 MiB)")
    return encoded


def _dumped(fields: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(fields)
    except TypeError:  # It is nested more deeply than a request can be: another program wrote it.
        return json.dumps(fields, ensure_ascii=False).encode()


def decode_event(document: Mapping[str, Any]) -> Event:
    """Return the event of a document that :func:`encode_event` made."""
    raw = document.get("_raw")
    if raw is not None:
        body = bytes(raw)
    else:
        fields = {name: value for name, value in document.items() if name[0] != "_"}
        for name in ("timestamp", "receivedAt"):
            fields[name] = render_time(int(document[name]))
        body = _dumped(fields)
        if b"%" in body:
            body = _dumped(_unescaped(fields))
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
