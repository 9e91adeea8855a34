# SPDX-License-Identifier: Apache-2.0
"""How the rows of the tables of plans are documents that people can query."""

from __future__ import annotations

import collections
import dataclasses
import functools
import operator
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import orjson
from bson.datetime_ms import DatetimeMS
from bson.objectid import ObjectId

from engage.api import Subject
from engage.store.choices import HISTORY
from engage.store.letters import BUDGETS, LETTERS, TOTALS, total_of
from engage.store.profiles import CHOICES, KIND_OF, KINDS
from engage.store.records import RECORDS, VERSIONS
from engage.store.suppressions import SUPPRESSIONS
from engage.store.tables import Get, Key, Page, Pages, Put, Row, Table

from . import schema
from .connection import BATCH, Connection
from .documents import (
    below,
    pair_id,
    path_id,
    scoped_id,
    subject_id,
    subject_of,
    unescape_key,
    with_visitors,
)

Document = Mapping[str, Any]


class Values(NamedTuple):
    """How the values of a column are those of a field, and back."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


_SAME: Final = Values(lambda value: value, lambda value: value)
_TIME: Final = Values(DatetimeMS, int)
_TEXT: Final = Values(bytes.decode, str.encode)
_BOOLEAN: Final = Values(bool, int)
_JSON: Final = Values(orjson.loads, orjson.dumps)
#: Not pairs: some servers do not store an array within an array.
_PAIRS: Final = Values(
    lambda value: [{"name": name, "value": text} for name, text in orjson.loads(value)],
    lambda value: orjson.dumps([(header["name"], header["value"]) for header in value]),
)


def _sequence(place: Any) -> ObjectId:
    if not ObjectId.is_valid(place):
        raise ValueError("not a cursor of this storage")
    return ObjectId(place)


def _budget(row: Row) -> str:
    workspace, _, origin, reason, *_ = row
    return BUDGETS[total_of(workspace, origin, reason)[-1]]


def _rank(row: Row) -> int:
    """Return the rank of a suppression: of two at one time, the one that is not lifted wins."""
    *_, at, lifted, _, _ = row
    return 2 * int(at) + (not lifted)


_SEQUENCE: Final = Values(_sequence, str)


def _within(number: Values, kind: type) -> Values:
    """Return how the number of a row within a document is that of the document, and back. Without
    a place in it, of this type, it is the end of the document."""

    def encode(place: Any) -> Any:
        if (
            not isinstance(place, list | tuple)
            or len(place) != 2
            or not isinstance(place[1], kind | None)
        ):
            raise ValueError("not a cursor of this storage")
        return number.encode(place[0])

    def decode(value: Any) -> tuple[Any, Any]:
        of_document, place = value if isinstance(value, tuple) else (value, None)
        return number.decode(of_document), place

    return Values(encode, decode)


def _choices(document: Document) -> Iterable[Document]:
    kind, name = subject_of(document)
    names = {"workspaceId": document["workspaceId"], "kind": KINDS[kind], "name": name}
    for group, key in sorted((unescape_key(key), key) for key in document["choices"]):
        number = {"groupId": group, "_id": (document["_id"], group)}
        yield {**names, **number, "changeId": "", **document["choices"][key]}


def _choices_of(values: Mapping[str, Any]) -> dict[str, Any]:
    workspace, *subject = values.values()
    if not subject:
        return with_visitors(workspace)
    kind, name = subject
    return {"_id": subject_id(workspace, Subject(KIND_OF[kind], name))}


def _records(document: Document) -> Iterable[Document]:
    kind, name = subject_of(document)
    unknown = dict.fromkeys(("secret", "userAgent", "address"), "")
    for at, record in enumerate(document["records"], 1):
        number = {"_seq": (document["_seq"], at)}
        yield {**unknown, **document, **record, **number, "kind": KINDS[kind], "name": name}


def _records_of(values: Mapping[str, Any]) -> dict[str, Any]:
    workspace, *subject = values.values()
    names = {"workspaceId": workspace}
    if subject:
        kind, name = subject
        names[schema.PLACES[KIND_OF[kind]].name] = name
    return names


@dataclasses.dataclass(frozen=True, eq=False)
class Form:
    """The form of the documents of a table."""

    collection: str
    #: Returns the ``_id`` of a key.
    id: Callable[..., str] = path_id
    #: Column → its values, if a document has others.
    values: Mapping[str, Values] = dataclasses.field(default_factory=dict)
    #: Column → its field, if that is not its name in camel case.
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    #: What finds documents by some values, if it is not these in their fields.
    find: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    #: What returns the rows of one document as documents, in their order: each has as its number
    #: that of the document and a place in it.
    parts: Callable[[Document], Iterable[Document]] | None = None
    #: Columns by which an index finds rows in the order of arrival.
    ordered: frozenset[str] = frozenset()
    #: Field → what makes its value of a row.
    made: Mapping[str, Callable[[Row], Any]] = dataclasses.field(default_factory=dict)
    #: A column that differs after each change: by it, a change is made only to what was read.
    guard: str = ""
    #: Large columns: what has no use for them reads a table without them.
    large: Sequence[str] = ()
    #: A field whose greatest value wins.
    rank: str = ""
    #: Whether a row is the number and the sum of some documents, which is not stored.
    is_total: bool = False

    @property
    def is_numbered(self) -> bool:
        """Whether a document that is inserted gets a number."""
        return self.names.get("number") == "_seq"

    @functools.cache  # noqa: B019 (there are few)
    def field(self, column: str) -> str:
        """Return the field of a column."""
        name = {"workspace": "workspaceId", **self.names}.get(column)
        return name or re.sub("_(.)", lambda match: match[1].upper(), column)

    def encode(self, column: str, value: Any) -> Any:
        """Return the value of a field."""
        return self.values.get(column, _SAME).encode(value)

    def decode(self, column: str, document: Document) -> Any:
        """Return the value of a column."""
        return self.values.get(column, _SAME).decode(document[self.field(column)])

    def query(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return a query for rows with some values, which an index serves."""
        return self.fields(values) if self.find is None else self.find(values)

    def fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return some values of a row as fields."""
        return {self.field(name): self.encode(name, value) for name, value in values.items()}

    def rows(self, document: Document) -> Iterable[Document]:
        """Return the documents of the rows of a document."""
        return [document] if self.parts is None else self.parts(document)

    @functools.cache  # noqa: B019 (there are few)
    def columns(
        self, table: Table
    ) -> tuple[Sequence[str], Sequence[tuple[int, Values]], Callable[[Document], Row]]:
        """Return the fields of the columns, the places of those that have other values, and what
        returns the values of the fields."""
        fields = [*map(self.field, table.columns)]
        other = [(at, self.values.get(name)) for at, name in enumerate(table.columns)]
        return fields, [(at, codec) for at, codec in other if codec], operator.itemgetter(*fields)

    def row(self, table: Table, document: Document) -> Row:
        """Return the row of a document."""
        _, others, get = self.columns(table)
        row = [*get(document)]
        for at, values in others:
            row[at] = values.decode(row[at])
        return tuple(row)

    def document(self, table: Table, row: Row) -> dict[str, Any]:
        """Return the fields of a row, those of its key first."""
        fields, others, _ = self.columns(table)
        encoded = [*row]
        for at, values in others:
            encoded[at] = values.encode(encoded[at])
        document = dict(zip(fields, encoded, strict=True))
        for field, make in self.made.items():
            document[field] = make(row)
        return document

    def projection(self, table: Table) -> dict[str, int] | None:
        """Return what to read of documents; None: everything."""
        if all(name in table.columns for name in self.large):
            return None
        return dict.fromkeys(map(self.field, (*table.columns, "number")), 1)


#: Table → the form of its documents.
FORMS: Final[Mapping[str, Form]] = {
    RECORDS.name: Form(schema.RECORDS, pair_id, {"body": _TEXT, "at": _TIME}, guard="version"),
    VERSIONS.name: Form(
        schema.META,
        "records:{}".format,
        {"kind": Values("records:{}".format, lambda key: key.partition(":")[2])},
        {"kind": "_id"},
    ),
    SUPPRESSIONS.name: Form(
        schema.SUPPRESSIONS,
        values={"at": _TIME, "lifted": _BOOLEAN, "number": Values(str, str)},
        names={"number": "_id"},
        find=lambda values: {"_id": below(path_id(*values.values()))},
        ordered=frozenset({"workspace"}),
        made={"rank": _rank},
        rank="rank",
    ),
    LETTERS.name: Form(
        schema.DEAD_LETTERS,
        scoped_id,
        {
            "received_at": _TIME,
            "number": _SEQUENCE,
            "errors": _JSON,
            "headers": _PAIRS,
            "truncated": _BOOLEAN,
        },
        {"number": "_seq"},
        ordered=frozenset({"workspace"}),
        made={"budget": _budget},
        large=("item", "envelope"),
    ),
    # These are written by subscriptions.py.
    CHOICES.name: Form(
        schema.SUBSCRIPTIONS,
        values={
            "subscribed": _BOOLEAN,
            "updated_at": _TIME,
            "number": _within(Values(str, str), str),
        },
        names={"number": "_id"},
        find=_choices_of,
        parts=_choices,
        ordered=frozenset({"workspace"}),
    ),
    HISTORY.name: Form(
        schema.HISTORY,
        values={"after": _BOOLEAN, "at": _TIME, "number": _within(_SEQUENCE, int)},
        names={"number": "_seq"},
        find=_records_of,
        parts=_records,
        ordered=frozenset({"workspace"}),
    ),
    TOTALS.name: Form(
        schema.DEAD_LETTERS,
        values={"api": Values(BUDGETS.__getitem__, BUDGETS.index)},
        names={"api": "budget"},
        is_total=True,
    ),
}


#: Seconds after which sums are counted again.
_SECONDS: Final = 5.0


class Totals:
    """Rows that are sums over documents. They are counted by an index, and not stored.

    They are remembered for a few seconds, and what plans put changes only what is remembered. So
    they are exact within a process; other processes also add to them.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        #: Name of the table → key → when it was counted, and the row.
        self._cached = collections.defaultdict[str, dict[Key, tuple[float, Row]]](dict)

    async def execute(self, step: Get | Put | Pages) -> Any:
        """Execute a step over a table of sums, and return its result."""
        table, cached = step.table, self._cached[step.table.name]
        form, now = FORMS[table.name], time.monotonic()
        if isinstance(step, Pages):
            # With this condition too the server answers from the index alone.
            rows = await self._count(table, {form.field(table.columns[0]): {"$gte": ""}})
            return Page(sorted(rows.values()), None, more=False)
        if isinstance(step, Put):
            for row in step.rows:
                if (key := row[: table.key]) in cached:
                    counted_at, before = cached[key]
                    sums = map(operator.add, before[table.key :], row[table.key :])
                    cached[key] = (counted_at, (*key, *sums))
            return None
        for key in step.keys:
            if key not in cached or cached[key][0] <= now - _SECONDS:
                query = form.query(dict(zip(table.columns, key, strict=False)))
                none = (*key, *[0] * (len(table.columns) - table.key))
                cached[key] = (now, (await self._count(table, query)).get(key, none))
        return {key: cached[key][1] for key in step.keys}

    async def _count(self, table: Table, query: Mapping[str, Any]) -> dict[Key, Row]:
        """Return the rows of the documents of a query: their count, and the sum of a field."""
        form, rows = FORMS[table.name], dict[Key, Row]()
        *names, _, size = table.columns
        fields = {"_id": 0, **dict.fromkeys(map(form.field, (*names, size)), 1)}
        with self._connection.calling() as db:
            async for document in db[form.collection].find(query, fields).batch_size(BATCH):
                key = tuple(form.decode(name, document) for name in names)
                *_, count, total = rows.get(key, (0, 0))
                rows[key] = (*key, count + 1, total + form.decode(size, document))
        return rows

    def forget(self) -> None:
        """Forget everything: what was put may not have become true."""
        self._cached.clear()
