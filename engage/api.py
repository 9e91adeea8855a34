# SPDX-License-Identifier: Apache-2.0
"""PUBLIC: all that a plugin imports.

A plugin is a module named by an entry point of the group ``engage``. It implements hooks of
:mod:`engage.hookspecs`, marked with :data:`hookimpl`, and registers what it brings: a storage, a
webhook provider, a transform, an observer or a command.

The errors of engage, each with who raises it and what becomes of it::

    EngageError
    ├── ConfigError            a plugin's factory: an option is wrong (start-up stops, exit 1)
    ├── StorageError
    │   ├── StorageUnavailable a storage: not now (503 with Retry-After, nothing acknowledged)
    │   ├── StorageMissing     a storage: there is no store yet, and ``create`` was not allowed
    │   └── StorageIncompatible a storage: made by a version that this one cannot read
    └── WebhookError
        ├── SignatureMismatch  a provider's ``verify``: not from the provider (401)
        │   └── NothingSigned  a provider's ``verify``: there is nothing that could be signed (400)
        └── PayloadInvalid     a provider's ``translate``: not understood (dead letter, 200)

This module imports nothing of engage.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Generic, Literal, TypeVar

import orjson
import pluggy

__all__ = [
    "API_ORIGIN",
    "DROP",
    "Change",
    "ConfigError",
    "DeadLetter",
    "DeadLetterBudget",
    "DeadLetterStore",
    "EngageError",
    "Event",
    "EventFilter",
    "EventStore",
    "Fetch",
    "GroupProfile",
    "GroupTraits",
    "Link",
    "Membership",
    "NothingSigned",
    "Observer",
    "ObserverFactory",
    "Outcome",
    "Page",
    "PayloadInvalid",
    "ProfileLimits",
    "ProfileStore",
    "Provider",
    "ProviderContext",
    "ProviderFactory",
    "Recipient",
    "Rejected",
    "Reply",
    "Seen",
    "SignatureMismatch",
    "Signing",
    "Status",
    "StorageContext",
    "StorageError",
    "StorageFactory",
    "StorageIncompatible",
    "StorageMissing",
    "StorageUnavailable",
    "SubscriptionChange",
    "SubscriptionRecord",
    "SubscriptionState",
    "SubscriptionStore",
    "Transform",
    "TransformFactory",
    "TranslatedEvent",
    "Translation",
    "UserProfile",
    "UserTraits",
    "WebhookError",
    "WebhookRequest",
    "WebhookResult",
    "changes_of",
    "hookimpl",
    "identifier_value",
]

#: Marks a function of a plugin as the implementation of a hook.
hookimpl: Final = pluggy.HookimplMarker("engage")

#: The origin of events that came in through the API rather than from a webhook provider.
API_ORIGIN: Final = "api"

#: Ids that careless clients send for "nobody": such events are stored and change no profile.
NOBODY: Final = frozenset({"undefined", "null", "none", "nan", "[object object]"})

#: Anonymous ids that the server made from a webhook's recipient. They are never linked to a user.
RECIPIENT_PREFIXES: Final = ("email:", "phone:")


# ---------------------------------------------------------------------------------------- errors
class EngageError(Exception):
    """Base of every error that engage or a plugin raises on purpose."""


class ConfigError(EngageError):
    """An option of a plugin is wrong. The message names the option and the rule, never a secret."""


class StorageError(EngageError):
    """Base of what a storage raises."""


class StorageUnavailable(StorageError):
    """The storage cannot answer now; the same call may succeed later. The cause is the driver's."""


class StorageMissing(StorageError):
    """There is no store at the configured place, and the caller did not allow to create one."""


class StorageIncompatible(StorageError):
    """The store was made by a newer version (``min_reader`` is above ours), or is not a store."""


class WebhookError(EngageError):
    """Base of what a webhook provider raises."""


class SignatureMismatch(WebhookError):
    """The delivery does not verify. The message is logged, never sent."""


class NothingSigned(SignatureMismatch):
    """The delivery holds nothing that the provider's scheme could have signed (400)."""


class PayloadInvalid(WebhookError):
    """A verified delivery cannot be translated. It is kept as a dead letter."""


