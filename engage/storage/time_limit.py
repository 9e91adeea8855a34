# SPDX-License-Identifier: Apache-2.0
"""Calls of the storage that are not gathered: each has only so much time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from engage.api import StorageUnavailable

__all__ = ["within"]


@contextlib.asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """Give what is awaited inside so much time. A storage bounds its calls itself; one that does
    not must not hold its caller for ever.

    :raises StorageUnavailable: it took longer.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise StorageUnavailable("the storage did not answer in time") from error
