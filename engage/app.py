# SPDX-License-Identifier: Apache-2.0
"""Composes a server from a config and the installed plugins. This is the only place that does.

:func:`build` makes an :class:`App`, which serves on any listening socket it is given.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from engage.api import StorageError
from engage.deliveries.fetcher import Fetcher
from engage.deliveries.receive import Deliveries
from engage.errors import Limit
from engage.handlers.cors import CorsPolicy
from engage.handlers.ingestion import Services
from engage.handlers.routes import Router
from engage.http1.listener import Listener
from engage.http1.shared import Bounds
from engage.monitoring.metrics import Metrics
from engage.pipeline.auth import Authenticator
from engage.pipeline.clock import Clock
from engage.pipeline.conflicts import Conflicts
from engage.pipeline.explain import Explainer
from engage.pipeline.ingest import Ingest
from engage.pipeline.keys import KeyTable
from engage.pipeline.observers import Observers
from engage.pipeline.pipeline import Pipeline
from engage.pipeline.replay import Replays
from engage.pipeline.transforms import Transforms
from engage.pipeline.validate import Schemas
from engage.storage.readiness import Readiness
from engage.storage.saved_keys import saved_keys_path

if TYPE_CHECKING:
    import socket

    from engage.api import EventStore
    from engage.config import Config
    from engage.http1.shares import Shares
    from engage.pipeline.log_front import LogFront
    from engage.registry import Registry

__all__ = ["App", "build"]

_log = logging.getLogger(__name__)

#: Seconds that the start of a server with a log waits for the storage.
STORE_SECONDS: Final = 2.0


def build(
    config: Config,
    registry: Registry,
    metrics: Metrics | None = None,
    *,
    had_store: bool = False,
    server_started: float | None = None,
    direct: bool = False,
) -> App:
    """Compose the server without opening anything.

    :param metrics: counts what happens; nothing is counted by default.
    :param direct: write to the storage although the config has a log, for a command or the console,
        which need to know what became of an event.
    :param had_store: see :attr:`engage.api.StorageContext.had_store`.
    :param server_started: see :attr:`engage.api.StorageContext.server_started`.
    :raises ConfigError: if an option is wrong, or the storage lacks what the config requires.
    """
    metrics = Metrics() if metrics is None else metrics
    store = registry.make_storage(config, had_store=had_store, server_started=server_started)
    schemas = Schemas.load()
    timeout = config.storage.write_timeout
    clock = Clock()
    log = None if direct else registry.make_log(config)
    front: LogFront | None = None
    if log is not None and config.log is not None:
        # Imported here, so that a server without a log does not have its parts.
        from engage.pipeline.log_front import LogFront

        front = LogFront(log, config.log, timeout=timeout, clock=clock, metrics=metrics)
    authenticator = Authenticator(config.workspaces)
    keys = KeyTable(
        config.workspaces,
        authenticator,
        store,
        timeout=timeout,
        file=None if direct else saved_keys_path(config),
    )

    async def check() -> None:
        await (store if log is None else log).check()
        keys.check()

    readiness = Readiness(check, timeout=timeout, what="storage" if log is None else "log")
    # With a log, the loaders know what is stored, and call the observers.
    observers = Observers(dict(registry.make_observers(config)) if log is None else {}, metrics)

    ingest = Ingest(
        store,
        limits=config.limits,
        write_timeout=config.storage.write_timeout,
        metrics=metrics,
        stored=observers.publish if observers else None,
        alive=readiness.alive,
        failed=readiness.write_failed,
        log=log,
        overdue=None if front is None else lambda: front.lag.overdue,
    )
    if front is not None:
        front.watch(store, ingest.reopen)
    transforms = Transforms(
        registry.make_transforms(config), schemas, json_depth=config.limits.json_depth
    )
    pipeline = Pipeline(
        workspaces=config.workspaces,
        limits=config.limits,
        authenticator=authenticator,
        schemas=schemas,
        transforms=transforms,
        ingest=ingest,
        store=store,
        metrics=metrics,
        timeout=config.storage.write_timeout,
        clock=clock,
        catch_up=None if front is None else front.catch_up,
    )
    fetcher = Fetcher()
    deliveries = Deliveries(
        known=registry.webhooks,
        providers=registry.make_webhooks(config),
        public_url=config.server.public_url,
        pipeline=pipeline,
        ingest=ingest,
        store=store,
        limits=config.limits,
        metrics=metrics,
        fetcher=fetcher,
        timeout=config.storage.write_timeout,
        clock=clock,
    )
    conflicts = Conflicts(ingest, store, timeout=config.storage.write_timeout)
    explainer = Explainer(
        schemas=schemas,
        transforms=transforms,
        limits=config.limits,
        conflicts=conflicts,
        store=store,
        clock=clock,
        timeout=config.storage.write_timeout,
    )
    replays = Replays(
        explainer=explainer,
        ingest=ingest,
        conflicts=conflicts,
        store=store,
        retry=deliveries.retry,
        timeout=config.storage.write_timeout,
    )
    services = Services(
        config=config,
        body_limit=Limit(config.limits.body_bytes, "limits.body_bytes"),
        pipeline=pipeline,
        authenticator=authenticator,
        keys=keys,
        cors=CorsPolicy(config.cors),
        readiness=readiness,
        deliveries=deliveries,
        draining=lambda: app.draining,
        log_state=None if front is None else front.state,
    )
    app = App(
        services,
        front=front,
        store=store,
        ingest=ingest,
        observers=observers,
        fetcher=fetcher,
        metrics=metrics,
        clock=clock,
        explainer=explainer,
        replays=replays,
    )
    return app


class App:
    """A composed server: :meth:`open`, :meth:`serve`, and finally :meth:`close`.

    To stop without dropping requests: :meth:`start_draining`, :meth:`stop_accepting`,
    :meth:`drain`, :meth:`close`. Made by :func:`build`.
    """

    def __init__(
        self,
        services: Services,
        *,
        front: LogFront | None,
        store: EventStore,
        ingest: Ingest,
        observers: Observers,
        fetcher: Fetcher,
        metrics: Metrics,
        clock: Clock,
        explainer: Explainer,
        replays: Replays,
    ) -> None:
        self.config = services.config
        #: The storage; open between :meth:`open` and :meth:`close`.
        self.store = store
        #: The write keys that are accepted; they follow the store while it is open.
        self.keys = services.keys
        #: Receives webhook deliveries, and can translate dead letters again.
        self.deliveries = services.deliveries
        #: Finds out what would become of an event, and replays dead letters.
        self.explainer = explainer
        self.replays = replays
        #: The log in front of the storage, if there is one.
        self.front = front
        self._ingest = ingest
        self._observers = observers
        #: Whether this process should get requests.
        self.readiness = services.readiness
        self._fetcher = fetcher
        self._metrics = metrics
        #: The time of this process.
        self.clock = clock
        #: Whether this process is about to stop.
        self.draining = False
        self._listener: Listener | None = None
        #: Finds the handler of each request.
        self.application = Router(services, metrics)

    async def open(self, *, create: bool = True, patient: bool = False) -> None:
        """Open the storage. See :meth:`engage.api.EventStore.open`.

        With a log, the log is opened, and the storage in the background.

        :param patient: if the storage cannot be opened, retry in the background instead of raising;
            requests get a 503 until it is open.
        """
        self._ingest.creates = create
        if self.front is not None:
            await self.front.open(create=create, patient=patient)
            if await self._ingest.open_soon(STORE_SECONDS):
                await self.front.look_at_store()
        else:
            try:
                await self.store.open(create=create)
            except StorageError as error:
                if not patient:
                    raise
                _log.error("the storage cannot be opened; retrying: %s", error)
                self._ingest.open_in_background()
        await self.keys.start()
        # The first sign of life, so that /readyz can answer 200 right after the start.
        await self.readiness.ready()

    async def serve(self, sock: socket.socket, shares: Shares | None = None) -> None:
        """Answer requests on a listening socket until :meth:`stop_accepting` closes it.

        :param shares: see :meth:`engage.http1.listener.Listener.serve`.
        """
        if self._listener is None:
            bounds = Bounds.of(self.config)
            self._listener = Listener(
                self.application, bounds, self._metrics, cors=self.application.cors
            )
        await self._listener.serve(sock, shares)

    @property
    def listener(self) -> Listener | None:
        """The listener; ``None`` before :meth:`serve`."""
        return self._listener

    def start_draining(self) -> None:
        """Make ``/readyz`` answer 503, and every answer the last of its connection."""
        self.draining = True
        if self._listener is not None:
            self._listener.start_draining()

    async def stop_accepting(self) -> None:
        """Close the listening sockets."""
        self.start_draining()
        if self._listener is not None:
            await self._listener.stop_accepting()

    async def drain(self, seconds: float) -> bool:
        """Finish the requests in flight, and write what waits to be written.

        :param seconds: after which the remaining connections are cut off.
        :return: whether no request was cut off.
        """
        self.start_draining()
        return self._listener is None or await self._listener.drain(seconds)

    async def close(self) -> None:
        """Cut off remaining clients, finish what is being written, close everything. Idempotent."""
        self.start_draining()
        if self._listener is not None:
            self._listener.close()
        await self.readiness.close()
        await self.keys.close()
        await self._ingest.close()
        await self._observers.close()
        await self._fetcher.close()
        if self.front is not None:
            await self.front.close()
        await self.store.close()
