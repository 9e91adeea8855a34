# SPDX-License-Identifier: Apache-2.0
"""Replays of many dead letters: in the background, one at a time, and resumed after a crash.

For pages and commands::

    jobs = Jobs(app.store, app.replays, clock=clock)
    jobs.open()                 # in a server: continues a job whose process has died
    job = await jobs.start("acme", group.wanted, actor=actor)
    await jobs.current()        # the running or the last job, of any process
    await jobs.finished()       # finished jobs, newest first
    await jobs.cancel()         # also a job of another process
    await jobs.close()          # interrupts the job; another process resumes it

The state is written before each page of letters. A replay is idempotent, so that a page which is
repeated after a crash stores nothing twice, and a letter is removed only when its event is durable.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from engage.api import DeadLetterStore, EngageError, EventStore, RecordStore, StorageUnavailable
from engage.console.job_records import Job, JobRecords, JobRunning, NotOursError
from engage.pipeline.ids import uuid7
from engage.storage.audit import Actor, record_audit

if TYPE_CHECKING:
    from engage.pipeline.replay import Replays
    from engage.storage.letter_groups import LetterFilter

__all__ = ["Job", "JobRunning", "Jobs"]

_log = logging.getLogger(__name__)

#: Letters replayed in one second at most.
RATE: Final = 500
#: Letters that are read and replayed together.
PAGE: Final = 50
#: Seconds for which a job waits for a storage that does not answer.
PATIENCE_SECONDS: Final = 60.0
#: Seconds between two looks for a job whose process has died.
RESUME_SECONDS: Final = 10.0
#: Seconds between two writes of the state while no letter matches.
WRITE_SECONDS: Final = 5.0
#: Seconds that :meth:`Jobs.close` waits for the page that is being replayed.
CLOSE_SECONDS: Final = 10.0

Result = TypeVar("Result")


class Jobs:
    """Runs jobs, one at a time on all processes that share the store.

    :param store: an open store.
    :param clock: returns milliseconds since 1970 UTC.
    """

    def __init__(self, store: EventStore, replays: Replays, *, clock: Callable[[], int]) -> None:
        self._letters = store if isinstance(store, DeadLetterStore) else None
        self._audit = store if isinstance(store, RecordStore) else None
        self._records = JobRecords(store, clock=clock)
        self._replays = replays
        self._clock = clock
        self._job: Job | None = None
        self._task: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._closing = False

    def open(self) -> None:
        """Look every few seconds for a job whose process has died, and continue it."""
        self._watching = asyncio.create_task(self._watch())

    @property
    def runs(self) -> bool:
        """Whether a job of this process runs."""
        return self._running() is not None

    async def start(
        self,
        workspace_id: str,
        wanted: LetterFilter,
        *,
        actor: Actor,
        operation: str | None = None,
        new_ids: bool = False,
    ) -> Job:
        """Start to replay all letters that match; letters that arrive later are left out.

        :param actor: who started it, for the audit.
        :param operation: the type of letters of an earlier version.
        :param new_ids: whether the events get new message ids, which conflicts need.
        :return: the job; this object has its progress.
        :raises JobRunning: if a job runs or waits to be resumed.
        :raises EngageError: if the storage does not keep dead letters.
        :raises StorageUnavailable: if the store does not answer.
        """
        if self._letters is None:
            raise EngageError("the storage does not keep dead letters")
        version, last = await self._records.current()
        if last is not None and last.state == "running":
            raise _running(last)
        if last is not None:
            await self._records.archive(last)
        now = self._clock()
        job = Job(
            id=uuid7(now),
            workspace_id=workspace_id,
            wanted=dataclasses.replace(wanted, until=now + 1),
            operation=operation,
            new_ids=new_ids,
            actor=actor,
            started_at=now,
            updated_at=now,
        )
        if not await self._records.take(job, version):
            raise _running((await self._records.current())[1])
        self._begin(job)
        return job

    async def resume(self) -> Job | None:
        """Continue a job whose process has died; return it, or ``None`` if there is none.

        :raises StorageUnavailable: if the store does not answer.
        """
        if self._running() is not None or self._letters is None:
            return None
        version, job = await self._records.current()
        if job is None or job.state != "running":
            return None
        mine = job.owner == self._records.owner
        if not (mine or self._records.abandoned(job)):
            return None
        if not await self._records.take(job, version):
            return None
        _log.info("a replay of dead letters is resumed", extra={"job": job.id})
        self._begin(job)
        return job

    async def current(self) -> Job | None:
        """Return the running or the last job.

        :raises StorageUnavailable: if the store does not answer.
        """
        return self._running() or (await self._records.current())[1]

    async def finished(self, limit: int = 50) -> Sequence[Job]:
        """Return finished jobs, newest first.

        :raises StorageUnavailable: if the store does not answer.
        """
        return await self._records.finished(limit)

    async def cancel(self) -> bool:
        """Cancel the running job, also that of another process; return whether there was one.

        The page of letters that is being replayed is finished.

        :raises StorageUnavailable: if the store does not answer.
        """
        if (own := self._running()) is not None:
            own.cancelling = True
            return True
        for _ in range(5):
            version, job = await self._records.current()
            if job is None or job.state != "running":
                return False
            if await self._records.cancel(job, version):
                return True
        return False

    async def wait(self, seconds: float | None = None) -> Job | None:
        """Wait until the job of this process has ended, at most some seconds; return the job."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=seconds)
        return self._job

    async def close(self) -> None:
        """Interrupt the job of this process after the page that is being replayed. Idempotent."""
        self._closing = True
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        if self._task is not None:
            await asyncio.wait([self._task], timeout=CLOSE_SECONDS)
            self._task.cancel()
            await asyncio.wait([self._task])

    # -------------------------------------------------------------------------------------- run
    def _running(self) -> Job | None:
        """Return the job that this process runs."""
        return None if self._task is None or self._task.done() else self._job

    def _begin(self, job: Job) -> None:
        self._job = job
        self._task = asyncio.create_task(self._run(job))

    async def _watch(self) -> None:
        while True:
            try:
                await self.resume()
            except StorageUnavailable:
                pass
            except Exception:
                _log.exception("resuming a replay of dead letters failed")
            await asyncio.sleep(RESUME_SECONDS)

    async def _run(self, job: Job) -> None:
        try:
            try:
                await self._replay_pages(job)
            except (NotOursError, StorageUnavailable):
                raise
            except Exception:
                _log.exception("a replay of dead letters failed")
                job.state, job.message = "stopped", "an unexpected error; the log has it"
            if self._closing and job.state == "running" and not job.cancelling:
                job.owner = ""
                await self._records.write(job)
                return
            if job.state == "running":
                job.state = "cancelled" if job.cancelling else "done"
            await self._end(job)
        except NotOursError:
            _log.warning("a replay of dead letters was taken over by another process")
        except StorageUnavailable as error:
            # The record says that it runs, so that it is resumed when the storage answers again.
            job.message = str(error)
            _log.warning("a replay of dead letters is interrupted: %s", error)

    async def _replay_pages(self, job: Job) -> None:
        letters = self._letters
        assert letters is not None
        if job.total is None:
            job.total = await self._patiently(lambda: self._count(job))
        written = time.monotonic()
        before = set(job.pending)
        while job.state == "running" and not job.cancelling and not self._closing:
            started = time.monotonic()
            page = await self._patiently(
                lambda: letters.scan_dead_letters(job.workspace_id, after=job.cursor, limit=PAGE)
            )
            # The process died while it replayed these; those that are gone were stored.
            job.stored += len(before.difference(letter.id for letter in page.items))
            before.clear()
            wanted = [letter for letter in page.items if job.wanted.matches(letter)]
            job.pending = [letter.id for letter in wanted]
            if wanted or started - written > WRITE_SECONDS:
                await self._patiently(lambda: self._records.write(job))
                written = time.monotonic()
            if job.cancelling:
                return
            if wanted:
                results = await self._patiently(
                    lambda: self._replays.replay_all(
                        wanted,  # noqa: B023 - called before the next page
                        operation=job.operation,
                        new_id=job.new_ids,
                    )
                )
                for result in results:
                    job.count(result)
            job.pending = []
            if page.cursor is None:
                return
            job.cursor = page.cursor
            await asyncio.sleep(max(0.0, len(wanted) / RATE - (time.monotonic() - started)))

    async def _count(self, job: Job) -> int:
        assert self._letters is not None
        count = 0
        cursor: str | None = None
        while True:
            page = await self._letters.scan_dead_letters(job.workspace_id, after=cursor, limit=200)
            count += sum(job.wanted.matches(letter) for letter in page.items)
            if page.cursor is None:
                return count
            cursor = page.cursor
            await asyncio.sleep(0)

    async def _end(self, job: Job) -> None:
        job.pending = []
        await self._patiently(lambda: self._records.write(job))
        await self._patiently(lambda: self._records.archive(job))
        if self._audit is not None:
            now = self._clock()
            await record_audit(self._audit, job.actor, "letters-replayed", job.details(), now=now)

    async def _patiently(self, call: Callable[[], Awaitable[Result]]) -> Result:
        """Repeat a call while the storage does not answer, for a minute."""
        ends = time.monotonic() + PATIENCE_SECONDS
        for attempt in itertools.count():
            try:
                return await call()
            except StorageUnavailable:
                if self._closing or time.monotonic() > ends:
                    raise
            await asyncio.sleep(min(0.5 * 2**attempt, 5.0))
        raise AssertionError("the loop has no end")


def _running(job: Job | None) -> JobRunning:
    who = "" if job is None else f", started by {job.actor.who}"
    return JobRunning(f"a replay of dead letters is running{who}; wait for it or cancel it")
