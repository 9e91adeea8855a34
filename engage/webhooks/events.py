# SPDX-License-Identifier: Apache-2.0
"""Makes events: ids, times, users, recipients, properties."""

from __future__ import annotations

import datetime
import email.utils
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import orjson

from engage.api import MAX_TIME, OptOut, PayloadInvalid, Recipient, identifier_value, render_time

__all__ = [
    "ElementIds",
    "at",
    "content_id",
    "email_opt_outs",
    "email_recipient",
    "event_id",
    "iso_time",
    "merged",
    "message_id",
    "own_user_id",
    "phone_recipient",
    "spread",
    "text",
    "track",
    "unix_time",
    "user_id",
]

_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_NAMESPACE: Final = uuid.UUID("6f1d8a3e-3c0a-5a83-9a41-0f5b1c8f6f0e")


def event_id(*parts: str) -> str:
    """Make a message id from what distinguishes an event from the provider's other events.

    :param parts: such as the kind, the message and the time.
    :return: a UUIDv5. Equal parts give equal ids, and different parts give different ids.
    """
    return str(uuid.uuid5(_NAMESPACE, "".join(f"{len(part)}:{part}" for part in parts)))


def content_id(value: object) -> str:
    """Make a message id from the whole content of an element for which the provider has no id.

    :param value: decoded JSON.
    :return: an id that is equal if the element is delivered again.
    :raises PayloadInvalid: if it is nested too deeply: orjson writes 254 levels, and reads 1024.
    """
    try:
        return event_id(orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode())
    except TypeError:
        raise PayloadInvalid("an element without an id is nested too deeply") from None


class ElementIds:
    """Makes message ids for elements that have neither an id nor a time.

    All of them get the time of arrival, and of two events with the same time the one with the
    greater message id wins. So these ids ascend with the element's index, and are the same if the
    delivery is sent again.

    :param elements: all elements of the delivery, decoded JSON.
    """

    def __init__(self, elements: Sequence[object]) -> None:
        self._elements = elements
        self._first: int | None = None

    def __call__(self, index: int) -> str:
        """Return the id of the element with this index."""
        if len(self._elements) == 1:
            return content_id(self._elements[0])
        if self._first is None:
            self._first = uuid.UUID(content_id(self._elements)).int
        return str(uuid.UUID(int=self._first + index))


def message_id(*candidates: object) -> str | None:
    """Return the first candidate that can be a message id, or ``None``.

    :param candidates: an integer's digits or a string that is not blank can be one, with at most
        256 characters.
    """
    for candidate in candidates:
        found = text(candidate)
        if found is not None and len(found) <= 256:
            return found
    return None


def unix_time(seconds: object) -> str | None:
    """Read seconds since 1970.

    :param seconds: a number, or a string of digits with an optional fraction.
    :return: RFC 3339 in UTC with milliseconds; ``None`` for anything else, and for times outside
        the years 1970 to 9999.
    """
    if isinstance(seconds, str):
        try:
            seconds = float(seconds) if seconds.isascii() and seconds[:1].isdigit() else None
        except ValueError:
            return None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        return None
    milliseconds = seconds * 1000
    return render_time(round(milliseconds)) if 0 <= milliseconds <= MAX_TIME else None


def iso_time(value: object) -> str | None:
    """Read a date and time in ISO 8601, with any number of digits of a second.

    Without a zone it is UTC. A space before the zone, the zone ``UTC`` or ``GMT`` and the second 60
    (read as 59.999) are accepted too.

    :return: RFC 3339 in UTC with milliseconds; ``None`` for anything else, and for times outside
        the years 1970 to 9999.
    """
    if not isinstance(value, str) or len(value) > 64 or not value.isascii():
        return None
    # In upper case, because fromisoformat() does not accept "z".
    written = re.sub(r" ?(?:UTC|GMT)\Z| (?=[+-][0-9:]+\Z)", "", value.strip().upper())
    written = re.sub(r"(:[0-5][0-9]):60(?:\.[0-9]*)?", r"\1:59.999", written, count=1)
    try:
        moment = datetime.datetime.fromisoformat(written)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=datetime.UTC)
        milliseconds = (moment - _EPOCH) // datetime.timedelta(milliseconds=1)
    except (ValueError, OverflowError):
        return None
    return render_time(milliseconds) if 0 <= milliseconds <= MAX_TIME else None


