# SPDX-License-Identifier: Apache-2.0
"""What a write key may not do, beyond what is the same for all keys.

A key without rules, as most are, has ``None`` in their place, so its requests cost nothing here.
"""

from __future__ import annotations

import dataclasses
import hmac
from typing import TYPE_CHECKING, Any, Final

from engage.api import ADDRESS_TRAITS
from engage.errors import ApiError, key_refused, quote

if TYPE_CHECKING:
    from engage.api import Provider
    from engage.config import Workspace, WriteKey

__all__ = ["UNVERIFIED", "WITHOUT_LETTER", "Rules"]

#: The code of an event without a valid hash of its user id.
UNVERIFIED: Final = "identity_not_verified"
#: The codes of events that their key may not send. No dead letter is kept of them.
WITHOUT_LETTER: Final = frozenset({"operation_not_allowed", UNVERIFIED})


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
    #: The identifiers for which its events vouch: see :data:`engage.api.TRUSTED`. Empty: anyone can
    #: send such events.
    trusted: frozenset[str] = frozenset()
    #: The secrets that sign user ids; empty: user ids are not verified.
    identity: tuple[bytes, ...] = dataclasses.field(default=(), repr=False)
    #: Their HMACs of nothing, which are copied for each user id.
    _signers: tuple[hmac.HMAC, ...] = dataclasses.field(
        init=False, repr=False, compare=False, default=()
    )

    def __post_init__(self) -> None:
        signers = tuple(hmac.new(secret, digestmod="sha256") for secret in self.identity)
        object.__setattr__(self, "_signers", signers)

    @classmethod
    def of(cls, workspace: Workspace, key: WriteKey) -> Rules | None:
        """Return the rules of a key; ``None`` if it has none."""
        if key.kind == "server":
            return dataclasses.replace(
                cls.of_trusted(workspace), secret=True, operations=frozenset(key.operations)
            )
        rules = dataclasses.replace(
            cls.of_public(workspace),
            origins=frozenset(origin.lower() for origin in key.origins),
            operations=frozenset(key.operations),
        )
        return None if rules == cls() else rules

    @classmethod
    def of_public(cls, workspace: Workspace) -> Rules:
        """Return the rules that all public keys of a workspace have."""
        required = workspace.verify_identity == "required"
        secrets = workspace.identity_secrets if required else ()
        return cls(
            protected=frozenset(workspace.protected_traits),
            identity=tuple(secret.encode() for secret in secrets),
        )

    @classmethod
    def of_trusted(cls, workspace: Workspace) -> Rules:
        """Return the rules of those who say of a workspace's users what is certain."""
        identifiers = {*ADDRESS_TRAITS.values(), *workspace.subscription_identifiers}
        return cls(trusted=frozenset(identifiers))

    @classmethod
    def of_provider(cls, workspace: Workspace, name: str, provider: Provider) -> Rules | None:
        """Return the rules of a provider's events: it may only pass on what browsers say."""
        if workspace.webhooks.get(name, {}).get("trusted", provider.trusted):
            return cls.of_trusted(workspace)
        protected = frozenset(workspace.protected_traits)
        return cls(protected=protected) if protected else None

    def check_request(
        self, origin: str | None, kind: str | None = None, *, in_query: bool = False
    ) -> None:
        """Check where a request comes from, where its key is, and what it sends.

        :param origin: the header ``Origin``: browsers send it, and no page can choose it.
        :param kind: the type of its events; ``None`` if each names its own.
        :raises ApiError: 403 ``server_key_exposed``, ``origin_not_allowed`` or
            ``operation_not_allowed``.
        """
        if self.secret and (in_query or origin is not None):
            where = "of web pages" if origin is not None else "with the key in the query"
            raise key_refused(
                f"it is a server key, which is a secret: requests {where} must not have it;"
                " replace the key, because others may have read it",
                "server_key_exposed",
            )
        origins = self.origins
        if origins and origin not in origins and (not origin or origin.lower() not in origins):
            source = "has no Origin" if not origin else f"has the Origin {quote(origin)}"
            raise key_refused(
                f"only web pages of its origins may use it, and the request {source}",
                "origin_not_allowed",
            )
        if kind is not None:
            self.check_operation(kind)

    def check_operation(self, kind: str) -> None:
        """Check that the key may send events of a type.

        :raises ApiError: 403 ``operation_not_allowed``.
        """
        if self.operations and kind not in self.operations:
            allowed = ", ".join(sorted(self.operations))
            raise key_refused(
                f"it may not send {kind} events, only {allowed}", "operation_not_allowed"
            )

    def check_user(self, item: Any, common: object) -> None:
        """Check that an item has the hash of its user id: anyone can send any id.

        :param item: as received.
        :param common: the ``userHash`` of its batch.
        :raises ApiError: 403 :data:`UNVERIFIED`.
        """
        user = item.get("userId") if type(item) is dict else None
        if user is None or user == "":
            return
        own = item.get("context")
        given = (own.get("userHash") if type(own) is dict else None) or common
        if type(user) is int:
            user = str(user)  # as it is stored
        # A longer id is not valid, but would be hashed for as long as a body is large.
        if type(user) is str and len(user) <= 512 and type(given) is str:
            sent, text = given.lower().encode(), user.encode()
            for signer in self._signers:
                own_hash = signer.copy()
                own_hash.update(text)
                if hmac.compare_digest(own_hash.hexdigest().encode(), sent):
                    return
        raise ApiError(
            UNVERIFIED,
            f"context.userHash is {'wrong' if given else 'missing'}: events with a userId need the"
            " HMAC-SHA256 of that userId with the identity_secret of the workspace, in hexadecimal",
        )
