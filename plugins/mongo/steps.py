# SPDX-License-Identifier: Apache-2.0
"""The steps of plans as queries and updates, without transactions.

A plan that runs reads at once. What it writes is sent at its end, so that it costs few round trips:

1. A row that was read is changed only if it is still the same, and a row that was not there is
   inserted only if there is still none. If no such write has an effect, another caller was first,
   and the plan is run again. So a plan changes *one* such row at a time. If it deletes several, it
   leaves those that another caller has changed.
2. The other writes follow, all at once: they have the same result in any order.

What a plan found by its key and does not write is written as it is, because no majority may have it
yet, and a failover would undo it.

The first row that a plan gets is not read if the table has a guard. It is taken to be what this
process wrote last, or to be missing, and the write confirms that, or the plan is run again.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, ParamSpec, TypeVar

import bson
import pymongo
from pymongo.errors import OperationFailure

from engage.api import StorageContext, StorageUnavailable
from engage.store.changes import apply
from engage.store.events import Changing
from engage.store.tables import (
    Add,
    Delete,
    Get,
    Key,
    Page,
    Pages,
    Place,
    Plan,
    Put,
    Recall,
    Remember,
    Row,
    Table,
    Under,
    execute_waiting,
)

from .changes import Changes
from .connection import BATCH, DUPLICATE, MAX_ATTEMPTS, UNCHANGED, Connection, all_of
from .documents import Sequencer
from .paging import read_page
from .people_steps import PeopleSteps
from .profiles import Cache
from .tables import FORMS, Document, Form, Totals

#: Name of a table and key → row; None: it was deleted.
_Written = dict[tuple[str, Key], Row | None]

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Steps:
    """Executes plans."""

    def __init__(
        self,
        connection: Connection,
        context: StorageContext,
        sequence: Sequencer,
        cache: Cache,
    ) -> None:
        self._connection = connection
        self._context = context
        self._sequence = sequence
        self._cache = cache
        self._totals = Totals(connection)
        #: Rows of tables with a guard, as this process wrote them last.
        self._written: _Written = {}

    def _attempt(self, *, is_run: bool, written: _Written | None = None) -> _Attempt:
        people = PeopleSteps(self._connection, self._context)
        return _Attempt(self._connection, self._totals, people, is_run=is_run, written=written)

    async def run(
        self, plan: Plan[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Result:
        """Run a plan, again if another caller was first."""
        with pymongo.timeout(self._connection.timeout):
            for number in range(MAX_ATTEMPTS):
                attempt = self._attempt(is_run=True, written=None if number else self._written)
                try:
                    steps = plan(*args, **kwargs)
                    result = await execute_waiting(steps, attempt.execute, self._context)
                    is_written = await attempt.write(self._sequence)
                except BaseException:
                    self._totals.forget()
                    raise
                if is_written:
                    self._written.update(attempt.guarded())
                    while len(self._written) > BATCH:
                        del self._written[next(iter(self._written))]
                    return result
                self._totals.forget()
        raise StorageUnavailable("this is being changed by too many callers")

    async def prefetch(self, changes: Sequence[Changing]) -> Changes:
        """Read what :meth:`apply` needs. To be called within :meth:`Connection.calling`."""
        people = Changes(self._connection, self._context, self._cache)
        await people.prefetch(changes)
        return people

    async def apply(self, changes: Sequence[Changing], people: Changes | None = None) -> int:
        """Apply the changes of events to people, and return how many were dropped. To be called
        within :meth:`Connection.calling`, and not by two at once.

        :param people: what :meth:`prefetch` returned for these changes and others.
        """
        people = people or await self.prefetch(changes)
        attempt = _Attempt(self._connection, self._totals, people, is_run=True, written=None)
        dropped = await execute_waiting(apply(changes), attempt.execute, self._context)
        return dropped + await people.write()

    async def read(
        self, plan: Plan[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Result:
        """Run a plan that only reads."""
        attempt = self._attempt(is_run=False)
        return await execute_waiting(plan(*args, **kwargs), attempt.execute, self._context)


@dataclasses.dataclass(slots=True)
class _Met:
    """A row that a plan has read or written."""

    #: The table in which it was read or written last.
    table: Table
    #: As it is for the plan; None: there is none.
    row: Row | None
    #: What was read; None: there was none, or it was not read.
    before: Row | None = None
    is_read: bool = True
    #: Whether it was found by its key.
    is_found: bool = False
    is_written: bool = False

    def has(self, table: Table) -> bool:
        """Return whether all columns of a table are known."""
        return self.row is None or len(self.row) >= len(table.columns)


class _Attempt:
    """A plan that is run once."""

    def __init__(
        self,
        connection: Connection,
        totals: Totals,
        people: PeopleSteps,
        *,
        is_run: bool,
        written: _Written | None,
    ) -> None:
        self._connection = connection
        #: What a row is taken to be that is not read; None: it is read.
        self._guesses = written
        self._guessed = False
        self._totals = totals
        self._people = people
        self._is_run = is_run
        self._met = collections.defaultdict[str, dict[Key, _Met]](dict)

    async def execute(self, step: Any) -> Any:
        """Execute a step, and return its result."""
        if isinstance(step, Recall | Remember):
            return self._people.recall(step)
        if step.table.name in PeopleSteps.TABLES:
            return await self._people.execute(step)
        if FORMS[step.table.name].is_total:
            return await self._totals.execute(step)
        return await self._EXECUTE[type(step)](self, step)

    # ------------------------------------------------------------------------------- reading
    def _meet(self, table: Table, document: Document) -> _Met:
        """Return what is known of a row whose document was read."""
        met, row = self._met[table.name], FORMS[table.name].row(table, document)
        state = met.get(key := row[: table.key])
        if state is None or not (state.is_written or (state.row and state.has(table))):
            state = met[key] = _Met(table, row, row)
        return state

    def _refuse_written(self, table: Table) -> None:
        """Refuse a step that does not see what the plan has written before. No plan needs it."""
        if any(state.is_written for state in self._met[table.name].values()):
            raise NotImplementedError(f"{table.name} was written by this plan")

    async def _load(self, table: Table, keys: Iterable[Key]) -> dict[Key, _Met]:
        """Return what is known of rows, after reading those that are not."""
        form, met = FORMS[table.name], self._met[table.name]
        if table.register or table.sums:
            self._refuse_written(table)
        missing = {form.id(*key): key for key in keys if key not in met or not met[key].has(table)}
        if form.guard and self._guesses is not None and len(missing) == 1:
            [key] = missing.values()
            row = self._guesses.get((table.name, key))
            met[key] = _Met(table, row, row, is_found=row is not None)
            self._guesses, self._guessed = None, True
        elif missing:
            with self._connection.calling():
                documents = await self._connection.read(
                    form.collection, missing, form.projection(table)
                )
            for document in documents:
                self._meet(table, document).is_found = True
        for key in missing.values():
            met.setdefault(key, _Met(table, None))
        return met

    async def _get(self, step: Get) -> dict[Key, Row]:
        met, width = await self._load(step.table, step.keys), len(step.table.columns)
        return {key: row[:width] for key in step.keys if (row := met[key].row) is not None}

    async def _under(self, step: Under) -> dict[Key, list[Row]]:
        table, form = step.table, FORMS[step.table.name]
        if step.by or step.equal or step.first:
            raise NotImplementedError("no plan over these tables needs it")
        rows: dict[Key, list[Row]] = {prefix: [] for prefix in step.prefixes}
        queries = [form.query(dict(zip(table.columns, prefix, strict=False))) for prefix in rows]
        for start in range(0, len(queries), BATCH):
            query = _any_of(queries[start : start + BATCH])
            with self._connection.calling():
                fields = form.projection(table)
                for document in await self._connection.find(form.collection, query, fields):
                    for part in form.rows(document):
                        self._meet(table, part)
        width = len(next(iter(rows), ()))
        for key, state in self._met[table.name].items():
            if state.row is not None and key[:width] in rows:
                rows[key[:width]].append(state.row[: len(table.columns)])
        return rows

    async def _page(self, step: Pages) -> Page:
        self._refuse_written(step.table)
        query = _Query(step)
        if step.after is not None and not query.free:
            return Page((), step.after, more=False)  # There is one row at most.
        # No client waits for a page in the order of arrival, except for the newest.
        is_scan = step.table.arrival and not step.reverse
        with self._connection.calling(scan=is_scan) as db:
            place, more = step.after, False
            if query.is_filtered:
                place, more = await query.end(db)
            # The first document may have been on the page before, up to a place in it.
            limit = step.limit + (query.form.parts is not None)
            documents, last = await read_page(query.cursor(db, place), limit, query.sized)
            rows: list[Row] = []
            behind = None
            for number, document in enumerate(documents):
                parts = query.form.rows(document)
                for part in parts if number else filter(query.is_behind, parts):
                    if len(rows) == step.limit:
                        return Page(rows, query.place(behind), more=True)
                    rows.append(query.form.row(step.table, part))
                    if self._is_run:
                        self._meet(step.table, part)
                    behind = part
                behind = document
            end = query.place(behind)
        if last is not None or not query.is_filtered:
            return Page(rows, end, last is not None)
        return Page(rows, place, more)

    # ------------------------------------------------------------------------------- writing
    def _change(self, table: Table, key: Key, row: Row | None) -> None:
        met = self._met[table.name]
        if FORMS[table.name].parts is not None:
            raise NotImplementedError(f"{table.name} is not written by plans")
        # Rows get their numbers in the order in which they were written.
        met[key] = state = met.pop(key, None) or _Met(table, None, is_read=False)
        state.row, state.table, state.is_written = row, table, True

    async def _add(self, step: Add) -> dict[Key, Row]:
        keys = [row[: step.table.key] for row in step.rows]
        stored = await self._get(Get(step.table, keys))
        for key, row in zip(keys, step.rows, strict=True):
            if self._met[step.table.name][key].row is None:
                self._change(step.table, key, row)
        return stored

    async def _put(self, step: Put) -> None:
        for row in step.rows:
            self._change(step.table, row[: step.table.key], row)

    async def _delete(self, step: Delete) -> int:
        keys: Collection[Key]
        if isinstance(step.keys, Pages):
            keys = [row[: step.table.key] for row in (await self._page(step.keys)).rows]
        else:
            keys = step.keys
        met = await self._load(step.table, keys)
        keys = {key for key in keys if met[key].row is not None}
        for key in keys:
            self._change(step.table, key, None)
        return len(keys)

    async def write(self, sequence: Sequencer) -> bool:
        """Send what the plan writes.

        :param sequence: gives the numbers of new documents.
        :return: false if nothing was sent, because another caller was first.
        """
        writes = _Writes(self._connection, sequence)
        for name, rows in self._met.items():
            for key, state in rows.items():
                writes.add(FORMS[name], key, state)
        if self._guessed and writes.guarded != 1:
            return False  # The guess would not be confirmed.
        with self._connection.calling():
            return await writes.send()

    def guarded(self) -> _Written:
        """Return the rows that were written in tables with a guard."""
        return {
            (name, key): state.row
            for name, rows in self._met.items()
            for key, state in rows.items()
            if state.is_written and FORMS[name].guard
        }

    _EXECUTE: Final[dict[type, Callable[[Any, Any], Awaitable[Any]]]] = {
        Get: _get,
        Under: _under,
        Add: _add,
        Put: _put,
        Delete: _delete,
        Pages: _page,
    }


def _any_of(queries: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return a query for what one of several queries finds."""
    if len(queries) == 1:
        return queries[0]
    fields = {name for query in queries for name in query}
    values = [value for query in queries for value in query.values()]
    if len(fields) == 1 and not any(isinstance(value, dict) for value in values):
        return {fields.pop(): {"$in": values}}
    return {"$or": queries}


