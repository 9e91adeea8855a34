# SPDX-License-Identifier: Apache-2.0
"""A delivery, the destination it goes to, and the dead letter that keeps one.

The functions are pure. A dead letter holds the whole delivery with its secrets redacted, so that
the provider can translate it again later.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl

from engage.api import ConfigError, DeadLetter, Provider, Translation
from engage.errors import MAX_ERRORS, Limit, Problem
from engage.pipeline.dead_letters import letter_id
from engage.pipeline.decode import Encoding, check_encoding

if TYPE_CHECKING:
    from engage.config import Limits

__all__ = [
    "PATH_HEADER",
    "REDACTED",
    "UNTRANSLATED",
    "Delivery",
    "Destination",
    "body_limit",
    "delivery_of_letter",
    "letter_of_delivery",
    "named_workspaces",
    "redacted",
    "type_of",
]

#: The reason of a dead letter that holds a whole delivery.
UNTRANSLATED: Final = "untranslated"
#: Replaces the value of a header that is, or may be, a secret.
REDACTED: Final = "[redacted]"
#: The name under which a dead letter keeps the request's path and query, as in HTTP/2.
PATH_HEADER: Final = ":path"

#: Maximum number of parameters in the query of a delivery.
_MAX_PARAMETERS: Final = 1000

#: What a type may not have in the log.
_UNPRINTABLE: Final = re.compile(r"[^!-+\--~]")

_SECRET_NAME: Final = re.compile(
    r"auth|cookie|secret|token|signature|passw|key$|hmac|credential", re.IGNORECASE
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One webhook request: a POST to the URL of a provider."""

    #: Path and query, as sent.
    target: str
    #: [name, value] pairs; a repeated header has several.
    headers: Sequence[tuple[str, str]]
    #: The raw body, before its content encoding is decoded.
    body: bytes
    encoding: Encoding = "identity"
    #: When it arrived: seconds since 1970 UTC.
    arrived_at: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Where a delivery goes: a provider, made with the options of one workspace."""

    #: The provider's name, such as ``stripe``.
    name: str
    workspace_id: str
    provider: Provider


def named_workspaces(target: str, headers: Sequence[tuple[str, str]]) -> set[str]:
    """Return every workspace that the query or a header names.

    A delivery that names more than one is refused.

    :param target: path and query.
    :raises ValueError: if the query has more than 1000 parameters.
    """
    query = parse_qsl(
        target.partition("?")[2], keep_blank_values=True, max_num_fields=_MAX_PARAMETERS
    )
    named = {value for name, value in query if name == "workspaceId"}
    return named | {value for name, value in headers if name.lower() == "df-workspace-id"}


def body_limit(name: str, providers: Iterable[Provider], limits: Limits) -> Limit:
    """Return the largest body of a delivery, compressed and decompressed.

    :param name: the name of the provider.
    :param providers: the provider with the options of each workspace that has it.
    """
    limit = Limit(limits.webhook_body_bytes, "limits.webhook_body_bytes")
    if limits.body_bytes < limit.bytes:
        limit = Limit(limits.body_bytes, "limits.body_bytes")
    sizes = [provider.max_body for provider in providers]
    largest = max((size for size in sizes if size is not None), default=None)
    if largest is None or None in sizes or largest >= limit.bytes:
        return limit
    return Limit(largest, f"for deliveries of {name}")


def type_of(translation: Translation) -> str:
    """Return what the service calls a delivery, for the log: the types of its elements, or else of
    its events, in at most 200 characters; ``unknown`` if none is read."""
    types = translation.types or {str(event.document.get("type")) for event in translation.events}
    shown = ",".join(sorted({_UNPRINTABLE.sub("?", name) for name in types if name}))
    return shown[:200] or "unknown"


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
    *,
    received_at: int,
) -> DeadLetter:
    """Make the dead letter of a verified delivery.

    :param problems: why the delivery, or a part of it, could not be translated; at least one.
    :param received_at: milliseconds since 1970 UTC.
    """
    # The signature and its timestamp are left out: they differ when the same delivery is repeated.
    identity = delivery.target.encode() + b"\n" + delivery.body
    return DeadLetter(
        id=letter_id(destination.workspace_id, destination.name, identity),
        workspace_id=destination.workspace_id,
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
    encodings = [value for name, value in headers if name.lower() == "content-encoding"]
    return Delivery(
        target=targets[0],
        headers=headers,
        body=letter.item,
        encoding=check_encoding(encodings),
        arrived_at=letter.received_at / 1000,
    )
