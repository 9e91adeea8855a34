# SPDX-License-Identifier: Apache-2.0
"""The state of a job, and the records in which all processes find it.

The state of the running or the last job is a record of kind :data:`JOB` with the id
:data:`CURRENT`. Only the process that owns a job writes it, and expects the version that it wrote
before; so two processes cannot both have it. Finished jobs are kept under their ids too.
"""

from __future__ import annotations

import dataclasses
import os
import re
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import orjson

from engage.api import EngageError, EventStore, Record, RecordStore
from engage.pipeline.ids import uuid7
from engage.storage.audit import Actor
from engage.storage.letter_groups import LetterFilter

if TYPE_CHECKING:
    from engage.pipeline.replay import Replayed

__all__ = ["CURRENT", "JOB", "Job", "JobRecords", "JobRunning", "NotOursError"]

#: The kind of the records.
JOB: Final = "job"
#: The id of the record of the running or the last job.
CURRENT: Final = "current"
#: A job stops after this many failures without a success between them.
FAILURES_IN_A_ROW: Final = 50
#: Failures that are kept with a job.
FAILURES_SHOWN: Final = 20
#: Seconds after which the process of a job that wrote nothing is taken for dead.
STALE_SECONDS: Final = 30.0
#: The owners that this process was.
_OWNERS: Final[set[str]] = set()


class JobRunning(EngageError):
    """Another job runs."""


