# SPDX-License-Identifier: Apache-2.0
"""The built-in providers pass the conformance suite; the cases are in ``support``."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from engage.testing import ProviderConformance
from support.each import each
from support.provider_cases import CASES

#: The tests of the suite, and the arguments of each.
RULES = [
    (rule, arguments)
    for rule, test in vars(ProviderConformance).items()
    if rule.startswith("test_")
    for mark in getattr(test, "pytestmark", [pytest.mark.parametrize("", [()])])
    for arguments in ([value] if mark.args[0] else () for value in mark.args[1])
]


@pytest.mark.parametrize("case", CASES)
def test_a_provider_conforms(case: str) -> None:
    suite: Any = CASES[case]()  # It checks the options once for all rules.

    @each("rule, arguments", RULES)
    def conforms(rule: str, arguments: list[Any]) -> None:
        with contextlib.suppress(pytest.skip.Exception):  # The scheme has nothing to check.
            getattr(suite, rule)(*arguments)

    conforms()
