# SPDX-License-Identifier: Apache-2.0
"""How long the event loop is held, in processor time of its thread.

What other processes do on a busy machine does not count as processor time. But they use the caches
and the other half of a core, and the garbage collector looks at everything that the test run has
loaded. So one long measurement proves nothing: what holds the loop for longer than a limit does so
each time. And a limit is one of the machine on which it was set: on a slower one, it is longer.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Final

#: Measurements until one is below the limit.
TRIES: Final = 10
#: Seconds that :func:`_work` takes on the machine on which the limits of the tests were set.
REFERENCE: Final = 0.002


async def longest_hold(work: Awaitable[object]) -> float:
    """Return the longest time for which the event loop was held while ``work`` ran, in seconds."""
    longest = 0.0
    task = asyncio.ensure_future(work)
    last = time.thread_time()
    while not task.done():
        await asyncio.sleep(0)
        now = time.thread_time()
        longest = max(longest, now - last)
        last = now
    task.result()
    return longest


async def check_time(
    measure: Callable[[], Awaitable[float]], limit: float, what: object = ""
) -> None:
    """Check that one of several measurements is below a limit in seconds."""
    results: list[float] = []
    for _ in range(TRIES):
        results.append(await measure())
        if results[-1] < limit or results[-1] < limit * slowness():
            return
    raise AssertionError(f"{what}: {results} instead of {limit}")


def slowness() -> float:
    """Return how many times as long as on the machine of the limits the same work takes now.

    :return: 1 to 5.
    """
    taken = []
    for _ in range(5):
        started = time.thread_time()
        _work()
        taken.append(time.thread_time() - started)
    return min(max(min(taken) / REFERENCE, 1.0), 5.0)


def _work() -> None:
    values = {f"name-{number}": str(number) for number in range(4000)}
    json.loads(json.dumps([values, list(range(4000))]))
    sorted(values, key=values.__getitem__)
