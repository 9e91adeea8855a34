# SPDX-License-Identifier: Apache-2.0
"""The steps of the plan that applies the changes of events, without transactions.

What the plan needs of the people of a write is read at once (:meth:`Changes.prefetch`), and what it
puts is sent at its end, with one update command for each collection. Each statement has the same
result in any order and from any number of processes, and may be sent twice:

A register is the document ``{t: timestamp, m: message id, o: origin, v: value}``, changed only by
``$max``. MongoDB compares documents field by field, so the greatest (timestamp, message id, origin)
wins. Besides ``v`` a register may have ``j`` (the value as JSON, where BSON may not keep it), ``i``
(the form in which users are looked up by it) and ``x`` (true if the trait is removed); all follow
from the event, as ``v`` does.

A link has the version of its first event, ``first``: ``{t: time of receipt, m, o}``, changed only
by ``$min``. One that was stored before there were versions has none, and is older than all others.
The decision of an operator is a register beside it; without a link, ``first`` is :data:`NEVER`.

What was read and is not changed is written as it is, because no majority may have it yet, and a
failover would undo it.
"""

from __future__ import annotations

import collections
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, ClassVar, Final

import orjson
from bson.datetime_ms import DatetimeMS

from engage.api import (
    MAX_CLAIMS,
    MAX_TIME,
    TRUSTED,
    Link,
    LinkDecision,
    Membership,
    Seen,
    StorageContext,
    identifier_value,
)
from engage.store.changes import Traits
from engage.store.events import Changing
from engage.store.profiles import (
    CLAIMS,
    IDENTIFIERS,
    KIND_OF,
    KINDS,
    LINKS,
    MEMBERSHIPS,
    PROFILES,
    REMOVED,
    TRAITS,
    USER,
    VISITOR,
    VISITOR_TOTALS,
    LinkRow,
    Person,
    Profile,
)
from engage.store.tables import Delete, Get, Key, Page, Pages, Put, Recall, Remember, Row, Under

from . import schema
from .connection import UNCHANGED, Connection, all_of
from .documents import NEVER, any_of, encode_value, escape_key, pair_id, scoped_id
from .identifiers import Claim
from .paging import beyond
from .people_steps import PLACE_OF, TIMES, Document, PeopleSteps, link_row, membership
from .profiles import Cache, delete_visitors

_log = logging.getLogger("engage.storage.mongo")

#: When a value was claimed that has a claim which was not read.
_SOME_TIME: Final = MAX_TIME


