# SPDX-License-Identifier: Apache-2.0
"""The interfaces of a storage: they are small, so that a storage can keep events only.

:class:`~engage.api.ProfileStore` is in ``profiles.py``.
"""

from __future__ import annotations

import abc
import asyncio
import dataclasses
import enum
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import orjson

from engage import __version__
from engage.api.dead_letters import DeadLetterBudget
from engage.api.events import TRUSTED, Event, Kind, Subject, begins_with
from engage.api.pages import Page
from engage.api.suppressions import Suppression

__all__ = [
    "ENGAGE_VERSION",
    "EventFilter",
    "EventStore",
    "Helper",
    "Outcome",
    "Preferences",
    "ProfileLimits",
    "Status",
    "StorageContext",
    "StorageFactory",
    "SubscriptionChange",
    "SubscriptionRecord",
    "SubscriptionState",
    "SubscriptionStore",
]

#: The version of engage. A storage keeps the one that made its store or brought it up to date:
#: an earlier version, which refuses the store, then names the version to use.
ENGAGE_VERSION: Final = __version__
#: Ids whose subscription choices are changed at once: a change takes several calls of a server.
_AT_ONCE: Final = 16


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
    #: was erased (see :meth:`ErasureStore.erase_events`).
    stored: bytes | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EventFilter:
    """Which events :meth:`EventStore.scan` returns; ``None`` means any."""

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


