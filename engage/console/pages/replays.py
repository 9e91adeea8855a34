# SPDX-License-Identifier: Apache-2.0
"""``/replays``: the progress of a replay of many letters, and its result."""

from __future__ import annotations

from tornado.web import HTTPError

from engage.console.base import ConsoleHandler
from engage.console.display.formats import number
from engage.pipeline.bulk_replay import BulkReplay

__all__ = ["ReplaysHandler"]


def counts_of(replay: BulkReplay) -> str:
    """Return the progress of a replay, in a sentence."""
    if replay.state == "done" and not replay.total:
        return "No rejected event matched."
    of = "" if replay.total is None else f", of {number(replay.total)}"
    return (
        f"{number(replay.stored)} stored, {number(replay.duplicates)} were stored already,"
        f" {number(replay.failed)} failed{of}."
    )


def status_of(replay: BulkReplay) -> tuple[str, str]:
    """Return the class of a replay's status, and its words."""
    if replay.state == "done" and replay.failed:
        return "bad", f"{number(replay.failed)} failed"
    if replay.state == "done" and not replay.total:
        return "off", "nothing matched"
    kinds = {"running": "ok", "done": "ok", "cancelled": "off", "stopped": "bad"}
    return kinds[replay.state], replay.state


class ReplaysHandler(ConsoleHandler):
    """The replay that runs, or the last one of this process."""

    async def get(self) -> None:
        """Show the replay; a script gets its progress."""
        replay = self.console.replay
        running = replay is not None and replay.state == "running"
        if self.wants_json:
            self.json(
                {
                    "running": running,
                    "done": 0 if replay is None else replay.done,
                    "total": None if replay is None else replay.total,
                    "counts": "" if replay is None else counts_of(replay),
                }
            )
            return
        self.page(
            "replays.html",
            title="Replays",
            nav="rejected",
            replay=replay,
            running=running,
            counts_of=counts_of,
            status_of=status_of,
        )

    async def post(self) -> None:
        """Cancel the replay that runs."""
        if self.get_body_argument("action", "") != "cancel":
            raise HTTPError(400, reason="This page has no such action")
        replay = self.console.replay
        if replay is not None and replay.state == "running":
            replay.cancel()
            await self.record_audit("replay-cancelled")
        self.go("replays")
