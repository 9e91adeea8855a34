# SPDX-License-Identifier: Apache-2.0
"""How much room is left for dead letters, as the pages show it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from engage.upkeep.budgets import use_ratio

if TYPE_CHECKING:
    from engage.api import BudgetUse, DeadLetterBudget

__all__ = ["Budget", "budgets_of"]


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
