# SPDX-License-Identifier: Apache-2.0
"""What a storage promises: small interfaces, so that it may be an event sink or a whole store."""

from __future__ import annotations

import abc
import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from engage.api.events import Event

__all__ = [
    "DeadLetter",
    "DeadLetterBudget",
    "DeadLetterStore",
    "EventFilter",
    "EventStore",
    "GroupProfile",
    "Outcome",
    "Page",
    "ProfileLimits",
    "ProfileStore",
    "Status",
    "StorageContext",
    "StorageFactory",
    "SubscriptionChange",
    "SubscriptionRecord",
    "SubscriptionState",
    "SubscriptionStore",
    "UserProfile",
]


class Status(enum.StrEnum):
    """What became of one event of a write."""

    STORED = "stored"
    DUPLICATE = "duplicate"
    REFUSED = "refused"


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one event of a write."""

    status: Status
    #: Why the storage can never take this event; one sentence for the client, without its values.
    reason: str | None = None
    #: Of a duplicate: the body of the event that is stored under the same identity.
    stored: bytes | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EventFilter:
    """Which events :meth:`EventStore.scan` returns; ``None`` means any."""

    workspace_id: str | None = None
    #: Milliseconds since 1970 UTC, by ``received_at``, inclusive.
    since: int | None = None
    type: str | None = None
    user_id: str | None = None


Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True, slots=True)
class Page(Generic[Item]):
    """A part of a scan."""

    items: Sequence[Item]
    #: Give it as ``after`` to get the next page; ``None``: there is nothing more now.
    cursor: str | None


class EventStore(abc.ABC):
    """What every storage must be able to do. All methods may raise :class:`StorageUnavailable`."""

    @abc.abstractmethod
    async def open(self, *, create: bool) -> None:
        """Open the store; prepare its schema when ``create`` is true and there is none. Idempotent.

        A store on another machine that cannot be reached *now* is no error when ``create`` is true:
        the server starts, ``check`` raises until it is there, and then the schema is prepared.

        :raises StorageMissing: there is no store, and ``create`` is false.
        :raises StorageIncompatible: it was made by a newer version, or it is something else.
        :raises StorageUnavailable: it cannot be opened.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Give everything back. Idempotent; until the next ``open`` every call of another method
        raises :class:`StorageUnavailable`.
        """

    @abc.abstractmethod
    async def check(self) -> None:
        """Prove that an event could be written now.

        :raises StorageUnavailable: it could not.
        """

    @abc.abstractmethod
    async def write(self, events: Sequence[Event]) -> Sequence[Outcome]:
        """Store events; return once they are durable.

        Idempotent by :attr:`Event.identity`, across processes and hosts, by a unique key in the
        store; of two with one identity in ``events`` the earlier is stored. The changes
        (:func:`changes_of`) of a newly stored event are applied before this returns, if the store
        is a :class:`ProfileStore`; those of a refused event or a duplicate never (but the *stored*
        event's changes are completed if a crash had cut them off). After any exception the whole
        batch may be written again. It is not all or nothing.

        :return: one outcome per event, in their order.
        :raises StorageUnavailable: at least one event is not durable.
        """

    @abc.abstractmethod
    async def find(self, workspace_id: str, origin: str, message_id: str) -> Event | None:
        """:return: the event that is stored under this identity."""

    @abc.abstractmethod
    async def scan(self, wanted: EventFilter, *, after: str | None, limit: int) -> Page[Event]:
        """Read events in order of arrival (those of one write in their order).

        Every event acknowledged before the first page was asked for is returned exactly once. The
        cursor is opaque, survives a restart, and holds no lock between pages.

        :param after: the cursor of the page before; ``None`` for the first.
        :param limit: at most so many items.
        """

    @abc.abstractmethod
    async def expire(self, before: int, *, limit: int, force: bool = False) -> int:
        """Delete events with ``received_at`` below ``before`` (milliseconds), oldest first.

        :param limit: at most so many, so that one call never stalls writes.
        :param force: also when the newest event is itself below ``before`` (without it nothing is
            deleted then: the clock may have jumped).
        :return: how many were deleted.
        """

    def gauges(self) -> Mapping[str, float]:
        """Numbers of the storage's own for the metrics; asked often, cheap, never raises.

        :return: name → value, such as ``{"wal_bytes": 4096, "free_bytes": 1e9}``. Names are few,
            constant, ``[a-z_]+`` and end in their unit; ``engage_storage_`` is put before them.
        """
        return {}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UserProfile:
    """A user as the merge of the stored events."""

    workspace_id: str
    user_id: str
    traits: Mapping[str, Any]
    #: Milliseconds since 1970 UTC: least and greatest timestamp of what made the user be there.
    created_at: int
    updated_at: int
    #: Sorted.
    anonymous_ids: Sequence[str]
    #: Ids of the groups that the user is a member of, sorted.
    groups: Sequence[str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupProfile:
    """A group as the merge of the stored events."""

    workspace_id: str
    group_id: str
    traits: Mapping[str, Any]


class ProfileStore(abc.ABC):
    """A storage that also keeps profiles; its ``write`` applies the changes of events.

    Limits per user (:class:`ProfileLimits`): past one, the event is stored, the change is dropped
    and counted in :attr:`dropped_changes`.
    """

    #: How many changes were dropped since the store was opened by this process.
    dropped_changes: int = 0

    @abc.abstractmethod
    async def profile(self, workspace_id: str, user_id: str) -> UserProfile | None:
        """:return: the user, or ``None`` if nothing made it exist."""

    @abc.abstractmethod
    async def find_users(
        self, workspace_id: str, trait: str, values: Sequence[str]
    ) -> Mapping[str, Sequence[str]]:
        """Find users by a declared identifier trait (:attr:`StorageContext.identifiers`).

        :param values: in the form of :func:`identifier_value`.
        :return: for each value that somebody has: at most 100 user ids, oldest (``created_at``,
            then id) first. Only the trait's current value counts. Served by an index.
        """

    @abc.abstractmethod
    async def scan_users(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[UserProfile]:
        """Read all users, in an order of the store's own; each once."""

    @abc.abstractmethod
    async def scan_groups(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[GroupProfile]:
        """Read all groups, in an order of the store's own; each once."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionChange:
    """A user's choices, to be applied as one."""

    #: Idempotency: a change whose id was applied to this workspace before changes nothing.
    id: str
    workspace_id: str
    user_id: str
    #: Group id → subscribed.
    choices: Mapping[str, bool]
    #: Milliseconds since 1970 UTC.
    at: int
    #: How it came: ``api``, ``copy``.
    how: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionState:
    """One current choice of a user."""

    workspace_id: str
    user_id: str
    group_id: str
    subscribed: bool
    updated_at: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionRecord:
    """The audit record of one choice that changed."""

    change_id: str
    workspace_id: str
    user_id: str
    group_id: str
    #: ``None``: the user had made no choice.
    before: bool | None
    after: bool
    at: int
    how: str


class SubscriptionStore(abc.ABC):
    """A storage that also keeps subscription choices with their history."""

    @abc.abstractmethod
    async def apply(self, change: SubscriptionChange) -> Mapping[str, bool]:
        """Apply the choices and their audit records as one durable, atomic, idempotent write.

        Makes the user exist (as a :class:`Seen` at ``change.at``) if the store keeps profiles.
        A choice that already holds writes nothing.

        :return: all choices of that user, after the change.
        """

    @abc.abstractmethod
    async def state(self, workspace_id: str, user_id: str) -> Mapping[str, bool]:
        """:return: group id → subscribed, of the choices that the user made."""

    @abc.abstractmethod
    async def scan_subscriptions(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[SubscriptionState]:
        """Read all current choices; each once."""

    @abc.abstractmethod
    async def history(
        self, workspace_id: str | None, user_id: str | None, *, after: str | None, limit: int
    ) -> Page[SubscriptionRecord]:
        """Read audit records, in the order in which they were applied."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """An event (or a webhook delivery) that was refused and kept."""

    #: A hash of workspace and item, so that a retry makes no second one.
    id: str
    workspace_id: str
    #: ``api``, or the provider's name; budgets are kept apart by whether it is ``api``.
    origin: str
    write_key_id: str | None
    user_id: str | None
    anonymous_id: str | None
    message_id: str | None
    #: An error code such as ``invalid_payload`` or ``message_id_conflict``.
    reason: str
    message: str
    #: ``{"pointer": …, "message": …}`` each.
    errors: Sequence[Mapping[str, str]]
    #: The raw item, as received (for a delivery: the raw body).
    item: bytes
    #: Whether ``item`` was cut.
    truncated: bool
    #: Of a delivery: [name, value] pairs, secrets redacted.
    headers: Sequence[tuple[str, str]]
    #: Milliseconds since 1970 UTC.
    received_at: int


class DeadLetterStore(abc.ABC):
    """A storage that also keeps what was refused, within :class:`DeadLetterBudget`."""

    @abc.abstractmethod
    async def put(self, letters: Sequence[DeadLetter]) -> int:
        """Keep letters, idempotent by (workspace, id); those beyond the budget are dropped.

        :return: how many were dropped because a budget is full.
        """

    @abc.abstractmethod
    async def scan_dead_letters(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[DeadLetter]:
        """Read all dead letters, in order of arrival."""

    @abc.abstractmethod
    async def remove(self, workspace_id: str, ids: Sequence[str]) -> int:
        """:return: how many were there and are gone."""

    @abc.abstractmethod
    async def expire_dead_letters(self, before: int, *, limit: int) -> int:
        """Delete letters with ``received_at`` below ``before``; at most ``limit``.

        :return: how many were deleted.
        """


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProfileLimits:
    """Limits per user (and, for traits, per group)."""

    traits: int = 500
    #: Sum of the compact JSON of keys and values.
    trait_bytes: int = 256 * 1024
    links: int = 1000
    memberships: int = 1000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterBudget:
    """Budgets per workspace; the API's and the verified deliveries' never displace each other."""

    api_count: int = 10_000
    api_bytes: int = 64 * 1024 * 1024
    webhook_count: int = 10_000
    webhook_bytes: int = 256 * 1024 * 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StorageContext:
    """What the core tells a storage beside its own options."""

    #: Relative paths in the options are relative to this folder (the config file's).
    base_dir: Path
    #: Workspace id → names of the traits by which users are looked up.
    identifiers: Mapping[str, Sequence[str]]
    profile_limits: ProfileLimits = ProfileLimits()
    dead_letter_budget: DeadLetterBudget = DeadLetterBudget()
    #: Seconds: no call may take longer, it raises :class:`StorageUnavailable` then.
    write_timeout: float = 8.0
    #: Days after which the core expires events (by ``received_at``) and dead letters; ``None``:
    #: never. A storage whose server expires by itself may use it; its ``expire`` returns 0 then.
    events_days: int | None = None
    dead_letters_days: int | None = 14
    #: Whether this server had the store open before, in another process: one that is missing now is
    #: not made anew by ``open(create=True)``, it was taken away and may come back.
    had_store: bool = False


#: Makes a storage from its validated options. The driver is imported here, not at the module's top.
StorageFactory = Callable[[Mapping[str, Any], StorageContext], EventStore]
