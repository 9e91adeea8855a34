# SPDX-License-Identifier: Apache-2.0
"""Users and visitors, found by their identifiers."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from itertools import starmap
from operator import attrgetter
from typing import Any

from engage import api
from engage.api import MAX_CANDIDATES, MAX_USERS, Page, Subject, identifier_value
from engage.store.keys import is_text
from engage.store.pages import page
from engage.store.people import people, registers, users, with_visitors
from engage.store.profiles import (
    CLAIMS,
    IDENTIFIER_HEADS,
    IDENTIFIERS,
    KIND_OF,
    PERSONS,
    TRAITS,
    USER,
    VISITOR,
    Identifier,
    Person,
    owners,
    profiles,
)
from engage.store.tables import Context, Executor, Get, Pages, Steps, Under, plan


def _candidates(workspace_id: str, trait: str, value: str, *kinds: int) -> Steps[list[Identifier]]:
    """Return the identifiers of those who have a value, oldest claim first: of each kind, those
    that are examined."""
    by, equal = IDENTIFIERS.indexes[0], {"workspace": workspace_id, "trait": trait, "value": value}
    matches = yield Pages(IDENTIFIERS, MAX_CANDIDATES, by, equal)
    rows = [row for row in starmap(Identifier, matches.rows) if row.kind in kinds]
    if matches.more:
        rows = []
        for kind in kinds:
            matches = yield Pages(IDENTIFIERS, MAX_CANDIDATES, by, {**equal, "kind": kind})
            rows += starmap(Identifier, matches.rows)
    return sorted(rows, key=attrgetter("claimed_at"))


@plan()
def find_users(workspace_id: str, trait: str, values: Sequence[str]) -> Steps[dict[str, list[str]]]:
    """Return the users who have one of these values: value → user ids, oldest claim first."""
    by_value = {}
    for value in values:
        if users := (yield from _having(workspace_id, trait, value)):
            by_value[value] = users
    return by_value


def _having(workspace_id: str, trait: str, value: str) -> Steps[list[str]]:
    """Return the users whose value wins, oldest claim first."""
    candidates = yield from _candidates(workspace_id, trait, value, USER, VISITOR)
    limits = (yield Context()).profile_limits
    users: list[str] = []
    seen: set[Person] = set()
    for start in range(0, len(candidates), MAX_USERS):
        step = candidates[start : start + MAX_USERS]
        own = yield from profiles([row.person for row in step if row.kind == USER])
        owner = yield from owners([(x.workspace, x.name) for x in step if x.kind == VISITOR])
        found_users = {user.person: user for user in own if user.exists}
        rows = {}
        for row in step:
            if row.kind == USER:
                user = found_users.get(row.person)
            else:
                user = owner.get((row.workspace, row.name))
            if user is not None and user.person not in seen:
                seen.add(user.person)
                rows[user.person] = user
        people = yield from with_visitors([*rows.values()])
        everyone = [profile for user, _, visitors in people for profile in (user, *visitors)]
        stored = yield Get(TRAITS, [(*profile.person, trait) for profile in everyone])
        traits = {key[:3]: [row] for key, row in stored.items()}
        for user, _, visitors in people:
            some = [registers(profile, traits, {}) for profile in (user, *visitors)]
            won = api.winner(trait, some[0], some[1:], limits)
            if identifier_value(trait, won) == value:
                users.append(user.name)
        if len(users) >= MAX_USERS:
            break
    return users[:MAX_USERS]


@plan()
def find_visitors(
    workspace_id: str, trait: str, values: Sequence[str]
) -> Steps[dict[str, list[str]]]:
    """Return the visitors without a user: value → anonymous ids, oldest claim first."""
    by_value = {}
    for value in values:
        some = yield from _candidates(workspace_id, trait, value, VISITOR)
        owner = yield from owners([(workspace_id, row.name) for row in some])
        alone = [row.name for row in some if (workspace_id, row.name) not in owner]
        if alone:
            by_value[value] = alone[:MAX_USERS]
    return by_value


@plan()
def holders(
    workspace_id: str, trait: str, value: str, after: str | None, limit: int
) -> Steps[Page[Subject]]:
    """Return a page of the users and visitors who have a value."""
    equal = {"workspace": workspace_id, "trait": trait, "value": value}
    matches = yield from page(
        Identifier._make, IDENTIFIERS, equal, after, limit, by=IDENTIFIERS.indexes[0]
    )
    return Page([Subject(KIND_OF[row.kind], row.name) for row in matches.items], matches.cursor)


@plan()
def users_beginning(
    workspace_id: str, trait: str | None, text: str, limit: int
) -> Steps[list[str]]:
    """Return the ids of users of which the id, or an identifier, has a beginning."""
    equal: dict[str, Any] = {"workspace": workspace_id, "kind": USER}
    table, by = PERSONS, PERSONS.columns
    if trait is not None:
        equal["trait"] = trait
        table, by = IDENTIFIER_HEADS, IDENTIFIERS.indexes[0][:3]
    end = text + chr(sys.maxunicode)
    matches = yield Pages(table, limit, by, equal, low=text, high=end)
    return [name for _, _, name, *_ in matches.rows]


@plan()
def named(
    workspace_id: str, name: str, values: Mapping[str, str]
) -> Steps[tuple[list[str], list[str]]]:
    """Return the users and the visitors that have an id, or a value of an identifier trait."""
    ids, names = yield from people(workspace_id, [name], [name], 0)
    both = [*ids], [*names]
    for trait, value in values.items():
        both[0].extend((yield from find_users(workspace_id, trait, [value])).get(value, ()))
        both[1].extend((yield from find_visitors(workspace_id, trait, [value])).get(value, ()))
    return both


@plan()
def identifier_history(
    workspace_id: str, trait: str, ids: Sequence[str]
) -> Steps[dict[str, list[str]]]:
    """Return the values of a trait that users have or had, by each of these ids."""
    people = yield from users(workspace_id, ids)
    keys = [(*who.person, trait) for user, _, visitors in people for who in (user, *visitors)]
    current = yield Get(IDENTIFIER_HEADS, keys)
    earlier = yield Under(CLAIMS, keys)
    history: dict[str, list[str]] = {}
    for user, _, visitors in people:
        mine = [(*who.person, trait) for who in (user, *visitors)]
        values = {current[key][-1] for key in mine if key in current}
        values.update(value for key in mine for *_, value, _ in earlier[key])
        if values:
            history[user.name] = [*values]
    return history


# --------------------------------------------------------------------------------------- storage
class Identifiers(Executor):
    """Users and visitors, found by the traits that the config declares as identifiers."""

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
        return await self.read(find_users, workspace_id, trait, [*filter(is_text, values)])

    async def identifier_history(
        self, workspace_id: str, trait: str, ids: Sequence[str]
    ) -> Mapping[str, Collection[str]]:
        """Return all values of a declared identifier trait that users have or had.

        They are those of the user and of each visitor that belongs to it.

        :param ids: ids of users.
        :return: each id that has any → values in the form of :func:`identifier_value`.
        """
        texts = [*filter(is_text, ids)]
        return await self.read(identifier_history, workspace_id, trait, texts)

    async def find_visitors(
        self, workspace_id: str, trait: str, values: Sequence[str]
    ) -> Mapping[str, Sequence[str]]:
        """Find visitors that belong to no user, by a declared identifier trait; otherwise as
        :meth:`find_users`.

        :return: each value that such a visitor has → anonymous ids, oldest claim first.
        """
        texts = [*filter(is_text, values)]
        return await self.read(find_visitors, workspace_id, trait, texts)

    async def holders(
        self, workspace_id: str, trait: str, value: str, *, after: str | None, limit: int
    ) -> Page[Subject]:
        """Read all users and visitors that have a value of a declared identifier trait, each by
        itself: no visitor is replaced by its user.

        So a signed link works however many users have the recipient's address.

        :param value: in the form of :func:`identifier_value`.
        :param after: the cursor of the page before; ``None`` for the first.
        :param limit: the maximum number of subjects.
        :return: each once, the users before the visitors, because a link of an earlier version
            that fits both is the user's. An index serves this.
        """
        if not is_text(value):
            return Page((), None)
        return await self.read(holders, workspace_id, trait, value, after, limit)

    async def users_beginning(
        self, workspace_id: str, text: str, *, trait: str | None = None, limit: int
    ) -> Sequence[str]:
        """Find users by the beginning of their ids or of an identifier, with capitals as they are.

        An index serves this. Ids of users that do not exist yet, but have links, may be among them.

        :param text: the beginning; of a trait in the form of :func:`identifier_value`.
        :param trait: a declared identifier trait; ``None`` for the id.
        :param limit: the maximum number of ids.
        :return: ids, in any order.
        """
        if not is_text(text):
            return ()
        return await self.read(users_beginning, workspace_id, trait, text, limit)
