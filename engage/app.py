# SPDX-License-Identifier: Apache-2.0
"""Composes a server from a config and the installed plugins. This is the only place that does.

:func:`build` makes an :class:`App`, which serves on any listening socket it is given.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from engage.api import EventLog, StorageError
from engage.deliveries.delivery import UNTRANSLATED
from engage.deliveries.fetcher import Fetcher
from engage.deliveries.receive import Deliveries
from engage.errors import STATUS, Limit
from engage.handlers.base import Services
from engage.handlers.cors import CorsPolicy
from engage.handlers.preferences.looks import Looks
from engage.handlers.routes import Router
from engage.http1.addresses import networks
from engage.http1.listener import Listener
from engage.http1.shared import Bounds
from engage.keys.auth import Authenticator
from engage.keys.limits import Guards, Quotas
from engage.keys.table import KeyTable
from engage.monitoring.metrics import Metrics
from engage.pipeline.clock import Clock
from engage.pipeline.conflicts import Conflicts
from engage.pipeline.explain import Explainer
from engage.pipeline.ingest import Ingest
from engage.pipeline.observers import Observers
from engage.pipeline.pipeline import Pipeline
from engage.pipeline.replay import Replays
from engage.pipeline.transforms import Transforms
from engage.pipeline.validate import Schemas
from engage.upkeep.readiness import Readiness

if TYPE_CHECKING:
    import socket

    from engage.config import Config
    from engage.http1.shares import Shares
    from engage.log.front import LogFront
    from engage.registry import Registry
    from engage.store.facade import Storage

__all__ = ["App", "build"]

#: Seconds that the start of a server with a log waits for the storage.
STORE_SECONDS: Final = 2.0


def build(
    config: Config,
    registry: Registry,
    metrics: Metrics | None = None,
    *,
    had_store: bool = False,
    supervised: bool = False,
    direct: bool = False,
    buckets: int | None = None,
) -> App:
    """Compose the server without opening anything.

    :param metrics: counts what happens; nothing is counted by default.
    :param direct: write to the storage also with a log: commands and the console need the outcome.
    :param buckets: see :func:`engage.keys.limits.open_buckets`.
    :param had_store: with ``supervised``, see :class:`engage.api.StorageContext`.
    :raises ConfigError: if an option is wrong.
    """
    metrics = Metrics() if metrics is None else metrics
    clock = Clock()
    schemas = Schemas.load()
    store = registry.make_storage(config, had_store=had_store, supervised=supervised)
    front = None if direct else _make_front(config, registry, metrics, clock)
    quotas = Quotas(config, store, lambda: keys.keys, clock) if config.has_quotas else None
    guards = Guards(config.limits, buckets, quotas)
    authenticator = Authenticator(config.workspaces, guards)
    keys = KeyTable(config.workspaces, authenticator, store, timeout=config.storage.write_timeout)
    readiness = _make_readiness(config, store if front is None else front.log, keys)
    # With a log, the loaders know which events are stored, and call the observers.
    observers = Observers({} if front else dict(registry.make_observers(config)), metrics)
    ingest = _make_ingest(config, store, front, observers, readiness, metrics)
    depth = config.limits.json_depth
    transforms = Transforms(registry.make_transforms(config), schemas, json_depth=depth)
    conflicts = Conflicts(ingest, config.erasures.key)
    pipeline = Pipeline(
        workspaces=config.workspaces,
        limits=config.limits,
        authenticator=authenticator,
        schemas=schemas,
        transforms=transforms,
        ingest=ingest,
        conflicts=conflicts,
        metrics=metrics,
        clock=clock,
        catch_up=None if front is None else front.catch_up,
        erasures_key=config.erasures.key,
    )
    services = Services(
        config=config,
        body_limit=Limit(config.limits.body_bytes, "limits.body_bytes"),
        pipeline=pipeline,
        authenticator=authenticator,
        keys=keys,
        guards=guards,
        cors=CorsPolicy(config.cors),
        readiness=readiness,
        deliveries=_make_deliveries(config, registry, metrics, pipeline, ingest, clock),
        looks=Looks(config),
        trusted_proxies=networks(config.server.trusted_proxies),
        draining=lambda: app.draining,
        log_state=None if front is None else front.state,
    )
    app = App(
        services,
        front=front,
        ingest=ingest,
        observers=observers,
        metrics=metrics,
        explainer=Explainer(
            schemas=schemas,
            transforms=transforms,
            limits=config.limits,
            conflicts=conflicts,
            ingest=ingest,
            rules=keys.replay_rules,
            clock=clock,
        ),
        conflicts=conflicts,
    )
    return app


def _make_front(
    config: Config, registry: Registry, metrics: Metrics, clock: Clock
) -> LogFront | None:
    """Make the log in front of the storage, if the config has one."""
    log = registry.make_log(config)
    if log is None or config.log is None:
        return None
    # Imported here, so that a server without a log does not have its parts.
    from engage.log.front import LogFront

    timeout = config.storage.write_timeout
    return LogFront(log, config.log, timeout=timeout, clock=clock, metrics=metrics)


def _make_readiness(config: Config, written: Storage | EventLog, keys: KeyTable) -> Readiness:
    """Make the check whether requests can be answered.

    :param written: where events go: the storage, or the log in front of it.
    """

    async def check() -> None:
        await written.check()
        keys.check()

    what = "log" if isinstance(written, EventLog) else "storage"
    return Readiness(check, timeout=config.storage.write_timeout, what=what)


def _make_ingest(
    config: Config,
    store: Storage,
    front: LogFront | None,
    observers: Observers,
    readiness: Readiness,
    metrics: Metrics,
) -> Ingest:
    """Make the part that writes events: to the log if there is one, else to the storage."""
    ingest = (Ingest if front is None else front.make_ingest)(
        store,
        limits=config.limits,
        write_timeout=config.storage.write_timeout,
        metrics=metrics,
        stored=observers.publish if observers else None,
        alive=readiness.alive,
        failed=readiness.write_failed,
    )
    if front is not None:
        front.watch(store, ingest)
    return ingest


def _make_deliveries(
    config: Config,
    registry: Registry,
    metrics: Metrics,
    pipeline: Pipeline,
    ingest: Ingest,
    clock: Clock,
) -> Deliveries:
    return Deliveries(
        config,
        installed=registry.webhooks,
        providers=registry.make_webhooks(config),
        pipeline=pipeline,
        ingest=ingest,
        metrics=metrics,
        fetcher=Fetcher(),
        clock=clock,
    )


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
        ingest: Ingest,
        observers: Observers,
        metrics: Metrics,
        explainer: Explainer,
        conflicts: Conflicts,
    ) -> None:
        self.config = services.config
        #: The storage; open between :meth:`open` and :meth:`close`.
        self.store = ingest.store
        #: The write keys that are accepted; they follow the store while it is open.
        self.keys = services.keys
        #: What may be stored in a day; ``None``: any amount.
        self.quotas = services.guards.quotas
        #: Receives webhook deliveries, and can translate dead letters again.
        self.deliveries = services.deliveries
        #: Finds out what would become of an event, and replays dead letters.
        self.explainer = explainer
        self.replays = Replays(
            explainer=explainer,
            ingest=ingest,
            conflicts=conflicts,
            retry=services.deliveries.retry,
        )
        #: The log in front of the storage, if there is one.
        self.front = front
        self._ingest = ingest
        self._observers = observers
        #: Whether this process should get requests.
        self.readiness = services.readiness
        self._metrics = metrics
        providers = {name for workspace in self.config.workspaces for name in workspace.webhooks}
        metrics.begin_requests([*STATUS, UNTRANSLATED], providers)
        #: The time of this process.
        self.clock = services.deliveries.clock
        #: Whether this process is about to stop.
        self.draining = False
        self._listener: Listener | None = None
        #: Finds the handler of each request.
        self.application = Router(services, metrics)

    async def open(self, *, create: bool = True, patient: bool = False) -> None:
        """Open the storage. See :meth:`engage.store.facade.Storage.open`.

        With a log, the log is opened, and the storage in the background.

        :param patient: if the storage cannot be opened, retry in the background instead of raising;
            requests get a 503 until it is open.
        """
        self._ingest.creates = create
        if self.front is not None:
            await self.front.open(create=create, patient=patient)
            opening = self._ingest.reopen()
            await asyncio.wait([opening], timeout=STORE_SECONDS)
            if opening.done():
                await self.front.look_at_store()
        else:
            try:
                await self.store.open(create=create)
            except StorageError:
                if not patient:
                    raise
                self._ingest.reopen()
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
        """Finish the requests in flight, and write the events in the queue.

        :param seconds: after which the remaining connections are cut off.
        :return: whether no request was cut off.
        """
        self.start_draining()
        return self._listener is None or await self._listener.drain(seconds)

    async def close(self) -> None:
        """Cut off remaining clients, finish the writes in progress, close everything.
        Idempotent."""
        self.start_draining()
        if self._listener is not None:
            self._listener.close()
        await self.readiness.close()
        await self.keys.close()
        await self._ingest.close()
        await self._observers.close()
        await self.deliveries.close()
        if self.front is not None:
            await self.front.close()
        await self.store.close()
