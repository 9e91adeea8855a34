# SPDX-License-Identifier: Apache-2.0
"""The size of the project, as ``benchmarks/size.py`` counts it, stays within limits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.checkout

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import size  # noqa: E402


def test_tests_rarely_use_private_attributes() -> None:
    """A test of public behaviour survives a change of the implementation."""
    found = size.private_uses()
    assert found.total() < 100, found.most_common(12)
