# SPDX-License-Identifier: Apache-2.0
"""An event, and the changes that it makes to profiles."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeGuard

import orjson

__all__ = [
    "API_ORIGIN",
    "ERASED",
    "EVENT_TYPES",
    "OPERATOR_ORIGIN",
    "RECIPIENT_PREFIXES",
    "TRUSTED",
    "Change",
    "Event",
    "Kind",
    "Link",
    "LinkDecision",
    "Membership",
    "RemovedTraits",
    "Seen",
    "Subject",
    "Traits",
    "begins_with",
    "changes_of",
    "engage_mark",
    "identifier_value",
]


#: Begins the mark that an erased event leaves in place of its body. The mark that an earlier
#: version of engage left is empty. The body of an event is a JSON object, so it is never a mark.
ERASED: Final = b"hmac-sha256:"
#: The origin of events that were sent to the API, rather than by a webhook provider.
API_ORIGIN: Final = "api"

#: The origin of events that an operator wrote with a command of engage. No client can send one.
OPERATOR_ORIGIN: Final = "operator"

#: The types of events.
EVENT_TYPES: Final = ("identify", "track", "page", "screen", "group", "alias")

#: Ids that clients send by mistake for no user: such events are stored and change no profile.
PLACEHOLDER_IDS: Final = frozenset({"undefined", "null", "none", "nan", "[object object]"})

#: Prefixes of anonymous ids made from a webhook's recipient. They are never linked to a user.
RECIPIENT_PREFIXES: Final = ("email:", "phone:")


#: The trait of a visitor that a server key or a trusted provider wrote. Followed by a colon and the
#: name of an identifier, it is the trait of a user with the value that such an event set last, in
#: the form of :func:`identifier_value`. Only :func:`changes_of` makes them; no profile shows them.
TRUSTED: Final = "engage:trusted"

#: Parts of an event, as JSON, that may name such a trait, or be the mark that makes it.
_RESERVED: Final = b'"engage:trusted'
_MARK: Final = b'"trusted":['


# Not frozen: the ``__init__`` of a frozen class takes 1.3 µs instead of 0.5. The difference is a
# tenth of the time of an event in a batch.
@dataclasses.dataclass(slots=True, kw_only=True, unsafe_hash=True)
class Event:
    """One valid, normalised event.

    Its identity is (``workspace_id``, ``origin``, ``message_id``). It has plain values only, so it
    can be sent to another process. Observers and requests share it: never change it.
    """

    workspace_id: str
    #: ``api``, or the name of the webhook provider.
    origin: str
    message_id: str
    #: One of :data:`EVENT_TYPES`.
    type: str
    user_id: str | None
    anonymous_id: str | None
    #: ``event`` of a track call, ``name`` of a page or screen.
    name: str | None
    #: The server's clock: milliseconds since 1970 UTC; never decreases within a process.
    received_at: int
    #: When it happened, after the client's clock is corrected: milliseconds since 1970 UTC.
    timestamp: int
    #: The whole event as stored: compact UTF-8 JSON of an object with every field that was sent and
    #: those that the server sets (``type``, ``messageId``, ``timestamp``, ``receivedAt``,
    #: ``workspaceId``, ``writeKeyId``, ``source`` …).
    body: bytes
    #: What writing it costs: 1, and 1 for each trait and 2 for the membership that it sets. Not
    #: stored.
    weight: int = dataclasses.field(default=1, compare=False, repr=False)

    @property
    def identity(self) -> tuple[str, str, str]:
        """Workspace id, origin and message id."""
        return (self.workspace_id, self.origin, self.message_id)

    def document(self) -> dict[str, Any]:
        """Return the event as stored; each call decodes it again."""
        document: dict[str, Any] = orjson.loads(self.body)
        return document

    @property
    def may_change_profiles(self) -> bool:
        """Whether :func:`changes_of` can return changes; cheap, because it decodes nothing."""
        return self.type in ("identify", "group", "alias") or (
            self.user_id is not None and self.anonymous_id is not None
        )


class Kind(enum.StrEnum):
    """What a profile is of."""

    USER = "user"
    #: Someone who has an anonymous id only.
    VISITOR = "visitor"
    GROUP = "group"


class Subject(NamedTuple):
    """The user or visitor to whom something belongs.

    User ids and anonymous ids are two namespaces: the same text may be a user's and a visitor's,
    and these are two people.
    """

    #: :attr:`Kind.USER` or :attr:`Kind.VISITOR`.
    kind: Kind
    id: str


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """The user, visitor or group exists."""

    kind: Kind
    id: str


@dataclasses.dataclass(frozen=True, slots=True)
class Traits:
    """Set traits of a user, a visitor or a group. Each top-level key is a register."""

    kind: Kind
    id: str
    traits: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class RemovedTraits:
    """Remove traits of a user or a visitor.

    Each removal is a value of the trait's register: it loses to a later value and wins over an
    earlier one, in whatever order they arrive. While it holds, the user does not have the trait,
    is not found by it, and the trait takes up nothing of the limits.
    """

    kind: Kind
    id: str
    names: Sequence[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Membership:
    """Set the membership of a user or a visitor in a group, or end it with ``assigned=False``. It
    is a register."""

    kind: Kind
    id: str
    group_id: str
    assigned: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """Link an anonymous id to a user.

    A storage keeps the least ``(received_at, message id, origin)`` of the events that made the
    link: the server's time, which no client can choose. A link does not make the user exist.
    """

    user_id: str
    anonymous_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class LinkDecision:
    """Decide whether a link of an anonymous id to a user counts. It is a register of the pair that
    only operators set, so it holds against the events of clients. Without one, the link counts."""

    user_id: str
    anonymous_id: str
    counts: bool


Change = Seen | Traits | RemovedTraits | Membership | Link | LinkDecision


def changes_of(event: Event) -> tuple[Change, ...]:
    """Return the changes that an event makes to profiles: a pure function of the stored event.

    Every register is ordered by ``(event.timestamp, event.message_id, event.origin)``: the greatest
    wins, in whatever order events arrive. ``created_at`` and ``updated_at`` of a profile are the
    least and the greatest timestamp of the events that have a :class:`Seen` for it.

    An identify or group event with only an anonymous id changes the *visitor* with that id. What
    belongs to one person is merged when it is read, by :func:`engage.api.merge`: nothing is copied
    from a visitor to a user.

    A storage calls this for each newly stored event, and again for events whose changes a crash may
    have interrupted.

    :return: the changes; empty for most events.
    """
    if not event.may_change_profiles:
        return ()
    user = event.user_id if _is_id(event.user_id) else None
    changes: list[Change] = []
    if event.type in ("identify", "group", "alias"):
        document = event.document()
        if event.type == "alias" and event.origin == OPERATOR_ORIGIN and "linked" in document:
            return _decision(user, document["previousId"], counts=document["linked"])
        subject: tuple[Kind, str] | None = None
        if user is not None:
            subject = (Kind.USER, user)
        elif event.user_id is None and event.type != "alias" and _is_visitor(event.anonymous_id):
            subject = (Kind.VISITOR, event.anonymous_id)
        if subject is not None:
            changes.append(Seen(*subject))
        if event.type == "identify" and subject is not None:
            if traits := _traits(event, document):
                changes.append(Traits(*subject, traits))
            if event.origin == OPERATOR_ORIGIN and document.get("removedTraits"):
                names = document["removedTraits"]
                trusted = [f"{TRUSTED}:{name}" for name in names if subject[0] is Kind.USER]
                changes.append(RemovedTraits(*subject, (*names, *trusted)))
        elif event.type == "group" and _is_id(document["groupId"]):
            group = document["groupId"]
            changes.append(Seen(Kind.GROUP, group))
            if traits := _traits(event, document):
                changes.append(Traits(Kind.GROUP, group, traits))
            if subject is not None:
                assigned = document.get("assigned") is not False
                changes.append(Membership(*subject, group, assigned))
        elif event.type == "alias" and user is not None:
            _link(changes, user, document.get("previousId"))
        if _MARK in event.body and subject is not None:
            _trust(changes, *subject, document)
    if user is not None:
        _link(changes, user, event.anonymous_id)
    return tuple(changes)


def engage_mark(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what engage has noted in an event: its ``context.engage``."""
    context = document.get("context")
    mark = context.get("engage") if isinstance(context, dict) else None
    return mark if isinstance(mark, dict) else {}


