# SPDX-License-Identifier: Apache-2.0
"""Runs engage: one listening socket and the processes that answer on it.

With one worker everything happens in this process. With more, this process is only the parent: it
holds the socket, starts the workers, which inherit it, replaces those that die
(:mod:`engage.server.supervisor`), and shows the metrics of all. What a worker does is in
:mod:`engage.server.worker`; the workers share nothing but the socket and the store.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
import tempfile
from typing import TYPE_CHECKING

from engage import logs
from engage.api import EngageError
from engage.config.schema_check import strings
from engage.http1.sockets import listen
from engage.server.supervisor import Supervisor
from engage.server.worker import Worker, new_event_loop

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from engage.config import Config
    from engage.registry import Registry

__all__ = ["secrets_of", "serve"]

_log = logging.getLogger(__name__)


def serve(config: Config, registry: Registry) -> int:
    """Run the server until a signal ends it.

    SIGTERM or SIGINT: drain and return. A second one: exit at once, with status 1.

    :return: the exit status: 0 after a drain; 1 when the server could not start (one line in the
        log says why), when workers died too often, or when one had to be killed.
    """
    secrets = tuple(secrets_of(config, registry))
    logs.configure(config.logging.level, config.logging.format, secrets=secrets)
    try:
        _allow_connections(config.server.max_connections)
        sock = listen(config.server.host, config.server.port)
        try:
            if config.server.workers == 1:
                with asyncio.Runner(loop_factory=new_event_loop) as runner:
                    return runner.run(Worker(config, registry, sock).run())
            if sys.platform == "win32":
                raise EngageError("server.workers: only 1 is possible on Windows")
            return _supervise(config, sock, secrets)
        finally:
            sock.close()
    except (EngageError, OSError) as error:
        _log.error("cannot start: %s", error)
        return 1
    finally:
        logs.flush()


def _allow_connections(count: int) -> None:
    """Raise this process's limit of open files, and its children's, to what connections need."""
    if sys.platform == "win32":
        return
    import resource

    # Beside the connections: those that are told that there are too many, the store, the log.
    wanted = count + 512
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= wanted:
        return
    possible = wanted if hard == unlimited else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
    except (OSError, ValueError):  # macOS has a lower limit that it does not tell.
        possible = soft
    if possible < wanted:
        _log.warning(
            "server.max_connections is %d, but the system allows only %d open files"
            " (ulimit -n, LimitNOFILE)",
            count,
            possible,
        )


def _supervise(config: Config, sock: socket.socket, secrets: tuple[str, ...]) -> int:
    folder = None
    if config.server.metrics_port is not None:
        # Fresh, so that nothing of an earlier run is counted, and known to everybody before anybody
        # imports prometheus_client, which looks at it once.
        folder = tempfile.mkdtemp(prefix="engage-metrics-")
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
    try:
        with asyncio.Runner() as runner:
            return runner.run(Supervisor(config, sock, secrets).run())
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def secrets_of(config: Config, registry: Registry) -> Iterator[str]:
    """:return: what must not be in a log line, not even inside somebody else's error text."""
    for workspace in config.workspaces:
        yield from workspace.subscription_secrets
        for write_key in workspace.write_keys:
            yield write_key.key
    for kind, secret in registry.secrets(config):
        # Which host it was is what a storage's error is about: of its URL only the password goes.
        if kind != "storage" or "://" not in secret:
            yield secret
    for _, text in strings(config.storage.options):
        user_info, at, _ = text.partition("://")[2].rpartition("@")
        if at:
            yield user_info.partition(":")[2]
