# SPDX-License-Identifier: Apache-2.0
"""The interface of a storage that also keeps users and groups."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from engage.api.events import Kind, Subject, identifier_value
from engage.api.pages import Page

__all__ = [
    "MAX_CANDIDATES",
    "MAX_CLAIMS",
    "MAX_USERS",
    "GroupProfile",
    "ProfileStore",
    "UserProfile",
    "VisitorProfile",
]

#: Maximum number of claims that a storage keeps for a trait of a user, and of users that
#: :meth:`ProfileStore.find_users` returns for a value.
MAX_CLAIMS: Final = 100
MAX_USERS: Final = 100
#: How many claims of a value :meth:`ProfileStore.find_users` examines at least, oldest first: not
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


class ProfileStore(abc.ABC):
    """A storage that also keeps profiles; its ``write`` applies the changes of events.

    What the events of one person change is kept apart: the user's registers, and those of each
    visitor. A user that the storage returns is merged from them by :func:`engage.api.merge`; see
    ``people.py`` for which visitors belong to it.

    Profiles have limits (:class:`ProfileLimits`). An event that exceeds one is stored, but its
    change is dropped and counted in :attr:`dropped_changes`.
    A declared identifier trait (:attr:`StorageContext.identifiers`) does not count, unless its
    value is larger than :attr:`ProfileLimits.identifier_bytes`: it always has room.

    At :attr:`ProfileLimits.visitors`, a new visitor replaces one that :meth:`expire_visitors` could
    delete and that has no trait :data:`~engage.api.events.TRUSTED`: the least recently changed, and
    first of those without a declared identifier. A storage may examine a bounded number for a
    write, and the visitors of one write need not replace each other.
    """

    #: How many changes were dropped since this process opened the store.
    dropped_changes: int = 0

    @abc.abstractmethod
    async def profile(self, workspace_id: str, user_id: str) -> UserProfile | None:
        """Return the user, or ``None`` if no event made the user exist."""

    async def certain(self, workspace_id: str, user_id: str) -> Mapping[str, str | None]:
        """Return which identifiers of a user are certain.

        A signed link calls this, so a storage should read only the user's own identifiers.

        :return: each identifier that a user has → its value if it is in
            :attr:`UserProfile.certain`, else ``None``. Other traits may be among them.
        """
        user = await self.profile(workspace_id, user_id)
        return {} if user is None else {**dict.fromkeys(user.traits), **user.certain}

    @abc.abstractmethod
    async def find_users(
        self, workspace_id: str, trait: str, values: Sequence[str]
    ) -> Mapping[str, Sequence[str]]:
        """Find users by a declared identifier trait (:attr:`StorageContext.identifiers`).

        A user is found by the value that wins the merge with its visitors. Its claim is the oldest
        one of the user and those visitors that have the value now. A storage examines at least the
        oldest :data:`MAX_CANDIDATES` claims of users, and as many of visitors.

        Several users may have one value: the one with the oldest claim comes first. A user's
        *claim* of a value is the least ``received_at`` of the stored events that set the user's
        trait to this value (compared in the form of :func:`identifier_value`), in whatever order
        they arrived and whatever the trait was in between. A client can choose a timestamp, but
        not a claim. A value that was set before the trait was declared is older than all.
        A storage keeps the first :data:`MAX_CLAIMS` of a user for each trait, so that anyone with a
        write key cannot make them grow without bound. A later value counts as claimed when it was
        received, while the user has it. Several processes that write to one user at the same moment
        may keep a few more.

        Only a trait's current value counts. An index serves this.

        :param values: values in the form of :func:`identifier_value`.
        :return: each value that a user has → at most :data:`MAX_USERS` ids, oldest claim first;
            users with equal claims are in any order.
        """

    async def holders(
        self, workspace_id: str, trait: str, value: str, *, after: str | None, limit: int
    ) -> Page[Subject]:
        """Read all users and visitors that have a value of a declared identifier trait, each by
        itself: no visitor is replaced by its user.

        This default returns the users that :meth:`find_users` finds, which may not be all. A
        storage that can return all of them overrides it; then a signed link works however many
        users have the recipient's address.

        :param value: in the form of :func:`identifier_value`.
        :param after: the cursor of the page before; ``None`` for the first.
        :param limit: the maximum number of subjects.
        :return: each once, the users before the visitors, because a link of an earlier version
            that fits both is the user's. An index serves this.
        """
        if after is not None:
            return Page((), None)
        found = await self.find_users(workspace_id, trait, [value])
        users = [Subject(Kind.USER, name) for name in found.get(value, ())]
        return Page(users[:limit], None)

    async def identifier_history(
        self, workspace_id: str, trait: str, ids: Sequence[str]
    ) -> Mapping[str, Collection[str]]:
        """Return all values of a declared identifier trait that users have or had.

        A storage that keeps claims returns those of the user and of each visitor that belongs to
        it. This default returns the current value of a user.

        :param ids: ids of users.
        :return: each id that has any → values in the form of :func:`identifier_value`.
        """
        users = [(name, await self.profile(workspace_id, name)) for name in ids]
        values = ((name, user.traits.get(trait)) for name, user in users if user is not None)
        forms = ((name, identifier_value(trait, value)) for name, value in values)
        return {name: (form,) for name, form in forms if form is not None}

    async def find_visitors(
        self, workspace_id: str, trait: str, values: Sequence[str]
    ) -> Mapping[str, Sequence[str]]:
        """Find visitors that belong to no user, by a declared identifier trait; otherwise as
        :meth:`find_users`. This default finds none.

        :return: each value that such a visitor has → anonymous ids, oldest claim first.
        """
        return {}

    async def visitor(self, workspace_id: str, anonymous_id: str) -> VisitorProfile | None:
        """Return the visitor, or ``None`` if no event made it exist, which is the default."""
        return None

    async def scan_visitors(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[VisitorProfile]:
        """Return one page of all visitors, in any order; each visitor once; by default none."""
        return Page((), None)

    async def expire_visitors(self, before: int, *, limit: int) -> int:
        """Delete visitors that belong to no user, have no subscription choice, and were changed by
        no event received since ``before``.

        :param before: milliseconds since 1970 UTC.
        :param limit: the maximum number of visitors, so that one call never stalls writes.
        :return: how many were deleted.
        """
        return 0

    async def users_beginning(
        self, workspace_id: str, text: str, *, trait: str | None = None, limit: int
    ) -> Sequence[str] | None:
        """Find users by the beginning of their ids or of an identifier, with capitals as they are.

        An index serves this. Ids of users that do not exist yet, but have links, may be among them.

        :param text: the beginning; of a trait in the form of :func:`identifier_value`.
        :param trait: a declared identifier trait; ``None`` for the id.
        :param limit: the maximum number of ids.
        :return: ids, in any order; ``None`` if the storage cannot do this, which is the default.
        """
        return None

    @abc.abstractmethod
    async def scan_users(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[UserProfile]:
        """Return one page of all users, in any order; each user once."""

    @abc.abstractmethod
    async def scan_groups(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[GroupProfile]:
        """Return one page of all groups, in any order; each group once."""
