# SPDX-License-Identifier: Apache-2.0
"""What a write key may not do, beyond what is the same for all keys.

A key without rules, as most are, has ``None`` in their place, so its requests cost nothing here.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

from engage.errors import key_refused, quote

if TYPE_CHECKING:
    from engage.config import Workspace, WriteKey

__all__ = ["WITHOUT_LETTER", "Rules"]

#: The codes of events that their key may not send. No dead letter is kept of them.
WITHOUT_LETTER: Final = frozenset({"operation_not_allowed"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules of one key."""

    #: Whether the key is a secret.
    secret: bool = False
    #: In lower case; empty: the ``Origin`` does not matter.
    origins: frozenset[str] = frozenset()
    #: Empty: all.
    operations: frozenset[str] = frozenset()
    #: The traits that are removed from its events.
    protected: frozenset[str] = frozenset()

    @classmethod
    def of(cls, workspace: Workspace, key: WriteKey) -> Rules | None:
        """Return the rules of a key; ``None`` if it has none."""
        secret = key.kind == "server"
        if not (secret or key.origins or key.operations or workspace.protected_traits):
            return None
        return cls(
            secret=secret,
            origins=frozenset(origin.lower() for origin in key.origins),
            operations=frozenset(key.operations),
            protected=frozenset(() if secret else workspace.protected_traits),
        )

    def check_request(self, origin: str | None, *, in_query: bool = False) -> None:
        """Check where a request comes from, and where its key is.

        :param origin: the header ``Origin``: browsers send it, and no page can choose it.
        :raises ApiError: 403 ``server_key_exposed`` or ``origin_not_allowed``.
        """
        if self.secret and (in_query or origin is not None):
            where = "of web pages" if origin is not None else "with the key in the query"
            raise key_refused(
                f"it is a server key, which is a secret: requests {where} must not have it;"
                " replace the key, because others may have read it",
                "server_key_exposed",
            )
        if self.origins and (origin is None or origin.lower() not in self.origins):
            source = "has no Origin" if not origin else f"has the Origin {quote(origin)}"
            raise key_refused(
                f"only web pages of its origins may use it, and the request {source}",
                "origin_not_allowed",
            )

    def check_operation(self, kind: str) -> None:
        """Check that the key may send events of a type.

        :raises ApiError: 403 ``operation_not_allowed``.
        """
        if self.operations and kind not in self.operations:
            allowed = ", ".join(sorted(self.operations))
            raise key_refused(
                f"it may not send {kind} events, only {allowed}", "operation_not_allowed"
            )
