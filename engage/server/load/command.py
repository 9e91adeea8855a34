# SPDX-License-Identifier: Apache-2.0
"""``engage load``: the processes that write the records of the log to the storage.

This process is the parent (:mod:`engage.server.load.supervisor`). Windows has no such children:
there this process loads itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
import tempfile
from typing import TYPE_CHECKING

from engage.api import EngageError
from engage.monitoring import logs
from engage.server.load.endpoints import log_section
from engage.server.load.process import LoaderProcess
from engage.server.load.supervisor import LoadSupervisor
from engage.server.metrics_endpoint import SHARED_FOLDER_VARIABLE
from engage.server.serve import secrets_of
from engage.server.worker import new_event_loop

if TYPE_CHECKING:
    from engage.api import Helper
    from engage.config import Config
    from engage.registry import Registry

__all__ = ["load"]

_log = logging.getLogger(__name__)


def load(config: Config, registry: Registry) -> int:
    """Load until a signal ends it.

    SIGTERM and SIGINT start the drain. A second signal ends the process at once with status 1.

    :return: the exit status: 0 after a drain; 1 if loading cannot start (one line in the log gives
        the reason), if loaders die too often, or if a loader had to be killed.
    """
    secrets = tuple(secrets_of(config, registry))
    process = "" if sys.platform == "win32" else "supervisor"
    logging_ = config.logging
    logs.configure(logging_.level, logging_.format, secrets=secrets, process=process)
    for warning in registry.warnings(config):
        _log.warning("%s", warning)
    try:
        if sys.platform == "win32":
            return _run_here(config, registry)
        return _supervise(config, secrets, registry.make_storage(config).helper())
    except (EngageError, OSError) as error:
        _log.error("cannot start: %s", error)
        return 1
    finally:
        logs.flush()


def _run_here(config: Config, registry: Registry) -> int:
    """Load in this process."""
    if log_section(config).loaders > 1:
        raise EngageError("log.loaders: must be 1 on Windows")
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(LoaderProcess(config, registry).run())


def _supervise(config: Config, secrets: tuple[str, ...], helper: Helper | None) -> int:
    folder = None
    if log_section(config).load_port is not None:
        # As for the workers of a server: see engage.server.serve.
        folder = tempfile.mkdtemp(prefix="engage-metrics-")
        os.environ[SHARED_FOLDER_VARIABLE] = folder
    try:
        with asyncio.Runner() as runner:
            return runner.run(LoadSupervisor(config, secrets, helper).run())
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