# ---------------------------------------------------------------------------------------- events
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
    #: identify, track, page, screen, group or alias.
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
        """Give everything back. Idempotent; nothing else may be called afterwards but ``open``."""

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


# -------------------------------------------------------------------------------------- profiles
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


# --------------------------------------------------------------------------------- subscriptions
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


# ---------------------------------------------------------------------------------- dead letters
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


# ---------------------------------------------------------------------------- what a storage gets
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


#: Makes a storage from its validated options. The driver is imported here, not at the module's top.
StorageFactory = Callable[[Mapping[str, Any], StorageContext], EventStore]


# ------------------------------------------------------------------------ transforms and observers
class _Drop(enum.Enum):
    DROP = "drop"


#: What a transform returns to drop an event (it is counted as accepted).
DROP: Final = _Drop.DROP

#: Gets an event as a document and returns it, a changed one, or :data:`DROP`. Synchronous and pure.
Transform = Callable[[dict[str, Any]], dict[str, Any] | Literal[_Drop.DROP]]
#: Makes a transform from its validated options.
TransformFactory = Callable[[Mapping[str, Any]], Transform]

#: Told what became durable.
Observer = Callable[[Sequence[Event]], Awaitable[None]]
#: Makes an observer from its validated options.
ObserverFactory = Callable[[Mapping[str, Any]], Observer]


# -------------------------------------------------------------------------------------- webhooks
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WebhookRequest:
    """One delivery, exactly as it arrived. All that a provider sees of the world."""

    #: ``POST``, in upper case.
    method: str
    #: [name, value] pairs in their order, repeated ones repeated, values decoded as Latin-1.
    headers: Sequence[tuple[str, str]]
    #: The raw bytes (after a Content-Encoding was undone).
    body: bytes
    #: The public URL of this request, query included as it was sent: the configured ``public_url``
    #: with path and query, never anything from a ``Host`` or forwarding header. Without a
    #: ``public_url`` in the config: path and query only.
    url: str
    #: The clock, seconds since 1970 UTC.
    now: float

    @property
    def query(self) -> str:
        """The part of the URL after the first ``?``, undecoded; empty if there is none."""
        return self.url.partition("?")[2]

    def values(self, name: str) -> list[str]:
        """:return: the values of a header, whatever the case of its name, in their order."""
        wanted = name.lower()
        return [value for key, value in self.headers if key.lower() == wanted]


@dataclasses.dataclass(frozen=True, slots=True)
class Fetch:
    """A document that the core is to fetch with one GET: no redirect, 3 s, 64 KiB.

    The core refuses it unless it is ``https``, without user information, port or fragment, and its
    host matches one of :attr:`Provider.hosts` as a whole.
    """

    url: str
    #: Whether what was fetched may be kept and used again (up to 24 h).
    cacheable: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Recipient:
    """Who a message went to, for events of which the provider gives no user id."""

    #: ``email`` or ``phone``: the trait by which the user is looked up.
    trait: Literal["email", "phone"]
    #: The address or number, in any spelling (the core uses :func:`identifier_value`).
    value: str


