# SPDX-License-Identifier: Apache-2.0
"""``/metrics`` for Prometheus, on a separate address.

A single process serves its registry. With several workers, each writes its numbers to files in a
folder that the parent created, and the parent serves their sum.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Final

from tornado.httpserver import HTTPServer
from tornado.web import Application, RequestHandler

from engage.http1.sockets import listen, url_of
from engage.monitoring.prometheus import shared_registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client import CollectorRegistry

    from engage.config import Config

__all__ = [
    "SHARED_FOLDER_VARIABLE",
    "MetricsHandler",
    "forget_process",
    "serve_metrics",
    "serve_shared_metrics",
]

_log = logging.getLogger(__name__)

#: The environment variable in which prometheus_client expects the folder that processes share.
SHARED_FOLDER_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"


class MetricsHandler(RequestHandler):
    """Answers with the metrics of a registry."""

    def initialize(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def get(self) -> None:
        from prometheus_client.exposition import choose_encoder

        encode, content_type = choose_encoder(self.request.headers.get("Accept", ""))
        body = encode(self._registry)
        self.set_header("Content-Type", content_type)
        self.finish(body)


def serve_metrics(config: Config, registry: CollectorRegistry) -> Callable[[], None]:
    """Serve the metrics in ``registry`` in the running event loop.

    :return: a function that stops it.
    :raises EngageError: if the address cannot be used.
    """
    host, port = config.server.metrics_host, config.server.metrics_port
    assert port is not None
    sock = listen(host, port, keys="server.metrics_host, server.metrics_port")
    server = HTTPServer(Application([("/metrics", MetricsHandler, {"registry": registry})]))
    server.add_socket(sock)
    _log.info("metrics", extra={"url": f"{url_of(sock)}/metrics"})
    return server.stop


def serve_shared_metrics(config: Config) -> Callable[[], None]:
    """Serve the sum of the metrics that all processes wrote to the shared folder.

    :return: a function that stops it.
    :raises EngageError: if the address cannot be used.
    """
    return serve_metrics(config, shared_registry(os.environ[SHARED_FOLDER_VARIABLE]))


def forget_process(pid: int) -> None:
    """Drop the gauges of a process that died; its counters remain part of the sum."""
    if SHARED_FOLDER_VARIABLE in os.environ:
        from prometheus_client.multiprocess import mark_process_dead

        mark_process_dead(pid)  # type: ignore[no-untyped-call]
