# SPDX-License-Identifier: Apache-2.0
"""Runs the operations of a writer on its engine, and chooses the settings that apply.

Several servers and commands may use one store, each with its config. The settings that matter are
those of the server that started last. A command is served with whatever settings the writer has.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from engage.api import (
    Outcome,
    StorageIncompatible,
    StorageMissing,
    StorageUnavailable,
)

from .connection import Settings
from .engine import Engine
from .events import Row
from .lock import WriterLock
from .operations import OPEN, Operation
from .protocol import differ

_log = logging.getLogger("engage.storage.sqlite")


class WriterHost:
    """Runs the operations of all clients. It is called by one thread at a time."""

    def __init__(self, lock: WriterLock) -> None:
        """:param lock: held by this process; when it is lost, another process is the writer."""
        self._lock = lock
        #: Whether the earlier writer was killed, perhaps by an error of the disk.
        self._is_doubtful = lock.is_doubtful
        self.settings: Settings | None = None
        self.serving = False
        #: When the server started whose settings these are.
        self.started = 0.0
        self._engine: Engine | None = None
        self._is_open = False

    @property
    def is_migrating(self) -> bool:
        """Whether the tables are being changed. May be read by any thread."""
        engine = self._engine
        return engine is not None and engine.is_migrating

    @property
    def is_doubtful(self) -> bool:
        """Whether something that was written may not be on the disk; ask when it is closed."""
        return self._is_doubtful

    def adopt(self, settings: Settings, *, serving: bool, started: float) -> None:
        """Take the settings of a client, if they are the ones that matter now.

        :param serving: whether the client belongs to a server.
        :param started: when that server started.
        """
        known = self.settings
        if known is not None:
            if not serving or (self.serving and started <= self.started):
                return
            self.started = started
            if self.serving and not differ(known, settings):
                return
            if self.serving:
                _log.info("SQLite: the writer takes the settings of the server that started last")
            self.close()
        self.settings, self.serving, self.started = settings, serving, started

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
        if self._engine is None:
            if self.settings is None:
                raise StorageUnavailable("the writer has no settings")
            self._engine = Engine(self.settings, self._lock.is_current)
            if self._is_doubtful:
                self._engine.require_checkpoint()
        self._engine.open(create, self.serving)
        self._is_open = True
        self._is_doubtful = False

    def _opened(self) -> Engine:
        if not self._is_open:
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
        engine, self._engine, self._is_open = self._engine, None, False
        if engine is not None:
            self._is_doubtful = self._is_doubtful or engine.needs_checkpoint
            engine.close()
