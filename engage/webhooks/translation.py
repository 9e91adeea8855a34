# SPDX-License-Identifier: Apache-2.0
"""Makes events: ids, times, users, recipients, properties."""

from __future__ import annotations

import collections
import re
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import orjson

from engage.api import (
    MAX_TIME,
    OptOut,
    PayloadInvalid,
    Recipient,
    Rejected,
    TranslatedEvent,
    Translation,
    identifier_value,
    render_time,
)
from engage.api.times import parse_time, standard_time

__all__ = [
    "ElementIds",
    "at",
    "content_id",
    "email_event",
    "email_opt_outs",
    "email_recipient",
    "email_recipients",
    "event_id",
    "iso_time",
    "merged",
    "message_id",
    "names_person",
    "own_user_id",
    "phone_recipient",
    "spread",
    "text",
    "track",
    "translated",
    "unix_time",
    "user_id",
    "user_id_notice",
]

_NAMESPACE: Final = uuid.UUID("6f1d8a3e-3c0a-5a83-9a41-0f5b1c8f6f0e")
#: An address; one whose local part is quoted may contain anything there.
_ADDRESS: Final = re.compile(r'(?:"[^"]+"|[^\s@<>()",;:\\]+)@[^\s@<>()",;:\\]+')
#: A quoted name or a comment. Without its end, it goes on to the end of the text: so the time does
#: not grow faster than the text.
_NAME: Final = re.compile(r'"(?:[^"\\]|\\.?)*(?:"|\Z)|\([^()]*\)?', re.DOTALL)
#: Names of members that have a person, in lower case without separators.
_PERSON: Final = frozenset(
    (
        *("customer", "customerid", "customeraccount", "user", "userid", "anonymousid"),
        *("email", "emailaddress", "phone", "phonenumber", "identifiers"),
        *("recipient", "recipients", "destination", "to"),
    )
)


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
    return next((value for value in map(text, candidates) if value and len(value) <= 256), None)


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
    """Read a date and time in ISO 8601, in all forms that events of clients may have.

    Blanks around it are removed, and the second 60 is read as 59.999.

    :return: RFC 3339 in UTC with milliseconds; ``None`` for anything else, and for times outside
        the years 1970 to 9999.
    """
    text = standard_time(value.strip()) if isinstance(value, str) and len(value) <= 64 else None
    milliseconds = None if text is None else parse_time(text)
    return None if milliseconds is None or milliseconds < 0 else render_time(milliseconds)


def at(value: object, path: str) -> object:
    """Return the value at a dotted path of keys, or ``None`` if there is no such value."""
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def translated(
    items: Sequence[object],
    translate: Callable[[Any, int], TranslatedEvent | Literal["ignored", "test", "unknown"]],
    types: Iterable[str | None] = (),
) -> Translation:
    """Translate each element of a delivery by itself.

    :param translate: gets an element and its index, and returns its event, or what it counts as:
        see :class:`~engage.api.Translation`. If it raises :class:`~engage.api.PayloadInvalid`, the
        element is rejected.
    :param types: what the service calls the elements.
    """
    events: list[TranslatedEvent] = []
    rejected: list[Rejected] = []
    unknown: dict[int, object] = {}
    counts = collections.Counter[str]()
    for index, item in enumerate(items):
        try:
            result = translate(item, index)
        except PayloadInvalid as error:
            rejected.append(Rejected(index, str(error)))
            continue
        if isinstance(result, TranslatedEvent):
            events.append(result)
        elif result == "unknown":
            unknown[index] = item
        else:
            counts[result] += 1
    return Translation(
        events=events,
        ignored=counts.total() + len(unknown),
        tests=counts["test"],
        unknown=unknown,
        rejected=rejected,
        types=set(filter(None, types)),
    )


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
    return next((value for value in map(text, candidates) if value and len(value) <= 512), None)


def own_user_id(custom: object) -> tuple[str | None, tuple[str, ...]]:
    """Find the user id among a sender's custom values (tags, metadata, arguments).

    :return: the value of ``userId`` or else of ``user_id``, and a tuple of the key that has it, for
        ``without`` of :func:`spread` and for :func:`user_id_notice`.
    """
    for key in ("userId", "user_id"):
        user = user_id(custom.get(key)) if isinstance(custom, Mapping) else None
        if user is not None:
            return user, (key,)
    return None, ()


