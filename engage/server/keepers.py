# SPDX-License-Identifier: Apache-2.0
"""Keeps the console and the helper process of the storage running beside the workers.

The server does not end with them: however often one dies, it is only started again, after a pause
that grows. If it cannot start, for example because its port is taken, the reason is logged once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any, ClassVar, Final

from engage.console.sign_in.links import hash_of
from engage.server.announcement import announce, token_for_terminal
from engage.server.child import ConsoleSetup, Setup
from engage.server.children import Child, start_child

__all__ = ["ConsoleKeeper", "HelperKeeper"]

_log = logging.getLogger(__name__)

#: A process that lived longer than this, in seconds, did not die early.
EARLY_SECONDS: Final = 60.0


class Keeper:
    """Runs a child process until :meth:`stop` is called.

    :param setup: what it is to do.
    :param restarted: called with the kind of the process when it is started again.
    """

    #: What it is called in the log, and in the metrics.
    what: ClassVar[str]
    kind: ClassVar[str]
    #: Seconds before the first restart. Each early death doubles the pause, up to the maximum. A
    #: process that was killed because it hung did not die.
    restart_pause: ClassVar[float]
    max_restart_pause: ClassVar[float]

    def __init__(self, setup: Setup, restarted: Callable[[str], None] = lambda _: None) -> None:
        self._setup = setup
        self._restarted = restarted
        self._child: Child | None = None
        self._stopping = asyncio.Event()
        #: Why it could not start, as it was logged.
        self._logged: str | None = None

    def stop(self) -> None:
        """Let the process finish its work and exit."""
        self._stopping.set()
        if self._child is not None:
            self._child.drain()

    def kill(self) -> None:
        """Kill the process."""
        if self._child is not None:
            self._child.kill()

    async def run(self) -> None:
        """Run the process, and start it again when it dies."""
        early_deaths = 0
        while not self._stopping.is_set():
            began = time.monotonic()
            hung = False
            try:
                hung = await self._run_once()
            except OSError as error:  # Out of processes, memory or file descriptors.
                self._log_once(f"{self.what} could not be started: {error}")
            if self._stopping.is_set():
                return
            lived = time.monotonic() - began
            early_deaths = 1 if hung or lived > EARLY_SECONDS else early_deaths + 1
            pause = min(self.restart_pause * 2 ** min(early_deaths - 1, 10), self.max_restart_pause)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stopping.wait()
                    return
            self._restarted(self.kind)

    def _next_setup(self) -> Setup:
        """Return what the next process is to do."""
        return self._setup

    def _started(self, *report: Any) -> None:
        """Handle the report of a process that it is ready.

        :param report: what it added.
        """

    async def _run_once(self) -> bool:
        """Run one process, and return whether it was killed because it hung."""
        child = self._child = await start_child(self._next_setup())
        if self._stopping.is_set():  # It began while the child was started.
            child.drain()
        if await child.started is True:
            self._logged = None
            self._started(*child.report)
        status = await child.process.wait()
        self._child = None
        child.writer.close()
        if self._stopping.is_set():
            return False
        if child.reason is not None:
            self._log_once(f"{self.what} cannot start: {child.reason}")
        else:
            _log.error(
                "%s died with status %d; it is started again",
                self.what,
                status,
                extra={"pid": child.process.pid},
            )
        return child.hung

    def _log_once(self, reason: str) -> None:
        if reason != self._logged:
            self._logged = reason
            _log.error("%s", reason)


class HelperKeeper(Keeper):
    """Runs the helper process of the storage."""

    what = "the helper process"
    kind = "helper"
    restart_pause = 0.1
    max_restart_pause = 5.0


class ConsoleKeeper(Keeper):
    """Runs the console."""

    what = "the console"
    kind = "console"
    restart_pause = 1.0
    max_restart_pause = 60.0
    #: The token of the link of the process that was started last.
    _token: str | None = None
    _announced = False

    def _next_setup(self) -> Setup:
        # The first console gets a link for the person who sits at the terminal.
        self._token = None if self._announced else token_for_terminal(self._setup.config)
        link_hash = None if self._token is None else hash_of(self._token)
        return dataclasses.replace(self._setup, console=ConsoleSetup(link_hash=link_hash))

    def _started(self, *report: Any) -> None:
        url, available = report
        self._announced = True
        announce(self._setup.config, url, self._token, available=available)