class Changes(PeopleSteps):
    """Executes the steps of :func:`engage.store.changes.apply` once.

    :param known: what this process remembers.
    """

    def __init__(self, connection: Connection, context: StorageContext, cache: Cache) -> None:
        super().__init__(connection, context)
        self._cache = cache
        #: None: there is none.
        self._profiles: dict[Key, Row | None] = {}
        #: The traits that are kept of those who are read: those that the write sets.
        self._names: dict[Person, set[str]] = collections.defaultdict(set)
        #: How many claims of a trait a profile has, by its key.
        self._counts: dict[Person, Mapping[str, int]] = {}
        #: When visitors were changed last.
        self._changed_at: dict[Key, int] = {}
        #: Registers that were read: those that the write sets, or that engage sets.
        self._rows: dict[Key, Row] = {}
        #: The values by which people are found.
        self._values: dict[Key, str] = {}
        #: The values of the claims that were read.
        self._claimed: dict[Key, set[str]] = {}
        #: Table → links or memberships that were read.
        self._pairs = collections.defaultdict[str, dict[Key, Row]](dict)
        #: What was read, as the collection and the query for the document.
        self._read_from: dict[tuple[str, str], Document] = {}
        #: Table → rows.
        self._put = collections.defaultdict[str, list[Row]](list)
        self._remembered: list[Remember] = []
        #: Collection → ``_id`` → statement.
        self._statements = collections.defaultdict[str, dict[str, dict[str, Any]]](dict)

    # ------------------------------------------------------------------------------- reading
    async def prefetch(self, changes: Iterable[Changing]) -> None:
        """Read the people of changes. To be called within :meth:`Connection.calling`."""
        seen: dict[int, dict[str, Person]] = collections.defaultdict(dict)
        linked, members = dict[str, Person](), dict[int, dict[str, Person]]()
        for event, some in changes:
            space = event.workspace_id
            for change in some:
                match change:
                    case Seen(kind, name):
                        seen[KINDS[kind]][scoped_id(space, name)] = (space, KINDS[kind], name)
                    case Traits(kind, name, traits):
                        self._names[space, KINDS[kind], name].update(traits)
                    case Membership(kind, name):
                        person = (space, KINDS[kind], name)
                        members.setdefault(person[1], {})[scoped_id(space, name)] = person
                    case Link(user) | LinkDecision(user):
                        linked[scoped_id(space, user)] = (space, USER, user)
        await all_of(
            [
                *(self._read_profiles(kind, people) for kind, people in seen.items()),
                *(self._read_memberships(kind, people) for kind, people in members.items()),
                self._read_links(linked),
            ]
        )
        rows = self._pairs[LINKS.name].values()
        links = collections.Counter(row[:3] for row in rows if LinkRow(*row).first is not None)
        groups = collections.Counter(row[:3] for row in self._pairs[MEMBERSHIPS.name].values())
        at = PROFILES.columns.index("links")
        for person in {*linked.values(), *(key for some in seen.values() for key in some.values())}:
            row = self._profiles.setdefault(person, None)
            if row is None and person in links:
                row = Profile(*person).row  # Somebody of whom there are only links.
            if row is not None:
                counts = (links[person], groups[person])
                self._profiles[person] = (*row[:at], *counts, *row[at + 2 :])

    async def _read_profiles(self, kind: int, people: Mapping[str, Person]) -> None:
        collection, step = PLACE_OF[kind].subjects, Get(PROFILES, ())
        for chunk in self._connection.chunks(people):
            # One by one: documents may be large, and little is kept of each.
            async for document in self._connection.db[collection].find({"_id": any_of(chunk)}):
                person = people[document["_id"]]
                self._profiles[person] = self._profile(step, person, document)
                self._read_from[collection, document["_id"]] = {"_id": document["_id"]}

    async def _read_memberships(self, kind: int, people: Mapping[str, Person]) -> None:
        collection, owner = PLACE_OF[kind].memberships, KIND_OF[kind].value
        for document in await self._connection.read(collection, people, by=owner):
            row = membership(people[document[owner]], document)
            self._pairs[MEMBERSHIPS.name][row[: MEMBERSHIPS.key]] = row

    async def _read_links(self, users: Mapping[str, Person]) -> None:
        for document in await self._connection.read(schema.LINKS, users, by="user"):
            row = link_row(document)
            self._pairs[LINKS.name][row[: LINKS.key]] = row

    def _profile(self, step: Get | Pages, person: Person, document: Document) -> Row:
        row = super()._profile(step, person, document)
        if person not in self._counts:  # The others may be read again, and less of them.
            self._counts[person] = document.get("claims", {})
        self._changed_at[person] = row[PROFILES.columns.index("changed_at")] or 0
        start = len(scoped_id(person[0], ""))
        traits = document.get("traits", {})
        for trait in self._context.identifiers.get(person[0], ()):
            if form := traits.get(escape_key(trait), {}).get("i"):
                self._values[*person, trait] = form[start:]
        return row

    def _keep_traits(self, step: Get | Pages, person: Person, traits: list[Row]) -> None:
        # Little is kept of each, because there may be many large ones.
        names = self._names.get(person, ())
        for row in traits:
            if row[3] in names or row[3] == TRUSTED:
                self._rows[row[:4]] = row

    async def execute(self, step: Any) -> Any:
        if isinstance(step, Put):
            self._put[step.table.name] += step.rows
            return None
        if isinstance(step, Delete):
            if step.table.name != PROFILES.name or isinstance(step.keys, Pages):
                return 0  # What belongs to a profile goes with it.
            changed = {person: self._changed_at[person] for person in step.keys}
            return await delete_visitors(self._connection, changed)
        return await super().execute(step)

    def recall(self, step: Recall | Remember) -> Any:
        if isinstance(step, Recall):
            return self._cache.of(step.topic)
        self._remembered.append(step)
        return None

    async def _get_profiles(self, step: Get) -> dict[Key, Row]:
        if step.table is not PROFILES:
            # Of those whom the write only links, the times were not read.
            return await super()._get_profiles(step)
        rows = {key: self._profiles.get(key) for key in step.keys}
        return {key: row for key, row in rows.items() if row is not None}

    async def _page_of_profiles(self, step: Pages) -> Page:
        """Read visitors of which some give way: the least recently changed first."""
        equal: Mapping[str, Any] = step.equal
        workspace = equal["workspace"]
        names = (TRUSTED, *self._context.identifiers.get(workspace, ()))
        traits = (f"traits.{escape_key(name)}" for name in names)
        fields = dict.fromkeys(("workspaceId", "anonymousId", *TIMES, *traits), 1)
        query = beyond("changedAt", *step.after) if step.after else {}
        visitors = self._connection.db[schema.VISITORS].find(query, fields)
        page = await visitors.sort([("changedAt", 1), ("_id", 1)]).limit(step.limit).to_list(None)
        rows = [
            self._profile(step, (workspace, VISITOR, document["anonymousId"]), document)
            for document in page
            if document["workspaceId"] == workspace
        ]
        place = (page[-1]["changedAt"], page[-1]["_id"]) if page else step.after
        return Page(rows, place, len(page) == step.limit)

    async def _get_pairs(self, step: Get) -> dict[Key, Row]:
        stored = self._pairs[step.table.name]
        rows = {key: stored[key] for key in step.keys if key in stored}
        for key in rows:
            collection, query = _pair(step.table.name, key)
            self._read_from[collection, query["_id"]] = query
        return rows

    async def _get_traits(self, step: Get) -> dict[Key, Row]:
        return {key: self._rows[key] for key in step.keys if key in self._rows}

    async def _get_identifiers(self, step: Get) -> dict[Key, Row]:
        rows = {key: (*key, self._values[key]) for key in step.keys if key in self._values}
        if late := [key for key in rows if self._count(key) >= MAX_CLAIMS]:
            await self._under_claims(Under(CLAIMS, late))
        times = self._cache.of(CLAIMS.name)
        return {key: (*row, times.get(row, _SOME_TIME)) for key, row in rows.items()}

    async def _under_identifiers(self, step: Under) -> dict[Key, list[Row]]:
        rows: dict[Key, list[Row]] = {prefix: [] for prefix in step.prefixes}
        for person in rows:
            for trait in self._context.identifiers.get(person[0], ()):
                if (key := (*person, trait)) in self._values:
                    rows[person].append((*key, self._values[key], _SOME_TIME))
        return rows

    async def _under_deleted(self, step: Under) -> dict[Key, list[Row]]:
        # They are read so that they are deleted, and go with the profile.
        return {prefix: [] for prefix in step.prefixes}

    async def _under_claims(self, step: Under) -> dict[Key, list[Row]]:
        if any(len(prefix) == PROFILES.key for prefix in step.prefixes):
            return await self._under_deleted(step)
        claims: dict[Key, list[Row]] = {prefix: [] for prefix in step.prefixes}
        # Somebody who never had the trait has no claim of it.
        traits = [trait for trait in claims if trait in self._values or self._count(trait)]
        async for key, row, is_late in self._claims(traits):
            if not is_late:
                claims[key].append(row)
        self._claimed.update((key, {row[4] for row in rows}) for key, rows in claims.items())
        return claims

    async def _get_totals(self, step: Get) -> dict[Key, Row]:
        most = self._context.profile_limits.visitors
        return {key: (*key, most) for key in step.keys if key[0] in self._cache.full}

    # ------------------------------------------------------------------------------- writing
    def _count(self, trait: Key) -> int:
        """Return how many claims somebody has of a trait."""
        return int(self._counts.get(trait[:3], {}).get(escape_key(trait[3]), 0))

    async def write(self) -> int:
        """Send what the plan writes. To be called within :meth:`Connection.calling`.

        :return: how many changes were dropped because the server can never apply them.
        """
        claims = [*self._put[CLAIMS.name], *self._put[IDENTIFIERS.name]]
        profiles = {row[:3]: row for row in self._put[PROFILES.name]}
        for row in claims:
            if read := self._profiles.get(row[:3]):  # It counts its claims.
                profiles.setdefault(row[:3], read)
        for row in profiles.values():
            self._put_profile(Profile(*row))
        for person, rows in itertools.groupby(self._put[TRAITS.name], lambda row: row[:3]):
            self._put_traits(person, rows)
        for row in self._put[MEMBERSHIPS.name]:
            self._put_membership(*row)
        for row in self._put[LINKS.name]:
            self._put_link(LinkRow(*row))
        times = self._put_claims()
        for (collection, key), query in self._read_from.items():
            nothing = {"q": query, "u": UNCHANGED, "upsert": False}
            self._statements[collection].setdefault(key, nothing)
        self._cache.growing.update(space for space, _ in self._put[VISITOR_TOTALS.name])
        results = await all_of(
            self._connection.update(name, [*part.values()])
            for name, part in self._statements.items()
        )
        if refused := [code for codes in results for code in codes if code]:
            _log.error(
                "%d profile changes can never be applied (code %d)", len(refused), refused[0]
            )
        self._cache.keep([*self._remembered, Remember(CLAIMS.name, times)])
        return len(refused)

    def _document(self, person: Key) -> dict[str, dict[str, Any]]:
        """Return the update of the document of a person."""
        workspace, kind, name = person
        key, place = scoped_id(workspace, name), PLACE_OF[kind]
        statement = self._statements[place.subjects].get(key)
        if statement is None:
            names = {"workspaceId": workspace, place.name: name}
            empty = {"$min": {}, "$max": {}, "$setOnInsert": names}
            statement = {"q": {"_id": key}, "u": empty, "upsert": True}
            self._statements[place.subjects][key] = statement
        update: dict[str, dict[str, Any]] = statement["u"]
        return update

    def _put_profile(self, row: Profile) -> None:
        if row.created_at is None or row.updated_at is None:
            return  # Only links or choices made it exist.
        update = self._document(row.person)
        read = self._profiles.get(row.person)
        # What was read is not written again: the profile may have been erased meanwhile.
        is_earlier = read is None or Profile(*read).created_at != row.created_at
        update["$min"]["createdAt"] = DatetimeMS(row.created_at if is_earlier else row.updated_at)
        update["$max"]["updatedAt"] = DatetimeMS(row.updated_at)
        if row.changed_at is not None:
            self._changed_at[row.person] = row.changed_at
            update["$max"]["changedAt"] = DatetimeMS(row.changed_at)

    def _changed(self, person: Key) -> dict[str, Any]:
        """Return when a visitor was changed, as a field: what expires with it has that too."""
        return {"changedAt": DatetimeMS(self._changed_at[person])} if person[1] == VISITOR else {}

    def _put_traits(self, person: Key, rows: Iterable[Row]) -> None:
        workspace, kind, _ = person
        greatest = self._document(person)["$max"]
        declared = self._context.identifiers.get(workspace, ()) if PLACE_OF[kind].claims else ()
        for *_, trait, at, encoded, message_id, origin, _ in rows:
            register = _register(at, message_id, origin)
            if encoded == REMOVED:
                register |= {"v": None, "x": True}
            else:
                register |= encode_value(value := orjson.loads(encoded))
                if trait in declared and (form := identifier_value(trait, value)) is not None:
                    register["i"] = scoped_id(workspace, form)
            greatest[f"traits.{escape_key(trait)}"] = register

    def _put_membership(
        self,
        workspace: str,
        kind: int,
        name: str,
        group: str,
        at: int,
        message_id: str,
        origin: str,
        assigned: int,
    ) -> None:
        person = (workspace, kind, name)
        register = _register(at, message_id, origin) | {"v": bool(assigned)}
        update = {"$max": {"assigned": register, **self._changed(person)}}
        self._put_pair(MEMBERSHIPS.name, (*person, group), {"groupId": group}, update)

    def _put_link(self, row: LinkRow) -> None:
        names: dict[str, Any] = {"anonymousId": row.anonymous_id}
        update: dict[str, Any] = {}
        if row.first is not None:
            update["$min"] = {"first": _register(*row.first)}
        else:
            names["first"] = _register(*NEVER)
        version, undone = row.decision
        if any(version):
            update["$max"] = {"decision": _register(*version) | {"v": not undone}}
        self._put_pair(LINKS.name, row[: LINKS.key], names, update)

    def _put_pair(
        self, table: str, key: Key, names: Mapping[str, Any], update: Mapping[str, Any]
    ) -> None:
        """Put a link or a membership."""
        collection, query = _pair(table, key)
        update = {**update, "$setOnInsert": {"workspaceId": key[0], **names}}
        self._statements[collection][query["_id"]] = {"q": query, "u": update, "upsert": True}

    def _put_claims(self) -> dict[Row, int]:
        """Put the claims of the values that identifiers have and had.

        :return: those of users that a process remembers, and when each value was claimed.
        """
        times = {}
        claims, current = self._put[CLAIMS.name], self._put[IDENTIFIERS.name]
        for row in claims:
            *_, value, at = row
            self._claimed.setdefault(row[:4], set()).add(value)
            if at not in (_SOME_TIME, self._cache.of(CLAIMS.name).get(row[:-1])):
                self._put_claim(_claim(row), at)
        for row in current:
            *_, value, at = row
            trait, claim = row[:4], _claim(row)
            if trait[:3] not in self._counts:
                self._claimed.setdefault(trait, set())
            values = self._claimed.get(trait)
            if values is not None and value not in values and len(values) >= MAX_CLAIMS:
                for statement in claim.late_statements(at, self._changed(trait[:3])):
                    statements = self._statements[PLACE_OF[row[1]].claims]
                    statements[f"{claim.late_key}\0{len(statements)}"] = statement
                continue
            if values is not None:
                values.add(value)
            self._put_claim(claim, at)
            if row[1] == USER:
                times[row[:-1]] = at
        for trait in {row[:4] for row in (*claims, *current)} & self._claimed.keys():
            count = {f"claims.{escape_key(trait[3])}": len(self._claimed[trait])}
            self._document(trait[:3])["$max"].update(count)
        return times

    def _put_claim(self, claim: Claim, at: int) -> None:
        kind = KINDS[claim.kind]
        changed = self._changed((claim.workspace, kind, claim.user))
        statement = claim.statement({"$min": {"at": DatetimeMS(at)}}, changed)
        self._statements[PLACE_OF[kind].claims][claim.key] = statement

    _EXECUTE: ClassVar[Mapping[tuple[type, str], Callable[[Any, Any], Awaitable[Any]]]] = {
        **PeopleSteps._EXECUTE,
        (Get, PROFILES.name): _get_profiles,
        (Pages, PROFILES.name): _page_of_profiles,
        (Get, TRAITS.name): _get_traits,
        (Under, TRAITS.name): _under_deleted,
        (Under, MEMBERSHIPS.name): _under_deleted,
        (Get, MEMBERSHIPS.name): _get_pairs,
        (Get, LINKS.name): _get_pairs,
        (Get, IDENTIFIERS.name): _get_identifiers,
        (Under, IDENTIFIERS.name): _under_identifiers,
        (Under, CLAIMS.name): _under_claims,
        (Get, VISITOR_TOTALS.name): _get_totals,
    }


def _claim(row: Row) -> Claim:
    """Return the claim of a row."""
    workspace, kind, name, trait, value, _ = row
    return Claim(KIND_OF[kind], workspace, name, trait, value)


def _pair(table: str, key: Key) -> tuple[str, Document]:
    """Return the collection and the query of a link or a membership.

    The query names the owner, although the ``_id`` contains it: that is the shard key in
    docs/scaling.md, and MongoDB before 7.1 cannot insert without it.
    """
    workspace, kind, name, other = key
    collection = schema.LINKS if table == LINKS.name else PLACE_OF[kind].memberships
    owner = scoped_id(workspace, name)
    return collection, {"_id": pair_id(workspace, name, other), KIND_OF[kind].value: owner}


def _register(at: int, message_id: str, origin: str) -> dict[str, Any]:
    return {"t": DatetimeMS(at), "m": message_id, "o": origin}
