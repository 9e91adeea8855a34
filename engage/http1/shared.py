# SPDX-License-Identifier: Apache-2.0
"""Shared by all connections of a process: the application, the bounds and the capacity."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import time
from collections.abc import Callable, Mapping
from email.utils import formatdate
from typing import TYPE_CHECKING, Final

from engage.http1.capacity import Capacity
from engage.monitoring import logs
from engage.monitoring.sampler import Refusal

if TYPE_CHECKING:
    from tornado.httputil import HTTPServerConnectionDelegate

    from engage.config import Config
    from engage.errors import ApiError
    from engage.monitoring.metrics import Metrics

__all__ = ["Bounds", "SharedState"]

#: Seconds of one turn of the event loop that deferred work of all connections takes together.
DEFERRED_SECONDS: Final = 0.005


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The limits of one process; sizes in bytes, times in seconds. See :mod:`engage.config`."""

    header_bytes: int
    pipelined_bytes: int
    body_bytes: int
    inflight_bytes: int
    head_timeout: float
    request_timeout: float
    idle_timeout: float
    max_connections: int

    @classmethod
    def of(cls, config: Config) -> Bounds:
        """Return the bounds that a config sets."""
        return cls(
            header_bytes=config.limits.header_bytes,
            pipelined_bytes=config.limits.header_bytes,
            body_bytes=config.limits.body_bytes,
            inflight_bytes=config.limits.inflight_bytes,
            head_timeout=config.server.head_timeout,
            request_timeout=config.server.request_timeout,
            idle_timeout=config.server.idle_timeout,
            max_connections=config.server.max_connections,
        )


class SharedState:
    """State of all connections. Made inside a running event loop.

    :param application: handles the requests.
    :param cors: path and origin → the headers that let a page's script read an answer that no
        handler gives.
    """

    def __init__(
        self,
        application: HTTPServerConnectionDelegate,
        bounds: Bounds,
        metrics: Metrics,
        cors: Callable[[str, str | None], Mapping[str, str]],
    ) -> None:
        #: The event loop. ``get_running_loop()`` is a system call in Python 3.11.
        self.loop = asyncio.get_running_loop()
        self.application = application
        self.bounds = bounds
        self.cors = cors
        #: All connections and the bytes they hold.
        self.capacity = Capacity(bounds.max_connections, bounds.inflight_bytes, metrics)
        #: Whether every answer is the last of its connection.
        self.draining = False
        #: A future that is done: nothing waits until a small answer is written.
        self.done: asyncio.Future[None] = self.loop.create_future()
        self.done.set_result(None)
        self._metrics = metrics
        #: In the order in which it was deferred; the same work is called once.
        self._deferred: collections.OrderedDict[Callable[[], None], None] = (
            collections.OrderedDict()
        )
        self._running_deferred = False
        self._second = 0
        self._date = ""

    def defer(self, work: Callable[[], None]) -> None:
        """Call ``work`` in a later turn of the event loop, after calls that were deferred before.

        However many connections defer work, a turn takes :data:`DEFERRED_SECONDS` of it. With
        ``call_soon``, each connection would do its work in the same turn.
        """
        if not self._deferred and not self._running_deferred:
            asyncio.get_running_loop().call_soon(self._run_deferred)
        self._deferred[work] = None

    def _run_deferred(self) -> None:
        end = time.monotonic() + DEFERRED_SECONDS
        self._running_deferred = True
        try:
            while self._deferred and time.monotonic() < end:
                work, _ = self._deferred.popitem(last=False)
                work()
        finally:
            self._running_deferred = False
            if self._deferred:
                asyncio.get_running_loop().call_soon(self._run_deferred)

    def date(self) -> str:
        """Return the line of the header ``Date``; it is formatted once a second."""
        now = int(time.time())
        if now != self._second:
            self._second = now
            self._date = f"Date: {formatdate(now, usegmt=True)}\r\n"
        return self._date

    def refused(self, error: ApiError | None, request_id: str) -> None:
        """Count and log an answer that no handler gave.

        :param error: ``None`` if the bytes were not HTTP.
        """
        status = 400 if error is None else error.status
        self._metrics.request("unknown", status, 0.0)
        logs.log_request(
            request_id=request_id,
            method="OTHER",
            route="unknown",
            status=status,
            seconds=0.0,
            code="invalid_request" if error is None else error.code,
        )
        self._metrics.refused(
            Refusal(
                reason="invalid_request" if error is None else error.code,
                status=status,
                route="unknown",
                message="the request is not HTTP" if error is None else error.message,
            )
        )
