# SPDX-License-Identifier: Apache-2.0
"""Appends events and dead letters to the log, where a server without a log writes to the storage.

A call returns when everything is durable in the log. Whether an event is a duplicate or a conflict
is not known then: the loaders find that out, and call the observers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from engage.api import DeadLetter, Event, EventLog, Outcome, Status
from engage.errors import far_behind
from engage.log.appending import Appending
from engage.pipeline.admission import (
    KEY_SHARE,
    QUEUE_WAIT,
    SUBSCRIPTIONS_SHARE,
    Admission,
    Admitted,
)
from engage.pipeline.ingest import Ingest, size_of_events, size_of_letters
from engage.store.facade import Storage

if TYPE_CHECKING:
    import asyncio

__all__ = ["LogIngest"]


class LogIngest(Ingest):
    """Appends to a log.

    :param store: takes the letters that are too large for the log.
    :param log: an open log.
    :param overdue: whether the store is too far behind the log to accept more events.
    :param options: those of :class:`Ingest`. ``stored`` and ``alive`` are not called.
    """

    def __init__(
        self,
        store: Storage,
        *,
        log: EventLog,
        overdue: Callable[[], bool] = lambda: False,
        **options: Any,
    ) -> None:
        super().__init__(store, **options)
        limits = options["limits"]
        self._appended_events: Appending[Event] = Appending(
            log,
            max_weight=limits.queue_events,
            max_bytes=limits.queue_bytes,
            share=KEY_SHARE,
            timeout=options["write_timeout"],
            done=self._appended,
            failed=self._append_failed,
        )
        self._appended_letters: Appending[DeadLetter] = Appending(
            log,
            max_weight=limits.queue_events,
            max_bytes=limits.queue_bytes,
            timeout=options["write_timeout"],
            done=lambda _seconds, _letters, _outcomes: None,
            failed=lambda: self._metrics.count("log_errors"),
        )
        self.admission = _GuardedAdmission(
            self._appended_events.has_room, wait=QUEUE_WAIT, overdue=overdue
        )
        self._appended_events.freed = self.admission.wake

    @property
    def waiting(self) -> int:
        """The number of events that are being appended."""
        return self._appended_events.items

    def submit(
        self, events: Sequence[Event], key: str, *, restated: Collection[str] = ()
    ) -> asyncio.Future[Sequence[Outcome]]:
        size, weight = size_of_events(events)
        return self._appended_events.submit(events, size, weight=weight, key=key, restated=restated)

    async def put(self, letters: Sequence[DeadLetter]) -> Sequence[bool]:
        """Append letters to the log; keep those that it can never take in the store.

        A letter of a large delivery can be larger than a record of the log.
        """
        outcomes = await self._appended_letters.submit(letters, size_of_letters(letters))
        kept = [outcome.status is Status.STORED for outcome in outcomes]
        refused = [index for index, durable in enumerate(kept) if not durable]
        if refused:
            stored = await super().put([letters[index] for index in refused])
            for index, durable in zip(refused, stored, strict=True):
                kept[index] = durable
        return kept

    async def drain(self) -> None:
        await self._appended_events.drain()
        await self._appended_letters.drain()
        await super().drain()

    async def close(self) -> None:
        await self._appended_events.close()
        await self._appended_letters.close()
        await super().close()

    # ---------------------------------------------------------------------------------- internals
    def _appended(
        self, seconds: float, events: Sequence[Event], _outcomes: Sequence[Outcome]
    ) -> None:
        self._metrics.write(seconds, len(events), self._appended_events.items, to="log_append")

    def _append_failed(self) -> None:
        self._metrics.count("log_errors")
        self._failed()


class _GuardedAdmission(Admission):
    """Lets no events in while the storage is too far behind the log.

    :param overdue: whether it is, see :attr:`engage.log.lag.Lag.overdue`.
    """

    def __init__(
        self, has_room: Callable[[str, bool], bool], *, wait: float, overdue: Callable[[], bool]
    ) -> None:
        super().__init__(has_room, wait=wait)
        self._overdue = overdue

    async def enter(self, key: str, *, small: bool, brief: bool = False) -> Admitted:
        self._check(key)
        return await super().enter(key, small=small, brief=brief)

    def _check(self, key: str) -> None:
        if key != SUBSCRIPTIONS_SHARE and self._overdue():
            raise far_behind()
