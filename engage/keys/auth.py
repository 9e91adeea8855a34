# SPDX-License-Identifier: Apache-2.0
"""Finds the workspace of a request by its write key.

A public key is an identifier, not a secret: it can appear in a web page, and it only permits
writing events. A server key is a secret, of which only the SHA-256 is known until a client sends
it; from then on the log masks it. These places are searched in order, and the first key found is
used:
``Authorization: Basic base64(key:)`` or ``Basic <key>`` verbatim, or the same with ``Bearer``;
``writeKey`` in the query; ``writeKey`` in the body.

:mod:`engage.keys.table` replaces the keys when they change in the store.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from engage.errors import ApiError, Limit, key_refused, storage_unavailable
from engage.keys.effective import is_possible_key
from engage.keys.limits import Guard, Guards, Rules
from engage.monitoring import logs
from engage.monitoring.sampler import SCHEMES

if TYPE_CHECKING:
    from engage.config import Workspace, WriteKey

__all__ = ["KEYLESS_BODY", "Authenticator", "Principal", "UnknownKeyError"]

#: Maximum size of a body that must be decoded to find its write key.
KEYLESS_BODY: Final = Limit(1024 * 1024, "without a write key in the header or the query")

_UNKNOWN: Final = "it is unknown; `engage keys list` shows the keys of this server"
_URL_SAFE: Final = str.maketrans("-_", "+/")
_BASE64: Final = re.compile(r"[A-Za-z0-9+/]+\Z")


@dataclasses.dataclass(frozen=True, slots=True)
class Principal:
    """The client of a request, identified by its write key."""

    workspace: Workspace
    #: Only its id is stored and logged, never the key.
    write_key: WriteKey
    #: ``None``: the key may send without limit.
    guard: Guard | None = None
    #: ``None``: the key has none.
    rules: Rules | None = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", Rules.of(self.workspace, self.write_key))


class UnknownKeyError(ApiError):
    """A 401 that is final only if the keys of the store have been read since the request arrived.

    :param key: the value of ``writeKey`` as sent; ``None`` if it was in the header.
    """

    def __init__(self, key: str | None = None) -> None:
        unknown = key_refused(_UNKNOWN)
        super().__init__(unknown.code, unknown.message)
        self.key = key


class Authenticator:
    """Finds the principal of a request.

    :param workspaces: the workspaces of the config. A write key is unique among all of them.
    :param guards: makes the limits of keys; ``None``: there are none.
    """

    def __init__(self, workspaces: Iterable[Workspace], guards: Guards | None = None) -> None:
        self._guards = guards
        #: ``None`` until the keys were read.
        self._by_key: dict[str, Principal] | None = {}
        self._by_digest: dict[str, Principal] = {}
        #: SHA-256 → key, of the server keys that clients have sent.
        self._sent: dict[str, str] = {}
        # By the usual form of the header, so that a lookup needs no parsing.
        self._by_header: dict[str, Principal] = {}
        self.replace(
            (workspace, write_key) for workspace in workspaces for write_key in workspace.write_keys
        )

    def replace(self, keys: Iterable[tuple[Workspace, WriteKey]] | None) -> None:
        """Use these write keys from now on.

        :param keys: with their workspaces, none twice; ``None``: every request with a key gets a
            503, because it is not known which keys there are.
        """
        by_key: dict[str, Principal] = {}
        by_digest: dict[str, Principal] = {}
        by_header: dict[str, Principal] = {}
        for workspace, write_key in keys or ():
            guard = None if self._guards is None else self._guards.of(workspace.id, write_key)
            principal = Principal(workspace, write_key, guard)
            key = write_key.key or self._sent.get(write_key.sha256)
            if write_key.kind == "server":
                by_digest[write_key.sha256] = principal
            else:
                by_key[write_key.key] = principal
            if key is not None and not write_key.disabled:
                by_header.update(dict.fromkeys(_usual_headers(key), principal))
        self._by_key = None if keys is None else by_key
        self._by_digest = by_digest
        self._by_header = by_header

    def header_or_query(
        self, authorization: str | None, query_keys: Sequence[str]
    ) -> Principal | None:
        """Authenticate a request before its body is decoded.

        :param authorization: the header ``Authorization``.
        :param query_keys: every ``writeKey`` of the query.
        :return: the principal, or ``None`` if the key must be in the body (see :meth:`body`).
        :raises UnknownKeyError: 401, if the key may have been created just now.
        :raises ApiError: 401 or 403; the body cannot change that. 503 if the keys were not read.
        """
        if authorization is not None:
            for key in query_keys:  # A secret there is not ignored: others can read it.
                exposed = self._get(key)
                if exposed is not None and exposed.write_key.kind == "server":
                    return exposed
            principal = self._by_header.get(authorization)
            return self._from_header(authorization) if principal is None else principal
        # An empty ``?writeKey=`` counts as absent.
        keys = set(query_keys) - {""}
        if not keys:
            return None
        if len(keys) > 1:
            raise key_refused("the query has more than one writeKey")
        return self._look_up(keys.pop())

    def body(self, value: object) -> Principal:
        """Authenticate a request by the ``writeKey`` of its body.

        :param value: as sent; ``None`` and ``""`` count as absent.
        :raises UnknownKeyError: 401, if the key may have been created just now.
        :raises ApiError: 401 or 403; 503 if the keys were not read.
        """
        if value is None or value == "":
            raise key_refused(
                "the request has no write key; send Authorization: Basic base64(<write key>:),"
                " or writeKey in the query or the body",
                "missing_write_key",
            )
        if not isinstance(value, str):
            raise key_refused("writeKey must be a string")
        return self._look_up(value)

    def _from_header(self, value: str) -> Principal:
        """Parse a header that is not in the usual form."""
        scheme, _, credential = value.strip().partition(" ")
        if scheme.lower() not in SCHEMES:
            raise key_refused("the Authorization scheme must be Basic or Bearer")
        credential = credential.strip()
        possible = False
        for candidate in _candidates(credential):
            if self._get(candidate) is not None:
                return self._look_up(candidate)
            possible = possible or is_possible_key(candidate)
        if possible:
            raise UnknownKeyError
        raise key_refused(_UNKNOWN)

    def _get(self, key: str) -> Principal | None:
        if self._by_key is None:
            # A 401 would make SDKs discard their events.
            raise storage_unavailable()
        principal = self._by_key.get(key)
        if principal is None and self._by_digest and is_possible_key(key):
            digest = hashlib.sha256(key.encode()).hexdigest()
            principal = self._by_digest.get(digest)
            if principal is not None and digest not in self._sent:
                self._sent[digest] = key
                # The second is the beginning of every header that has the key.
                logs.mask([key, base64.b64encode(key[: len(key) // 3 * 3].encode()).decode()])
                if not principal.write_key.disabled:
                    self._by_header.update(dict.fromkeys(_usual_headers(key), principal))
        return principal

    def _look_up(self, key: str) -> Principal:
        principal = self._get(key)
        if principal is None:
            if is_possible_key(key):
                raise UnknownKeyError(key)
            raise key_refused(_UNKNOWN)
        if principal.write_key.disabled:
            raise key_refused("it is disabled", "write_key_disabled")
        return principal


def _usual_headers(key: str) -> tuple[str, str]:
    """Return the ``Authorization`` headers that SDKs and clients of Dittofeed's OpenAPI send."""
    credential = base64.b64encode(f"{key}:".encode()).decode()
    return f"Basic {credential}", f"Bearer {credential}"


def _candidates(credential: str) -> Iterator[str]:
    """Yield the keys that a credential can mean."""
    # Verbatim: a key in Dittofeed's style is itself the base64 of ``id:secret``.
    yield credential
    standard = credential.rstrip("=").translate(_URL_SAFE)
    if not _BASE64.match(standard):
        return
    try:
        text = base64.b64decode(standard + "=" * (-len(standard) % 4)).decode()
    except (binascii.Error, ValueError):
        return
    yield text.partition(":")[0]
    # A key that contains a colon: with and without the colon that the SDK appends.
    yield text.rpartition(":")[0]
    yield text
