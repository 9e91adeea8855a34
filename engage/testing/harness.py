# SPDX-License-Identifier: Apache-2.0
"""What a storage's author fills in, and the bench on which a store is tested."""

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
    """What a subclass of the suite says about its storage."""

    #: Name of the plugin's module: that which its entry point names.
    plugin: ClassVar[str]
    #: Name under which it registers the storage; needed when it brings several.
    storage: ClassVar[str | None] = None
    #: How many examples each property-based test tries.
    examples: ClassVar[int] = 30

    def options(self, tmp_path: Path) -> Mapping[str, Any]:
        """:return: the storage's options, of a store that is empty and this test's own."""
        raise NotImplementedError

    def can(self, feature: str) -> bool:
        """What the server under the store can do, where products of one protocol differ.

        Asked for: ``atomic-updates`` (several connections change one user), ``durable`` (what was
        acknowledged survives the end of every process), ``break`` (:meth:`break_store` works),
        ``expire`` (events are expired by :meth:`~engage.api.EventStore.expire`, not by the server),
        ``nested-arrays`` (a list directly within a list is stored).
        """
        return True

    def break_store(self, options: Mapping[str, Any]) -> None:
        """Make the real thing fail: nothing can be written until :meth:`mend_store`."""
        raise NotImplementedError

    def mend_store(self, options: Mapping[str, Any]) -> None:
        """End what :meth:`break_store` began; what was stored before is there again."""
        raise NotImplementedError

    def unstorable(self, event: Event) -> Event:
        """:return: the event, made so that this storage can never store it."""
        return dataclasses.replace(event, message_id=event.message_id + "\ud800")


def find_factory(plugin: str, storage: str | None) -> tuple[str, StorageFactory]:
    """Ask a plugin for its storage, as engage does.

    :return: the name and the factory.
    """
    found: dict[str, StorageFactory] = {}

    def register(name: str, factory: StorageFactory, schema: Mapping[str, Any]) -> None:
        found[name] = factory

    importlib.import_module(plugin).engage_register_storage(register)
    name = storage if storage is not None else next(iter(found))
    return name, found[name]


class Bench:
    """One store, opened as often as a test likes; all of it is closed at the end."""

    def __init__(self, subject: Subject, tmp_path: Path) -> None:
        self.subject = subject
        self.options = subject.options(tmp_path)
        self.context = StorageContext(base_dir=tmp_path, identifiers=IDENTIFIERS)
        self._factory = find_factory(subject.plugin, subject.storage)[1]
        self._opened: list[EventStore] = []
        self._runner = asyncio.Runner()

    def new(self, **context: Any) -> EventStore:
        """:param context: fields of :class:`StorageContext` that differ.
        :return: the store, not opened.
        """
        store = self._factory(self.options, dataclasses.replace(self.context, **context))
        self._opened.append(store)
        return store

    async def open(self, **context: Any) -> EventStore:
        """:return: the store, opened (and made, if it is the first)."""
        store = self.new(**context)
        await store.open(create=True)
        return store

    async def open_as(self, interface: type, **context: Any) -> Any:
        """:return: the store, opened; the test is skipped if it does not have this interface."""
        store = self.new(**context)
        if not isinstance(store, interface):
            pytest.skip(f"this storage is not a {interface.__name__}")
        await store.open(create=True)
        return store

    def require(self, feature: str) -> None:
        """Skip the test where the server cannot do this."""
        if not self.subject.can(feature):
            pytest.skip(f"the server under this storage cannot do this: {feature}")

    @contextlib.asynccontextmanager
    async def broken(self) -> AsyncIterator[None]:
        """The real thing is broken meanwhile."""
        self.require("break")
        await asyncio.to_thread(self.subject.break_store, self.options)
        try:
            yield
        finally:
            await asyncio.to_thread(self.subject.mend_store, self.options)

    def run(self, awaitable: Awaitable[Answer]) -> Answer:
        """Run something on the bench's event loop, for tests that are not coroutines."""

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
    """Make ``async def test_x(self, bench)`` a test that pytest runs without a plugin."""

    def run(self: Any, tmp_path: Path) -> None:
        with Bench(self, tmp_path) as bench:
            bench.run(test(self, bench))

    # Not functools.wraps: pytest would look for a fixture "bench".
    run.__name__ = run.__qualname__ = test.__name__
    run.__doc__ = test.__doc__
    return run


async def eventually(
    attempt: Callable[[], Awaitable[Answer]], *errors: type[Exception], seconds: float = 30
) -> Answer:
    """Try until it no longer raises one of these errors.

    :return: what the attempt returned.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            return await attempt()
        except errors:
            if time.monotonic() > end:
                raise
        await asyncio.sleep(0.05)