def user_id_notice(taken: Iterable[str]) -> str:
    """Return the notice for an event whose user id is not in the documented field, or ``""``.

    :param taken: the keys that :func:`own_user_id` returned.
    """
    if "user_id" not in taken:
        return ""
    return "the user id is in user_id. The next version reads only userId: send it under this name"


def names_person(value: object, keys: Collection[str] | None = None) -> bool:
    """Return whether a payload has something in it that names a person, in any depth.

    :param keys: the names of members that do, in lower case without separators, such as
        ``customerid``. A member counts if it contains a text that is not blank, or an integer.
    """
    keys = _PERSON if keys is None else keys
    waiting = [(value, False)]
    while waiting:
        current, named = waiting.pop()
        if isinstance(current, Mapping):
            waiting += [
                (inner, named or re.sub(r"[^a-z]", "", str(key).lower()) in keys)
                for key, inner in current.items()
            ]
        elif isinstance(current, list):
            waiting += [(inner, named) for inner in current]
        elif named and text(current) is not None:
            return True
    return False


def email_recipients(*candidates: object) -> tuple[Recipient, ...]:
    """Return the e-mail addresses of the first candidate that has any, each once.

    :param candidates: a text of at most 8192 characters, or a list of them. A text is an address,
        ``Name <address>``, or several of these, separated by commas or semicolons.
    """
    for candidate in candidates:
        texts = candidate if isinstance(candidate, list) else [candidate]
        recipients: dict[str | None, Recipient] = {}
        for address in (address for written in texts for address in _addresses(written)):
            recipients.setdefault(identifier_value("email", address), Recipient("email", address))
        if recipients:
            return tuple(recipients.values())
    return ()


def _addresses(written: object) -> list[str]:
    """Return the addresses in a text."""
    if not isinstance(written, str) or len(written) > 8192:
        return []
    parts = [written]
    if not _ADDRESS.fullmatch(written.strip()):
        parts = re.split("[,;]", _NAME.sub(" ", written))
    inner = ((re.search(r"<([^<>]*)>", part), part) for part in parts)
    addresses = ((part if match is None else match[1]).strip() for match, part in inner)
    return [x for x in addresses if identifier_value("email", x) and _ADDRESS.fullmatch(x)]


def email_recipient(*candidates: object) -> Recipient | None:
    """Return the first e-mail address of the first candidate that has one; see
    :func:`email_recipients`."""
    return next(iter(email_recipients(*candidates)), None)


def email_event(
    document: dict[str, Any],
    named: object,
    opt_outs: Iterable[OptOut],
    *,
    one_of: bool = False,
    taken: Iterable[str] = (),
    **fields: Any,
) -> TranslatedEvent:
    """Make an event about the addresses that a service names, with what it says of subscriptions.

    :param document: the event; it may be changed.
    :param named: the addresses, as a candidate for :func:`email_recipients`.
    :param one_of: whether they are all recipients of the message, and the event is about one of
        them. If there are several, the event changes nothing, and has the property
        ``recipientUnknown`` instead of ``email``.
    :param taken: the keys that :func:`own_user_id` returned.
    :param fields: other fields of :class:`~engage.api.TranslatedEvent`.
    :return: an event with a ``problem`` if it says something of subscriptions, and what is named
        cannot be read as an address.
    """
    recipients, opt_outs = email_recipients(named), tuple(opt_outs)
    texts = named if isinstance(named, list) else [named]
    unread = [value for value in texts if text(value) is not None and not email_recipients(value)]
    if opt_outs and unread and not recipients:
        fields["problem"] = "the address of a report cannot be read"
    if opt_outs and one_of and len(recipients) + len(unread) > 1:
        opt_outs = ()
        document["properties"].pop("email", None)
        document["properties"]["recipientUnknown"] = True
    return TranslatedEvent(
        document,
        recipients[0] if recipients else None,
        opt_outs=opt_outs,
        named=recipients if len(recipients) > 1 else None,
        notice=user_id_notice(taken),
        **fields,
    )


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