class _Query:
    """The queries of a page."""

    def __init__(self, step: Pages) -> None:
        self._step = step
        self.form = form = FORMS[step.table.name]
        #: The columns of the order that differ.
        self.free = step.order[step.given :]
        self._fields = [*map(form.field, self.free)]
        types = step.table.types.items()
        self._large = [form.field(name) for name, kind in types if kind is bytes]
        #: The conditions that an index serves in this order.
        self._served = {*step.order[: step.given], *(() if step.by else form.ordered)}
        equal = {name: value for name, value in step.equal.items() if name in self._served}
        self._bounds = [form.query(equal)] if equal else []
        for sign, bound in (("$gte", step.low), ("$lt", step.high)):
            if bound is not None:
                self._bounds.append({self._fields[0]: {sign: form.encode(self.free[0], bound)}})
        if step.after is not None and self.free:
            sign = "$lt" if step.reverse else "$gt"
            self._bounds.append(self._beyond(step.after, sign, inclusive=form.parts is not None))

    @property
    def is_filtered(self) -> bool:
        """Whether there are conditions that the order does not serve."""
        step = self._step
        conditions = step.one_of or step.least or step.below
        return bool(conditions or step.equal.keys() - self._served)

    def _beyond(self, place: Place, sign: str, *, inclusive: bool = False) -> dict[str, Any]:
        """Return a condition for the rows beyond a place."""
        fields = self._fields
        values = [
            self.form.encode(name, value)
            for name, value in zip(self.free, place[self._step.given :], strict=True)
        ]
        if len(fields) == 1:
            return {fields[0]: {f"{sign}e" if inclusive else sign: values[0]}}
        same = [dict(zip(fields[:end], values, strict=False)) for end in range(len(fields) + 1)]
        cases = [
            {**same[at], name: {sign: value}}
            for at, (name, value) in enumerate(zip(fields, values, strict=True))
        ]
        # The first condition is for the index.
        return {
            fields[0]: {f"{sign}e": values[0]},
            "$or": [*cases, *same[len(fields) :]] if inclusive else cases,
        }

    def is_behind(self, row: Document) -> bool:
        """Return whether a row of a document is behind the place where the page begins."""
        if self.form.parts is None or self._step.after is None:
            return True
        (of_document, place), (number, at) = self._step.after[-1], self.form.decode("number", row)
        return bool(number != of_document or (place is not None and at > place))

    def _find(self, db: Any, conditions: Sequence[Document], fields: Any) -> Any:
        """Return a cursor of the driver, without its order."""
        query: dict[str, Any] = {}
        rest = []
        for name, condition in [pair for document in conditions for pair in document.items()]:
            if query.setdefault(name, condition) is not condition:
                rest.append({name: condition})
        if rest:
            query["$and"] = rest
        return db[self.form.collection].find(query, fields)

    def _sort(self, *, back: bool = False) -> list[tuple[str, int]]:
        way = -1 if self._step.reverse is not back else 1
        return [(field, way) for field in self._fields or ["_id"]]

    async def end(self, db: Any) -> tuple[Place | None, bool]:
        """Return the place of the last row that a page looks at, and whether there may be rows
        behind it."""
        fields = None
        if self.form.parts is None:  # The index alone has them.
            fields = {"_id": 0, **dict.fromkeys(map(self.form.field, self._step.order), 1)}
        for skipped, back in ((self._step.most - 1, False), (0, True)):
            cursor = self._find(db, self._bounds, fields).sort(self._sort(back=back))
            for document in await cursor.skip(skipped).limit(1).to_list(None):
                return self.place(document), not back
        return self._step.after, False

    def cursor(self, db: Any, end: Place | None) -> Any:
        """Return a cursor over the rows of the page."""
        step, form = self._step, self.form
        conditions: list[Document] = [*self._bounds]
        if self.is_filtered:
            if end is not None and self.free:
                sign = "$gt" if step.reverse else "$lt"
                conditions.append(self._beyond(end, sign, inclusive=True))
            others = {column: step.equal[column] for column in step.equal.keys() - self._served}
            conditions.append(form.fields(others))
            for names, values in step.one_of.items():
                cases: list[Document] = []
                none: Document = {}
                for name in (names,) if isinstance(names, str) else names:
                    one_of = [form.encode(name, value) for value in values]
                    cases.append({**none, form.field(name): {"$in": one_of}})
                    none = {**none, form.field(name): None}
                conditions.append({"$or": cases} if len(cases) > 1 else cases[0])
            for sign, bounds in (("$gte", step.least), ("$lt", step.below)):
                for name, value in bounds.items():
                    conditions.append({form.field(name): {sign: form.encode(name, value)}})
        return self._find(db, conditions, form.projection(step.table)).sort(self._sort())

    def place(self, document: Document | None) -> Place | None:
        """Return the place of a document; if there is none, that where the page begins."""
        step = self._step
        if document is None:
            return step.after
        given = [step.equal[name] for name in step.order[: step.given]]
        return (*given, *(self.form.decode(name, document) for name in self.free))

    def sized(self, document: Document) -> tuple[Document, int]:
        """Return a document with its size in bytes."""
        return document, sum([len(document[field] or "") for field in self._large])