class NotOursError(Exception):
    """Another process has taken the job over."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Job:
    """A replay of all letters that match a filter."""

    id: str
    workspace_id: str
    wanted: LetterFilter
    #: The type that letters of an earlier version get, see :mod:`engage.pipeline.replay`.
    operation: str | None = None
    new_ids: bool = False
    actor: Actor
    #: ``stopped``: after too many failures; ``message`` has the reason.
    state: Literal["running", "done", "cancelled", "stopped"] = "running"
    message: str | None = None
    #: Milliseconds since 1970 UTC.
    started_at: int
    updated_at: int
    #: How many letters matched when it began; ``None`` until they are counted.
    total: int | None = None
    stored: int = 0
    duplicates: int = 0
    failed: int = 0
    #: Failures since the last success.
    in_a_row: int = 0
    #: The first failures: ``letter``, ``code``, ``message``.
    failures: list[dict[str, str]] = dataclasses.field(default_factory=list)
    #: Where the page of letters begins that is being replayed, and the ids of its letters.
    cursor: str | None = None
    pending: list[str] = dataclasses.field(default_factory=list)
    #: The process that runs it; ``""``: none.
    owner: str = ""
    #: Whether it is to be cancelled.
    cancelling: bool = False

    @property
    def done(self) -> int:
        """The number of letters that were replayed, with and without success."""
        return self.stored + self.duplicates + self.failed

    @property
    def fraction(self) -> float | None:
        """The part that is done, from 0 to 1; ``None`` if it is unknown."""
        return None if self.total is None else min(1.0, self.done / max(self.total, 1))

    def count(self, result: Replayed) -> None:
        """Count a letter that was replayed; stop after too many failures in a row."""
        if result.outcome != "failed":
            self.in_a_row = 0
            if result.outcome == "stored":
                self.stored += 1
            else:
                self.duplicates += 1
            return
        self.failed += 1
        self.in_a_row += 1
        if len(self.failures) < FAILURES_SHOWN:
            failure = {"letter": result.letter_id, "code": result.code or ""}
            self.failures.append({**failure, "message": (result.message or "")[:500]})
        if self.in_a_row == FAILURES_IN_A_ROW:
            self.state = "stopped"
            self.message = f"{FAILURES_IN_A_ROW} letters in a row failed: {result.message}"[:500]

    def details(self) -> dict[str, Any]:
        """Return what the audit keeps of the job."""
        wanted = {n: v for n, v in dataclasses.asdict(self.wanted).items() if v is not None}
        return {
            "workspace": self.workspace_id,
            **wanted,
            "job": self.id,
            "state": self.state,
            "newIds": self.new_ids,
            "stored": self.stored,
            "duplicates": self.duplicates,
            "failed": self.failed,
        }

    @classmethod
    def read(cls, record: Record) -> Job | None:
        """Return the job in a record of kind :data:`JOB`; ``None`` if it cannot be read."""
        try:
            fields: dict[str, Any] = orjson.loads(record.body)
            known = {field.name for field in dataclasses.fields(cls)}
            values = {name: value for name, value in fields.items() if name in known}
            values["wanted"] = LetterFilter(**values["wanted"])
            values["actor"] = Actor(**values["actor"])
            job = cls(**values)
        except (ValueError, TypeError, KeyError, AttributeError):
            job = None
        return job if job is not None and job._is_possible() else None

    def _is_possible(self) -> bool:
        """Return whether the values have the right types."""
        numbers = [self.started_at, self.updated_at, self.stored, self.duplicates, self.failed]
        numbers += [self.in_a_row, self.total or 0]
        texts = [self.id, self.workspace_id, self.owner, self.actor.who, self.actor.origin]
        return (
            all(type(one) is int for one in numbers)
            and all(isinstance(one, str) for one in texts)
            and self.state in ("running", "done", "cancelled", "stopped")
            and (self.owner == "" or re.fullmatch(r".* [0-9]{1,9} \S+", self.owner) is not None)
            and all(isinstance(one, dict) for one in self.failures)
        )


class JobRecords:
    """Reads and writes jobs. A storage without records has them in memory only.

    :param clock: returns milliseconds since 1970 UTC.
    """

    def __init__(self, store: EventStore, *, clock: Callable[[], int]) -> None:
        self._store = store if isinstance(store, RecordStore) else None
        self._clock = clock
        #: This process: its host, its pid, and an id that no other process has.
        self.owner = f"{socket.gethostname()} {os.getpid()} {uuid7(clock())}"
        _OWNERS.add(self.owner)
        #: The version of the current record that this process wrote last.
        self._version = 0
        self._current: Job | None = None
        self._finished: list[Job] = []

    async def current(self) -> tuple[int, Job | None]:
        """Return the running or the last job, and the version of its record."""
        if self._store is None:
            return 0, self._current
        record = await self._store.get_record(JOB, "", CURRENT)
        return (0, None) if record is None else (record.version, Job.read(record))

    async def finished(self, limit: int) -> Sequence[Job]:
        """Return finished jobs, newest first."""
        if self._store is None:
            return self._finished[::-1][:limit]
        page = await self._store.list_records(JOB, "", limit=limit + 1, reverse=True)
        jobs = [Job.read(record) for record in page.items if record.id != CURRENT]
        return [job for job in jobs if job is not None][:limit]

    async def take(self, job: Job, version: int) -> bool:
        """Make this process the owner of a job; return whether nobody else was faster.

        :param version: of the record that was read before.
        """
        job.owner = self.owner
        taken = await self._put(CURRENT, job, version)
        if taken is not None:
            self._version = taken
        return taken is not None

    async def write(self, job: Job) -> None:
        """Write the state of the job of this process.

        :raises NotOursError: if another process has taken it over.
        """
        version = await self._put(CURRENT, job, self._version)
        while version is None:
            # Another process has asked to cancel it, or the last write was applied after all.
            found, stored = await self.current()
            if stored is None or (stored.id, stored.owner) != (job.id, self.owner):
                raise NotOursError
            job.cancelling = job.cancelling or stored.cancelling
            version = await self._put(CURRENT, job, found)
        self._version = version

    async def cancel(self, job: Job, version: int) -> bool:
        """Write that the job of another process is cancelled; return whether nobody was faster."""
        job.cancelling = True
        if self.abandoned(job):
            job.state = "cancelled"
        return await self._put(CURRENT, job, version) is not None

    async def archive(self, job: Job) -> None:
        """Keep a finished job under its id. Idempotent."""
        if self._store is not None:
            await self._put(job.id, job, None)
        elif job not in self._finished:
            self._finished.append(job)

    def abandoned(self, job: Job) -> bool:
        """Return whether the process of a running job has died, as far as this one can tell.

        Of its own jobs, the caller knows it.
        """
        if not job.owner or self._clock() - job.updated_at > STALE_SECONDS * 1000:
            return True
        host, pid, _ = job.owner.rsplit(" ", 2)
        if job.owner == self.owner or host != socket.gethostname() or os.name != "posix":
            return False
        if int(pid) == os.getpid():  # in a container, the process before had the same pid
            return job.owner not in _OWNERS
        return not _alive(int(pid))

    async def _put(self, name: str, job: Job, expected: int | None) -> int | None:
        job.updated_at = now = self._clock()
        if self._store is None:
            self._current = job if name == CURRENT else self._current
            return 1
        body = orjson.dumps(dataclasses.asdict(job))
        record = Record(kind=JOB, workspace_id="", id=name, body=body, at=now)
        return await self._store.put_record(record, expected_version=expected)


def _alive(pid: int) -> bool:
    """Return whether a process of this machine runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
