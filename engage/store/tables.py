# SPDX-License-Identifier: Apache-2.0
"""The seam: tables, the steps of plans, and what an executor guarantees.

A *plan* is a function that decides what engage keeps. It does no IO: it yields steps, each over one
table, and gets their results. A storage *executes* plans, and knows nothing of what they mean::

    @plan(repeatable=False)
    def put(record: Record, expected_version: int | None) -> Steps[int | None]:
        key = (record.kind, record.workspace_id, record.id)
        stored = yield Get(RECORDS, [key])
        version = stored[key][-1] if key in stored else 0
        if expected_version not in (None, version):
            return None
        yield Put(RECORDS, [(*key, record.body, record.at, version + 1)])
        return version + 1

    version = await executor.run(put, record, 0)

An executor guarantees:

1. A plan is isolated and durable. Nothing of it is visible before all of it is, it is durable when
   ``run`` returns, and two plans have the result of one after the other, over any number of
   processes. A plan that raises an error has no effect.
2. It runs a plan again only if the attempt before surely had no effect, or if the plan is
   repeatable. Otherwise the caller gets :class:`~engage.api.StorageUnavailable`.
3. Of two rows with one key, :class:`Add` keeps the first, also within one step.
4. A row with a number has a greater one than every row that is visible when it is added. In a
   table that is followed, no number is ever given twice.
5. Values are text, integers of 64 bits, bytes and None. Text is any valid Unicode, U+0000 included,
   and is compared by code points. A row comes back as it was given.
6. An outage is :class:`~engage.api.StorageUnavailable`, within ``write_timeout``. Every other error
   of a plan rolls it back and reaches the caller as it is, or over processes by its message.

Without transactions, the first is true of one row that a plan reads and changes. Others may see its
rows one by one, and after a failure some of them may be stored: a plan that runs again makes the
others. The fourth need not be true, and a place has a value of another type for the number.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import typing
from collections.abc import Awaitable, Callable, Collection, Generator, Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, ParamSpec, TypeVar

from engage.api import StorageContext

Value = str | int | bytes | None
Row = tuple[Any, ...]
Key = tuple[Any, ...]
#: Where a page ends in the order of its rows: the values that give the order.
Place = tuple[Any, ...]

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

#: Rows that one page looks at, at most: it is a short call even if few of them are wanted.
MAX_ROWS: Final = 50_000
#: A page ends with the row that makes its bytes (of values that are bytes) more than this.
MAX_PAGE_BYTES: Final = 32 * 1024 * 1024
#: Bytes of the stored rows that one :class:`Add` returns.
MAX_STORED_BYTES: Final = 16 * 1024 * 1024


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """The rows of one kind.

    A second table of the same name may have its first columns only: rows are read, found and
    deleted by it without what is large in them, and never written. It may have indexes of columns
    that it lacks.
    """

    name: str
    #: Column → the type of its values; those of the unique key first. A value of another column may
    #: also be None. In an order, None comes before every other value; bounds leave it out.
    types: Mapping[str, type]
    #: How many columns the unique key has.
    key: int
    #: Columns by which rows are found or ordered, besides the key.
    indexes: tuple[tuple[str, ...], ...] = ()
    #: Whether each row has a number, in the order of arrival: greater than 0 and below 10**18. A
    #: row that is replaced keeps its number. If ``number`` is one of the columns, it is that, and
    #: None in a row that is new. If it is the key, a row that is added is always new.
    arrival: bool = False
    #: Whether somebody may go on from a place much later. In other tables, the number of the newest
    #: row may be given again when that row was deleted.
    followed: bool = False
    #: :class:`Put` replaces a row only if these columns of the new row are greater, compared
    #: together; less, for a column with ``-`` before it. Equal ones do not replace. Empty: always.
    register: tuple[str, ...] = ()
    #: Columns to which :class:`Put` adds, if there is a row.
    sums: tuple[str, ...] = ()
    #: The table with the rows to which the rows of this one belong: its key begins theirs, and it
    #: is put first. A document store may keep them in its document, and a relational one by its
    #: number. None is left when it is deleted: the plan deletes them before.
    within: Table | None = None

    @functools.cached_property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(self.types)


def types_of(row: type) -> dict[str, type]:
    """Return the columns of a table whose rows have the annotated fields of a class."""
    hints = typing.get_type_hints(row)
    return {name: next(iter(typing.get_args(hint)), hint) for name, hint in hints.items()}


class Get(NamedTuple):
    """Read rows by their keys. → key → row, of those that are stored."""

    table: Table
    keys: Collection[Key]


class Under(NamedTuple):
    """Read the rows whose keys begin with a prefix. → prefix → its rows, in any order.

    All prefixes have the same length, and each is in the result.
    """

    table: Table
    prefixes: Collection[Key]
    #: An index, of which these are prefixes instead. Rows with None in one of its columns are left
    #: out.
    by: tuple[str, ...] = ()
    #: Column → the value that it has.
    equal: Mapping[str, Value] = {}
    #: Read only the first row of each prefix, in the order of ``by``.
    first: bool = False


class Add(NamedTuple):
    """Insert the rows whose key is new. → key → row, of those that were stored before the step. Of
    two rows with one key, the first is inserted, and neither is in the result.

    Values that are bytes may be None in a stored row, the longest first, if all of them together
    are more than :data:`MAX_STORED_BYTES`. A row may have more values than there are columns, for
    an executor that gave them to the plan; another one ignores them.
    """

    table: Table
    rows: Collection[Row]


class Put(NamedTuple):
    """Insert or replace rows, of which none has the key of another; see :attr:`Table.register`
    and :attr:`Table.sums`."""

    table: Table
    rows: Collection[Row]


class Delete(NamedTuple):
    """Delete rows by their keys, or those of a page. → how many there were."""

    table: Table
    keys: Collection[Key] | Pages


class Pages(NamedTuple):
    """Read rows in an order. → :class:`Page`.

    The order is that of the columns ``by``, which are the key or an index or the beginning of one,
    and then that of arrival (of the row to which it belongs), or of the key in a table without
    numbers. A place has the values of :attr:`order`. An executor calls :meth:`check_number`.
    """

    table: Table
    #: The maximum number of rows.
    limit: int
    by: tuple[str, ...] = ()
    #: Column → the value that it has.
    equal: Mapping[str, Value] = {}
    #: Column → values of which it has one. Of several columns, the first that is not None has it.
    one_of: Mapping[Any, Collection[Value]] = {}
    #: Column → the least value that is wanted.
    least: Mapping[str, Value] = {}
    #: Column → the least value that is too great.
    below: Mapping[str, Value] = {}
    #: Columns, of which one begins with a text, by :func:`~engage.api.begins_with`. An executor may
    #: return more rows.
    begins: Sequence[tuple[Sequence[str], str]] = ()
    #: Bounds of the first column of the order behind those in ``equal``: low <= value < high.
    low: Any = None
    high: Any = None
    #: Begin behind this place.
    after: Place | None = None
    reverse: bool = False
    #: Look at so many rows of the order at most, behind the place and between the bounds, whether
    #: they are wanted or not. Only columns in ``equal`` that begin the order narrow them.
    most: int = MAX_ROWS

    @property
    def order(self) -> tuple[str, ...]:
        """The columns that give the order, and a place; ``number`` is that of the arrival."""
        return _order(self.table, self.by)

    def check_number(self) -> None:
        """:raises ValueError: if what its place has in the order of arrival is not a number."""
        for name, value in zip(self.order, self.after or (), strict=False):
            if name == "number" and not isinstance(value, int):
                raise ValueError("not a cursor of this store")

    @property
    def given(self) -> int:
        """How many columns at the beginning of the order are in ``equal``."""
        at = 0
        if self.equal:
            order = self.order
            while at < len(order) and order[at] in self.equal:
                at += 1
        return at


@functools.cache
def _order(table: Table, by: tuple[str, ...]) -> tuple[str, ...]:
    last = ("number",) if table.arrival else table.columns[: table.key]
    if table.within is not None:
        last = ("number", *table.columns[table.within.key : table.key])
    return (*by, *(name for name in last if name not in by))


class Page(NamedTuple):
    """A page of rows."""

    rows: Sequence[Row]
    #: Where the next page begins: the last row that was looked at, or where the page began; None if
    #: that is the first one and there was no row.
    place: Place | None
    #: Whether there may be rows behind it, wanted or not; if not, there were none.
    more: bool


class Context(NamedTuple):
    """Learn the settings of the process that executes. → :class:`~engage.api.StorageContext`."""


class Recall(NamedTuple):
    """Learn what this process remembers from earlier plans. → key → value, in a mapping that must
    not be changed."""

    topic: str


class Remember(NamedTuple):
    """Let this process remember values when the plan is durable, or forget all at once.

    Only a process that makes all changes may remember anything, and any may forget it.
    """

    topic: str
    #: Key → value; None: forget.
    values: Mapping[Any, Any] | None


Step = Get | Under | Add | Put | Delete | Pages | Context | Recall | Remember
#: What a plan returns when it is called: its steps, and at their end its result.
Steps = Generator[Step, Any, Result]


@dataclasses.dataclass(frozen=True, eq=False)
class Plan(Generic[Parameters, Result]):
    """A plan: calling it returns its steps, so that another plan can have them with ``yield from``.

    Its arguments and its result are values that MessagePack can carry, by their annotations.
    """

    function: Callable[Parameters, Steps[Result]]
    #: Whether running it twice has the same effect and result as running it once.
    repeatable: bool = True
    #: Whether it only makes the store smaller, so that it runs on a full disk.
    frees: bool = False
    #: Whether what it deletes or replaces must not be left in free space.
    overwrites: bool = False
    #: For executors that lock: gets the arguments, and returns what the plan names. Two plans that
    #: name the same run one after the other; what :class:`Pages` returns is not named. None: it
    #: runs while no other plan does.
    locks: Callable[..., Collection[Key]] | None = None

    @property
    def name(self) -> str:
        """Its name in :data:`PLANS`: that of its module and of its function."""
        return f"{self.function.__module__.rpartition('.')[2]}.{self.function.__name__}"

    @property
    def types(self) -> tuple[Any, Any]:
        """The type of its arguments, a tuple, and that of its result."""
        hints = typing.get_type_hints(self.function)
        result = typing.get_args(hints.pop("return"))[2]
        arguments: Any = tuple
        return arguments[tuple(hints.values())], result

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Steps[Result]:
        return self.function(*args, **kwargs)


def nothing(*_: Any) -> Collection[Key]:
    """Name nothing: for plans whose steps are right by themselves."""
    return ()


#: Name → plan, for executors that run plans in another process.
PLANS: Final[dict[str, Plan[..., Any]]] = {}


def plan(
    *,
    repeatable: bool = True,
    frees: bool = False,
    overwrites: bool = False,
    locks: Callable[..., Collection[Key]] | None = None,
) -> Callable[[Callable[Parameters, Steps[Result]]], Plan[Parameters, Result]]:
    """Make a plan of a function and register it; see :class:`Plan` for the parameters."""

    def made(function: Callable[Parameters, Steps[Result]]) -> Plan[Parameters, Result]:
        new = Plan(function, repeatable=repeatable, frees=frees, overwrites=overwrites, locks=locks)
        if new.name in PLANS:
            raise ValueError(f"there is a plan {new.name} already")
        PLANS[new.name] = new
        return new

    return made


def execute(steps: Steps[Result], step: Callable[[Any], Any], context: StorageContext) -> Result:
    """Execute all steps of a plan, and return its result.

    :param step: executes one of them, and returns its result.
    :param context: the settings that the plan learns.
    """
    answer: Any = None
    try:
        while True:
            current = steps.send(answer)
            answer = context if isinstance(current, Context) else step(current)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


async def execute_waiting(
    steps: Steps[Result], step: Callable[[Any], Awaitable[Any]], context: StorageContext
) -> Result:
    """Do what :func:`execute` does, with a function that waits for a server."""
    answer: Any = None
    try:
        while True:
            current = steps.send(answer)
            answer = context if isinstance(current, Context) else await step(current)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


class Executor(abc.ABC):
    """What runs plans. Both methods may raise :class:`~engage.api.StorageUnavailable`."""

    @abc.abstractmethod
    async def run(
        self, plan: Plan[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Result:
        """Run a plan, and return its result when what it did is durable."""

    @abc.abstractmethod
    async def read(
        self, plan: Plan[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Result:
        """Run a plan that only reads, in one snapshot, and return its result."""
