# SPDX-License-Identifier: Apache-2.0
"""What the author of a storage fills in, and the harness (``Bench``) in which a store is tested."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, TypeVar

import pytest

from engage.api import Event, EventStore, StorageContext, StorageFactory

from .factories import IDENTIFIERS

Answer = TypeVar("Answer")


class Subject:
    """What a subclass of the suite defines about its storage."""

    #: The module of the plugin, as its entry point names it.
    plugin: ClassVar[str]
    #: The name that the plugin registers; needed if it registers several storages.
    storage: ClassVar[str | None] = None
    #: The number of examples of each property-based test.
    examples: ClassVar[int] = 30

    def options(self, tmp_path: Path) -> Mapping[str, Any]:
        """Return the options of a storage whose store does not exist yet.

        :param tmp_path: an empty folder. Each test has a different one.
        """
        raise NotImplementedError

    def can(self, feature: str) -> bool:
        """Return whether the server under the store has a feature; servers of one protocol differ.

        :param feature: ``atomic-updates`` (several connections can change one user),
            ``several-processes`` (they can write to one store at the same time), ``durable`` (what
            was acknowledged survives the end of every process), ``break`` (:meth:`break_store`
            works), ``expire`` (:meth:`~engage.api.EventStore.expire` deletes events, and not the
            server), ``nested-arrays`` (a list directly within a list can be stored),
            ``code-point-order`` (text is ordered by code points, and not by the code units of
            UTF-16).
        """
        return True

    def break_store(self, options: Mapping[str, Any]) -> None:
        """Make what is under the store fail: nothing can be written until :meth:`mend_store`."""
        raise NotImplementedError

    def mend_store(self, options: Mapping[str, Any]) -> None:
        """Undo :meth:`break_store`. What was stored before must be there again."""
        raise NotImplementedError

    def unstorable(self, event: Event) -> Event:
        """Return the event, changed so that this storage can never store it."""
        return dataclasses.replace(event, message_id=event.message_id + "\ud800")


def find_factory(plugin: str, storage: str | None) -> tuple[str, StorageFactory]:
    """Return the name and the factory that a plugin registers, as engage gets them.

    :param plugin: the module of the plugin.
    :param storage: the name of the storage; ``None``: the only one.
    """
    found: dict[str, StorageFactory] = {}

    def register(name: str, factory: StorageFactory, schema: Mapping[str, Any]) -> None:
        found[name] = factory

    importlib.import_module(plugin).engage_register_storage(register)
    name = storage if storage is not None else next(iter(found))
    return name, found[name]


class Bench:
    """One store, which a test can open several times. Leaving the context closes all of them.

    :param subject: the suite's subclass.
    """

    def __init__(self, subject: Subject, tmp_path: Path) -> None:
        self.subject = subject
        self.options = subject.options(tmp_path)
        self.context = StorageContext(base_dir=tmp_path, identifiers=IDENTIFIERS)
        self._factory = find_factory(subject.plugin, subject.storage)[1]
        self._opened: list[EventStore] = []
        self._runner = asyncio.Runner()

    def new(self, **context: Any) -> EventStore:
        """Return a storage that is not opened yet.

        :param context: fields of :class:`~engage.api.StorageContext` that differ from the defaults.
        """
        store = self._factory(self.options, dataclasses.replace(self.context, **context))
        self._opened.append(store)
        return store

    async def open(self, **context: Any) -> EventStore:
        """Return an opened storage. The first one creates the store.

        :param context: see :meth:`new`.
        """
        store = self.new(**context)
        await store.open(create=True)
        return store

    async def open_as(self, interface: type, **context: Any) -> Any:
        """Return an opened storage, or skip the test if it does not have an interface.

        :param interface: such as :class:`~engage.api.ProfileStore`.
        :param context: see :meth:`new`.
        """
        store = self.new(**context)
        if not isinstance(store, interface):
            pytest.skip(f"this storage is not a {interface.__name__}")
        await store.open(create=True)
        return store

    def require(self, feature: str) -> None:
        """Skip the test if the server lacks a feature; see :meth:`Subject.can`."""
        if not self.subject.can(feature):
            pytest.skip(f"the server under this storage does not have: {feature}")

    @contextlib.asynccontextmanager
    async def broken(self) -> AsyncIterator[None]:
        """Break the store inside of the context."""
        self.require("break")
        await asyncio.to_thread(self.subject.break_store, self.options)
        try:
            yield
        finally:
            await asyncio.to_thread(self.subject.mend_store, self.options)

    def run(self, awaitable: Awaitable[Answer]) -> Answer:
        """Run an awaitable on the event loop of the test, for tests that are not coroutines.

        :return: its result.
        """

        async def wait() -> Answer:
            return await awaitable

        return self._runner.run(wait())

    def __enter__(self) -> Bench:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            for store in self._opened:
                self.run(store.close())
        finally:
            self._runner.close()


def on_store(
    test: Callable[[Any, Bench], Awaitable[None]],
) -> Callable[[Any, Path], None]:
    """Turn ``async def test_x(self, bench)`` into a test that pytest runs without a plugin."""

    def run(self: Any, tmp_path: Path) -> None:
        with Bench(self, tmp_path) as bench:
            bench.run(test(self, bench))

    # functools.wraps would make pytest look for a fixture "bench".
    run.__name__ = run.__qualname__ = test.__name__
    run.__doc__ = test.__doc__
    return run


async def eventually(
    attempt: Callable[[], Awaitable[Answer]], *errors: type[Exception], seconds: float = 30
) -> Answer:
    """Call a function until it does not raise one of these errors.

    :param seconds: how long to try; then the error is raised.
    :return: the result of the last call.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            return await attempt()
        except errors:
            if time.monotonic() > end:
                raise
        await asyncio.sleep(0.05)
