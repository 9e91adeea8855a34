# SPDX-License-Identifier: Apache-2.0
"""``engage verify`` on SQLite."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.sqlite import make
from support.verifying import fill, healthy, verified


@pytest.mark.parametrize("seed", range(6))
async def test_a_healthy_store_has_no_differences(tmp_path: Path, seed: int) -> None:
    store = make(tmp_path)
    await store.open(create=True)
    await fill(store, seed=seed)
    report = await verified(store)
    print(report)
    healthy(report)
    await store.close()
