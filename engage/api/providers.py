# SPDX-License-Identifier: Apache-2.0
"""The interface of a webhook provider: it verifies and translates deliveries, without I/O."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

__all__ = [
    "Fetch",
    "OptOut",
    "Provider",
    "ProviderContext",
    "ProviderFactory",
    "Recipient",
    "Rejected",
    "Reply",
    "Signing",
    "TranslatedEvent",
    "Translation",
    "WebhookRequest",
    "WebhookResult",
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WebhookRequest:
    """One delivery, exactly as it arrived: everything that a provider knows about it."""

    #: ``POST``.
    method: str
    #: [name, value] pairs in the order sent; a repeated header has several. Decoded as Latin-1.
    headers: Sequence[tuple[str, str]]
    #: The raw bytes, after any ``Content-Encoding`` is decoded.
    body: bytes
    #: The public URL of this request: ``[server] public_url`` with the path and query as sent.
    #: No part of it comes from a ``Host`` or forwarding header. Without a ``public_url`` it is
    #: only the path and query.
    url: str
    #: The current time: seconds since 1970 UTC.
    now: float

    @property
    def query(self) -> str:
        """The part of the URL after the first ``?``, not decoded; may be empty."""
        return self.url.partition("?")[2]

    def values(self, name: str) -> list[str]:
        """Return the values of a header in the order sent; the case of the name does not matter."""
        header = name.lower()
        return [value for key, value in self.headers if key.lower() == header]


@dataclasses.dataclass(frozen=True, slots=True)
class Fetch:
    """A document for the core to fetch with one GET, without redirects, within 3 s and 64 KiB.

    The core refuses a URL unless it is ``https`` without user information, port or fragment, and
    its whole host matches one of :attr:`Provider.hosts`.
    """

    url: str
    #: Whether the document may be kept and used again, for at most 24 hours.
    cacheable: bool = True
    #: Raises if the document is not the expected one, such as an error page with status 200. The
    #: call then counts as failed (503), and the document is not kept.
    check: Callable[[bytes], object] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Recipient:
    """A trait that finds the user, for events for which the provider gives no user id."""

    #: The trait by which the user is looked up: ``email``, ``phone``, or one of
    #: :attr:`Provider.identifiers`.
    trait: str
    #: The address, number or id, in any spelling; the core applies :func:`identifier_value`.
    value: str


@dataclasses.dataclass(frozen=True, slots=True)
class OptOut:
    """A report of the service that it no longer sends to an address, or with ``start`` sends again.

    ``[workspaces.unsubscribes.<provider>]`` says what changes: the choices of the user whom the
    document names by ``userId``, if an address that the event names is or was the user's, or a
    suppression of the address. A user who was looked up by the address is never changed.
    """

    #: ``unsubscribe``: the person chose it. ``complaint``: the person reported spam. ``bounce``:
    #: the address does not exist (a hard bounce). ``stop`` and ``start``: the person answered so;
    #: they are of the address, and ``start`` lifts only what ``stop`` set.
    kind: Literal["unsubscribe", "complaint", "bounce", "stop", "start"]
    #: One of :attr:`Provider.opt_out_channels`. The address of ``email`` is an e-mail address,
    #: that of any other channel a phone number.
    channel: str
    #: The service's own groups (lists, topics, streams) that it is about; empty: everything that
    #: the service sends in this channel.
    groups: Sequence[str] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class TranslatedEvent:
    """One event of a delivery, in Segment's form."""

    #: ``type`` and its fields: ``event``, ``userId``, ``anonymousId``, ``messageId``, ``timestamp``
    #: (RFC 3339; it is not corrected), ``properties``, ``traits``, ``context`` …
    #: ``messageId`` must be the same when the same event is delivered again.
    document: dict[str, Any]
    #: Finds the user if the document has neither ``userId`` nor ``anonymousId``. If there is no
    #: such user, the address becomes the anonymous id.
    recipient: Recipient | None = None
    #: The index of its element in the delivery, for the dead letter if the event is refused.
    index: int = 0
    #: Whether the service reports this event twice, in different words, under one message id. The
    #: first report is stored, and the second is a duplicate. Otherwise an event that differs from
    #: the stored one is kept as a conflict.
    restated: bool = False
    #: Looked up before ``recipient``, in this order; the first that finds a user counts.
    lookups: Sequence[Recipient] = ()
    #: The user id if nothing finds another user, instead of an anonymous id. A user who has just
    #: this id is not looked up: events move on to the real user as soon as one is known.
    fallback: str | None = None
    #: The ``messageId`` of an earlier event of this provider about the same message. If this event
    #: has no ``userId``, and that one is stored or in the same delivery, this one gets the
    #: ``userId`` of that one, or else its ``anonymousId``, and the properties that it lacks. Set
    #: ``restated`` too: when the delivery is repeated, the earlier event may be stored that was not
    #: stored at first.
    earlier: str | None = None
    #: What the event says about subscriptions. It is applied when the event is stored.
    opt_outs: Sequence[OptOut] = ()
    #: Every address that the service names as one that the event is about, if there are several:
    #: ``opt_outs`` are of each. ``None``: only ``recipient``. Empty: the service names the user and
    #: no address.
    named: Sequence[Recipient] | None = None
    #: A sentence for the operator, without a value of the payload; it is logged once.
    notice: str = ""
    #: Why it cannot be stored, in one sentence: then its element is rejected.
    problem: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Rejected:
    """An element of a delivery that could not be translated; the others are stored."""

    index: int
    #: One sentence, without a value of the payload.
    message: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """The events of a delivery."""

    events: Sequence[TranslatedEvent] = ()
    #: The ids of users that the service wants to be erased, where it says so without an event: for
    #: `engage erase requests`. The elements count as ``ignored`` too.
    erasures: Sequence[str] = ()
    #: How many elements were left out.
    ignored: int = 0
    #: How many of these are tests of the service, which are about nobody.
    tests: int = 0
    #: Those of these that the provider does not know or cannot assign to anybody, by index. One
    #: that names a person (:func:`engage.webhooks.names_person`) is rejected instead.
    unknown: Mapping[int, object] = dataclasses.field(default_factory=dict)
    #: What the service calls the elements, such as ``email.bounced``, for the log.
    types: Collection[str] = ()
    #: Elements that were not understood; if there are any, the delivery becomes a dead letter too.
    rejected: Sequence[Rejected] = ()
    #: A call that the delivery requires, such as the one that confirms a subscription of SNS. If it
    #: fails, the answer is 503.
    call: Fetch | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WebhookResult:
    """The result of a delivery."""

    #: How many events are newly stored.
    accepted: int
    #: How many elements were deliberately left out.
    ignored: int
    #: How many events were stored already.
    duplicates: int = 0
    #: How many elements could not be stored, so that the delivery is a dead letter (1: all of it).
    rejected: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A provider's own answer, instead of ``{"success": true, …}``; its status is 200."""

    body: bytes
    content_type: str = "application/json; charset=utf-8"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Signing:
    """The parts that a scheme signs. The conformance suite breaks each and expects a 401.

    A scheme with a static credential signs nothing: ``Signing(credential="authorization")``.
    """

    #: The header with the signature; ``None``: the signature is in the body, or there is none.
    signature: str | None = None
    #: For a signature in a JSON body: the dotted paths of the members that are signed, and of those
    #: with the signature and the time of signing. Their values are texts; see
    #: :func:`~engage.webhooks.body_members`.
    members: Sequence[str] = ()
    signature_member: str | None = None
    timestamp_member: str | None = None
    #: A regular expression whose group ``signature`` finds each signature in that header.
    signature_pattern: str = r"^(?P<signature>.*)$"
    encoding: Literal["hex", "base64"] = "hex"
    body: bool = False
    url: bool = False
    #: Whether the decoded form fields are signed, rather than the body's bytes.
    form: bool = False
    #: Headers whose raw values are signed.
    headers: Sequence[str] = ()
    #: The header with the time of signing, and a regular expression whose group ``timestamp`` finds
    #: it there.
    timestamp: str | None = None
    timestamp_pattern: str = r"^(?P<timestamp>.*)$"
    #: How many seconds old, and how many ahead, a delivery may be; ``None``: any.
    past: int | None = None
    future: int | None = None
    #: The header with a static credential.
    credential: str | None = None


