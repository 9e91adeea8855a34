# SPDX-License-Identifier: Apache-2.0
"""The steps that read people. Their rows are not documents, as those of other tables are.

The document of a user, visitor or group has its profile and its traits, also in the form in which
they are looked up. What one step reads of it serves the next ones of the plan. The claims have
since when somebody has a value. Links and memberships are not counted.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from typing import Any, ClassVar, Final

import orjson
from bson.datetime_ms import DatetimeMS

from engage import api
from engage.api import MAX_TIME, MAX_USERS, StorageContext, identifier_value
from engage.store.profiles import (
    CLAIMS,
    GROUP,
    IDENTIFIER_HEADS,
    IDENTIFIERS,
    KIND_OF,
    KINDS,
    LINKS,
    MEMBERSHIPS,
    PROFILES,
    REMOVED,
    TRAITS,
    USER,
    VALUES,
    VISITOR,
    VISITOR_TOTALS,
    LinkRow,
    Person,
)
from engage.store.tables import Get, Key, Page, Pages, Recall, Remember, Row, Under

from . import schema
from .connection import BATCH, Connection
from .documents import (
    any_of,
    below,
    escape_key,
    identifier_field,
    link_version,
    scoped_id,
    trait_value,
    unescape_key,
    version_of,
)
from .identifiers import Claim, claim_id, held_by
from .paging import STEP, beyond, id_after, read_page

Document = Mapping[str, Any]
#: Orders those who have a value: time, and the ``_id`` of the claim; and the name.
_Age = tuple[int, str, str]

#: Kind, as a number → where its profiles are.
PLACE_OF: Final = {number: schema.PLACES[kind] for number, kind in KIND_OF.items()}
#: The fields of the times of a profile.
TIMES: Final = ("createdAt", "updatedAt", "firstChoiceAt", "lastChoiceAt", "changedAt")
_CLAIM: Final = {"userId": 1, "visitor": 1, "at": 1}
#: The links that no operator undid.
_COUNTS: Final = {"decision.v": {"$ne": False}}
#: The order in which the index of an identifier has the users.
_ORDER: Final = [("createdAt", 1), ("_id", 1)]
#: Pages of claims that are read to find the oldest of very many users: so many users may have had
#: the value earlier and not have it now. Then the order is that of ``createdAt``.
_CLAIM_PAGES: Final = 20


class PeopleSteps:
    """Executes the steps of a plan that read people."""

    def __init__(self, connection: Connection, context: StorageContext) -> None:
        self._connection = connection
        self._context = context
        #: Rows of :data:`TRAITS` that were read with profiles.
        self._traits: dict[Key, list[Row]] = {}
        #: The traits of so many people are kept: of all of a page, and of some others.
        self._most_kept = BATCH
        #: Whether the plan reads a page of all people.
        self._is_scan = False

    def recall(self, step: Recall | Remember) -> Any:
        """Execute a step about what this process remembers: nothing, because others make changes,
        too."""
        return {}

    async def execute(self, step: Any) -> Any:
        """Execute a step, and return its result."""
        method = self._EXECUTE[type(step), step.table.name]
        self._is_scan |= isinstance(step, Pages) and not step.by
        with self._connection.calling(scan=self._is_scan):
            return await method(self, step)

    async def _read(
        self, people: Collection[Key], fields: Mapping[str, int] | None, *, members: bool = False
    ) -> AsyncIterator[tuple[Any, Document]]:
        """Read the documents of people, or of their memberships: not all at once, which may be
        large."""
        for kind, place in PLACE_OF.items():
            whose = {scoped_id(key[0], key[-1]): key for key in people if key[1] == kind}
            ids = [*whose]
            collection, by = place.subjects, "_id"
            if members:
                collection, by = place.memberships, KIND_OF[kind].value
            for start in range(0, len(ids), BATCH):
                some = ids[start : start + BATCH]
                for document in await self._connection.read(collection, some, fields, by=by):
                    yield whose[document[by]], document

    # ------------------------------------------------------------------- profiles and traits
    def _profile(self, step: Get | Pages, person: Person, document: Document) -> Row:
        """Return the row of a document, and keep its traits, if the step wants them."""
        times = [document.get(name) for name in TIMES]
        row: Row = (*person, *[None if time is None else int(time) for time in times], -1, -1)
        if "traits" not in step.table.columns:
            return row
        traits = self._registers(person, document)
        self._keep_traits(step, person, traits)
        sizes = [row[-1] for row in traits]
        return (*row, sum(map(bool, sizes)), sum(sizes), document["_id"])

    def _keep_traits(self, step: Get | Pages, person: Person, traits: list[Row]) -> None:
        """Keep those traits of somebody that the plan may need."""
        self._most_kept += isinstance(step, Pages)
        if len(self._traits) < self._most_kept:
            self._traits[person] = traits

    def _registers(self, person: Person, document: Document) -> list[Row]:
        """Return the rows of the traits of a document."""
        identifiers = self._context.identifiers.get(person[0], ()) if person[1] != GROUP else ()
        size_of = self._context.profile_limits.size
        rows = []
        for key, register in document.get("traits", {}).items():
            trait, value = unescape_key(key), trait_value(register)
            encoded, size = REMOVED, 0
            if value is not api.REMOVED:
                encoded = orjson.dumps(value)
                size = size_of(trait, encoded, identifies=trait in identifiers)
            message_id, origin, at = register["m"], register["o"], int(register["t"])
            rows.append((*person, trait, at, encoded, message_id, origin, size))
        return rows

    async def _get_profiles(self, step: Get) -> dict[Key, Row]:
        fields = None if "traits" in step.table.columns else dict.fromkeys(TIMES, 1)
        people = self._read(step.keys, fields)
        return {person: self._profile(step, person, document) async for person, document in people}

    async def _page_of_profiles(self, step: Pages) -> Page:
        if step.by:
            return await self._beginning(step)
        equal: Mapping[str, Any] = step.equal
        kind, place = equal["kind"], PLACE_OF[equal["kind"]]
        query = id_after(equal.get("workspace"), *(step.after or (None,)))
        cursor = self._connection.db[place.subjects].find(query).sort([("_id", 1)])
        documents, last = await read_page(cursor, step.limit, _sized)
        people = [(document["workspaceId"], kind, document[place.name]) for document in documents]
        rows = [*map(functools.partial(self._profile, step), people, documents)]
        return Page(rows, (documents[-1]["_id"],) if documents else step.after, last is not None)

    async def _beginning(self, step: Pages) -> Page:
        """Read whose ids, or values of an identifier, are between bounds."""
        equal: Mapping[str, Any] = step.equal
        workspace, kind, trait = equal["workspace"], equal["kind"], equal.get("trait")
        place, field = PLACE_OF[kind], "_id" if trait is None else identifier_field(trait)
        start, low, high = (scoped_id(workspace, end) for end in ("", step.low, step.high))
        fields = {place.name: 1, field: 1}
        cursor = self._connection.db[place.subjects].find({field: {"$gte": low}}, fields)
        rows = []
        for document in await cursor.sort([(field, 1)]).limit(step.limit).to_list(None):
            value = functools.reduce(operator.getitem, field.split("."), document)
            # Servers order letters in different ways, and all of them put these next to each other.
            if not low <= value < high:
                break
            row = (workspace, kind, document[place.name], trait, value.removeprefix(start))
            rows.append(row[: len(step.table.columns)])
        return Page(rows, None, more=False)

    async def _under_traits(self, step: Under) -> dict[Key, list[Row]]:
        width = len(step.table.columns)
        # A plan reads them once.
        rows = {key: self._traits.pop(key) for key in step.prefixes if key in self._traits}
        async for person, document in self._read({*step.prefixes} - rows.keys(), {"traits": 1}):
            rows[person] = self._registers(person, document)
        return {key: [row[:width] for row in rows.get(key, ())] for key in step.prefixes}

    async def _get_traits(self, step: Get) -> dict[Key, Row]:
        kept = {person: self._traits.get(person) for person in {key[:-1] for key in step.keys}}
        fields = {f"traits.{escape_key(trait)}": 1 for *_, trait in step.keys}
        async for person, stored in self._read([key for key in kept if kept[key] is None], fields):
            kept[person] = self._registers(person, stored)
        keys, width = {*step.keys}, len(step.table.columns)
        rows = {row[: VALUES.key]: row[:width] for some in kept.values() for row in some or ()}
        return {key: row for key, row in rows.items() if key in keys}

    # ------------------------------------------------------------------ memberships and links
    async def _under_memberships(self, step: Under) -> dict[Key, list[Row]]:
        rows: dict[Key, list[Row]] = {person: [] for person in step.prefixes}
        async for person, document in self._read(step.prefixes, None, members=True):
            rows[person].append(membership(person, document))
        return rows

    async def _under_links(self, step: Under) -> dict[Key, list[Row]]:
        if step.by:
            return await self._first_links(step)
        rows: dict[Key, list[Row]] = {user: [] for user in step.prefixes}
        ids = [scoped_id(workspace, name) for workspace, _, name in rows]
        for link in map(link_row, await self._connection.read(schema.LINKS, ids, by="user")):
            rows[link[: PROFILES.key]].append(link)
        return rows

    async def _first_links(self, step: Under) -> dict[Key, list[Row]]:
        """Return the first link that counts of each visitor."""
        rows: dict[Key, list[Row]] = {visitor: [] for visitor in step.prefixes}
        order = [("anonymousId", 1), ("first", 1), ("user", 1)]
        for workspace in {workspace for workspace, _ in rows}:
            names = [name for space, name in rows if space == workspace]
            for chunk in self._connection.chunks(names):
                left = {*chunk}
                # Anyone can link an anonymous id to very many users: it needs another turn.
                while left:
                    query = {"workspaceId": workspace, "anonymousId": any_of([*left]), **_COUNTS}
                    limit = BATCH + len(left)
                    cursor = self._connection.db[schema.LINKS].find(query).sort(order).limit(limit)
                    links = [*map(link_row, await cursor.to_list(None))]
                    for link in links:
                        if link.anonymous_id in left and link.counts:
                            rows[link.visitor].append(link)
                        left.discard(link.anonymous_id)
                    if len(links) < limit:
                        break
        return rows

    async def _page_of_links(self, step: Pages) -> Page:
        links, equal = self._connection.db[schema.LINKS], step.equal
        if step.by:
            query = {"workspaceId": equal["workspace"], "anonymousId": equal["anonymous_id"]}
            cursor = links.find({**query, **_COUNTS}).sort([("first", 1), ("user", 1)])
            rows = map(link_row, await cursor.limit(step.limit).to_list(None))
            return Page([link for link in rows if link.counts], None, more=False)
        query = id_after(None, step.after[0] if step.after else None)
        cursor = links.find(query).sort([("_id", 1)])
        documents, last = await read_page(cursor, step.limit, lambda document: (document, 0))
        place = (documents[-1]["_id"], documents[-1]["anonymousId"]) if documents else step.after
        return Page([*map(link_row, documents)], place, last is not None)

    # ---------------------------------------------------------------------------- identifiers
    async def _get_identifiers(self, step: Get) -> dict[Key, Row]:
        assert step.table.columns == IDENTIFIER_HEADS.columns, "times are in the claims"
        return await self._forms(step.keys)

    async def _forms(self, keys: Collection[Key]) -> dict[Key, Row]:
        """Return the values of identifiers, without the times of their claims."""
        rows = await self._get_traits(Get(VALUES, keys))
        values = {key: value for key, (*_, value) in rows.items() if value != REMOVED}
        forms = {key: identifier_value(key[-1], orjson.loads(text)) for key, text in values.items()}
        return {key: (*key, form) for key, form in forms.items() if form is not None}

    async def _under_claims(self, step: Under) -> dict[Key, list[Row]]:
        rows: dict[Key, list[Row]] = {prefix: [] for prefix in step.prefixes}
        async for key, row, _ in self._claims(step.prefixes):
            rows[key].append(row)
        return rows

    async def _claims(self, traits: Iterable[Key]) -> AsyncIterator[tuple[Key, Row, bool]]:
        """Read the claims of traits: each with the trait, and whether it is the late one."""
        for kind, place in PLACE_OF.items():
            whose = [(space, name, trait) for space, of, name, trait in traits if of == kind]
            paths = [claim_id(*key, "").removesuffix(":") for key in whose]
            for start in range(0, len(paths), STEP):
                query = {"$or": [{"_id": below(path)} for path in paths[start : start + STEP]]}
                for claim in await self._connection.db[place.claims].find(query).to_list(None):
                    name, trait, value = held_by(claim)
                    key = (claim["workspaceId"], kind, name, trait)
                    is_late = claim["_id"] == claim_id(claim["workspaceId"], name, trait, "")
                    yield key, (*key, value, int(claim["at"])), is_late

    async def _page_of_identifiers(self, step: Pages) -> Page:
        equal: Mapping[str, Any] = step.equal
        if "value" not in equal:
            return await self._beginning(step)
        workspace, trait, value = (equal[name] for name in ("workspace", "trait", "value"))
        rows, place = list[Row](), step.after
        *_, first, at, key = step.after or (USER, None, None)
        after = None if at is None else (at, key)
        for kind in (USER, VISITOR):
            if not first <= kind == equal.get("kind", kind):
                continue
            claim = Claim(KIND_OF[kind], workspace, "", trait, value)
            ages, last = await self._having(claim, after if kind == first else None, step.limit)
            for at, key, name in ages:
                rows.append((workspace, kind, name, trait, value, at))
                place = (workspace, trait, value, kind, *min((at, key), last or (at, key)))
                if len(rows) == step.limit:
                    return Page(rows, place, more=True)
            if last is not None:
                return Page(rows, (workspace, trait, value, kind, *last), more=True)
        return Page(rows, place, more=False)

    async def _having(
        self, claim: Claim, after: tuple[int, str] | None, limit: int
    ) -> tuple[list[_Age], tuple[int, str] | None]:
        """Return those who have a value, oldest claim first.

        :param claim: a claim of the value by any of them.
        :param after: only those behind this place, if there are many.
        :return: with the place behind them, if there may be more.
        """
        place, db = PLACE_OF[KINDS[claim.kind]], self._connection.db
        query: dict[str, Any] = {identifier_field(claim.trait): claim.form}
        fields = {place.name: 1, "createdAt": 1}
        holders = functools.partial(db[place.subjects].find, projection=fields, sort=_ORDER)
        first = await holders(query, limit=MAX_USERS + 1).to_list(None)
        if len(first) <= MAX_USERS:
            ages = sorted(await self._ages(claim, first))
            return [age for age in ages if after is None or age[:2] > after], None
        claimed, most = dict[str, _Age](), max(limit, MAX_USERS)
        is_behind = is_all = after is not None and after[0] > MAX_TIME
        for _ in range(0 if is_behind else _CLAIM_PAGES):
            rest = {} if after is None else beyond("at", DatetimeMS(after[0]), after[1])
            cursor = db[place.claims].find({"held": claim.held, **rest}, _CLAIM)
            claims = await cursor.sort([("at", 1), ("_id", 1)]).limit(most).to_list(None)
            times: dict[str, tuple[int, str]] = {}
            for document in claims:
                after = (int(document["at"]), document["_id"])
                owner = document.get("visitor") or scoped_id(claim.workspace, document["userId"])
                times.setdefault(owner, after)
            stored = await self._connection.read(place.subjects, times, fields, **query)
            names = {document["_id"]: document[place.name] for document in stored}
            for owner in filter(names.__contains__, times):
                claimed.setdefault(names[owner], (*times[owner], names[owner]))
            if is_all := len(claims) < most:
                break
            if len(claimed) >= limit:
                return [*claimed.values()], after
        if is_behind and after is not None:
            query |= beyond("createdAt", DatetimeMS(after[0] - 2 * MAX_TIME), after[1])
        documents = await holders(query, limit=most).to_list(None)
        others = [document for document in documents if document[place.name] not in claimed]
        ages = sorted(await self._ages(claim, others))
        if not is_all:
            return [*claimed.values(), *(age for age in ages if after and age[:2] > after)], after
        last = _unclaimed(documents[-1], "_id")[:2] if len(documents) == most else None
        return [*claimed.values(), *(age for age in ages if age[0] > MAX_TIME)], last

    async def _ages(self, claim: Claim, documents: Sequence[Document]) -> Collection[_Age]:
        """Return the ages of those who have a value."""
        place = PLACE_OF[KINDS[claim.kind]]
        ages, keys = dict[str, _Age](), dict[str, str]()
        for document in documents:
            name = document[place.name]
            own_claim = dataclasses.replace(claim, user=name)
            keys[own_claim.key] = keys[own_claim.late_key] = name
            ages[name] = _unclaimed(document, place.name)
        for stored in await self._connection.read(place.claims, keys, {"held": 1, "at": 1}):
            # A late claim may belong to another value.
            if stored["held"] == claim.held:
                name = keys[stored["_id"]]
                ages[name] = min(ages[name], (int(stored["at"]), stored["_id"], name))
        return ages.values()

    _EXECUTE: ClassVar[Mapping[tuple[type, str], Callable[[Any, Any], Awaitable[Any]]]] = {
        (Get, PROFILES.name): _get_profiles,
        (Pages, PROFILES.name): _page_of_profiles,
        (Get, TRAITS.name): _get_traits,
        (Under, TRAITS.name): _under_traits,
        (Under, MEMBERSHIPS.name): _under_memberships,
        (Under, LINKS.name): _under_links,
        (Pages, LINKS.name): _page_of_links,
        (Get, IDENTIFIERS.name): _get_identifiers,
        (Pages, IDENTIFIERS.name): _page_of_identifiers,
        (Under, CLAIMS.name): _under_claims,
    }
    #: The tables over which steps are executed here.
    TABLES: Final = {table for _, table in _EXECUTE} | {VISITOR_TOTALS.name}


def _unclaimed(document: Document, name: str) -> _Age:
    """Return the age of somebody who has a value without a claim: later than all claims, because
    anyone can choose a timestamp."""
    return 2 * MAX_TIME + int(document["createdAt"]), document["_id"], document[name]


def membership(person: Person, document: Document) -> Row:
    """Return the row of a membership."""
    register = document["assigned"]
    return (*person, document["groupId"], *version_of(register), int(register["v"]))


def link_row(document: Document) -> LinkRow:
    """Return the row of a link. One without a version is older than all."""
    workspace, first = document["workspaceId"], link_version(document)
    # It may be damaged.
    decision = {"t": 0, "m": "", "o": "", "v": True} | document.get("decision", {})
    user = document["user"].removeprefix(scoped_id(workspace, ""))
    version = (None, "", "") if first is None else (max(0, first[0]), *first[1:])
    person = (workspace, USER, user)
    values = (*version, *version_of(decision), int(not decision["v"]))
    return LinkRow(*person, document["anonymousId"], *values)


def _sized(document: Document) -> tuple[Document, int]:
    # An estimate is enough: only pages of large profiles must end early.
    return document, 512 * len(document.get("traits", ()))
