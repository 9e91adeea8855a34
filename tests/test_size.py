# SPDX-License-Identifier: Apache-2.0
"""The size of the project, as ``benchmarks/size.py`` counts it, stays within limits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from engage.config import config_schema

pytestmark = pytest.mark.checkout

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import size  # noqa: E402

#: The numbers of ``engage/`` and ``plugins/``: those that a module names, and all. A change may
#: raise these by a number that its commit message names, with the reason for it.
NAMED = 425
ALL = 2247
#: Each config key is a decision that an operator has to understand.
KEYS = 95


def test_the_product_has_no_more_numbers() -> None:
    """Each is a decision that a reader has to understand."""
    counted = size.count_numbers()
    assert counted["named"] <= NAMED
    assert counted.total() <= ALL


def test_the_config_has_no_more_keys() -> None:
    assert size.count_config_keys(config_schema()) <= KEYS


def test_tests_rarely_use_private_attributes() -> None:
    """A test of public behaviour survives a change of the implementation."""
    found = size.private_uses()
    assert found.total() < 100, found.most_common(12)
