# SPDX-License-Identifier: Apache-2.0
"""Which events are read, choices and their changes, and what a storage is told."""

from __future__ import annotations

import dataclasses
import enum
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

import orjson

from engage import __version__
from engage.api.dead_letters import DeadLetterBudget
from engage.api.events import TRUSTED, Event, Kind, Subject, begins_with
from engage.api.suppressions import Suppression

__all__ = [
    "ENGAGE_VERSION",
    "EventFilter",
    "Helper",
    "Outcome",
    "Preferences",
    "ProfileLimits",
    "Status",
    "StorageContext",
    "SubscriptionChange",
    "SubscriptionRecord",
    "SubscriptionState",
]

#: The version of engage. A storage keeps the one that made its store or brought it up to date:
#: an earlier version, which refuses the store, then names the version to use.
ENGAGE_VERSION: Final = __version__


class Status(enum.StrEnum):
    """The result of writing one event."""

    STORED = "stored"
    DUPLICATE = "duplicate"
    REFUSED = "refused"


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The result of writing one event, with details."""

    status: Status
    #: Why the storage can never store this event: one sentence for the client, without its values.
    reason: str | None = None
    #: For a duplicate: the body of the event that is stored under the same identity; its mark if it
    #: was erased (see :meth:`Storage.erase_events`).
    stored: bytes | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EventFilter:
    """Which events :meth:`Storage.scan` returns; ``None`` means any."""

    workspace_id: str | None = None
    #: The earliest ``received_at``: milliseconds since 1970 UTC, inclusive.
    since: int | None = None
    type: str | None = None
    user_id: str | None = None
    #: ``event`` of a track call, ``name`` of a page or screen.
    name: str | None = None
    origin: str | None = None
    #: The end of ``received_at``, exclusive.
    until: int | None = None
    #: Conditions: one of these fields (of ``message_id``, ``user_id``, ``anonymous_id``, ``name``)
    #: begins with this text, by :func:`begins_with`. A storage may return more events, such as
    #: those in which only the letters A to Z are the same.
    begins: Sequence[tuple[Sequence[str], str]] = ()
    #: One of these is the user id or, of an event without one, the anonymous id; at most 8000.
    ids: Collection[str] | None = None

    def matches(self, event: Event) -> bool:
        """Return whether an event is wanted.

        The core applies it to the events that a storage returns, because a storage that was
        written for an earlier version does not know the newer fields.
        """
        return (
            (self.workspace_id is None or event.workspace_id == self.workspace_id)
            and (self.since is None or event.received_at >= self.since)
            and (self.type is None or event.type == self.type)
            and (self.user_id is None or event.user_id == self.user_id)
            and (self.name is None or event.name == self.name)
            and (self.origin is None or event.origin == self.origin)
            and (self.until is None or event.received_at < self.until)
            and (self.ids is None or (event.user_id or event.anonymous_id) in self.ids)
            and all(
                any(begins_with(getattr(event, field), text) for field in fields)
                for fields, text in self.begins
            )
        )


class _OfSubject:
    """What belongs to a user or a visitor."""

    __slots__ = ()
    subject: Subject

    @property
    def user_id(self) -> str | None:
        """The user's id; ``None``: it is a visitor's."""
        return self.subject.id if self.subject.kind is Kind.USER else None

    @property
    def anonymous_id(self) -> str | None:
        """The visitor's id; ``None``: it is a user's."""
        return self.subject.id if self.subject.kind is Kind.VISITOR else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionChange(_OfSubject):
    """The choices of a user or a visitor, which are applied together."""

    #: Makes the change idempotent: the workspace ignores a second change with the same id.
    id: str
    workspace_id: str
    subject: Subject
    #: Group id → subscribed.
    choices: Mapping[str, bool]
    #: Milliseconds since 1970 UTC.
    at: int
    #: How it was made: ``api``, ``page``, ``one-click``, ``webhook:<provider>``, ``console``,
    #: ``copy`` or ``import``, or what an import says.
    how: str
    #: Whether ``at`` is when the person chose, perhaps long ago, and not when the change is made. A
    #: choice of this id that was made later, or in the same millisecond, then stays.
    dated: bool = False
    #: The first 8 hexadecimal digits of the SHA-256 of the secret that signed the link, if any.
    secret: str = ""
    #: ``User-Agent`` of the request, if there was one: at most 256 characters.
    user_agent: str = ""
    #: The client's IP address, if the workspace keeps it.
    address: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionState(_OfSubject):
    """One current choice of a user or a visitor."""

    workspace_id: str
    subject: Subject
    group_id: str
    subscribed: bool
    updated_at: int
    #: The change that made the choice, or repeated it last.
    change_id: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionRecord(_OfSubject):
    """The audit record of one choice that changed; fields as in :class:`SubscriptionChange`."""

    change_id: str
    workspace_id: str
    subject: Subject
    group_id: str
    #: The choice before the change; ``None`` if there was none.
    before: bool | None
    after: bool
    at: int
    how: str
    secret: str = ""
    user_agent: str = ""
    address: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Preferences:
    """What is sent to a person, for those who have a link."""

    #: Group id → subscribed.
    choices: Mapping[str, bool]
    #: What is suppressed of the addresses.
    suppressions: Sequence[Suppression]
    #: The traits whose address may be another's, so that nothing is said about it.
    left_out: Sequence[str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProfileLimits:
    """Limits of a user; those of traits also apply to a group, and a visitor has its own.

    The config sets ``traits``, ``trait_bytes`` and ``visitors``.
    """

    traits: int = 500
    #: The sum of the sizes of all keys and values as compact JSON.
    trait_bytes: int = 256 * 1024
    links: int = 1000
    memberships: int = 1000
    #: Compact JSON of key and value up to which a user's declared identifier trait does not count.
    identifier_bytes: int = 4096
    visitor_traits: int = 50
    visitor_trait_bytes: int = 16 * 1024
    visitor_memberships: int = 100
    #: How many visitors are merged into a user: those that were linked first.
    user_visitors: int = 100
    #: How many visitors a workspace has, exact to five seconds; then a new one replaces another.
    visitors: int = 1_000_000

    def of(self, kind: Kind) -> tuple[int, int, int]:
        """Return how many traits, bytes of traits and memberships a profile has at most."""
        if kind is Kind.VISITOR:
            return self.visitor_traits, self.visitor_trait_bytes, self.visitor_memberships
        return self.traits, self.trait_bytes, self.memberships

    def size(self, trait: str, encoded: bytes, *, identifies: bool) -> int:
        """Return what a trait takes of the bytes; 0 for a declared identifier that has room anyway,
        and for a trait that engage sets.

        :param encoded: its value, as compact JSON.
        :param identifies: whether it is one by which the users of the workspace are looked up.
        """
        size = len(orjson.dumps(trait)) + len(encoded)
        has_room = identifies or trait.startswith(TRUSTED)
        return 0 if has_room and size <= self.identifier_bytes else size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StorageContext:
    """The arguments that a storage receives from the core in addition to its options."""

    #: The folder of the config file: relative paths in the options are relative to it.
    base_dir: Path
    #: Workspace id → names of the traits by which users are looked up.
    identifiers: Mapping[str, Sequence[str]]
    profile_limits: ProfileLimits = ProfileLimits()
    dead_letter_budget: DeadLetterBudget = dataclasses.field(default_factory=DeadLetterBudget)
    #: Seconds that a call may take; after that it raises :class:`StorageUnavailable`. A scan may
    #: take longer.
    write_timeout: float = 8.0
    #: Days after which the core expires events (by ``received_at``) and dead letters; ``None``:
    #: never. The core checks the time before; a storage whose server expires them itself, by its
    #: clock, may use these, and its ``expire`` then returns 0.
    events_days: int | None = None
    dead_letters_days: int | None = 14
    #: Whether another process of this server had the store open before. If the store is missing
    #: now, ``open(create=True)`` does not create it again: it may come back.
    had_store: bool = False
    #: Whether the parent of this process runs what :meth:`Storage.helper` returns. It does not
    #: for a command, for a console without a server, and on Windows.
    supervised: bool = False
    #: ``[erasures] key``: plans know by it what was received of people before they were erased.
    erasures_key: str | None = dataclasses.field(default=None, repr=False)
    #: Always ``None``; for storages that read it.
    server_started: float | None = None


#: What a helper process runs: a function of a module, or a :func:`functools.partial` of one with
#: arguments that can be pickled. It gets a socket, and returns when that can be read or is closed:
#: all other processes of the server have ended then. Signals do not end it. It may send ``beat``
#: and a newline there about once a second: from the first one on, it is killed and started again if
#: it sends none for ``server.hang_timeout``.
Helper = Callable[[socket.socket], None]
