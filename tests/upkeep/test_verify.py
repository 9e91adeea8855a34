# SPDX-License-Identifier: Apache-2.0
"""Verifying a store of any kind."""

from __future__ import annotations

import pytest

from support.memory_store import MemoryStore
from support.verifying import fill, healthy, verified


@pytest.mark.parametrize("seed", range(20))
async def test_a_healthy_store_has_no_differences(seed: int) -> None:
    store = MemoryStore()
    await fill(store, seed=seed)
    report = await verified(store)
    print(report)
    healthy(report)
