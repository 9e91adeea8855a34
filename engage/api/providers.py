# SPDX-License-Identifier: Apache-2.0
"""What a webhook provider is: it verifies and translates, both pure."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

__all__ = [
    "Fetch",
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
    #: Raises if the document is not what was asked for, such as an error page with status 200:
    #: the call counts as failed then (503), and the document is not kept.
    check: Callable[[bytes], object] | None = None


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
