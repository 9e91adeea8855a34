# SPDX-License-Identifier: Apache-2.0
"""``engage console``: the console without a server beside it."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING

from engage.api import EngageError
from engage.console.links import hash_of
from engage.console.process import ConsoleProcess
from engage.monitoring import logs
from engage.server.announcement import announce, token_for_terminal
from engage.server.serve import secrets_of
from engage.server.worker import handle_signals

if TYPE_CHECKING:
    from engage.config import Config
    from engage.registry import Registry

__all__ = ["serve_console"]

_log = logging.getLogger(__name__)


def serve_console(config: Config, registry: Registry) -> int:
    """Run the console until a signal ends it; a second signal ends it at once.

    :return: the exit status: 1 if the console cannot start; one line in the log gives the reason.
    """
    secrets = tuple(secrets_of(config, registry))
    logs.configure(config.logging.level, config.logging.format, secrets=secrets)
    try:
        return asyncio.run(_run(config, registry))
    except (EngageError, OSError) as error:
        _log.error("the console cannot start: %s", error)
        return 1
    finally:
        logs.flush()


async def _run(config: Config, registry: Registry) -> int:
    token = token_for_terminal(config)
    process = ConsoleProcess(
        config,
        registry,
        link_hash=None if token is None else hash_of(token),
        ready=lambda url: announce(url, token),
    )
    stopping = False

    def on_signal() -> None:
        nonlocal stopping
        if stopping:
            logs.flush()
            os._exit(1)
        stopping = True
        process.stop()

    handle_signals(on_signal)
    return await process.run()
