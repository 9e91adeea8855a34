# SPDX-License-Identifier: Apache-2.0
"""Claims: when each user or visitor first had each value of an identifier trait.

A claim is a document that is changed only by ``$min``, so that the least time stays in any order of
arrival. A user keeps the first :data:`MAX_CLAIMS` claims of a trait, and the user's document counts
them (``claims.<trait>``): that is read with the traits, so that only a value that may be new to the
user needs another look-up. The same holds for a visitor.

All later values share one document, the *late* claim of the user and the trait. It belongs to the
value that became the current one last.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any

from bson.datetime_ms import DatetimeMS

from engage.api import MAX_CLAIMS, Kind

from .documents import escape_key, pair_id, scoped_id


def claim_id(workspace: str, user: str, trait: str, value: str) -> str:
    """Return the ``_id`` of a claim."""
    return pair_id(workspace, user, _held(trait, value))


def _held(trait: str, value: str) -> str:
    return f"{len(trait)}:{trait}:{value}"


@dataclasses.dataclass(eq=False)
class Claim:
    """A user's trait was set to a value; see :meth:`~engage.api.ProfileStore.find_users`.

    It is never changed. It is not frozen, because making it would then take twice as long.
    """

    kind: Kind
    workspace: str
    #: The id of the user or visitor.
    user: str
    trait: str
    #: In the form in which users are looked up.
    value: str

    @functools.cached_property
    def owner(self) -> str:
        """The ``_id`` of the user or visitor."""
        return scoped_id(self.workspace, self.user)

    @functools.cached_property
    def name(self) -> str:
        """The trait as a key in the document of the user."""
        return escape_key(self.trait)

    @functools.cached_property
    def key(self) -> str:
        """The ``_id`` of the claim."""
        return claim_id(self.workspace, self.user, self.trait, self.value)

    @property
    def late_key(self) -> str:
        """The ``_id`` of the late claim of the same trait; no claim has an empty value."""
        return claim_id(self.workspace, self.user, self.trait, "")

    @property
    def held(self) -> str:
        """The trait with the value, within the workspace."""
        return scoped_id(self.workspace, _held(self.trait, self.value))

    @functools.cached_property
    def form(self) -> str:
        """The value as a register has it in ``i``."""
        return scoped_id(self.workspace, self.value)

    def statement(self, times: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
        """Return the statement that stores the claim.

        :param times: the operator that sets ``at``.
        :param changed: fields of which the greatest value stays.
        """
        return self._upsert(self.key, times, changed)

    def late_statements(self, at: int, changed: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the statements that give the late claim to this value: with the time ``at``, or
        the time that it has if it belongs to this value already."""
        time = DatetimeMS(at)
        return [
            {
                "q": {"_id": self.late_key, "held": {"$ne": self.held}},
                "u": {"$set": {"held": self.held, "at": time}},
            },
            self._upsert(self.late_key, {"$min": {"at": time}}, changed),
        ]

    def _upsert(
        self, key: str, times: Mapping[str, Any], changed: Mapping[str, Any]
    ) -> dict[str, Any]:
        whose = {"userId": self.user} if self.kind is Kind.USER else {"visitor": self.owner}
        fields = {"workspaceId": self.workspace, **whose, "held": self.held}
        update = {**times, "$setOnInsert": {**fields, **times.get("$setOnInsert", {})}}
        if changed:
            update["$max"] = changed
        return {"q": {"_id": key}, "u": update, "upsert": True}


class StoredClaims:
    """The stored claims of a write's users, or of its visitors, that the bound needs.

    :param owners: the ``_id`` of those that are needed.
    """

    def __init__(self, owners: Collection[str] = ()) -> None:
        self._owners = owners
        #: ``_id`` of a user → for each trait, escaped, the value in the form in which users are
        #: looked up, and how many claims are stored.
        self._users: dict[str, tuple[Mapping[str, str | None], Mapping[str, int]]] = {}
        #: The ``_id`` of claims that were looked up, and are stored.
        self.keys: set[str] = set()

    def add(self, user: Mapping[str, Any]) -> None:
        """Take in the stored document of a user."""
        if user["_id"] in self._owners:
            traits = user.get("traits", {}).items()
            forms = {name: register.get("i") for name, register in traits}
            self._users[user["_id"]] = (forms, user.get("claims", {}))

    def count(self, claim: Claim) -> int:
        """Return how many claims the user has of the trait."""
        found = self._users.get(claim.owner)
        return 0 if found is None else int(found[1].get(claim.name, 0))

    def form(self, claim: Claim) -> str | None:
        """Return the current value of the trait, in the form in which users are looked up."""
        found = self._users.get(claim.owner)
        return None if found is None else found[0].get(claim.name)

    def is_doubtful(self, claim: Claim) -> bool:
        """Return whether a look-up must show if the claim is stored."""
        if claim.owner not in self._users:
            return False
        forms, counts = self._users[claim.owner]
        return (claim.name in forms or claim.name in counts) and not self._is_current(claim)

    def has(self, claim: Claim) -> bool:
        """Return whether the claim is stored, or at least counted."""
        return self._is_current(claim) or claim.key in self.keys

    def _is_current(self, claim: Claim) -> bool:
        # While there is room, each value that became the current one has a claim.
        return self.form(claim) == claim.form and self.count(claim) < MAX_CLAIMS
