# SPDX-License-Identifier: Apache-2.0
"""``/jobs``: replays of many letters: the one that runs, and those that have ended."""

from __future__ import annotations

from tornado.web import HTTPError

from engage.api import StorageUnavailable
from engage.console.base import ConsoleHandler, Outage
from engage.console.job_records import Job

__all__ = ["JobsHandler"]


class JobsHandler(ConsoleHandler):
    """The jobs."""

    async def get(self) -> None:
        """Show the jobs."""
        jobs = self.console.jobs
        current: Job | None = None
        finished: list[Job] = []
        try:
            current = await jobs.current()
            finished = list(await jobs.finished())
        except StorageUnavailable as error:
            self.outage = Outage(str(error), self.console.reader.last_good)
        if current is not None:
            finished = [job for job in finished if job.id != current.id]
        self.page(
            "jobs.html",
            title="Replays",
            nav="rejected",
            current=current,
            finished=finished,
            progress=current is not None and current.state == "running",
        )

    async def post(self) -> None:
        """Cancel the running job."""
        if self.get_body_argument("action", "") != "cancel":
            raise HTTPError(400, reason="This page has no such action")
        if await self.console.jobs.cancel():
            await self.record_audit("replay-cancelled")
        self.go("jobs", workspace=self.workspace.id)
