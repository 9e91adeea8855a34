# SPDX-License-Identifier: Apache-2.0
"""Which workspace a request writes to: the write key.

A write key identifies, it is not a secret: it may stand in a web page, and it may write events and
nothing else. Where it may stand, first found wins: ``Authorization: Basic base64(key:)`` or
``Basic <key>`` verbatim; the query's ``writeKey``; the body's ``writeKey``.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from engage.errors import ApiError, Limit

if TYPE_CHECKING:
    from engage.config import Workspace, WriteKey

__all__ = ["KEYLESS", "Authenticator", "Principal"]

#: Of a body that must be decoded to find its write key.
KEYLESS: Final = Limit(1024 * 1024, "without a write key in the header or the query")

_URL_SAFE: Final = str.maketrans("-_", "+/")
_BASE64: Final = re.compile(r"[A-Za-z0-9+/]+\Z")


@dataclasses.dataclass(frozen=True, slots=True)
class Principal:
    """The client of a request, as its write key identifies it."""

    workspace: Workspace
    #: Its id is stored and logged; the key itself never is.
    write_key: WriteKey


class Authenticator:
    """Finds the principal of a request.

    :param workspaces: of the config; write keys are unique among all of them.
    """

    def __init__(self, workspaces: Iterable[Workspace]) -> None:
        self._by_key: dict[str, Principal] = {}
        # The usual header, ready to be looked up as it came.
        self._by_header: dict[str, Principal] = {}
        for workspace in workspaces:
            for write_key in workspace.write_keys:
                principal = Principal(workspace, write_key)
                self._by_key[write_key.key] = principal
                if not write_key.disabled:
                    credential = base64.b64encode(f"{write_key.key}:".encode()).decode()
                    self._by_header[f"Basic {credential}"] = principal

    def header_or_query(
        self, authorizations: Sequence[str], query_keys: Sequence[str]
    ) -> Principal | None:
        """Authenticate before the body is decoded.

        :param authorizations: every ``Authorization`` header.
        :param query_keys: every ``writeKey`` of the query.
        :return: ``None``: there is no key here, the body must have it (:meth:`body`).
        :raises ApiError: 401 or 403, final.
        """
        if authorizations:
            if len(authorizations) > 1:
                raise _invalid("the request has more than one Authorization header")
            principal = self._by_header.get(authorizations[0])
            return self._header(authorizations[0]) if principal is None else principal
        # ``?writeKey=`` says nothing, as an absent one.
        keys = set(query_keys) - {""}
        if not keys:
            return None
        if len(keys) > 1:
            raise _invalid("the query has more than one writeKey")
        return self._known(keys.pop())

    def body(self, value: object) -> Principal:
        """Authenticate by the ``writeKey`` of a body; ``None`` or ``""``: it has none.

        :raises ApiError: 401 or 403, final.
        """
        if value is None or value == "":
            raise ApiError(
                "missing_write_key",
                "a write key is required; send Authorization: Basic base64(<write key>:),"
                " or writeKey in the query or the body",
            )
        if not isinstance(value, str):
            raise _invalid("writeKey must be a string")
        return self._known(value)

    def _header(self, value: str) -> Principal:
        """Take a header apart that is not written the usual way."""
        scheme, _, credential = value.strip().partition(" ")
        if scheme.lower() != "basic":
            raise _invalid("the Authorization scheme must be Basic")
        credential = credential.strip()
        for candidate in _candidates(credential):
            if candidate in self._by_key:
                return self._known(candidate)
        raise _invalid("the write key is unknown")

    def _known(self, key: str) -> Principal:
        principal = self._by_key.get(key)
        if principal is None:
            raise _invalid("the write key is unknown")
        if principal.write_key.disabled:
            raise ApiError("write_key_disabled", "the write key is disabled")
        return principal


def _candidates(credential: str) -> Iterator[str]:
    """:return: the keys that a Basic credential may mean."""
    # Verbatim: a Dittofeed-style key is itself the base64 of ``id:secret``.
    yield credential
    standard = credential.rstrip("=").translate(_URL_SAFE)
    if not _BASE64.match(standard):
        return
    try:
        text = base64.b64decode(standard + "=" * (-len(standard) % 4)).decode()
    except (binascii.Error, ValueError):
        return
    yield text.partition(":")[0]
    # A key that has a colon itself: with the SDK's colon after it, and without.
    yield text.rpartition(":")[0]
    yield text


def _invalid(message: str) -> ApiError:
    return ApiError("invalid_write_key", message)
