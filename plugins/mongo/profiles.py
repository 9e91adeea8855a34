# SPDX-License-Identifier: Apache-2.0
"""Users, groups, links and memberships: the merge of the stored events."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import operator
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from engage.api import (
    Change,
    Event,
    GroupProfile,
    Page,
    ProfileLimits,
    UserProfile,
    changes_of,
)

from .changes import FoldedChanges, StoredState, stored_traits, user_statement
from .connection import Connection
from .documents import any_of, decode_value, is_text, pair_id, scoped_id, unescape_key
from .identifiers import STEP, Identifiers, StoredClaims, identifier_field
from .paging import id_after, read_page
from .schema import CLAIMS, GROUPS, LINKS, MEMBERSHIPS, USERS

_log = logging.getLogger("engage.storage.mongo")

#: How many durable links, and how many durable claims, are remembered: most events of a visitor
#: then need no look-up of the link, and not each identify call writes its claim again.
_MAX_KNOWN: Final = 100_000


class Profiles:
    """Applies the changes of events, reads profiles, and remembers which links are durable.

    :param limits: per user and group.
    """

    def __init__(
        self, connection: Connection, limits: ProfileLimits, identifiers: Identifiers
    ) -> None:
        self._connection = connection
        self._limits = limits
        self._identifiers = identifiers
        self._links: OrderedDict[str, None] = OrderedDict()
        self._claims: OrderedDict[str, int] = OrderedDict()

    # -------------------------------------------------------------------------------- changes
    def forget(self) -> None:
        """Forget the remembered links and claims: another store may be at the address when it is
        opened."""
        self._links.clear()
        self._claims.clear()

    def changes(self, event: Event) -> tuple[Change, ...]:
        """Return the changes of an event; nothing if it only makes links that are known."""
        if not event.may_change_profiles:
            return ()
        user, anonymous = event.user_id, event.anonymous_id
        if (
            event.type in ("track", "page", "screen")
            and user is not None
            and anonymous is not None
            and pair_id(event.workspace_id, user, anonymous) in self._links
        ):
            return ()
        return changes_of(event)

    def fold(self, changes: Sequence[tuple[Event, Sequence[Change]]]) -> FoldedChanges:
        """Return the changes of a write, folded.

        :param changes: events with their changes, in order of arrival.
        """
        return FoldedChanges(changes, self._links, self._claims, self._identifiers.declared)

    async def read_state(self, folded: FoldedChanges) -> StoredState:
        """Read what :meth:`apply` needs. To be called within :meth:`Connection.calling`."""
        claims = StoredClaims(folded.claimants())
        users, groups, links, memberships = await asyncio.gather(
            self._stored_traits(USERS, folded.wanted_traits(USERS), claims),
            self._stored_traits(GROUPS, folded.wanted_traits(GROUPS)),
            self._stored_pairs(LINKS, folded.wanted_pairs(LINKS)),
            self._stored_pairs(MEMBERSHIPS, folded.wanted_pairs(MEMBERSHIPS)),
        )
        for chunk in self._connection.chunks(folded.wanted_claims(claims)):
            cursor = self._connection.db[CLAIMS].find({"_id": any_of(chunk)}, {"_id": 1})
            claims.keys.update(document["_id"] for document in await cursor.to_list(None))
        traits = {USERS: users, GROUPS: groups}
        return StoredState(traits, {LINKS: links, MEMBERSHIPS: memberships}, claims)

    async def _stored_traits(
        self, collection: str, ids: Sequence[str], claims: StoredClaims | None = None
    ) -> dict[str, Any]:
        found = {}
        fields = {"traits": 1} if claims is None else {"traits": 1, "claims": 1}
        for chunk in self._connection.chunks(ids):
            # One by one: documents may be large, and only the sizes of their traits are kept.
            cursor = self._connection.db[collection].find({"_id": any_of(chunk)}, fields)
            async for document in cursor:
                found[document["_id"]] = stored_traits(document)
                if claims is not None:
                    claims.add(document)
        return found

    async def _stored_pairs(self, collection: str, users: Sequence[str]) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for chunk in self._connection.chunks(users):
            cursor = self._connection.db[collection].find({"user": any_of(chunk)}, {"user": 1})
            for document in await cursor.to_list(None):
                found.setdefault(document["user"], set()).add(document["_id"])
        return found

    async def apply(self, folded: FoldedChanges, state: StoredState | None = None) -> int:
        """Make changes durable, with one update command per collection, all at once. To be called
        within :meth:`Connection.calling`.

        :param state: what :meth:`read_state` returned, if it was called already.
        :return: how many changes were dropped.
        """
        if not folded:
            return 0
        if state is None:
            state = await self.read_state(folded)
        statements = folded.statements(state, self._limits)
        results = await asyncio.gather(
            *(self._connection.update(name, part) for name, part in statements.items()),
            return_exceptions=True,
        )
        dropped = folded.dropped
        for result in results:
            if isinstance(result, BaseException):
                raise result
            refused = [code for code in result if code]
            if refused:
                _log.error(
                    "%d profile changes can never be applied (code %d)", len(refused), refused[0]
                )
                dropped += len(refused)
        durable = [statement["q"]["_id"] for statement in statements.get(LINKS, ())]
        for key in durable:
            self._links[key] = None
        while len(self._links) > _MAX_KNOWN:
            self._links.popitem(last=False)
        for key, at in folded.kept_claims.items():
            self._claims[key] = min(at, self._claims.get(key, at))
        while len(self._claims) > _MAX_KNOWN:
            self._claims.popitem(last=False)
        return dropped

    async def ensure_user(self, workspace_id: str, user_id: str, at: int) -> None:
        """Make a user exist, as an event of the time ``at`` would. To be called within
        :meth:`Connection.calling`."""
        await self._connection.update(USERS, [user_statement(workspace_id, user_id, at)])

    # -------------------------------------------------------------------------------- reading
    async def find(self, workspace_id: str, user_id: str) -> UserProfile | None:
        """Return a user, or ``None`` if the user does not exist."""
        key = scoped_id(workspace_id, user_id)
        with self._connection.calling() as db:
            document, links, memberships = await asyncio.gather(
                db[USERS].find_one({"_id": key}), self._links_of([key]), self._groups_of([key])
            )
        return None if document is None else _user(document, links, memberships)

    async def _links_of(self, users: Sequence[str]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        fields = {"user": 1, "anonymousId": 1}
        cursor = self._connection.db[LINKS].find({"user": any_of(users)}, fields)
        for document in await cursor.to_list(None):
            found.setdefault(document["user"], []).append(document["anonymousId"])
        return found

    async def _groups_of(self, users: Sequence[str]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        fields = {"user": 1, "groupId": 1, "assigned.v": 1}
        cursor = self._connection.db[MEMBERSHIPS].find({"user": any_of(users)}, fields)
        for document in await cursor.to_list(None):
            if document["assigned"]["v"]:
                found.setdefault(document["user"], []).append(document["groupId"])
        return found

    async def users_beginning(
        self, workspace_id: str, text: str, *, trait: str | None = None, limit: int
    ) -> Sequence[str]:
        """Return the ids of users of which the id, or an identifier, has a beginning."""
        if not is_text(text):
            return ()
        first = scoped_id(workspace_id, text)
        field = "_id" if trait is None else identifier_field(trait)
        with self._connection.calling() as db:
            cursor = db[USERS].find({field: {"$gte": first}}, {"userId": 1, field: 1})
            documents = await cursor.sort([(field, 1)]).limit(limit).to_list(None)
        # Servers order letters in different ways, and all of them put these next to each other.
        found = itertools.takewhile(
            lambda one: functools.reduce(operator.getitem, field.split("."), one).startswith(first),
            documents,
        )
        return [document["userId"] for document in found]

    async def scan_users(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[UserProfile]:
        """Return a page of users."""
        with self._connection.calling(scan=True) as db:
            cursor = db[USERS].find(id_after(workspace_id, after)).sort([("_id", 1)])
            documents, last = await read_page(cursor, limit, _sized)
            users = []
            for start in range(0, len(documents), STEP):
                part = documents[start : start + STEP]
                ids = [document["_id"] for document in part]
                links, groups = await asyncio.gather(self._links_of(ids), self._groups_of(ids))
                users += [_user(document, links, groups) for document in part]
        return Page(users, None if last is None else last["_id"])

    async def scan_groups(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[GroupProfile]:
        """Return a page of groups."""
        with self._connection.calling(scan=True) as db:
            cursor = db[GROUPS].find(id_after(workspace_id, after)).sort([("_id", 1)])
            documents, last = await read_page(cursor, limit, _sized)
        groups = [
            GroupProfile(
                workspace_id=document["workspaceId"],
                group_id=document["groupId"],
                traits=_values(document),
            )
            for document in documents
        ]
        return Page(groups, None if last is None else last["_id"])


def _sized(document: Mapping[str, Any]) -> tuple[Mapping[str, Any], int]:
    # An estimate is enough: only pages of large profiles must end early.
    return document, 512 * len(document.get("traits", ()))


def _values(document: Mapping[str, Any]) -> dict[str, Any]:
    traits = document.get("traits", {})
    return {
        unescape_key(key): decode_value(register)
        for key, register in traits.items()
        if "x" not in register
    }


def _user(
    document: Mapping[str, Any],
    links: Mapping[str, Sequence[str]],
    groups: Mapping[str, Sequence[str]],
) -> UserProfile:
    key = document["_id"]
    return UserProfile(
        workspace_id=document["workspaceId"],
        user_id=document["userId"],
        traits=_values(document),
        created_at=int(document["createdAt"]),
        updated_at=int(document["updatedAt"]),
        anonymous_ids=sorted(links.get(key, ())),
        groups=sorted(groups.get(key, ())),
        trait_times={
            unescape_key(trait): int(register["t"])
            for trait, register in document.get("traits", {}).items()
            if "x" not in register
        },
    )
