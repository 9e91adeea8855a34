# SPDX-License-Identifier: Apache-2.0
"""Run the server: one listening socket, and the processes that answer requests on it.

This process is the parent (:mod:`engage.server.supervisor`): it holds the socket, starts the helper
process of the storage, the workers, which inherit the socket, and the console, replaces those that
die, and serves the metrics of several workers. The workers share only the socket, the number of
connections that each has, and the store.

Windows has no such children: there this process answers the requests (:mod:`engage.server.worker`),
and the console is started by hand.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import shutil
import sys
import tempfile
from typing import TYPE_CHECKING

from engage.api import ConfigError, EngageError
from engage.config.schema_check import strings
from engage.http1.sockets import listen, own_address
from engage.monitoring import logs
from engage.people.erase import obstacle
from engage.server.metrics_endpoint import SHARED_FOLDER_VARIABLE
from engage.server.supervisor import Supervisor
from engage.server.worker import Worker, new_event_loop

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from engage.api import Helper
    from engage.config import Config
    from engage.registry import Registry

__all__ = ["check_ports", "secrets_of", "serve"]

_log = logging.getLogger(__name__)


def serve(config: Config, registry: Registry) -> int:
    """Run the server until a signal ends it.

    SIGTERM and SIGINT start the drain. A second signal ends the process at once with status 1.

    :return: the exit status: 0 after a drain; 1 if the server cannot start (one line in the log
        gives the reason), if workers die too often, or if a worker had to be killed.
    """
    secrets = tuple(secrets_of(config, registry))
    process = "" if sys.platform == "win32" else "supervisor"
    logging_ = config.logging
    logs.configure(logging_.level, logging_.format, secrets=secrets, process=process)
    for warning in registry.warnings(config):
        _log.warning("%s", warning)
    try:
        check_ports(config)
        _raise_open_file_limit(config.server.max_connections)
        sock = listen(config.server.host, config.server.port)
        # The console shows the port, and sends test events to it.
        server = dataclasses.replace(config.server, port=sock.getsockname()[1])
        config = dataclasses.replace(config, server=server)
        try:
            storage = registry.make_storage(config)
            if problem := obstacle(config):
                chosen = config.erasures.key is None
                _log.log(logging.INFO if chosen else logging.WARNING, "%s", problem)
            if sys.platform == "win32":
                return _run_here(config, registry, sock)
            helper = storage.helper()
            return _supervise(config, sock, secrets, helper)
        finally:
            sock.close()
    except (EngageError, OSError) as error:
        _log.error("cannot start: %s", error)
        return 1
    finally:
        logs.flush()


def check_ports(config: Config) -> list[str]:
    """Check that no two parts of a server listen on one port.

    :return: a warning for each host that this machine does not have; it may not be the one that
        the server runs on.
    :raises ConfigError: if two parts have the same port.
    """
    server, console = config.server, config.console
    listeners = [("server.", server.host, server.port)]
    if server.metrics_port is not None:
        listeners.append(("server.metrics_", server.metrics_host, server.metrics_port))
    if console is not None:
        listeners.append(("console.", console.host, console.port))
    warnings: list[str] = []
    ports: list[tuple[str, str, int]] = []
    for key, host, port in listeners:
        try:
            address = own_address(host, keys=f"{key}host")
        except EngageError as error:
            warnings.append(str(error))
            continue
        for other, taken, its_port in ports:
            if port == its_port != 0 and _overlap(address, taken):
                same = f"{key}port: is the same port as {other}port"
                raise ConfigError(f"{config.path}: {same}; use a different one")
        ports.append((key, address, port))
    return warnings


def _overlap(host: str, other: str) -> bool:
    """Return whether two sockets of these addresses cannot have one port."""
    # :: also takes the connections over IPv4.
    ipv4 = ":" not in host + other
    return host == other or "::" in (host, other) or (ipv4 and "0.0.0.0" in (host, other))  # noqa: S104


def _raise_open_file_limit(connections: int) -> None:
    """Raise the limit of open files of this process and its children, as connections need it."""
    if sys.platform == "win32":
        return
    import resource

    # The others are for the store, the log, and connections that are answered "too many".
    files = connections + 512
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= files:
        return
    possible = files if hard == unlimited else min(files, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
    except (OSError, ValueError):  # macOS has a lower limit that it does not report.
        possible = soft
    if possible < files:
        _log.warning(
            "server.max_connections is %d, but the system allows only %d open files, so there will"
            " be fewer connections (ulimit -n, LimitNOFILE)",
            connections,
            possible,
        )


def _run_here(config: Config, registry: Registry, sock: socket.socket) -> int:
    """Answer the requests in this process."""
    if config.server.workers > 1:
        raise EngageError("server.workers: must be 1 on Windows")
    if config.console is not None:
        _log.warning("on Windows, start the console in a second window: engage console")
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(Worker(config, registry, sock).run())


def _supervise(
    config: Config, sock: socket.socket, secrets: tuple[str, ...], helper: Helper | None
) -> int:
    folder = None
    if config.server.metrics_port is not None and config.server.workers > 1:
        # A new folder, so that metrics of an earlier run are not counted. The variable must be set
        # before prometheus_client is imported, which reads it once.
        folder = tempfile.mkdtemp(prefix="engage-metrics-")
        os.environ[SHARED_FOLDER_VARIABLE] = folder
    try:
        with asyncio.Runner() as runner:
            count = config.server.workers
            supervisor = Supervisor(config, sock, secrets, count=count, helper=helper)
            return runner.run(supervisor.run())
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def secrets_of(config: Config, registry: Registry) -> Iterator[str]:
    """Yield the strings that must not appear in a log line, not even within an error of a library.

    :param config: the config whose keys and secrets are yielded.
    :param registry: knows which options of plugins are secret.
    """
    for workspace in config.workspaces:
        yield from (*workspace.subscription_secrets, *workspace.identity_secrets)
        for write_key in workspace.write_keys:
            yield write_key.key
    for kind, secret in registry.secrets(config):
        # An error of a storage is about a host. So only the password of its URL is masked, below.
        if kind != "storage" or "://" not in secret:
            yield secret
    for _, text in strings(config.storage.options):
        user_info, at, _ = text.partition("://")[2].rpartition("@")
        if at:
            yield user_info.partition(":")[2]
