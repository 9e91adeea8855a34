# SPDX-License-Identifier: Apache-2.0
"""How full the budgets of dead letters are: for the metrics and ``engage check``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from engage.api import BudgetName, BudgetUse, DeadLetterBudget

__all__ = ["BUDGETS", "fullness", "use_ratio"]

#: All budgets of a workspace.
BUDGETS: Final[tuple[BudgetName, ...]] = ("api", "webhook", "conflict")


def use_ratio(use: BudgetUse, budget: DeadLetterBudget) -> float:
    """Return the part of a budget that is used: 0 to 1, by number or by bytes, the greater one."""
    count, size = budget.of(use.budget)
    return max(use.count / count if count else 1.0, use.size / size if size else 1.0)


def fullness(uses: Iterable[BudgetUse], budget: DeadLetterBudget) -> Mapping[BudgetName, float]:
    """Return for each budget the ratio of the workspace that uses most of it."""
    shares = dict.fromkeys(BUDGETS, 0.0)
    for use in uses:
        shares[use.budget] = max(shares[use.budget], use_ratio(use, budget))
    return shares