class EventStore(abc.ABC):
    """A storage of events. Every method may raise :class:`StorageUnavailable`."""

    #: The maximum number of calls of :meth:`write` that the core makes at the same time; it is read
    #: once. With one, the events of all requests that arrive during a call share the next one. More
    #: is worth it for a storage that waits for another process or machine, which can store the
    #: events of one call while this process prepares those of the next. The calls may end in
    #: another order than they began, and may have events of one identity or of one user.
    concurrent_writes: int = 1

    @abc.abstractmethod
    async def open(self, *, create: bool) -> None:
        """Open the store, and create it if ``create`` is true and there is none. Idempotent.

        Only ``create`` migrates a store of an earlier version. Otherwise it is read as it is, and
        writes that it cannot hold raise :class:`StorageUnavailable`.

        With ``create``, a store on another machine that cannot be reached *now* is not an error:
        the server starts, ``check`` raises until the store can be reached, and then it is created.

        :raises StorageMissing: if there is no store, and ``create`` is false.
        :raises StorageIncompatible: if a newer version made the store, or if it is not a store.
        :raises StorageUnavailable: if the store cannot be opened.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Release all resources. Idempotent.

        Until the next ``open``, every other method raises :class:`StorageUnavailable`.
        """

    @abc.abstractmethod
    async def check(self) -> None:
        """Check that an event could be written now.

        :raises StorageUnavailable: if it could not.
        """

    @abc.abstractmethod
    async def write(self, events: Sequence[Event]) -> Sequence[Outcome]:
        """Store events, and return when they are durable.

        It is idempotent by :attr:`Event.identity`, across processes and hosts, by a unique key in
        the store. If two of ``events`` have one identity, the first is stored. It is not atomic:
        after an exception, the caller may write the whole batch again.

        A :class:`ProfileStore` applies the changes (:func:`changes_of`) of each newly stored event
        before it returns. It never applies those of a refused event or a duplicate, but it
        completes the changes of the *stored* event if a crash had interrupted them.

        :return: one outcome for each event, in their order.
        :raises StorageUnavailable: if at least one event is not durable.
        """

    @abc.abstractmethod
    async def find(self, workspace_id: str, origin: str, message_id: str) -> Event | None:
        """Return the event that is stored under this identity, or ``None``."""

    @abc.abstractmethod
    async def scan(self, wanted: EventFilter, *, after: str | None, limit: int) -> Page[Event]:
        """Return one page of events, in order of arrival (within a write, in their order).

        Every event that was acknowledged before the first page was read is returned exactly once.
        The cursor is opaque, survives a restart, and holds no lock between pages.

        :param after: the cursor of the previous page; ``None`` for the first page.
        :param limit: the maximum number of items.
        """

    @abc.abstractmethod
    async def expire(self, before: int, *, limit: int, force: bool = False) -> int:
        """Delete events with ``received_at`` below ``before`` (milliseconds), oldest first.

        :param limit: the maximum number of events, so that one call never stalls writes.
        :param force: delete even if the newest event is below ``before`` too. Otherwise nothing is
            deleted in that case, because the clock may have jumped.
        :return: how many events were deleted.
        """

    async def recent(
        self, wanted: EventFilter, *, before: str | None = None, limit: int
    ) -> Page[Event] | None:
        """Return one page of events, newest first (the reverse of the order of arrival).

        One call looks at a bounded number of events and takes a bounded time: a page with a
        cursor may have fewer items than ``limit``, or none. The cursor is a place in the order of
        arrival: another filter may continue there.

        :param before: the cursor of the previous page; ``None`` for the newest events.
        :param limit: the maximum number of items.
        :return: ``None`` if the storage cannot do this, which is the default.
        """
        return None

    async def follow(
        self, *, after: str | None, since: int | None = None, limit: int
    ) -> Page[Event] | None:
        """Return one page of events in an order to which others are only added at the end.

        :meth:`scan` may pass an event whose write ends later. This does not: an event that is
        acknowledged after a page was read is behind the cursor of that page, however many processes
        write, also if one of them is stopped or killed. An event may be returned twice after a
        fault. An event is returned at the latest two seconds after it was acknowledged, or 40 after
        its process was killed.

        :param after: the cursor of a page of any process, maybe long ago; ``None``: from the first
            event on.
        :param since: if ``after`` is ``None``, events that were received earlier (milliseconds
            since 1970 UTC) may be left out.
        :param limit: the maximum number of items.
        :return: a page always has a cursor. The end is reached when it is ``after`` and there are
            no items. ``None`` if the storage cannot do this, which is the default.
        :raises ForeignCursor: if the cursor is not one of this store.
        :raises ValueError: if it is not a cursor.
        """
        return None

    def helper(self) -> Helper | None:
        """Return what a separate process is to run beside the processes of a server, if anything.

        The parent of the workers (or loaders) calls this once, without opening the store. It starts
        a process for the function before the first worker, and another one when that dies. The
        storages of the other processes have :attr:`StorageContext.supervised`.
        """
        return None

    def backup_commands(self) -> tuple[str, str] | None:
        """Return the lines to type to back up the store and to restore it; never with a secret.

        For a storage that is no :class:`BackupStore`, because its database has its own commands.
        """
        return None

    def versions(self) -> Mapping[str, str]:
        """Return the software that the storage uses; cheap, never raises.

        ``engage check`` and the console show it.

        :return: name → version, such as ``{"SQLite": "3.51.3"}``; a recommendation may follow.
        """
        return {}

    #: Name of a gauge → what it is, for those who read the metrics.
    gauge_texts: ClassVar[Mapping[str, str]] = {}

    def gauges(self) -> Mapping[str, float]:
        """Return the storage's own numbers for the metrics; called often, cheap, never raises.

        The console also shows them. A storage with its own process can report that process's use:
        ``writer_memory_bytes``, ``writer_cpu_seconds``, ``writer_process_pid``.

        :return: name → value, such as ``{"wal_bytes": 4096, "free_bytes": 1e9}``. Names are few and
            constant, have the form ``[a-z_]+`` and end in their unit (``bytes``, ``seconds``,
            ``pid`` …); ``engage_storage_`` is prepended.
        """
        return {}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionChange:
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