class Provider(abc.ABC):
    """A webhook provider with the options of one workspace.

    It is pure: it has no input or output and no clock, and everything comes with the request.
    ``verify`` and ``translate`` run on the event loop, and should take well under a millisecond per
    event.
    """

    #: The signed parts of a delivery.
    signing: Signing
    #: The steps for the operator at the provider, as plain text for ``engage webhook-url``: where
    #: to enter the URL, which events to choose, where to find the secret.
    setup: str = ""
    #: Regular expressions; the core fetches only from hosts that one of them matches as a whole.
    hosts: Sequence[str] = ()
    #: Traits, besides ``email`` and ``phone``, by which the provider's events find their users.
    #: Each workspace that enables the provider declares them as identifiers. The core reads them
    #: from the registered factory: a factory that is not the class needs this attribute itself.
    identifiers: Sequence[str] = ()
    #: The channels of the :class:`OptOut` of its events, such as ``email`` or ``sms``; empty: it
    #: reports none. The core reads them as it does ``identifiers``.
    opt_out_channels: Sequence[str] = ()
    #: Names of its events with which a service passes on that a person wants to be erased, for
    #: `engage erase requests`. The core reads these from the registered factory as well.
    erasure_requests: Sequence[str] = ()
    #: Whether the service states what it knows of its own customers, and passes on nothing that
    #: browsers say. Its events set protected traits, and the addresses in them are certain.
    #: ``trusted`` in the table of the config goes before this.
    trusted: bool = False
    #: The largest body of the service's deliveries in bytes, compressed and decompressed; ``None``:
    #: ``limits.webhook_body_bytes``, which a larger value does not exceed. A body costs time and
    #: memory before it is verified, so set it if the service's deliveries are small.
    max_body: int | None = None

    @abc.abstractmethod
    def credentials(self) -> Sequence[bytes]:
        """Return every secret that authenticates a delivery, in a canonical form.

        The server does not start if two workspaces share one, because a delivery for one of them
        would be accepted for the other.
        """

    def probe(self, request: WebhookRequest) -> Reply | None:
        """Recognise a request by which the provider only tries the URL; called before ``verify``.

        :return: the answer, and nothing is stored; ``None`` for any real delivery.
        """
        return None

    def needs(self, request: WebhookRequest) -> Fetch | None:
        """Return the document that ``verify`` needs, or ``None``.

        Before that, check everything that can be checked without the document.

        :raises SignatureMismatch: if the delivery can be refused without the document.
        """
        return None

    @abc.abstractmethod
    def verify(self, request: WebhookRequest, fetched: bytes | None) -> None:
        """Check that the provider sent the delivery: in constant time, over the raw bytes.

        :param fetched: the document that ``needs`` returned.
        :raises SignatureMismatch: if the provider did not send it; any other exception counts as
            this one.
        """

    @abc.abstractmethod
    def translate(self, request: WebhookRequest) -> Translation:
        """Translate a verified delivery to events. Reject invalid elements one by one.

        A large delivery is translated in a thread, one at a time, while the event loop may call the
        other methods of the provider for other requests.

        :raises PayloadInvalid: if nothing of it can be understood; any other exception counts as
            this one.
        """

    def reply(self, request: WebhookRequest, result: WebhookResult) -> Reply | None:
        """Return the answer to a stored delivery, or ``None`` for the usual one."""
        return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProviderContext:
    """The arguments that a provider receives from the core in addition to its options."""

    workspace_id: str
    #: ``[server] public_url`` without a trailing slash; ``None`` if it is not set. A provider that
    #: signs the URL then raises :class:`ConfigError`.
    public_url: str | None


#: Makes a provider from the validated options of one workspace. Raises :class:`ConfigError` if an
#: option breaks a rule that a schema cannot express.
ProviderFactory = Callable[[Mapping[str, Any], ProviderContext], Provider]
