# SPDX-License-Identifier: Apache-2.0
"""Users, visitors and groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

__all__ = [
    "MAX_CANDIDATES",
    "MAX_CLAIMS",
    "MAX_USERS",
    "GroupProfile",
    "UserProfile",
    "VisitorProfile",
]

#: Maximum number of claims that a storage keeps for a trait of a user, and of users that
#: :meth:`Storage.find_users` returns for a value.
MAX_CLAIMS: Final = 100
MAX_USERS: Final = 100
#: How many claims of a value :meth:`Storage.find_users` examines at least, oldest first: not
#: each of them is of a user whose value wins.
MAX_CANDIDATES: Final = 1000


# Not frozen: the ``__init__`` of a frozen class takes longer, and a page has a thousand.
@dataclasses.dataclass(slots=True, kw_only=True, unsafe_hash=True)
class UserProfile:
    """A user, merged from the stored events of the user and of the visitors that belong to it."""

    workspace_id: str
    user_id: str
    traits: Mapping[str, Any]
    #: Least and greatest timestamp of the events that made the user exist: milliseconds since 1970
    #: UTC. Visitors count for ``updated_at`` only.
    created_at: int
    updated_at: int
    #: All that are linked; sorted.
    anonymous_ids: Sequence[str]
    #: Ids of the groups that the user is a member of, sorted.
    groups: Sequence[str]
    #: Trait → timestamp of the event that set it; empty if the storage cannot tell.
    trait_times: Mapping[str, int] = dataclasses.field(default_factory=dict, compare=False)
    #: How many traits and groups of visitors are left out because of a limit.
    left_out: int = 0
    #: The identifiers that surely are the user's: see :func:`engage.api.certain_of`.
    certain: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VisitorProfile:
    """Someone who has an anonymous id only, merged from the stored events."""

    workspace_id: str
    anonymous_id: str
    #: The user that the visitor belongs to, if that user exists.
    user_id: str | None
    traits: Mapping[str, Any]
    #: Least and greatest timestamp of the events that made the visitor exist.
    created_at: int
    updated_at: int
    #: Ids of the groups that the visitor is a member of, sorted.
    groups: Sequence[str]
    #: Trait → timestamp of the event that set it; empty if the storage cannot tell.
    trait_times: Mapping[str, int] = dataclasses.field(default_factory=dict, compare=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupProfile:
    """A group, merged from the stored events."""

    workspace_id: str
    group_id: str
    traits: Mapping[str, Any]