class SubscriptionStore(abc.ABC):
    """A storage that also keeps subscription choices with their history.

    A choice belongs to the one user or visitor for whom it was made. Links between ids do not carry
    it to another one.
    """

    @abc.abstractmethod
    async def apply(self, change: SubscriptionChange) -> Mapping[str, bool]:
        """Apply the choices and their audit records as one durable, atomic, idempotent write.

        Changes without effect are remembered too, so that one that is repeated does not undo a
        later one, but only some of the latest (at least ten) of each subject: they must not make
        the store grow.

        Each new change makes the choice's ``updated_at`` greater, also one that repeats the choice.
        It has an audit record if it changes the choice. So the last record of a subject and a group
        always has the choice that is kept for them.

        If the store keeps profiles, a change of a user makes the user exist, as by a :class:`Seen`
        at ``change.at``. A change of a visitor makes no profile.

        A :attr:`SubscriptionChange.dated` change keeps its time. For a group with a later choice of
        this subject, it has no effect.

        :return: as :meth:`state` after the change.
        """

    async def apply_all(
        self, changes: Sequence[SubscriptionChange]
    ) -> Sequence[Mapping[str, bool]]:
        """Apply changes, those of one subject in their order, and return the result of each.

        It is not atomic. This default calls :meth:`apply` for several subjects at the same time.
        """
        found: list[Mapping[str, bool]] = [{}] * len(changes)
        of_subject: dict[tuple[str, Subject], list[int]] = {}
        for index, change in enumerate(changes):
            of_subject.setdefault((change.workspace_id, change.subject), []).append(index)
        waiting = iter(of_subject.values())

        async def work() -> None:
            for indexes in waiting:
                for index in indexes:
                    found[index] = await self.apply(changes[index])

        await asyncio.gather(*(work() for _ in range(_AT_ONCE)))
        return found

    @abc.abstractmethod
    async def state(self, workspace_id: str, subject: Subject) -> Mapping[str, bool]:
        """Return group id → subscribed, for each choice that is kept for a subject."""

    @abc.abstractmethod
    async def preferences(
        self,
        workspace_id: str,
        subject: Subject,
        identifier: tuple[str, str] | None,
        key: str | None,
    ) -> Preferences:
        """Return the choices of a subject, and what is suppressed of its addresses.

        :param identifier: the trait and the value in the link; ``None``: the addresses are those
            that surely are this user's, because anyone can give somebody that of another.
        :param key: of the hashes under which the addresses of erased people are kept; ``None``:
            nobody was erased.
        """

    @abc.abstractmethod
    async def scan_subscriptions(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[SubscriptionState]:
        """Return one page of all current choices; each choice once."""

    @abc.abstractmethod
    async def history(
        self,
        workspace_id: str | None,
        subject: Subject | None,
        *,
        since: int = 0,
        after: str | None,
        limit: int,
    ) -> Page[SubscriptionRecord]:
        """Return one page of audit records, in the order in which they were applied. They are never
        changed or deleted.

        :param subject: only its records.
        :param since: the least ``at``.
        """


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProfileLimits:
    """Limits of a user; those of traits also apply to a group, and a visitor has its own."""

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

    def size(self, trait: str, value: Any, identifiers: Collection[str]) -> int:
        """Return what a trait takes of the bytes; 0 for a declared identifier that has room anyway,
        and for a trait that engage sets.

        :param identifiers: the traits by which the users of the workspace are looked up.
        """
        size = len(orjson.dumps(trait)) + len(orjson.dumps(value))
        has_room = trait in identifiers or trait.startswith(TRUSTED)
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
    #: Whether the parent of this process runs what :meth:`EventStore.helper` returns. It does not
    #: for a command, for a console without a server, and on Windows.
    supervised: bool = False
    #: Always ``None``; for storages that read it.
    server_started: float | None = None


#: What a helper process runs: a function of a module, or a :func:`functools.partial` of one with
#: arguments that can be pickled. It gets a socket, and returns when that can be read or is closed:
#: all other processes of the server have ended then. Signals do not end it. It may send ``beat``
#: and a newline there about once a second: from the first one on, it is killed and started again if
#: it sends none for ``server.hang_timeout``.
Helper = Callable[[socket.socket], None]

#: Makes a storage from its validated options. Import the driver here, not at the module's top.
StorageFactory = Callable[[Mapping[str, Any], StorageContext], EventStore]
