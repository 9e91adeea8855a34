# SPDX-License-Identifier: Apache-2.0
"""Keeps the console running beside the workers.

The server does not depend on it: however often the console dies, it is only started again, after a
pause that grows. If it cannot start, for example because its port is taken, the reason is logged
once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Final

from engage.console.sign_in.links import hash_of
from engage.server.announcement import announce, token_for_terminal
from engage.server.child import ConsoleSetup, Setup
from engage.server.children import Child, start_child

if TYPE_CHECKING:
    from engage.config import Config

__all__ = ["ConsoleKeeper"]

_log = logging.getLogger(__name__)

#: Seconds before the first restart. Each early death doubles the pause, up to the maximum.
RESTART_PAUSE: Final = 1.0
MAX_RESTART_PAUSE: Final = 60.0
#: A console that lived longer than this did not die early.
EARLY_SECONDS: Final = 60.0


class ConsoleKeeper:
    """Runs the console in a child process until :meth:`stop` is called.

    :param secrets: strings that the console masks in the log.
    :param server_started: ``time.monotonic()`` when the server started.
    """

    def __init__(self, config: Config, secrets: tuple[str, ...], server_started: float) -> None:
        self._config = config
        self._server_started = server_started
        self._secrets = secrets
        self._child: Child | None = None
        self._stopping = asyncio.Event()
        self._announced = False
        #: Why the console could not start, as it was logged.
        self._logged: str | None = None

    def stop(self) -> None:
        """Let the console finish its requests and exit."""
        self._stopping.set()
        if self._child is not None:
            self._child.drain()

    def kill(self) -> None:
        """Kill the console."""
        if self._child is not None:
            self._child.kill()

    async def run(self) -> None:
        """Run the console, and start it again when it dies."""
        early_deaths = 0
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                await self._run_once()
            except OSError as error:  # Out of processes, memory or file descriptors.
                self._log_once(f"the console could not be started: {error}")
            if self._stopping.is_set():
                return
            lived = time.monotonic() - began
            early_deaths = 1 if lived > EARLY_SECONDS else early_deaths + 1
            pause = min(RESTART_PAUSE * 2 ** min(early_deaths - 1, 10), MAX_RESTART_PAUSE)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stopping.wait()

    async def _run_once(self) -> None:
        # The first console gets a link for the person who sits at the terminal.
        token = None if self._announced else token_for_terminal(self._config)
        console = ConsoleSetup(link_hash=None if token is None else hash_of(token))
        child = self._child = await start_child(
            Setup(
                self._config,
                0,
                server_running=True,
                server_started=self._server_started,
                secrets=self._secrets,
                console=console,
            )
        )
        if self._stopping.is_set():  # It began while the child was started.
            child.drain()
        if await child.started is True:
            self._logged = None
            self._announced = True
            announce(child.url or "", token)
        status = await child.process.wait()
        self._child = None
        child.writer.close()
        if self._stopping.is_set():
            return
        if child.reason is not None:
            self._log_once(f"the console cannot start: {child.reason}")
        else:
            _log.error(
                "the console died with status %d; it is started again",
                status,
                extra={"pid": child.process.pid},
            )

    def _log_once(self, reason: str) -> None:
        if reason != self._logged:
            self._logged = reason
            _log.error("%s", reason)
