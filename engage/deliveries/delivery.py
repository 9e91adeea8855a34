# SPDX-License-Identifier: Apache-2.0
"""A delivery, the destination it goes to, and the dead letter that keeps one.

A dead letter holds the whole delivery with its secrets redacted, so that the provider can translate
it again later.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from engage.api import ConfigError, DeadLetter, Provider
from engage.errors import MAX_ERRORS, Limit, Problem
from engage.keys.limits import Rules
from engage.pipeline.dead_letters import letter_id
from engage.pipeline.decode import Encoding, check_encoding

if TYPE_CHECKING:
    from engage.config import Limits, Workspace

__all__ = [
    "PATH_HEADER",
    "REDACTED",
    "UNTRANSLATED",
    "Delivery",
    "Destination",
    "body_limit",
    "delivery_of_letter",
    "letter_of_delivery",
    "redacted",
]

#: The reason of a dead letter that holds a whole delivery.
UNTRANSLATED: Final = "untranslated"
#: Replaces the value of a header that is, or may be, a secret.
REDACTED: Final = "[redacted]"
#: The name under which a dead letter keeps the request's path and query, as in HTTP/2.
PATH_HEADER: Final = ":path"

_SECRET_NAME: Final = re.compile(
    r"auth|cookie|secret|token|signature|passw|key$|hmac|credential", re.IGNORECASE
)


@dataclasses.dataclass(slots=True, kw_only=True)
class Delivery:
    """One webhook request: a POST to the URL of a provider."""

    #: Path and query, as sent.
    target: str
    #: [name, value] pairs; a repeated header has several.
    headers: Sequence[tuple[str, str]]
    #: The raw body, before its content encoding is decoded; empty until it has arrived.
    body: bytes = b""
    encoding: Encoding = "identity"
    #: When it arrived: seconds since 1970 UTC; 0: when it is received.
    arrived_at: float = 0.0

    @classmethod
    def recorded(
        cls, target: str, headers: Sequence[tuple[str, str]], body: bytes, arrived_at: float
    ) -> Delivery:
        """Return a delivery that arrived earlier: its headers say how its body is compressed.

        :raises ApiError: 415 ``unsupported_encoding``.
        """
        encodings = [value for name, value in headers if name.lower() == "content-encoding"]
        encoding = check_encoding(encodings)
        return cls(
            target=target, headers=headers, body=body, encoding=encoding, arrived_at=arrived_at
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Where a delivery goes: a provider, made with the options of one workspace."""

    #: The provider's name, such as ``stripe``.
    name: str
    workspace: Workspace
    provider: Provider
    #: Those of its events; ``None``: they have none.
    rules: Rules | None
    #: The name of the share of the queue that its deliveries have.
    key: str

    @classmethod
    def of(cls, workspace: Workspace, name: str, provider: Provider) -> Destination:
        """Return the destination of a provider's deliveries for a workspace."""
        return cls(
            name=name,
            workspace=workspace,
            provider=provider,
            rules=Rules.of_provider(workspace, name, provider),
            key=f"webhook {workspace.id} {name}",
        )


def body_limit(name: str, providers: Iterable[Provider], limits: Limits) -> Limit:
    """Return the largest body of a delivery, compressed and decompressed.

    :param name: the name of the provider.
    :param providers: the provider with the options of each workspace that has it.
    """
    bounds = [
        Limit(limits.webhook_body_bytes, "limits.webhook_body_bytes"),
        Limit(limits.body_bytes, "limits.body_bytes"),
    ]
    sizes = [provider.max_body for provider in providers]
    own = [size for size in sizes if size is not None]
    if own and len(own) == len(sizes):
        bounds.append(Limit(max(own), f"for deliveries of {name}"))
    return min(bounds, key=lambda limit: limit.bytes)


def redacted(headers: Sequence[tuple[str, str]], provider: Provider) -> list[tuple[str, str]]:
    """Return the headers with every value replaced that is, or may be, a secret."""
    signing = provider.signing
    names = {name.lower() for name in (signing.signature, signing.credential) if name}
    secrets = [secret.decode("latin-1") for secret in provider.credentials()]
    return [
        (
            name,
            REDACTED
            if name.lower() in names
            or _SECRET_NAME.search(name)
            or any(secret in value for secret in secrets)
            else value,
        )
        for name, value in headers
    ]


def letter_of_delivery(
    delivery: Delivery,
    destination: Destination,
    problems: Sequence[Problem],
    received_at: int,
) -> DeadLetter:
    """Make the dead letter of a verified delivery.

    :param problems: why the delivery, or a part of it, could not be translated; at least one.
    :param received_at: milliseconds since 1970 UTC.
    """
    # The signature and its timestamp are left out: they differ when the same delivery is repeated.
    identity = delivery.target.encode() + b"\n" + delivery.body
    return DeadLetter(
        id=letter_id(destination.workspace.id, destination.name, identity),
        workspace_id=destination.workspace.id,
        origin=destination.name,
        write_key_id=None,
        user_id=None,
        anonymous_id=None,
        message_id=None,
        reason=UNTRANSLATED,
        message=str(problems[0]),
        errors=[problem.as_dict() for problem in problems[:MAX_ERRORS]],
        item=delivery.body,
        truncated=False,
        headers=[
            (PATH_HEADER, delivery.target),
            *redacted(delivery.headers, destination.provider),
        ],
        received_at=received_at,
    )


def delivery_of_letter(letter: DeadLetter) -> Delivery:
    """Return the delivery that a dead letter keeps, without the secrets that were redacted.

    :raises ConfigError: if the letter does not hold a whole delivery.
    """
    headers = [(name, value) for name, value in letter.headers if name != PATH_HEADER]
    targets = [value for name, value in letter.headers if name == PATH_HEADER]
    if letter.reason != UNTRANSLATED or letter.truncated or not targets:
        raise ConfigError(f"dead letter {letter.id} does not hold a whole delivery")
    return Delivery.recorded(targets[0], headers, letter.item, letter.received_at / 1000)
