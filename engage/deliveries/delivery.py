# SPDX-License-Identifier: Apache-2.0
"""A request to a webhook's URL, and the dead letter in which one is kept that was not understood.

Pure. A letter holds the whole delivery, its secrets redacted, so that it can be translated again.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Final
from urllib.parse import parse_qsl

from engage.api import ConfigError, DeadLetter, Provider
from engage.errors import MAX_ERRORS, Problem
from engage.pipeline.dead_letters import letter_id
from engage.pipeline.decode import Encoding, check_encoding

__all__ = [
    "PATH_HEADER",
    "REDACTED",
    "UNTRANSLATED",
    "Incoming",
    "delivery_of_letter",
    "letter_of_delivery",
    "named_workspaces",
    "redacted",
]

#: Reason of a dead letter that holds a whole delivery.
UNTRANSLATED: Final = "untranslated"
REDACTED: Final = "[redacted]"
#: Of a dead letter: the path and query of its request, under the name that HTTP/2 gives them.
PATH_HEADER: Final = ":path"

_SECRET_NAME: Final = re.compile(
    r"auth|cookie|secret|token|signature|passw|key$|hmac|credential", re.IGNORECASE
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """A request to a webhook's URL."""

    provider: str
    method: str
    #: Path and query as they were sent.
    target: str
    #: [name, value] pairs, repeated ones repeated.
    headers: Sequence[tuple[str, str]]
    #: Raw, as it came over the wire.
    body: bytes
    encoding: Encoding = "identity"


def named_workspaces(target: str, headers: Sequence[tuple[str, str]]) -> set[str]:
    """:return: every workspace that a delivery's query or headers name; more than one is a lie."""
    query = parse_qsl(target.partition("?")[2], keep_blank_values=True)
    named = {value for name, value in query if name == "workspaceId"}
    return named | {value for name, value in headers if name.lower() == "df-workspace-id"}


def redacted(headers: Sequence[tuple[str, str]], provider: Provider) -> list[tuple[str, str]]:
    """:return: the headers with the values taken out of all that are, or may be, a secret."""
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
    incoming: Incoming,
    workspace: str,
    provider: Provider,
    problems: Sequence[Problem],
    *,
    received_at: int,
) -> DeadLetter:
    """Make the dead letter of a verified delivery.

    :param problems: why it, or an element of it, could not be translated; at least one.
    :param received_at: milliseconds since 1970 UTC.
    """
    # A redelivery is the same letter; signature and time of signing differ each time.
    identity = incoming.target.encode() + b"\n" + incoming.body
    return DeadLetter(
        id=letter_id(workspace, incoming.provider, identity),
        workspace_id=workspace,
        origin=incoming.provider,
        write_key_id=None,
        user_id=None,
        anonymous_id=None,
        message_id=None,
        reason=UNTRANSLATED,
        message=str(problems[0]),
        errors=[problem.as_dict() for problem in problems[:MAX_ERRORS]],
        item=incoming.body,
        truncated=False,
        headers=[(PATH_HEADER, incoming.target), *redacted(incoming.headers, provider)],
        received_at=received_at,
    )


def delivery_of_letter(letter: DeadLetter) -> Incoming:
    """Undo :func:`letter_of_delivery`; only what was redacted is lost.

    :raises ConfigError: the letter is of something else than a whole delivery.
    """
    headers = [(name, value) for name, value in letter.headers if name != PATH_HEADER]
    targets = [value for name, value in letter.headers if name == PATH_HEADER]
    if letter.reason != UNTRANSLATED or letter.truncated or not targets:
        raise ConfigError(f"dead letter {letter.id} is no delivery")
    encodings = [value for name, value in headers if name.lower() == "content-encoding"]
    return Incoming(
        provider=letter.origin,
        method="POST",
        target=targets[0],
        headers=headers,
        body=letter.item,
        encoding=check_encoding(encodings),
    )
