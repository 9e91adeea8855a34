# SPDX-License-Identifier: Apache-2.0
"""Waiting for what will be true."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


async def eventually(condition: Callable[[], Any], *, deadline: float = 30.0) -> Any:
    """Poll in the event loop until ``condition()`` is true and return what it returned.

    :raises TimeoutError: it never was.
    """
    async with asyncio.timeout(deadline):
        while not (result := condition()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return result
