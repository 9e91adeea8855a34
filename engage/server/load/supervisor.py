# SPDX-License-Identifier: Apache-2.0
"""The parent of the loaders: starts them, replaces those that die, stops them.

It answers ``/readyz`` from their reports of each second, and serves the sum of their metrics.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from engage.monitoring.prometheus import shared_registry
from engage.server.child import Setup
from engage.server.load.endpoints import log_section, serve_endpoints
from engage.server.metrics_endpoint import SHARED_FOLDER_VARIABLE
from engage.server.supervisor import Supervisor

if TYPE_CHECKING:
    from engage.api import Helper
    from engage.config import Config

__all__ = ["LoadSupervisor"]

_log = logging.getLogger(__name__)

#: Seconds after which a loader that reports nothing is not ready: its event loop hangs.
STALE: Final = 10.0


class LoadSupervisor(Supervisor):
    """Keeps ``config.log.loaders`` loaders running.

    :param config: with ``[log]``.
    :param helper: see :class:`Supervisor`.
    """

    what: ClassVar[str] = "loader"

    def __init__(self, config: Config, secrets: tuple[str, ...], helper: Helper | None) -> None:
        self._settings = log_section(config)
        super().__init__(config, None, secrets, count=self._settings.loaders, helper=helper)

    def _open_services(self, stack: contextlib.ExitStack) -> None:
        if self._settings.load_port is None:
            return
        registry = shared_registry(os.environ[SHARED_FOLDER_VARIABLE])
        stack.callback(serve_endpoints(self._settings, registry, self._states))

    def _states(self) -> Sequence[Mapping[str, Any]]:
        """Return the states of all loaders that should run."""
        if self._stopping.is_set():
            return []
        oldest = time.monotonic() - STALE
        states: list[Mapping[str, Any]] = [{}] * self._count
        for child in self._children:
            if child.state is not None and child.state[0] >= oldest:
                states[child.setup.number] = child.state[1]
        return states

    def _announce(self) -> None:
        extra = {"group": self._settings.group, "pid": os.getpid(), "loaders": self._count}
        _log.info("loading", extra=extra)

    def _setup(self, number: int) -> Setup:
        return Setup(
            self._config,
            number,
            self._server_running,
            self._secrets,
            loads=True,
            restarts={} if number else self._restarts,
        )
