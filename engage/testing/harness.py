# SPDX-License-Identifier: Apache-2.0
"""The harness of the suites: it opens what a plugin registers, and closes it after each test."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sized
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Generic, Protocol, Self, TypeVar

import jsonschema
import pytest

from engage.api import StorageUnavailable

#: Seconds that a call may take: no test fails because the disk is slow.
PATIENCE: Final = 60.0

Answer = TypeVar("Answer")
#: Calls one method of a store or log.
Call = Callable[[], Awaitable[object]]


class SubjectLike(Protocol):
    """The part of a suite's subclass that every harness uses."""

    def options(self, tmp_path: Path) -> Mapping[str, Any]:
        """Return the options of a store or log that does not exist yet."""

    def can(self, feature: str) -> bool:
        """Return whether the server under it has a feature."""


Tested = TypeVar("Tested", bound=SubjectLike)


class Closable(Protocol):
    """A store, a log or a reader."""

    async def close(self) -> None:
        """Close it."""


class Harness(Generic[Tested]):
    """One store or log, which a test can open several times. Leaving the context closes all.

    :param subject: the suite's subclass.
    """

    def __init__(self, subject: Tested, tmp_path: Path) -> None:
        self.subject = subject
        self.options = subject.options(tmp_path)
        self._opened: list[Closable] = []
        self._runner = asyncio.Runner()

    async def _break(self) -> None:
        """Make the server under the subject fail."""
        raise NotImplementedError

    async def _mend(self) -> None:
        """Undo :meth:`_break`."""
        raise NotImplementedError

    def require(self, feature: str) -> None:
        """Skip the test if the server lacks a feature; see ``can`` of the subject."""
        if not self.subject.can(feature):
            pytest.skip(f"the server under this plugin does not have: {feature}")

    @contextlib.asynccontextmanager
    async def broken(self) -> AsyncIterator[None]:
        """Break the store or log inside of the context."""
        self.require("break")
        await self._break()
        try:
            yield
        finally:
            await self._mend()

    async def break_twice(self, acknowledged: Sized) -> None:
        """Break the store or log twice while other tasks use it.

        :param acknowledged: what they have written; before each failure and after the last one,
            wait until it has grown by 50.
        """
        await asyncio.wait_for(_grow(acknowledged), 60)
        for _ in range(2):
            async with self.broken():
                await asyncio.sleep(0.05)
            await asyncio.wait_for(_grow(acknowledged), 60)

    def run(self, awaitable: Awaitable[Answer]) -> Answer:
        """Run an awaitable on the event loop of the test, for tests that are not coroutines.

        :return: its result.
        """

        async def wait() -> Answer:
            return await awaitable

        return self._runner.run(wait())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            # A reader is closed before its log.
            for store in reversed(self._opened):
                self.run(store.close())
        finally:
            self._runner.close()


AnyHarness = TypeVar("AnyHarness", bound=Harness[Any])


async def _grow(acknowledged: Sized) -> None:
    target = len(acknowledged) + 50
    while len(acknowledged) < target:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def must_fail(call: Call) -> None:
    """Check that a call raises ``StorageUnavailable`` with a message for the log."""
    with pytest.raises(StorageUnavailable) as raised:
        await call()
    # The message is logged: it must be one line, and not empty.
    assert str(raised.value).strip()
    assert "\n" not in str(raised.value)


async def may_fail(call: Call) -> None:
    """Make a call that may succeed. If it fails, then with ``StorageUnavailable``."""
    with contextlib.suppress(StorageUnavailable):
        await call()


def on_bench(
    bench_class: Callable[[Any, Path], AnyHarness],
) -> Callable[[Callable[[Any, AnyHarness], Awaitable[None]]], Callable[[Any, Path], None]]:
    """Return a decorator that makes ``async def test_x(self, bench)`` a test without a plugin.

    :param bench_class: the harness of one kind, made from a subject and an empty folder.
    """

    def decorate(
        test: Callable[[Any, AnyHarness], Awaitable[None]],
    ) -> Callable[[Any, Path], None]:
        def run(self: Any, tmp_path: Path) -> None:
            with bench_class(self, tmp_path) as bench:
                bench.run(test(self, bench))

        # functools.wraps would make pytest look for a fixture "bench".
        run.__name__ = run.__qualname__ = test.__name__
        run.__doc__ = test.__doc__
        return run

    return decorate


def find_factory(
    plugin: str, name: str | None, kind: str
) -> tuple[Callable[..., Any], Mapping[str, Any]]:
    """Return what a plugin registers, as engage gets it: a factory and the schema of its options.

    :param plugin: the module of the plugin.
    :param name: the registered name; ``None``: the first one.
    :param kind: ``storage``, ``log``, ``webhook``: the end of the hook's name.
    :return: the factory checks the options with the schema first.
    """
    factories: dict[str, tuple[Callable[..., Any], Mapping[str, Any]]] = {}

    def register(
        name: str, factory: Callable[..., Any], schema: Mapping[str, Any] | None = None
    ) -> None:
        factories[name] = (factory, {"maxProperties": 0} if schema is None else schema)

    getattr(importlib.import_module(plugin), f"engage_register_{kind}")(register)
    factory, schema = factories[name if name is not None else next(iter(factories))]

    def make(options: Mapping[str, Any], *context: Any) -> Any:
        jsonschema.validate(options, schema, jsonschema.Draft202012Validator)
        return factory(options, *context)

    return make, schema


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
