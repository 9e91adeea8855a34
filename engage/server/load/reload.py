# SPDX-License-Identifier: Apache-2.0
"""``engage load --from``: reads a part of the log again, such as after a restore of the store.

It reads as a group that nothing else uses, so the loaders go on as if it did not exist. Events
that the store has are duplicates. It ends where the log ended when it began.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from engage.api import DAY_MS, DeadLetter, Event, StorageError
from engage.log.loading import READ_WAIT, Range
from engage.monitoring import logs
from engage.monitoring.metrics import Metrics
from engage.reading.time_limit import within
from engage.server.load.endpoints import log_section
from engage.server.load.process import Load
from engage.server.serve import secrets_of
from engage.server.worker import handle_signals

if TYPE_CHECKING:
    from engage.config import Config
    from engage.log.loading import Loader
    from engage.registry import Registry

__all__ = ["Reloaded", "reload"]

_log = logging.getLogger(__name__)

#: Seconds between two reports.
_TURN: Final = 0.2
#: Reads without a record, together ten seconds, after which nothing more can be expected of
#: partitions that have no record since the time.
QUIET_READS: Final = round(10 / READ_WAIT)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reloaded:
    """The outcomes of the records."""

    #: The outcomes of the metric ``loaded_records``, with their numbers.
    outcomes: Mapping[str, int]
    #: Partition → why the rest of it was not read.
    paused: Mapping[int, str]
    #: Whether a signal ended the command before the end of the log.
    interrupted: bool


def reload(config: Config, registry: Registry, since: int, show: Callable[[int], None]) -> Reloaded:
    """Load the records that were appended since a time and are still in the log.

    While the log or the store is down, it waits, and logs that. SIGTERM and SIGINT end it after the
    current batch; a second signal ends the process at once with status 1.

    :param since: milliseconds since 1970 UTC.
    :param show: called several times a second with the number of records so far.
    :raises EngageError: if the log or the store cannot be used.
    """
    secrets = tuple(secrets_of(config, registry))
    logs.configure(config.logging.level, config.logging.format, secrets=secrets)
    try:
        return asyncio.run(_reload(config, registry, since, show))
    finally:
        logs.flush()


async def _reload(
    config: Config, registry: Registry, since: int, show: Callable[[int], None]
) -> Reloaded:
    metrics = Metrics()
    load = Load(config, registry, metrics)
    try:
        await load.open()
        async with within(config.storage.write_timeout):
            ends = await load.log.ends()
        bounds = Range(
            group=f"{log_section(config).group}.from-{uuid.uuid4().hex[:12]}",
            since=since,
            ends=ends,
            skips=_skips(config, load.clock()),
        )
        loader = load.loader(bounds)
        interrupted = False

        def interrupt() -> None:
            nonlocal interrupted
            interrupted = True
            loader.stop()

        handle_signals(interrupt)
        running = asyncio.create_task(loader.run(), name="loader")
        try:
            while not running.done() and not await _is_quiet(loader, load):
                show(sum(_outcomes(metrics).values()))
                await asyncio.wait([running], timeout=_TURN)
            loader.stop()
            await running
        finally:
            running.cancel()
            await asyncio.wait([running])
    finally:
        await load.close()
    return Reloaded(outcomes=_outcomes(metrics), paused=loader.paused, interrupted=interrupted)


async def _is_quiet(loader: Loader, load: Load) -> bool:
    """Return whether all partitions could be read, and nothing came for a while.

    A partition may have no record since the time, or end with numbers that no record has.
    """
    if loader.empty_reads < QUIET_READS:
        return False
    try:
        await load.log.check()
    except StorageError as error:
        _log.warning("a partition cannot be read now; waiting: %s", error)
        await asyncio.sleep(1)
        return False
    return loader.empty_reads >= QUIET_READS


def _skips(config: Config, now: int) -> Callable[[Event | DeadLetter], bool]:
    """Return a function that finds items past the retention of the store."""
    retention = config.retention

    def before(days: int | None) -> int:
        return -1 if days is None else now - days * DAY_MS

    events, letters = before(retention.events_days), before(retention.dead_letters_days)

    def skips(item: Event | DeadLetter) -> bool:
        return item.received_at < (events if isinstance(item, Event) else letters)

    return skips


def _outcomes(metrics: Metrics) -> dict[str, int]:
    """Return the number of records of each outcome."""
    loaded = metrics.numbers["loaded_records"].items()
    return {str(outcome): int(count) for (outcome,), count in loaded if count}
