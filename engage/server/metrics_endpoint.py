# SPDX-License-Identifier: Apache-2.0
"""``/metrics`` for Prometheus, on an address of its own.

Of one process: its registry. Of several: the files that each writes into the folder that the parent
made; the parent adds them up.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from tornado.httpserver import HTTPServer
from tornado.web import Application, RequestHandler

from engage.http1.sockets import listen, url_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client import CollectorRegistry

    from engage.config import Config

__all__ = ["forget_process", "serve_metrics", "serve_shared_metrics"]


_log = logging.getLogger(__name__)


class _Metrics(RequestHandler):
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

    :return: call it to stop.
    :raises EngageError: the address is taken.
    """
    host, port = config.server.metrics_host, config.server.metrics_port
    assert port is not None
    sock = listen(host, port, keys="server.metrics_host, server.metrics_port")
    server = HTTPServer(Application([("/metrics", _Metrics, {"registry": registry})]))
    server.add_socket(sock)
    _log.info("metrics", extra={"url": f"{url_of(sock)}/metrics"})
    return server.stop


def serve_shared_metrics(config: Config) -> Callable[[], None]:
    """Serve the sum of what all processes wrote to ``PROMETHEUS_MULTIPROC_DIR``.

    :return: call it to stop.
    :raises EngageError: the address is taken.
    """
    from prometheus_client import CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector

    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return serve_metrics(config, registry)


def forget_process(pid: int) -> None:
    """Drop the gauges of a process that died; its counters go on counting."""
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        from prometheus_client.multiprocess import mark_process_dead

        mark_process_dead(pid)  # type: ignore[no-untyped-call]
