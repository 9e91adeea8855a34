# SPDX-License-Identifier: Apache-2.0
"""Users, visitors and groups as they are stored: what the events of each one changed, kept apart.

A visitor belongs to the user of its first link that counts, if that user exists. Who that is is not
stored, so nothing has to be changed when an earlier link arrives late, or when an operator undoes
one.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import starmap
from operator import attrgetter
from typing import Final, NamedTuple

from engage.api import (
    Kind,
    Version,
)
from engage.store.tables import (
    Delete,
    Get,
    Put,
    Row,
    Steps,
    Table,
    Under,
    types_of,
)

#: Kinds, as numbers.
USER: Final = 0
GROUP: Final = 1
VISITOR: Final = 2
KINDS: Final = {Kind.USER: USER, Kind.VISITOR: VISITOR, Kind.GROUP: GROUP}
KIND_OF: Final = {number: kind for kind, number in KINDS.items()}
#: A user, a visitor or a group: (workspace, kind, name).
Person = tuple[str, int, str]
#: The value of a trait that is removed. No other value begins with a space.
REMOVED: Final = b" null"
#: What a process remembers: (user, anonymous id) → when the first event that made a stored link was
#: received; and (workspace, whether with identifiers) → where the next search for visitors that
#: give way begins.
KNOWN_LINKS: Final = "links"
SEARCHED: Final = "searched"
_PERSON: Final = {"workspace": str, "kind": int, "name": str}
_VERSION: Final = {"timestamp": int, "message_id": str, "origin": str}


@dataclasses.dataclass(slots=True)
class Profile:
    """A user, a visitor or a group."""

    workspace: str
    kind: int
    name: str
    #: Least and greatest timestamp of the events that made it exist. None: only links or choices
    #: did.
    created_at: int | None = None
    updated_at: int | None = None
    #: Least and greatest time of its choices.
    chosen_first: int | None = None
    chosen_last: int | None = None
    #: Of a visitor: when the last event was received.
    changed_at: int | None = None
    #: How much it has of what has a limit. A store may leave out how many links and memberships
    #: these are: then they are -1.
    links: int = 0
    memberships: int = 0
    traits: int = 0
    trait_bytes: int = 0
    #: In a store without numbers, another value that gives an order.
    number: int | str | None = None

    @property
    def person(self) -> Person:
        """Who it is."""
        return self.workspace, self.kind, self.name

    @property
    def row(self) -> Row:
        """Its row."""
        return _row_of(self)

    @property
    def visitor(self) -> tuple[str, str]:
        """The workspace and the anonymous id of a visitor."""
        return self.workspace, self.name

    @property
    def exists(self) -> bool:
        """Whether an event or a choice made a user exist, and not only a link."""
        return self.created_at is not None or self.chosen_first is not None

    @property
    def times(self) -> tuple[int, int]:
        """The first and the last time of one that exists."""
        if self.chosen_first is None or self.chosen_last is None:
            return self.created_at or 0, self.updated_at or 0
        if self.created_at is None or self.updated_at is None:
            return self.chosen_first, self.chosen_last
        return min(self.created_at, self.chosen_first), max(self.updated_at, self.chosen_last)


class LinkRow(NamedTuple):
    """A link of a user, or an operator's decision about one, or both."""

    workspace: str
    kind: int
    name: str
    anonymous_id: str
    #: The first event that made it. None: there was none.
    received_at: int | None = None
    message_id: str = ""
    origin: str = ""
    #: The version of the decision, and whether the link does not count.
    decided_at: int = 0
    decision_id: str = ""
    decision_origin: str = ""
    undone: int = 0

    @property
    def counts(self) -> bool:
        """Whether the anonymous id belongs to the user, if no other link was earlier."""
        return self.received_at is not None and not self.undone

    @property
    def first(self) -> Version | None:
        """The version of the first event that made it."""
        if self.received_at is None:
            return None
        return self.received_at, self.message_id, self.origin

    @property
    def decision(self) -> tuple[Version, bool]:
        """The version of the decision, and whether the link does not count."""
        return (self.decided_at, self.decision_id, self.decision_origin), bool(self.undone)

    @property
    def visitor(self) -> tuple[str, str]:
        """The workspace and the anonymous id."""
        return self.workspace, self.anonymous_id


class Identifier(NamedTuple):
    """A value by which a user or a visitor is looked up."""

    workspace: str
    kind: int
    name: str
    trait: str
    value: str
    #: When the first event that set the value was received.
    claimed_at: int

    @property
    def person(self) -> Person:
        """Who has it."""
        return self[:3]


