# SPDX-License-Identifier: Apache-2.0
"""``/readyz`` and ``/metrics`` of the loaders, at ``log.load_host`` and ``log.load_port``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tornado.httpserver import HTTPServer
from tornado.web import Application, RequestHandler

from engage.api import ConfigError
from engage.http1.sockets import listen, url_of
from engage.server.metrics_endpoint import MetricsHandler

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from engage.config import Config, LogConfig

__all__ = ["log_section", "serve_endpoints", "summary"]

_log = logging.getLogger(__name__)

#: Returns the state of each loader; an empty one is not known.
States = Callable[[], Sequence[Mapping[str, Any]]]


def log_section(config: Config) -> LogConfig:
    """Return ``[log]``.

    :raises ConfigError: if there is none.
    """
    if config.log is None:
        raise ConfigError(f"{config.path}: there is no [log] section, so there is nothing to load")
    return config.log


def summary(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of all loaders: the answer of ``/readyz``."""

    def all_of(name: str) -> str:
        available = bool(states) and all(state.get(name) == "available" for state in states)
        return "available" if available else "unavailable"

    return {
        "success": bool(states) and all(state.get("ready", False) for state in states),
        "storage": all_of("storage"),
        "log": all_of("log"),
        "loaders": len(states),
        # Partitions with a record of an unknown version.
        "paused": sorted({number for state in states for number in state.get("paused", ())}),
    }


class _Ready(RequestHandler):
    def initialize(self, states: States) -> None:
        self._states = states

    def get(self) -> None:
        answer = summary(self._states())
        self.set_status(200 if answer["success"] else 503)
        self.set_header("Cache-Control", "no-store")
        self.finish(answer)

    head = get


def serve_endpoints(
    config: LogConfig, registry: CollectorRegistry, states: States
) -> Callable[[], None]:
    """Serve both in the running event loop.

    :param registry: has the metrics.
    :return: a function that stops it.
    :raises EngageError: if the address cannot be used.
    """
    assert config.load_port is not None
    sock = listen(config.load_host, config.load_port, keys="log.load_host, log.load_port")
    routes: list[Any] = [
        ("/metrics", MetricsHandler, {"registry": registry}),
        ("/readyz", _Ready, {"states": states}),
    ]
    server = HTTPServer(Application(routes))
    server.add_socket(sock)
    _log.info("metrics", extra={"url": f"{url_of(sock)}/metrics"})
    return server.stop
