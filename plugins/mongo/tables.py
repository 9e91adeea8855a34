# SPDX-License-Identifier: Apache-2.0
"""How the rows of the tables of plans are documents that people can query."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

import orjson
from bson.binary import Binary
from bson.datetime_ms import DatetimeMS
from bson.objectid import ObjectId

from engage.store.letters import BUDGETS, LETTERS, TOTALS, total_of
from engage.store.records import RECORDS, VERSIONS
from engage.store.suppressions import SUPPRESSIONS
from engage.store.tables import Row, Table

from . import schema
from .documents import below, pair_id, path_id, scoped_id

Document = Mapping[str, Any]


class Values(NamedTuple):
    """How the values of a column are those of a field, and back."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


_SAME: Final = Values(lambda value: value, lambda value: value)
_TIME: Final = Values(DatetimeMS, int)
_TEXT: Final = Values(bytes.decode, str.encode)
_BOOLEAN: Final = Values(bool, int)
_BYTES: Final = Values(
    lambda value: None if value is None else Binary(value),
    lambda value: None if value is None else bytes(value),
)
_JSON: Final = Values(orjson.loads, orjson.dumps)
#: Not pairs: some servers do not store an array within an array.
_PAIRS: Final = Values(
    lambda value: [{"name": name, "value": one} for name, one in orjson.loads(value)],
    lambda value: orjson.dumps([(one["name"], one["value"]) for one in value]),
)


def _sequence(place: Any) -> ObjectId:
    if not ObjectId.is_valid(place):
        raise ValueError("not a cursor of this storage")
    return ObjectId(place)


def _budget(row: Mapping[str, Any]) -> str:
    _, budget = total_of(row["workspace"], row["origin"], row["reason"])
    return BUDGETS[budget]


_SEQUENCE: Final = Values(_sequence, str)


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
    #: Whether the ``_id`` begins with the ``_id`` of the first values of the key.
    is_path: bool = False
    #: Columns by which an index finds rows in the order of arrival.
    ordered: frozenset[str] = frozenset()
    #: Field → what makes its value of those of the columns.
    made: Mapping[str, Callable[[Mapping[str, Any]], Any]] = dataclasses.field(default_factory=dict)
    #: A field that is another one after each change: by it, a change is made only to what was read.
    guard: str = ""
    #: A field whose greatest value wins.
    rank: str = ""
    #: Whether a row is the number and the sum of some documents, which is not stored.
    is_total: bool = False
    #: A field to which plans add: the difference between what they read and put is added.
    sum: str = ""

    @property
    def is_numbered(self) -> bool:
        """Whether a document that is inserted gets a number."""
        return self.names.get("number") == "_seq"

    @functools.cache  # noqa: B019 (there are few)
    def field(self, column: str) -> str:
        """Return the field of a column."""
        known = {"workspace": "workspaceId", **self.names}.get(column)
        return known or re.sub("_(.)", lambda match: match[1].upper(), column)

    def encode(self, column: str, value: Any) -> Any:
        """Return the value of a field."""
        return self.values.get(column, _SAME).encode(value)

    def decode(self, column: str, document: Document) -> Any:
        """Return the value of a column."""
        return self.values.get(column, _SAME).decode(document[self.field(column)])

    def query(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the documents of rows with some values have."""
        return {self.field(name): self.encode(name, value) for name, value in values.items()}

    def under(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the documents of rows have whose keys begin with some values."""
        return {"_id": below(self.id(*values.values()))} if self.is_path else self.query(values)

    def row(self, table: Table, document: Document) -> Row:
        """Return the row of a document."""
        return tuple(self.decode(column, document) for column in table.columns)

    def projection(self, columns: Iterable[str]) -> dict[str, int]:
        """Return what to read of documents."""
        return dict.fromkeys((*map(self.field, columns), *filter(None, [self.guard])), 1)


#: Table → the form of its documents.
FORMS: Final[Mapping[str, Form]] = {
    RECORDS.name: Form(schema.RECORDS, pair_id, {"body": _TEXT, "at": _TIME}, guard="version"),
    VERSIONS.name: Form(
        schema.META,
        "records:{}".format,
        {"kind": Values("records:{}".format, lambda key: key.partition(":")[2])},
        {"kind": "_id"},
        sum="version",
    ),
    SUPPRESSIONS.name: Form(
        schema.SUPPRESSIONS,
        values={"at": _TIME, "lifted": _BOOLEAN, "number": Values(str, str)},
        names={"number": "_id"},
        is_path=True,
        ordered=frozenset({"workspace"}),
        # Of two at one time, the one that is not lifted.
        made={"rank": lambda row: 2 * row["at"] + (not row["lifted"])},
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
            "item": _BYTES,
            "envelope": _BYTES,
            "truncated": _BOOLEAN,
        },
        {"number": "_seq"},
        ordered=frozenset({"workspace"}),
        made={"budget": _budget},
    ),
    TOTALS.name: Form(
        schema.DEAD_LETTERS,
        values={"api": Values(BUDGETS.__getitem__, BUDGETS.index)},
        names={"api": "budget"},
        is_total=True,
    ),
}
