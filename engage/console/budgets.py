# SPDX-License-Identifier: Apache-2.0
"""How much room is left for dead letters, as the pages show it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from engage.storage.budgets import use_ratio

if TYPE_CHECKING:
    from engage.api import BudgetName, BudgetUse, DeadLetterBudget

__all__ = ["Budget", "budgets_of"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much of a budget of dead letters a workspace uses."""

    workspace_id: str
    name: BudgetName
    count: int
    max_count: int
    size: int
    max_size: int
    #: 0 to 1.
    ratio: float


def budgets_of(uses: Iterable[BudgetUse], budget: DeadLetterBudget) -> list[Budget]:
    """Return what the pages show of the budgets.

    :param budget: ``limits.dead_letter_budget``.
    """
    found = []
    for use in uses:
        max_count, max_size = budget.of(use.budget)
        found.append(
            Budget(
                workspace_id=use.workspace_id,
                name=use.budget,
                count=use.count,
                max_count=max_count,
                size=use.size,
                max_size=max_size,
                ratio=use_ratio(use, budget),
            )
        )
    return found