PROFILES: Final = Table("profiles", types_of(Profile), key=3, arrival=True)
PERSONS: Final = dataclasses.replace(PROFILES, types=_PERSON)
#: Without that for which a store may have to read the traits.
PROFILE_HEADS: Final = dataclasses.replace(
    PROFILES, types={name: PROFILES.types[name] for name in PROFILES.columns[:-3]}
)
#: The values of traits, and when each was set.
VALUES: Final = Table(
    "traits",
    {**_PERSON, "trait": str, "timestamp": int, "value": bytes},
    key=4,
    within=PROFILES,
)
#: Registers. size counts towards the limit; it is 0 for what does not count.
TRAITS: Final = dataclasses.replace(
    VALUES, types={**VALUES.types, "message_id": str, "origin": str, "size": int}
)
MEMBERSHIPS: Final = Table(
    "memberships",
    {**_PERSON, "group_id": str, **_VERSION, "assigned": int},
    key=4,
    within=PROFILES,
)
LINKS: Final = Table(
    "links",
    types_of(LinkRow),
    key=4,
    indexes=(("workspace", "anonymous_id", "received_at", "message_id", "origin"),),
    within=PROFILES,
)
#: The current values of declared identifier traits, in the form in which they are looked up.
IDENTIFIERS: Final = Table(
    "identifiers",
    types_of(Identifier),
    key=4,
    indexes=(("workspace", "trait", "value", "kind", "claimed_at"),),
    within=PROFILES,
)
#: Without the times of claims, which a store may have elsewhere.
IDENTIFIER_HEADS: Final = dataclasses.replace(
    IDENTIFIERS, types={name: IDENTIFIERS.types[name] for name in IDENTIFIERS.columns[:-1]}
)
#: When an event first set a trait to a value: only for declared identifier traits, and for values
#: that it does not have now; a row for the current value may exist as well.
CLAIMS: Final = Table(
    "claims",
    {**_PERSON, "trait": str, "value": str, "received_at": int},
    key=5,
    within=PROFILES,
)
#: Current choices; see ``choices.py``.
CHOICES: Final = Table(
    "choices",
    {**_PERSON, "group_id": str, "subscribed": int, "updated_at": int, "change_id": str},
    key=4,
    arrival=True,
)
#: How many visitors there are.
VISITOR_TOTALS: Final = Table("visitor_totals", {"workspace": str, "count": int}, key=1)
_row_of: Final = attrgetter(*PROFILES.columns)


def profiles(people: Collection[Person], table: Table = PROFILES) -> Steps[list[Profile]]:
    """Read profiles."""
    rows = (yield Get(table, people)) if people else {}
    return [*starmap(Profile, rows.values())]


def chose(choices: Iterable[tuple[Person, int]]) -> Steps[None]:
    """Make users exist.

    :param choices: a user, and when it made a choice.
    """
    times: dict[Person, list[int]] = {}
    for user, at in choices:
        times.setdefault(user, []).append(at)
    users = {profile.person: profile for profile in (yield from profiles(times.keys()))}
    for user, new in times.items():
        profile = users.setdefault(user, Profile(*user))
        new += [at for at in (profile.chosen_first, profile.chosen_last) if at is not None]
        profile.chosen_first, profile.chosen_last = min(new), max(new)
    if users:
        yield Put(PROFILES, [profile.row for profile in users.values()])


# ------------------------------------------------------------------------------ who belongs to whom
def first_users(visitors: Collection[tuple[str, str]]) -> Steps[dict[tuple[str, str], Person]]:
    """Return the users of the first links of visitors: (workspace, anonymous id) → user."""
    if not visitors:
        return {}
    rows = yield Under(LINKS, visitors, by=LINKS.indexes[0], equal={"undone": 0}, first=True)
    return {visitor: links[0][:3] for visitor, links in rows.items() if links}


def owners(visitors: Collection[tuple[str, str]]) -> Steps[dict[tuple[str, str], Profile]]:
    """Return the users that visitors belong to: (workspace, anonymous id) → user."""
    first = yield from first_users(visitors)
    stored = yield from profiles({*first.values()}, PROFILE_HEADS)
    users = {profile.person: profile for profile in stored if profile.exists}
    return {visitor: users[user] for visitor, user in first.items() if user in users}


def may_expire(visitors: Sequence[Profile]) -> Steps[list[Profile]]:
    """Return the visitors that belong to no user and made no choice."""
    owner = yield from owners([visitor.visitor for visitor in visitors])
    alone = [visitor for visitor in visitors if visitor.visitor not in owner]
    chosen = yield Under(CHOICES, [visitor.person for visitor in alone])
    return [visitor for visitor in alone if not chosen[visitor.person]]


def delete_profiles(people: Sequence[Person]) -> Steps[int]:
    """Delete profiles with what is stored of them, except links, and return how many.

    An executor without transactions may leave those that another caller has changed.
    """
    if not people:
        return 0
    for table in (TRAITS, MEMBERSHIPS, IDENTIFIERS, CLAIMS):
        stored = yield Under(table, people)
        if keys := [row[: table.key] for rows in stored.values() for row in rows]:
            yield Delete(table, keys)
    deleted: int = yield Delete(PROFILES, people)
    gone = Counter(workspace for workspace, kind, _ in people if kind == VISITOR)
    totals = yield Get(VISITOR_TOTALS, [(workspace,) for workspace in gone])
    if rows := [(space, count - gone[space]) for space, count in totals.values()]:
        yield Put(VISITOR_TOTALS, rows)
    return deleted
