# SPDX-License-Identifier: Apache-2.0
"""Wait until a condition is true: in the event loop, or by blocking."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

#: Seconds after which a step counts as failed.
DEADLINE = 120.0


async def eventually(condition: Callable[[], Any], *, deadline: float = DEADLINE) -> Any:
    """Poll in the event loop until ``condition()`` is true and return what it returned.

    :raises TimeoutError: if it is not true in time.
    """
    async with asyncio.timeout(deadline):
        while not (result := condition()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return result


def wait_for(
    condition: Callable[[], Any], *, what: str = "the condition", deadline: float = DEADLINE
) -> Any:
    """Poll until ``condition()`` is true and return what it returned.

    :raises AssertionError: if it is not true in time.
    """
    end = time.monotonic() + deadline
    while True:
        if result := condition():
            return result
        assert time.monotonic() < end, f"waited {deadline:.0f} s in vain for {what}"
        time.sleep(0.02)