def _traits(event: Event, document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the traits of an event without those that only engage sets."""
    traits: Mapping[str, Any] = document.get("traits") or {}
    if _RESERVED in event.body:
        return {name: value for name, value in traits.items() if not name.startswith(TRUSTED)}
    return traits


def _trust(changes: list[Change], kind: Kind, name: str, document: Mapping[str, Any]) -> None:
    """Add what an event says that its server, or a trusted provider, vouches for."""
    if not isinstance(trusted := engage_mark(document).get("trusted"), list):
        return
    if kind is Kind.VISITOR:
        changes.append(Traits(kind, name, {TRUSTED: True}))
        return
    traits = document.get("traits") or {}
    # A transform may have removed one.
    names = [trait for trait in trusted if isinstance(trait, str) and trait in traits]
    values = {f"{TRUSTED}:{name}": identifier_value(name, traits[name]) for name in names}
    if values:
        changes.append(Traits(kind, name, values))


def _decision(user_id: str | None, anonymous_id: str, *, counts: bool) -> tuple[Change, ...]:
    if user_id is None:
        return ()
    decision = LinkDecision(user_id, anonymous_id, counts)
    if counts and _is_visitor(anonymous_id):
        return (Link(user_id, anonymous_id), decision)
    return (decision,)


def _is_id(text: str | None) -> TypeGuard[str]:
    return text is not None and text.strip().lower() not in PLACEHOLDER_IDS


def _is_visitor(text: str | None) -> TypeGuard[str]:
    return _is_id(text) and not text.startswith(RECIPIENT_PREFIXES)


def _link(changes: list[Change], user_id: str, anonymous_id: str | None) -> None:
    if anonymous_id != user_id and _is_visitor(anonymous_id):
        changes.append(Link(user_id, anonymous_id))


def begins_with(text: str | None, beginning: str) -> bool:
    """Return whether a text begins with another one; capitals do not count.

    :param text: ``None`` begins with nothing.
    """
    return text is not None and text[: len(beginning)].lower() == beginning.lower()


def identifier_value(trait: str, value: object) -> str | None:
    """Return the form of a value by which users are looked up.

    :param trait: the trait's name; ``email`` is trimmed and lower-cased, ``phone`` keeps its digits
        and a leading ``+``, any other trait is not changed.
    :return: at most 512 characters; ``None`` if the value is longer, empty or not a string.
    """
    if not isinstance(value, str):
        return None
    if trait == "email":
        value = value.strip().lower()
    elif trait == "phone":
        stripped = value.strip()
        digits = "".join(character for character in stripped if character in "0123456789")
        value = ("+" if stripped.startswith("+") else "") + digits if digits else ""
    return value if 0 < len(value) <= 512 else None
