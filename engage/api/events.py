# SPDX-License-Identifier: Apache-2.0
"""An event, and what it changes in the profiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import orjson

__all__ = [
    "API_ORIGIN",
    "EVENT_TYPES",
    "Change",
    "Event",
    "GroupTraits",
    "Link",
    "Membership",
    "Seen",
    "UserTraits",
    "changes_of",
    "identifier_value",
]


#: The origin of events that came in through the API rather than from a webhook provider.
API_ORIGIN: Final = "api"

#: What an event can be.
EVENT_TYPES: Final = ("identify", "track", "page", "screen", "group", "alias")

#: Ids that careless clients send for "nobody": such events are stored and change no profile.
NOBODY: Final = frozenset({"undefined", "null", "none", "nan", "[object object]"})

#: Anonymous ids that the server made from a webhook's recipient. They are never linked to a user.
RECIPIENT_PREFIXES: Final = ("email:", "phone:")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event, valid and normalised, on its way to the storage or out of it.

    Its identity is (``workspace_id``, ``origin``, ``message_id``). Plain values only, so that it
    can cross to another process.
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
    #: Server clock, milliseconds since 1970 UTC; never decreasing within a process.
    received_at: int
    #: When it happened after the correction of the client's clock; milliseconds since 1970 UTC.
    timestamp: int
    #: The whole event as stored: compact UTF-8 JSON of an object with every field that came in and
    #: those that the server set (``type``, ``messageId``, ``timestamp``, ``receivedAt``,
    #: ``workspaceId``, ``writeKeyId``, ``source`` …).
    body: bytes

    @property
    def identity(self) -> tuple[str, str, str]:
        """(workspace id, origin, message id)."""
        return (self.workspace_id, self.origin, self.message_id)

    def document(self) -> dict[str, Any]:
        """:return: the event as stored, decoded anew at each call."""
        document: dict[str, Any] = orjson.loads(self.body)
        return document

    @property
    def may_change_profiles(self) -> bool:
        """Whether :func:`changes_of` can be anything but empty; cheap, decodes nothing."""
        return self.type in ("identify", "group", "alias") or (
            self.user_id is not None and self.anonymous_id is not None
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """The user exists."""

    user_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class UserTraits:
    """Set traits of a user: one register per top-level key."""

    user_id: str
    traits: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class GroupTraits:
    """Set traits of a group: one register per top-level key. May be empty: the group exists."""

    group_id: str
    traits: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Membership:
    """Set (or, with ``assigned=False``, end) a user's membership of a group: one register."""

    user_id: str
    group_id: str
    assigned: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """An anonymous id is this user. A row of its own, added once, never removed. A link alone does
    not make a user exist."""

    user_id: str
    anonymous_id: str


Change = Seen | UserTraits | GroupTraits | Membership | Link


def changes_of(event: Event) -> tuple[Change, ...]:
    """What an event changes in the profiles: a pure function of the stored event.

    Every register is ordered by ``(event.timestamp, event.message_id, event.origin)``: the greatest
    wins, in whatever order events arrive. ``UserProfile.created_at`` and ``updated_at`` are the
    least and the greatest timestamp of the events that have a :class:`Seen` for that user.

    A storage calls it for each newly stored event, and again for events whose changes may have been
    cut off by a crash. Whether a ``previousId`` names a known *user* (then there is no link) is for
    the storage to see: :class:`Link` is dropped when its ``anonymous_id`` is the id of an existing
    user at the time it is applied.

    :return: nothing for most events.
    """
    if not event.may_change_profiles:
        return ()
    user = event.user_id
    if user is None or user.strip().lower() in NOBODY:
        user = None
    changes: list[Change] = []
    document: dict[str, Any] | None = None
    if event.type in ("identify", "group", "alias"):
        document = event.document()
        if user is not None:
            changes.append(Seen(user))
        if event.type == "identify" and user is not None:
            traits = document.get("traits") or {}
            if traits:
                changes.append(UserTraits(user, traits))
        elif event.type == "group":
            group = document["groupId"]
            if group.strip().lower() not in NOBODY:
                changes.append(GroupTraits(group, document.get("traits") or {}))
                if user is not None:
                    changes.append(Membership(user, group, document.get("assigned") is not False))
        elif event.type == "alias" and user is not None:
            _link(changes, user, document.get("previousId"))
    if user is not None:
        _link(changes, user, event.anonymous_id)
    return tuple(changes)


def _link(changes: list[Change], user_id: str, anonymous_id: str | None) -> None:
    if (
        anonymous_id is None
        or anonymous_id == user_id
        or anonymous_id.startswith(RECIPIENT_PREFIXES)
        or anonymous_id.strip().lower() in NOBODY
    ):
        return
    changes.append(Link(user_id, anonymous_id))


def identifier_value(trait: str, value: object) -> str | None:
    """The form in which a user is looked up by a trait.

    :param trait: the trait's name; ``email`` is trimmed and lower-cased, ``phone`` keeps its digits
        and a leading ``+``, any other is taken as it is.
    :return: at most 512 characters, or ``None`` for what cannot be looked up (not a string, empty).
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
