# SPDX-License-Identifier: Apache-2.0
"""Limit the time of a call of the storage that is not part of a group commit."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from engage.api import StorageUnavailable

__all__ = ["within"]


@contextlib.asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """Limit the calls awaited inside to ``seconds``.

    A storage limits its calls itself. This protects the caller from a storage that does not.

    :raises StorageUnavailable: if the calls take longer.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise StorageUnavailable("the storage did not answer in time") from error
