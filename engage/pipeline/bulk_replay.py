# SPDX-License-Identifier: Apache-2.0
"""Replays all dead letters that match a filter, for the console and the command line.

A replay is idempotent. So nothing of its state is stored: after a crash, run it again, and each
letter that was replayed before is either gone or a duplicate.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from engage.api import StorageUnavailable
from engage.audit import Actor, record_audit
from engage.store.facade import Storage

if TYPE_CHECKING:
    from engage.pipeline.replay import Replayed, Replays
    from engage.reading.letter_groups import LetterFilter

__all__ = ["BulkReplay"]

_log = logging.getLogger(__name__)

#: Letters replayed in one second at most: the store answers clients at the same time.
RATE: Final = 500
#: Letters that are read and replayed in one write: a tenth of a second at :data:`RATE`.
PAGE: Final = 50
#: A replay stops after this many failures in a row: their cause is still there.
FAILURES_IN_A_ROW: Final = 50
#: Failures that are kept to be shown: enough to see the cause.
FAILURES_SHOWN: Final = 20


class BulkReplay:
    """One replay; it runs in the background once :meth:`start` is called.

    :param store: an open store.
    :param criteria: which letters; those that arrive later, or from its ``until`` on, are left out.
    :param actor: who started it, for the audit.
    :param clock: returns milliseconds since 1970 UTC.
    :param new_ids: whether the events get new message ids, which conflicts need.
    :param unverified: see :meth:`engage.pipeline.replay.Replays.replay`.
    :param times: see :meth:`engage.pipeline.replay.Replays.replay_all`.
    """

    def __init__(
        self,
        store: Storage,
        replays: Replays,
        workspace_id: str,
        criteria: LetterFilter,
        *,
        actor: Actor,
        clock: Callable[[], int],
        new_ids: bool = False,
        unverified: bool = False,
        times: Sequence[str] = (),
    ) -> None:
        self._store = store
        self._replays = replays
        self._clock = clock
        self._new_ids = new_ids
        self._unverified = unverified
        self._times = times
        self._task: asyncio.Task[None] | None = None
        self._cancelled = False
        self._in_a_row = 0
        self.workspace_id = workspace_id
        self.actor = actor
        #: Milliseconds since 1970 UTC.
        self.started_at = clock()
        self.criteria = dataclasses.replace(criteria, until=criteria.until or self.started_at + 1)
        self.state: Literal["running", "done", "cancelled", "stopped"] = "running"
        #: Why it stopped.
        self.message: str | None = None
        #: How many letters match; ``None`` until they are counted.
        self.total: int | None = None
        self.stored = 0
        self.duplicates = 0
        self.failed = 0
        #: The first failures.
        self.failures: list[Replayed] = []

    @property
    def done(self) -> int:
        """The number of letters that were replayed, with and without success."""
        return self.stored + self.duplicates + self.failed

    def start(self) -> None:
        """Begin to replay."""
        self._task = asyncio.create_task(self._run(), name="replay dead letters")

    def cancel(self) -> None:
        """Stop after the letters that are being replayed."""
        self._cancelled = True

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait until the replay has ended and is in the audit.

        :param seconds: the longest time to wait; ``None``: no limit.
        :return: whether it has ended.
        """
        assert self._task is not None
        await asyncio.wait([self._task], timeout=seconds)
        return self._task.done()

    async def _run(self) -> None:
        try:
            await self._replay()
        except StorageUnavailable as error:
            self.state, self.message = "stopped", f"{error}; run it again"
        except Exception:
            _log.exception("a replay of dead letters failed")
            self.state, self.message = "stopped", "an unexpected error; the log has it"
        now = self._clock()
        details = self._details()
        await record_audit(self._store, self.actor, "letters-replayed", details, now=now)

    async def _replay(self) -> None:
        self.total = await self._count()
        cursor: str | None = None
        while not self._cancelled:
            started = time.monotonic()
            page = await self._store.scan_dead_letters(self.workspace_id, after=cursor, limit=PAGE)
            letters = [letter for letter in page.items if self.criteria.matches(letter)]
            for result in await self._replays.replay_all(
                letters, new_id=self._new_ids, unverified=self._unverified, times=self._times
            ):
                self._add(result)
            if self.state == "stopped":
                return
            cursor = page.cursor
            if cursor is None:
                self.state = "done"
                return
            await asyncio.sleep(max(0.0, len(letters) / RATE - (time.monotonic() - started)))
        self.state = "cancelled"

    async def _count(self) -> int:
        count = 0
        cursor: str | None = None
        while not self._cancelled:
            page = await self._store.scan_dead_letters(self.workspace_id, after=cursor, limit=PAGE)
            count += sum(self.criteria.matches(letter) for letter in page.items)
            cursor = page.cursor
            if cursor is None:
                break
            await asyncio.sleep(0)
        return count

    def _add(self, result: Replayed) -> None:
        if result.outcome == "failed":
            self.failed += 1
            self._in_a_row += 1
            if len(self.failures) < FAILURES_SHOWN:
                self.failures.append(result)
            if self._in_a_row == FAILURES_IN_A_ROW:
                self.state = "stopped"
                self.message = f"{FAILURES_IN_A_ROW} letters in a row failed: {result.message}"
            return
        self._in_a_row = 0
        if result.outcome == "stored":
            self.stored += 1
        else:
            self.duplicates += 1

    def _details(self) -> dict[str, Any]:
        """Return the details for the audit."""
        criteria = dataclasses.asdict(self.criteria)
        return {
            "workspace": self.workspace_id,
            **{name: value for name, value in criteria.items() if value is not None},
            "state": self.state,
            "newIds": self._new_ids,
            "unverified": self._unverified,
            "undated": list(self._times),
            "stored": self.stored,
            "duplicates": self.duplicates,
            "failed": self.failed,
        }
