# SPDX-License-Identifier: Apache-2.0
"""Runs the operations of a writer on its engine, and chooses the settings that apply.

Several servers and commands may use one store, each with its config. The settings of the first
server apply until the writer ends; before there is a server, those of the first command.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engage.api import (
    Outcome,
    StorageIncompatible,
    StorageMissing,
    StorageUnavailable,
)

from ..connection import Settings
from ..engine import Engine
from ..schema import has_log
from ..tables.events import Row
from .lock import WriterLock
from .operations import OPEN, Operation


class WriterHost:
    """Runs the operations of all clients. It is called by one thread at a time."""

    def __init__(self, lock: WriterLock) -> None:
        """:param lock: held by this process; when it is lost, another process is the writer."""
        self._lock = lock
        self._settings: Settings | None = None
        self._serving = False
        #: Whether the engine has the settings of a command, and must be opened with a server's.
        self._is_outdated = False
        self._engine: Engine | None = None
        self._is_open = False

    @property
    def is_preparing(self) -> bool:
        """Whether the tables are being changed. May be read by any thread."""
        engine = self._engine
        return engine is not None and engine.is_preparing

    def adopt(self, settings: Settings, *, serving: bool) -> None:
        """Take the settings of a client, if they are the ones that matter now. They apply from the
        next call on, so this may be called while another thread opens the store.

        :param serving: whether the client belongs to a server.
        """
        if self._settings is None or (serving and not self._serving):
            self._is_outdated = self._engine is not None
            self._settings, self._serving = settings, serving

    def call(self, operation: Operation[Any], arguments: Sequence[Any]) -> Any:
        """Run an operation, and return its result.

        :raises StorageError: as the method of the engine does.
        """
        if operation is OPEN:
            return self.open(arguments[0])
        return getattr(self._opened(), operation.name)(*arguments)

    def write(self, rows: Sequence[Row]) -> tuple[Sequence[Outcome], int]:
        """Store events; see :meth:`Engine.write`."""
        return self._opened().write(rows)

    def open(self, create: bool) -> None:
        """Open the store; see :meth:`Engine.open`."""
        if self._is_outdated:
            self.close()
        if self._engine is None:
            assert self._settings is not None
            self._engine = Engine(self._settings, self._lock.is_current)
            if has_log(self._settings.path):
                # The writer before this one did not close the store.
                self._engine.require_checkpoint()
        self._engine.open(create, self._serving)
        self._is_open = True

    def _opened(self) -> Engine:
        if not self._is_open or self._is_outdated:
            try:
                self.open(False)
            except (StorageMissing, StorageIncompatible) as error:
                # The clients had it open before: it is unavailable now.
                raise StorageUnavailable(str(error)) from error
        assert self._engine is not None
        return self._engine

    def work(self) -> bool:
        """Do a part of the work that no request waits for, and return whether there is more."""
        if self._engine is not None and self._is_open:
            return self._engine.work()
        return False

    def close(self) -> None:
        """Close the store."""
        engine, self._engine = self._engine, None
        self._is_open = self._is_outdated = False
        if engine is not None:
            engine.close()
