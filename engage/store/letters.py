# SPDX-License-Identifier: Apache-2.0
"""Dead letters, each id once, within the budgets of their workspaces."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Final

import orjson

from engage.api import API_ORIGIN, CONFLICT, BudgetName, BudgetUse, DeadLetter, Page
from engage.store.erasures import covered
from engage.store.keys import is_text
from engage.store.pages import every, page
from engage.store.tables import (
    Context,
    Delete,
    Executor,
    Get,
    Key,
    Pages,
    Put,
    Row,
    Steps,
    Table,
    plan,
)

#: What budgets and expiry need of a letter: it is read without the item.
HEADS: Final = Table(
    "letters",
    {
        **dict.fromkeys(("workspace", "id", "origin", "reason"), str),
        "received_at": int,
        "size": int,
    },
    key=2,
    indexes=(("received_at",),),
    arrival=True,
    followed=True,
)
#: The errors and the headers are JSON.
LETTERS: Final = dataclasses.replace(
    HEADS,
    types={
        **HEADS.types,
        **dict.fromkeys(
            ("write_key_id", "user_id", "anonymous_id", "message_id", "message", "operation"), str
        ),
        **dict.fromkeys(("errors", "headers", "item", "envelope"), bytes),
        "truncated": int,
    },
)
#: How much of each budget is used; ``api`` is the place of the budget in :data:`BUDGETS`.
TOTALS: Final = Table(
    "letter_totals",
    {"workspace": str, "api": int, "count": int, "size": int},
    key=2,
    sums=("count", "size"),
)
BUDGETS: Final[Sequence[BudgetName]] = ("webhook", "api", "conflict")


_FIELDS: Final = ("workspace_id", *LETTERS.columns[1:])
_values: Final = attrgetter(*_FIELDS)
_texts: Final = attrgetter(
    *(x for x, y in zip(_FIELDS, LETTERS.types.values(), strict=True) if y is str)
)
_received: Final = attrgetter("workspace_id", "user_id", "anonymous_id", "received_at")
_SIZE, _TRUNCATED = map(LETTERS.columns.index, ("size", "truncated"))
_JSON: Final = [*map(LETTERS.columns.index, ("errors", "headers"))]


def total_of(workspace: str, origin: str, reason: str) -> Key:
    """Return the key of the total in which a letter counts; see :attr:`DeadLetter.budget`."""
    budget: BudgetName = "conflict" if reason == CONFLICT else "api"
    return workspace, BUDGETS.index(budget if origin == API_ORIGIN else "webhook")


def row_of(letter: DeadLetter) -> Row:
    """Return the row of a letter."""
    row = [*_values(letter)]
    row[_TRUNCATED] = int(letter.truncated)
    for at in _JSON:
        row[at] = orjson.dumps(list(row[at]))
    return tuple(row)


def letter_of(row: Row) -> DeadLetter:
    """Return the letter of a row."""
    values: dict[str, Any] = dict(zip(_FIELDS, row, strict=True))
    del values["size"]
    values["truncated"] = bool(values["truncated"])
    values["errors"] = orjson.loads(values["errors"])
    values["headers"] = [(name, value) for name, value in orjson.loads(values["headers"])]
    return DeadLetter(**values)


def storable(letter: DeadLetter) -> DeadLetter:
    """Return a letter without lone surrogates: one may be the reason why the event was refused,
    and must not prevent the letter from being kept."""

    def text(value: str) -> str:
        return value.encode(errors="replace").decode()

    try:
        # It takes no lone surrogate.
        orjson.dumps([*_texts(letter), list(letter.errors), list(letter.headers)])
        return letter
    except orjson.JSONEncodeError:
        values = {field.name: getattr(letter, field.name) for field in dataclasses.fields(letter)}
    values |= {name: text(value) for name, value in values.items() if isinstance(value, str)}
    values["errors"] = [{name: text(error[name]) for name in error} for error in letter.errors]
    values["headers"] = [(text(name), text(value)) for name, value in letter.headers]
    return DeadLetter(**values)


@plan(locks=lambda letters: {(letter.workspace_id,) for letter in letters})
def keep(letters: Sequence[DeadLetter]) -> Steps[list[bool]]:
    """Keep letters within the budgets, and return of each whether it is kept now. One that an
    erasure covers counts as kept."""
    erased = yield from covered([*map(_received, letters)])
    budgets = (yield Context()).dead_letter_budget
    kept: set[Key] = {*(yield Get(HEADS, {(letter.workspace_id, letter.id) for letter in letters}))}
    keys = [total_of(letter.workspace_id, letter.origin, letter.reason) for letter in letters]
    totals = yield Get(TOTALS, set(keys))
    used = {key: [*row[TOTALS.key :]] for key, row in totals.items()}
    rows: list[Row] = []
    result = []
    for letter, gone, key in zip(letters, erased, keys, strict=True):
        identity = (letter.workspace_id, letter.id)
        if not gone and identity not in kept:
            row = row_of(letter)
            size = row[_SIZE]
            count, total = used.get(key, (0, 0))
            most, most_bytes = budgets.of(letter.budget)
            if count < most and total + size <= most_bytes:
                used[key] = [count + 1, total + size]
                rows.append(row)
                kept.add(identity)
        result.append(gone or identity in kept)
    yield Put(LETTERS, rows)
    yield _count(rows)
    return result


@plan()
def use() -> Steps[list[BudgetUse]]:
    """Return how much of each budget is used."""
    return [
        BudgetUse(workspace_id=workspace, budget=BUDGETS[budget], count=count, size=size)
        for workspace, budget, count, size in (yield from every(TOTALS))
    ]


@plan()
def get(workspace_id: str, letter_id: str) -> Steps[DeadLetter | None]:
    """Return a letter, or ``None``."""
    stored = yield Get(LETTERS, [(workspace_id, letter_id)])
    return next(map(letter_of, stored.values()), None)


@plan()
def scan(
    workspace_id: str | None, after: str | None, limit: int, reverse: bool
) -> Steps[Page[DeadLetter]]:
    """Return a page in the order of arrival, or newest first."""
    equal = {} if workspace_id is None else {"workspace": workspace_id}
    return (yield from page(letter_of, LETTERS, equal, after, limit, reverse=reverse))


@plan(frees=True, overwrites=True)
def remove(workspace_id: str, ids: Sequence[str]) -> Steps[int]:
    """Delete letters, and return how many there were."""
    stored = yield Get(HEADS, {(workspace_id, letter_id) for letter_id in ids})
    return (yield from _delete(list(stored.values())))


@plan(frees=True)
def expire(before: int, limit: int) -> Steps[int]:
    """Delete the oldest letters, and return how many."""
    oldest = yield Pages(HEADS, limit, by=("received_at",), high=before)
    return (yield from _delete(oldest.rows))


def _delete(heads: Sequence[Row]) -> Steps[int]:
    """Delete letters, and make room in their budgets."""
    deleted: int = yield Delete(HEADS, [row[: HEADS.key] for row in heads])
    yield _count(heads, -1)
    return deleted


def _count(rows: Sequence[Row], sign: int = 1) -> Put:
    """Return the step that adds letters to their totals, or takes them away."""
    count, size = Counter[Key](), Counter[Key]()
    for workspace, _, origin, reason, _, bytes_, *_ in rows:
        key = total_of(workspace, origin, reason)
        count[key] += sign
        size[key] += sign * bytes_
    return Put(TOTALS, [(*key, count[key], size[key]) for key in count])


# --------------------------------------------------------------------------------------- storage
class Letters(Executor):
    """Dead letters, within a :class:`~engage.api.DeadLetterBudget`."""

    async def put(self, letters: Sequence[DeadLetter]) -> int:
        """Keep letters, idempotently by workspace and id; drop those beyond the budget.

        :return: how many were dropped because a budget is full.
        """
        return sum(not kept for kept in await self.keep(letters))

    async def keep(self, letters: Sequence[DeadLetter]) -> Sequence[bool]:
        """Keep letters as :meth:`put` does, and report each.

        The server calls this method only: an event that conflicts with another is acknowledged only
        if its letter is kept.

        :return: whether each letter is durable, in their order. A letter that was kept before is.
        """
        return await self.run(keep, [*map(storable, letters)])

    async def budget_use(self) -> Sequence[BudgetUse]:
        """Return how much of each budget is used.

        The server reports it in its metrics, and ``engage check`` shows it. Budgets without a
        letter may be left out.
        """
        return await self.read(use)

    async def scan_dead_letters(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[DeadLetter]:
        """Return one page of all dead letters, in order of arrival."""
        return await self.read(scan, workspace_id, after, limit, False)

    async def recent_dead_letters(
        self, workspace_id: str | None, *, before: str | None = None, limit: int
    ) -> Page[DeadLetter]:
        """Return one page of dead letters, newest first (the reverse of the order of arrival).

        :param before: the cursor of the previous page; ``None`` for the newest letters.
        :param limit: the maximum number of items.
        """
        return await self.read(scan, workspace_id, before, limit, True)

    async def dead_letter(self, workspace_id: str, letter_id: str) -> DeadLetter | None:
        """Return the letter with this id, or ``None``."""
        if not is_text(workspace_id, letter_id):
            return None
        return await self.read(get, workspace_id, letter_id)

    async def remove(self, workspace_id: str, ids: Sequence[str]) -> int:
        """Delete letters, and return how many of them existed."""
        return await self.run(remove, workspace_id, [*ids])

    async def expire_dead_letters(self, before: int, *, limit: int) -> int:
        """Delete at most ``limit`` letters with ``received_at`` below ``before`` (milliseconds).

        :return: how many letters were deleted.
        """
        return await self.run(expire, before, limit)