def at(value: object, path: str) -> object:
    """Return the value at a dotted path of keys, or ``None`` if there is no such value."""
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def merged(*layers: object, without: Iterable[str] = ()) -> dict[str, Any]:
    """Merge objects into one; if several have a key, the first of them wins.

    :param layers: objects; other values, and members that are ``None``, are left out.
    :param without: keys to leave out, because they have become fields.
    """
    left_out = frozenset(without)
    result: dict[str, Any] = {}
    for layer in layers:
        if isinstance(layer, Mapping):
            for key, value in layer.items():
                if value is not None and key not in left_out:
                    result.setdefault(key, value)
    return result


def spread(
    properties: Mapping[str, Any], custom: object, key: str, *, without: Iterable[str] = ()
) -> dict[str, Any]:
    """Add a sender's custom values (tags, metadata, arguments) to a provider's properties.

    :param custom: an object; any other value that is not empty is stored under ``key``.
    :param key: if a property already has the name of a custom value, all of ``custom`` is stored
        under this key too.
    :param without: keys of ``custom`` to leave out, because they have become fields.
    """
    result = dict(properties)
    if not isinstance(custom, Mapping):
        if custom:
            result[key] = custom
        return result
    own = merged(custom, without=without)
    if any(name in result and result[name] != value for name, value in own.items()):
        result[key] = dict(custom)
    for name, value in own.items():
        result.setdefault(name, value)
    return result


def text(value: object) -> str | None:
    """Return a string that is not blank or an integer's digits, and ``None`` for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return str(value)
    return value if isinstance(value, str) and value.strip() else None


def user_id(*candidates: object) -> str | None:
    """Return the first candidate that can be a user id (1 to 512 characters, not blank)."""
    for candidate in candidates:
        found = text(candidate)
        if found is not None and len(found) <= 512:
            return found
    return None


def own_user_id(custom: object) -> tuple[str | None, tuple[str, ...]]:
    """Find the user id among a sender's custom values (tags, metadata, arguments).

    :return: the value of ``userId`` or else of ``user_id``, and a tuple of the key that has it, for
        ``without`` of :func:`spread`.
    """
    for key in ("userId", "user_id"):
        found = user_id(custom.get(key)) if isinstance(custom, Mapping) else None
        if found is not None:
            return found, (key,)
    return None, ()


def email_recipient(*candidates: object) -> Recipient | None:
    """Return the first candidate that is an e-mail address, such as ``Name <address>``."""
    for candidate in candidates:
        if not isinstance(candidate, str) or len(candidate) > 2048:
            continue
        address = candidate
        if "<" in candidate:
            address = email.utils.parseaddr(candidate)[1]
        if "@" in address and identifier_value("email", address) is not None:
            return Recipient("email", address.strip())
    return None


def email_opt_outs(name: str, bounce: str | None, *groups: object) -> tuple[OptOut, ...]:
    """Return what an e-mail event says about subscriptions: an :class:`~engage.api.OptOut`, or ().

    :param name: the event's name, as in the table of ``docs/webhooks.md``.
    :param bounce: the ``bounceType``; only a ``hard`` bounce counts.
    :param groups: the service's groups that it is about; those that :func:`text` does not accept
        are left out.
    """
    own = tuple(filter(None, map(text, groups)))
    if name == "Email Unsubscribed":
        return (OptOut("unsubscribe", "email", own),)
    if name == "Email Marked as Spam":
        return (OptOut("complaint", "email", own),)
    if name == "Email Bounced" and bounce == "hard":
        return (OptOut("bounce", "email", own),)
    return ()


def phone_recipient(*candidates: object) -> Recipient | None:
    """Return the first candidate that is a phone number, such as ``whatsapp:+1…``."""
    for candidate in candidates:
        if isinstance(candidate, str):
            number = candidate.rpartition(":")[2]
            if identifier_value("phone", number) is not None:
                return Recipient("phone", number)
    return None


def track(
    name: str,
    *,
    message_id: str,
    timestamp: str | None,
    user: str | None = None,
    properties: Mapping[str, Any] | None = None,
    context: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Make the document of a track event; arguments that are ``None`` are left out.

    :param name: the event's name.
    :param message_id: the provider's id of this one event.
    :param timestamp: RFC 3339; ``None``: the event happened when it arrived.
    :param user: the user's id, if the provider has one.
    """
    document: dict[str, Any] = {"type": "track", "event": name, "messageId": message_id}
    if user is not None:
        document["userId"] = user
    if timestamp is not None:
        document["timestamp"] = timestamp
    document["properties"] = dict(properties or {})
    if context is not None:
        document["context"] = dict(context)
    return document
