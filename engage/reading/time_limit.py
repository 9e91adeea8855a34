# SPDX-License-Identifier: Apache-2.0
"""Limit the time of a call of the storage or the log that is not part of a write."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from engage.api import StorageUnavailable
from engage.errors import LogUnavailable

__all__ = ["log_within", "within"]


@contextlib.asynccontextmanager
async def within(seconds: float | None, what: str = "storage") -> AsyncIterator[None]:
    """Limit the calls awaited inside to ``seconds``; ``None``: no limit.

    A storage limits its calls itself. This protects the caller from a storage that does not.

    :param what: the called part, for the error.
    :raises StorageUnavailable: if the calls take longer.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise StorageUnavailable(f"the {what} did not answer in time") from error


@contextlib.asynccontextmanager
async def log_within(seconds: float) -> AsyncIterator[None]:
    """Limit the calls of the log awaited inside, as :func:`within` does with those of a storage.

    :raises LogUnavailable: if the calls take longer, or if the log is unavailable.
    """
    try:
        async with within(seconds, "log"):
            yield
    except StorageUnavailable as error:
        raise LogUnavailable(str(error)) from error
