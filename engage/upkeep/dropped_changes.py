# SPDX-License-Identifier: Apache-2.0
"""Report the changes of profiles that a limit dropped: the clients got 200, because the events are
stored, so only the log and the metrics show it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Final

from engage.monitoring.sampler import LINE_SECONDS
from engage.store.facade import Storage

if TYPE_CHECKING:
    from collections.abc import Callable

    from engage.monitoring.metrics import Metrics

__all__ = ["report_dropped_changes"]

_log = logging.getLogger(__name__)

#: Seconds between two looks at the store.
LOOK_SECONDS: Final = 5.0


async def report_dropped_changes(
    store: Storage,
    metrics: Metrics,
    *,
    every: float = LOOK_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Count dropped changes as ``profile_change``, and log them at most once a minute.

    The first ones are logged at once. Runs until it is cancelled.

    :param every: seconds between two looks at the store.
    :param clock: returns seconds.
    """
    counted = logged = 0
    next_log = clock()
    while True:
        dropped = store.dropped_changes
        if dropped != counted:
            metrics.count("dropped", "profile_change", by=dropped - counted)
            counted = dropped
        if dropped != logged and clock() >= next_log:
            _log.warning(
                "%d changes of users, visitors or groups were dropped, because limits.user_*, "
                "limits.visitor_* or limits.visitors allows no more; their events are stored "
                "(`engage users remove-trait` makes room for traits)",
                dropped - logged,
            )
            logged, next_log = dropped, clock() + LINE_SECONDS
        await asyncio.sleep(every)