@dataclasses.dataclass(frozen=True, slots=True)
class TranslatedEvent:
    """One event in Segment's form, made of a delivery."""

    #: ``type`` and what belongs to it: ``event``, ``userId``, ``anonymousId``, ``messageId``,
    #: ``timestamp`` (RFC 3339, kept without correction), ``properties``, ``traits``, ``context`` …
    #: ``messageId`` must be the same whenever the same event is delivered again.
    document: dict[str, Any]
    #: Who it belongs to when the document has neither ``userId`` nor ``anonymousId``.
    recipient: Recipient | None = None
    #: Which element of the delivery it was made of, for the dead letter if it is refused.
    index: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Rejected:
    """An element of a delivery that could not be translated; its neighbours are stored."""

    index: int
    #: One sentence without the payload's values.
    message: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """What a delivery means."""

    events: Sequence[TranslatedEvent] = ()
    #: How many elements were understood and are of no interest.
    ignored: int = 0
    #: Elements that were not understood: the delivery is kept as a dead letter too.
    rejected: Sequence[Rejected] = ()
    #: A call that the delivery asks for (SNS: confirm the subscription). Its failure is a 503.
    call: Fetch | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WebhookResult:
    """What became of a delivery."""

    #: Events that are newly stored.
    accepted: int
    #: Elements of no interest.
    ignored: int
    #: Events that were stored before.
    duplicates: int = 0
    #: Elements (or the whole delivery, 1) that went to the dead letters.
    rejected: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer of the provider's own, instead of ``{"success": true, …}``; its status is 200."""

    body: bytes
    content_type: str = "application/json; charset=utf-8"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Signing:
    """What a provider's scheme signs. The conformance suite breaks each of these and expects a 401.

    A scheme of a static credential signs nothing: ``Signing(credential="authorization")``.
    """

    #: The header that carries the signature; ``None``: it is in the body, or there is none.
    signature: str | None = None
    #: Finds each signature in that header's value, in a group named ``signature``.
    signature_pattern: str = r"^(?P<signature>.*)$"
    encoding: Literal["hex", "base64"] = "hex"
    body: bool = False
    url: bool = False
    #: Whether the decoded form fields are signed rather than the body's bytes.
    form: bool = False
    #: Headers whose values are signed as they stand.
    headers: Sequence[str] = ()
    #: The header that carries the time of signing, and how to find it there (group ``timestamp``).
    timestamp: str | None = None
    timestamp_pattern: str = r"^(?P<timestamp>.*)$"
    #: Seconds that a delivery may be old, and ahead; ``None``: not limited.
    past: int | None = None
    future: int | None = None
    #: The header of a static credential.
    credential: str | None = None


class Provider(abc.ABC):
    """A webhook provider with the options of one workspace.

    Pure: no input or output, no clock; everything comes in with the request. ``verify`` and
    ``translate`` run on the event loop and should take well under a millisecond per event.
    """

    #: What the scheme signs.
    signing: Signing
    #: What an operator sets at the provider, for ``engage webhook-url``: where the URL goes, which
    #: events to choose, where the secret is found. Plain text.
    setup: str = ""
    #: Regular expressions; the core fetches only from hosts that match one of them as a whole.
    hosts: Sequence[str] = ()

    @abc.abstractmethod
    def credentials(self) -> Sequence[bytes]:
        """:return: every secret (in one canonical form) that lets a delivery in. The server does
        not start when two workspaces share one, so that nobody's delivery fits another's."""

    def probe(self, request: WebhookRequest) -> Reply | None:
        """Recognise a request by which the provider only tries the URL; asked before ``verify``.

        :return: the answer; nothing else happens then. ``None`` for any real delivery.
        """
        return None

    def needs(self, request: WebhookRequest) -> Fetch | None:
        """Say what must be fetched before ``verify``, after every check that needs no fetch.

        :raises SignatureMismatch: the delivery can be refused without.
        """
        return None

    @abc.abstractmethod
    def verify(self, request: WebhookRequest, fetched: bytes | None) -> None:
        """Return if the delivery is the provider's. Compare in constant time, over the raw bytes.

        :param fetched: what ``needs`` asked for.
        :raises SignatureMismatch: it is not; any other exception counts as this one.
        """

    @abc.abstractmethod
    def translate(self, request: WebhookRequest) -> Translation:
        """Turn a verified delivery into events. One element that makes no sense costs only itself.

        :raises PayloadInvalid: nothing of it can be understood; any other exception counts as this.
        """

    def reply(self, request: WebhookRequest, result: WebhookResult) -> Reply | None:
        """:return: an answer of the provider's own to a stored delivery, or ``None``."""
        return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProviderContext:
    """What the core tells a provider beside its own options."""

    workspace_id: str
    #: ``[server] public_url`` without a trailing slash, or ``None`` if there is none. A provider
    #: that signs the URL raises :class:`ConfigError` without it.
    public_url: str | None


#: Makes a provider from the validated options of one workspace.
#: Raises :class:`ConfigError` for an option that a schema cannot describe.
ProviderFactory = Callable[[Mapping[str, Any], ProviderContext], Provider]