class _Writes:
    """The writes of a plan."""

    def __init__(self, connection: Connection, sequence: Sequencer) -> None:
        self._connection = connection
        self._sequence = sequence
        #: Those that have no effect if another caller was first: each returns its effect.
        self._first: list[Callable[[], Awaitable[int]]] = []
        self._rest: list[Callable[[], Awaitable[int]]] = []
        #: Collection → queries for what is deleted.
        self._deleted = collections.defaultdict[str, list[Document]](list)
        #: Documents that are inserted, or are greater than those that are stored.
        self._documents = collections.defaultdict[Form, list[dict[str, Any]]](list)
        #: Collection → statements.
        self._statements = collections.defaultdict[str, list[Document]](list)

    @property
    def guarded(self) -> int:
        """How many writes have no effect if another caller was first."""
        return len(self._first) + sum(map(len, self._deleted.values()))

    def add(self, form: Form, key: Key, met: _Met) -> None:
        """Add the write of a row."""
        table, row, before = met.table, met.row, met.before
        same: dict[str, Any] = {"_id": form.id(*key)}
        guard = {}
        if before is not None and form.guard:
            value = before[table.columns.index(form.guard)]
            guard = {form.field(form.guard): form.encode(form.guard, value)}
            same.update(guard)
        if not met.is_written:
            if met.is_found and form.guard:
                self._first.append(functools.partial(self._update, form, same, guard))
            elif met.is_found:
                # It changes nothing, and waits until what was read is durable.
                self._statement(form, same, UNCHANGED, upsert=False)
        elif row is None:
            if not met.is_read:
                # Put and deleted by this plan. There may be one nevertheless.
                self._rest.append(functools.partial(self._delete, form.collection, [same]))
            elif before is not None:
                self._deleted[form.collection].append(same)
        else:
            fields = form.document(table, row)
            document = {**same, **fields}
            if form.is_numbered:
                document["_seq"] = self._sequence()
            if table.sums:
                more = {field: document[field] for field in map(form.field, table.sums)}
                self._statement(form, same, {"$inc": more})
            elif not form.guard:
                self._documents[form].append(document)
            elif not met.is_read:
                self._statement(form, same, {"$set": document})
            elif before is None:
                self._first.append(functools.partial(self._insert_first, form, document))
            else:
                values = dict([*fields.items()][table.key :])
                self._first.append(functools.partial(self._update, form, same, values))

    def _statement(
        self, form: Form, query: Document, update: Document, *, upsert: bool = True
    ) -> None:
        statement = {"q": query, "u": update, "upsert": upsert}
        self._statements[form.collection].append(statement)

    async def send(self) -> bool:
        """Send them, and return whether they have an effect."""
        first = [*self._first]
        for name, queries in self._deleted.items():
            first.append(functools.partial(self._delete, name, queries))
        if first and not any(await all_of(call() for call in first)):
            return False
        await all_of(
            [
                *(self._keep(form, documents) for form, documents in self._documents.items()),
                *(self._change(name, part) for name, part in self._statements.items()),
                *(call() for call in self._rest),
            ]
        )
        return True

    async def _insert(
        self, form: Form, documents: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Insert documents, and return those of which another one has the ``_id``."""
        codes = await self._connection.insert(form.collection, [*map(bson.encode, documents)])
        for code in codes.values():
            if code != DUPLICATE:
                raise OperationFailure("an insert failed", code)
        return [documents[index] for index in codes]

    async def _insert_first(self, form: Form, document: dict[str, Any]) -> int:
        return not await self._insert(form, [document])

    async def _keep(self, form: Form, documents: Sequence[dict[str, Any]]) -> None:
        stored = await self._insert(form, documents)
        if form.rank:
            # Those that are not less are durable since the insert.
            await self._change(
                form.collection,
                [
                    {
                        "q": {"_id": document.pop("_id"), form.rank: {"$lt": document[form.rank]}},
                        "u": {"$set": document},
                    }
                    for document in stored
                ],
            )

    async def _change(self, collection: str, statements: Sequence[Document]) -> None:
        if refused := max(await self._connection.update(collection, statements), default=0):
            raise OperationFailure("an update failed", refused)

    async def _update(self, form: Form, query: Document, values: Document) -> int:
        async with self._connection.updating:
            collection = self._connection.db[form.collection]
            done = await collection.update_one(query, {"$set": values})
        return int(done.raw_result["n"])

    async def _delete(self, collection: str, queries: Sequence[Document]) -> int:
        if len(queries) > 1:
            return await self._connection.delete(collection, queries)
        # The driver repeats the deletion of one after a lost answer.
        async with self._connection.updating:
            done = await self._connection.db[collection].delete_one(queries[0])
        return int(done.raw_result["n"])
