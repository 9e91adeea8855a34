# SPDX-License-Identifier: Apache-2.0
"""``/jobs``: replays of many letters: the one that runs, and those that have ended."""

from __future__ import annotations

from tornado.web import HTTPError

from engage.api import StorageUnavailable
from engage.console.base import ConsoleHandler
from engage.console.formats import number
from engage.console.job_records import Job

__all__ = ["JobsHandler"]


def counts_of(job: Job) -> str:
    """Return what a job has done, in a sentence."""
    of = "" if job.total is None else f", of {number(job.total)}"
    return (
        f"{number(job.stored)} stored, {number(job.duplicates)} were stored already,"
        f" {number(job.failed)} failed{of}."
    )


class JobsHandler(ConsoleHandler):
    """The jobs."""

    async def get(self) -> None:
        """Show the jobs; a script gets the progress of the current one."""
        jobs = self.console.jobs
        current: Job | None = None
        finished: list[Job] = []
        try:
            current = await jobs.current()
            finished = list(await jobs.finished())
        except StorageUnavailable as error:
            self.show_outage(str(error))
        running = current is not None and current.state == "running"
        if self.wants_json:
            if self.outage is not None:
                self.set_status(503)
            self.json(
                {
                    "running": running,
                    "done": 0 if current is None else current.done,
                    "total": None if current is None else current.total,
                    "counts": "" if current is None else counts_of(current),
                }
            )
            return
        if current is not None:
            finished = [job for job in finished if job.id != current.id]
        self.page(
            "jobs.html",
            title="Replays",
            nav="rejected",
            current=current,
            finished=finished,
            progress=running,
            counts_of=counts_of,
        )

    async def post(self) -> None:
        """Cancel the running job."""
        if self.get_body_argument("action", "") != "cancel":
            raise HTTPError(400, reason="This page has no such action")
        if await self.console.jobs.cancel():
            await self.record_audit("replay-cancelled")
        self.go("jobs", workspace=self.workspace.id)
