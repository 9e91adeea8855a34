# SPDX-License-Identifier: Apache-2.0
"""The class that the author of a storage fills in, and the harness (``Bench``) of the tests."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from engage.api import Event, StorageContext
from engage.store.facade import Storage

from ..factories import IDENTIFIERS
from ..harness import PATIENCE, Call, Harness, find_factory, on_bench


class Subject:
    """The members that a subclass of the suite defines about its storage."""

    #: The module of the plugin, as its entry point names it.
    plugin: ClassVar[str]
    #: The name that the plugin registers; needed if it registers several storages.
    storage: ClassVar[str | None] = None
    #: Whether this process makes writes durable with ``os.fsync`` or ``os.fdatasync``, called by
    #: these names. The suite then checks that it does; for a server, another process, or a library
    #: in C such as SQLite it cannot, and a subclass sets this to false.
    syncs_with_os: ClassVar[bool] = True
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
            ``several-processes`` (they can write to one store at the same time), ``durable``
            (acknowledged events survive the end of every process), ``break`` (:meth:`break_store`
            works), ``expire`` (the storage deletes events, and not the server), ``nested-arrays``
            (a list directly within a list can be stored), ``code-point-order`` (text is ordered by
            code points, and not by the code units of UTF-16), ``transactions`` (nobody sees half of
            a plan, and rows have numbers).
        """
        return True

    def break_store(self, options: Mapping[str, Any]) -> None:
        """Make the server under the store fail: nothing can be written until :meth:`mend_store`."""
        raise NotImplementedError("define break_store, or return False from can('break')")

    def mend_store(self, options: Mapping[str, Any]) -> None:
        """Undo :meth:`break_store`. Events that were stored before must be there again."""
        raise NotImplementedError

    def unstorable(self, event: Event) -> Event:
        """Return the event, changed so that this storage can never store it."""
        return dataclasses.replace(event, message_id=event.message_id + "\ud800")


class Bench(Harness[Subject]):
    """One store, which a test can open several times. Leaving the context closes all of them.

    :param subject: the suite's subclass.
    """

    def __init__(self, subject: Subject, tmp_path: Path) -> None:
        super().__init__(subject, tmp_path)
        self.context = StorageContext(
            base_dir=tmp_path, identifiers=IDENTIFIERS, write_timeout=PATIENCE
        )
        self._factory = find_factory(subject.plugin, subject.storage, "storage")[0]

    def new(self, **context: Any) -> Storage:
        """Return a storage that is not opened yet.

        :param context: fields of :class:`~engage.api.StorageContext` that differ from the defaults.
        """
        store: Storage = self._factory(self.options, dataclasses.replace(self.context, **context))
        self._opened.append(store)
        return store

    def elsewhere(self, folder: Path) -> Callable[[], Any]:
        """Return what makes storages, which are not opened yet, of a store that does not exist.

        :param folder: an empty folder.
        """
        options = self.subject.options(folder)

        def new() -> Any:
            self._opened.append(store := self._factory(options, self.context))
            return store

        return new

    async def open(self, **context: Any) -> Storage:
        """Return an opened storage. The first one creates the store.

        :param context: see :meth:`new`.
        """
        store = self.new(**context)
        await store.open(create=True)
        return store

    async def _break(self) -> None:
        await asyncio.to_thread(self.subject.break_store, self.options)

    async def _mend(self) -> None:
        await asyncio.to_thread(self.subject.mend_store, self.options)


on_store = on_bench(Bench)


async def must_sync(call: Call) -> None:
    """Check that a call syncs a file, and that no file that it syncs grows after that."""
    sizes: list[tuple[int, int]] = []  # (descriptor, size when it was synced)
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:

        def watching(sync: Callable[[Any], None]) -> Callable[[Any], None]:
            def watched(file: Any) -> None:
                number = os.dup(file if isinstance(file, int) else file.fileno())
                stack.callback(os.close, number)
                sizes.append((number, os.fstat(number).st_size))
                sync(file)

            return watched

        for name in {"fsync", "fdatasync"} & set(dir(os)):
            patch.setattr(os, name, watching(getattr(os, name)))
        await call()
        assert sizes, "it returned without os.fsync or os.fdatasync: see Subject.syncs_with_os"
        # A file may be synced several times: the last time counts.
        ends = {os.fstat(number).st_ino: (number, size) for number, size in sizes}
        for number, size in ends.values():
            assert os.fstat(number).st_size == size, "a file was written after it was synced"


def on_open(test: Callable[[Any, Any], Awaitable[None]]) -> Callable[[Any, Path], None]:
    """Make ``async def test_x(self, store)`` a test of an open store."""

    @functools.wraps(test)
    async def run(self: Any, bench: Bench) -> None:
        await test(self, await bench.open())

    return on_store(run)
