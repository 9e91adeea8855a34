# SPDX-License-Identifier: Apache-2.0
"""How many different rejected events the store keeps: the number beside "Rejected".

A rejected event that comes again unchanged is one more rejection, and no second dead letter. So
this number and that of the rejections differ, and the pages name both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from engage.api import BudgetUse
from engage.upkeep.budgets import use_ratio

if TYPE_CHECKING:
    from engage.api import DeadLetterBudget
    from engage.console.data.reader import Reader
    from engage.store.facade import Storage

__all__ = ["Badge", "Budget", "budgets_of"]

#: Seconds for which numbers are used again.
FRESH: Final = 10.0


class Badge:
    """Reads how many dead letters are kept.

    :param clock: the time in seconds since 1970.
    """

    def __init__(self, store: Storage, reader: Reader, clock: Callable[[], float]) -> None:
        self._store = store
        self._reader = reader
        self._clock = clock
        self._at = 0.0
        self._uses: Sequence[BudgetUse] = ()

    async def uses(self, workspace_id: str, *, fresh: bool = False) -> Sequence[BudgetUse]:
        """Return how much of each budget a workspace uses; nothing if that is unknown.

        :param fresh: read the store now.
        :raises StorageUnavailable: if the store does not answer.
        """
        store = self._store
        now = self._clock()
        if fresh or not 0 <= now - self._at < FRESH:
            self._uses = await self._reader.read(store.budget_use())
            self._at = now
        return [use for use in self._uses if use.workspace_id == workspace_id]


class Budget(NamedTuple):
    """How much of a budget of dead letters a workspace uses."""

    use: BudgetUse
    max_count: int
    max_size: int
    #: 0 to 1.
    ratio: float


def budgets_of(uses: Iterable[BudgetUse], budget: DeadLetterBudget) -> list[Budget]:
    """Return the budgets as the pages show them.

    :param budget: ``limits.dead_letter_budget``.
    """
    return [Budget(use, *budget.of(use.budget), use_ratio(use, budget)) for use in uses]
