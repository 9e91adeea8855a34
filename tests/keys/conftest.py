# SPDX-License-Identifier: Apache-2.0
"""A store for the tests of write keys."""

from __future__ import annotations

import pytest

from engage.store.facade import Storage
from engage.testing import MemoryStore


@pytest.fixture
def store() -> Storage:
    """A new store in memory."""
    return MemoryStore()
