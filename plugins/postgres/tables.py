# SPDX-License-Identifier: Apache-2.0
"""The tables of plans in the database.

Each has two columns of its own: ``hash`` stands for the unique key, and ``number`` gives the order
of arrival. An entry of a B-tree has at most 2,704 bytes, and ids may be longer: other indexes have
the beginnings of texts, and what they find is compared again.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Final

import orjson

from engage.store.facade import TABLES
from engage.store.tables import MAX_STORED_BYTES, Key, Pages, Row, Table

#: Characters of a text, or bytes, in an index. Five columns of four bytes each fit into an entry.
_SHORT: Final = "substr({}, 1, 120)"
#: The types of columns in the database. Text is compared by code points.
TYPES: Final = {str: "text", int: "bigint", bytes: "bytea"}
_DECLARED: Final = {**TYPES, str: 'text COLLATE "C"'}
#: Tables whose rows no plan finds by the beginning of their keys.
_BY_HASH_ONLY: Final = frozenset({"events", "letters", "history", "count_series"})


def encode(value: Any) -> Any:
    """Return a value as it is stored. A text cannot have U+0000: it is U+0001 U+0001, and U+0001 is
    U+0001 U+0002, so that texts keep their order."""
    if isinstance(value, str) and ("\0" in value or "\1" in value):
        return value.replace("\1", "\1\2").replace("\0", "\1\1")
    return value


def decode(value: Any) -> Any:
    """Return what was given to :func:`encode`."""
    if isinstance(value, str) and "\1" in value:
        return value.replace("\1\1", "\0").replace("\1\2", "\1")
    return value


def hash_of(key: Iterable[Any]) -> bytes:
    """Return the SHA-256 of the JSON array of values; bytes are hexadecimal."""
    values = [value.hex() if isinstance(value, bytes) else value for value in key]
    return hashlib.sha256(orjson.dumps(values)).digest()


class Sql:
    """The parts of the statements over a table, whose alias is ``t``."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.name = f'"{table.name}"'
        #: Column → its type, also of those that only the whole table has; what an index has of it.
        self.types = {**TABLES.get(table.name, table).types, "number": int, "hash": bytes}
        self.short = {x: "{}" if kind is int else _SHORT for x, kind in self.types.items()}
        self.is_hashed = table.columns[0] != "number"
        self.key = "hash" if self.is_hashed else "number"
        self.columns = ", ".join(f't."{name}"' for name in table.columns)
        self._texts = [at for at, kind in enumerate(table.types.values()) if kind is str]
        #: The columns whose bytes count, and their sum.
        self.large = [name for name, kind in table.types.items() if kind is bytes]
        self.size = " + ".join(f'coalesce(octet_length("{name}"), 0)' for name in self.large)
        rows = f"FROM {self.name} t WHERE t.{self.key} = ANY($1::{TYPES[self.types[self.key]]}[])"
        self.get = f"SELECT {self.columns} {rows}"
        self.delete = f"DELETE {rows}"
        #: Rows by their keys, without the longest values beyond a size.
        self.stored = self.get
        fits = f"sum({self.size}) OVER (ORDER BY {self.size}, {self.key}) <= {MAX_STORED_BYTES}"
        for name in self.large:
            case = f'CASE WHEN {fits} THEN t."{name}" END'
            self.stored = self.stored.replace(f't."{name}"', case)
        self.add = f"{self._insert()} NOTHING RETURNING {self.key}"
        #: Some rows with their hashes, in the order of these.
        self.hashes = f"SELECT {self.columns}, hash FROM {self.name} t WHERE hash > $1"
        self.hashes += " ORDER BY hash LIMIT 100"

    def keys(self, keys: Iterable[Key]) -> list[Any]:
        """Return the values of the unique key."""
        return [hash_of(key) if self.is_hashed else key[0] for key in keys]

    def row(self, record: Any) -> Row:
        """Return the row of a record of the driver, which may have more values."""
        row = tuple(record)[: len(self.table.columns)]
        if any(row[at] is not None and "\1" in row[at] for at in self._texts):
            return tuple(map(decode, row))
        return row

    def arrays(self, rows: Collection[Row]) -> list[list[Any]]:
        """Return rows as the parameters of :attr:`add` or :attr:`put`."""
        columns: list[list[Any]] = [[*column] for column in zip(*rows, strict=True)]
        for at in self._texts:
            columns[at] = [*map(encode, columns[at])]
        hashes = self.keys(row[: self.table.key] for row in rows)
        return [*columns, *[hashes][: self.is_hashed]]

    def _insert(self) -> str:
        # Rows get their numbers in their order. They are inserted in that of their keys, so that
        # two statements do not wait for each other.
        given = [*self.table.columns, *["hash"][: self.is_hashed]]
        arrays = ", ".join(f"${at}::{TYPES[self.types[x]]}[]" for at, x in enumerate(given, 1))
        named = ", ".join(f'"{name}"' for name in given)
        others = ", ".join(f'"{name}"' for name in given if name != "number")
        number = f"coalesce({'number' if 'number' in given else 'NULL'}, nextval('numbers'))"
        rows = f"SELECT {others}, {number} AS number FROM unnest({arrays}) u({named})"
        rows = f"SELECT {others}, number FROM ({rows}) v ORDER BY {self.key}"
        target = f"{self.name} AS t ({others}, number)"
        return f"INSERT INTO {target} {rows} ON CONFLICT ({self.key}) DO"

    @functools.cached_property
    def put(self) -> str:
        """The statement that inserts or replaces rows."""
        values = [
            f'"{name}" = excluded."{name}"' + f' + t."{name}"' * (name in self.table.sums)
            for name in self.table.columns[self.table.key :]
            if name != "number"
        ]
        update = f"UPDATE SET {', '.join(values)}" if values else "NOTHING"
        if register := self.table.register:
            # A column with - wins if it is less: it is compared with its sides exchanged.
            sides = [("t", "excluded") if x[0] == "-" else ("excluded", "t") for x in register]
            pairs = [(s, x.removeprefix("-")) for s, x in zip(sides, register, strict=True)]
            new, old = (", ".join(f'{s[at]}."{x}"' for s, x in pairs) for at in (0, 1))
            update += f" WHERE ({new}) > ({old})"
        return f"{self._insert()} {update}"

    def equals(self, name: str, value: str) -> str:
        """Return the condition that a column has a value, for an index."""
        column, part = f't."{name}"', self.short[name]
        same = f"{column} = {value}"
        return same if part == "{}" else f"{part.format(column)} = {part.format(value)} AND {same}"

    def order(self, names: Sequence[str]) -> list[tuple[str, str]]:
        """Return the columns of an order with their forms: as an index has them, and then whole."""
        longer = [(name, "{}") for name in names if self.short[name] != "{}"]
        return [*((name, self.short[name]) for name in names), *longer]

    @functools.cache  # noqa: B019 (each table has one)
    def under(self, by: tuple[str, ...], width: int, equal: tuple[str, ...], first: bool) -> str:
        """Return the query for the rows under prefixes of ``width`` columns, each with the place of
        its prefix, from 1. The values of the columns in ``equal`` are the last parameters."""
        names = (by or self.table.columns)[:width]
        arrays = [f"${at}::{TYPES[self.types[x]]}[]" for at, x in enumerate(names, 1)]
        conditions = [self.equals(name, f"k.k{at}") for at, name in enumerate(names)]
        conditions += [f't."{name}" IS NOT NULL' for name in by[width:]]
        for at, name in enumerate(equal, width + 1):
            conditions.append(f't."{name}" = ${at}::{TYPES[self.types[name]]}')
        columns = ", ".join((*(f"k{at}" for at in range(width)), "place"))
        select = f"SELECT {self.columns}, k.place FROM "
        select += f"unnest({', '.join(arrays)}) WITH ORDINALITY k({columns})"
        rows, where = f"{self.name} t", " AND ".join(conditions)
        order = self.order(Pages(self.table, 1, by).order[width:])
        ordered = ", ".join(form.format(f't."{name}"') for name, form in order)
        first_row = f"SELECT * FROM {rows} WHERE {where} ORDER BY {ordered} LIMIT 1"
        return f"{select} " + (f", LATERAL ({first_row}) t" if first else f"JOIN {rows} ON {where}")

    def definitions(self) -> Iterator[str]:
        """Yield the statements that create the table."""
        table, indexes = self.table, [*self.table.indexes]
        columns = [
            f'"{name}" {_DECLARED[kind]}' + " NOT NULL" * (at < table.key)
            for at, (name, kind) in enumerate(table.types.items())
            if name != "number"
        ]
        columns += ["number bigint NOT NULL", *["hash bytea NOT NULL"][: self.is_hashed]]
        yield f"CREATE TABLE {self.name} ({', '.join(columns)}, PRIMARY KEY ({self.key}))"
        if self.is_hashed and (table.arrival or table.name == "links"):
            yield f'CREATE UNIQUE INDEX "{table.name}_by_number" ON {self.name} (number)'
        if table.name not in _BY_HASH_ONLY:
            indexes.insert(0, table.columns[: table.key])
        for by in indexes:
            order = [(self.short[x], f'"{x}"') for x in Pages(table, 1, by).order]
            listed = ", ".join(f"({form.format(column)})" for form, column in order)
            name = f"{table.name}_by_{'_'.join(by)}"
            yield f'CREATE INDEX "{name[:63]}" ON {self.name} ({listed})'


sql_of: Final = functools.cache(Sql)


def definitions(tables: Iterable[Table]) -> str:
    """Return the statements that create tables, and what gives the numbers of their rows."""
    made = [statement for table in tables for statement in sql_of(table).definitions()]
    return ";".join(["CREATE SEQUENCE numbers", *made])
