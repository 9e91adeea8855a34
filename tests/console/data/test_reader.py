# SPDX-License-Identifier: Apache-2.0
"""Calls of the store: few at a time, each within a time limit."""

from __future__ import annotations

import asyncio

from engage.api import StorageUnavailable
from engage.console.data.reader import Reader


async def test_two_calls_of_the_store_run_at_once() -> None:
    running, most = 0, 0

    async def call() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1

    reader = Reader(5.0)
    await asyncio.gather(*(reader.read(call()) for _ in range(20)))
    assert most == 2


async def test_a_call_that_takes_too_long_is_given_up() -> None:
    reader = Reader(0.5)
    assert await reader.read(asyncio.sleep(0, "value")) == "value"
    assert reader.error is None
    hanging = [reader.read(asyncio.sleep(9)) for _ in range(5)]
    results = await asyncio.gather(*hanging, return_exceptions=True)
    assert [type(result) for result in results] == [StorageUnavailable] * 5
    assert reader.error == "the storage did not answer within 0.5 seconds"
    await reader.read(asyncio.sleep(0))
    assert reader.error is None
