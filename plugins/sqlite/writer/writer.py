# SPDX-License-Identifier: Apache-2.0
"""What the storage calls for all writes."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from engage.api import Event, Outcome, Status, StorageUnavailable

from ..connection import Settings
from ..tables.events import Row, UnstorableError, row_of
from .client import WriterClient
from .listening import takes_sockets
from .lock import require_owner
from .operations import OPEN, WRITE, Operation, decode_outcomes
from .thread import WriterThread
from .usage import writer_gauges

Result = TypeVar("Result")

_log = logging.getLogger("engage.storage.sqlite")

#: Whether there can be a writer process: it needs Unix sockets.
AVAILABLE: Final = sys.platform != "win32" and hasattr(socket, "AF_UNIX") and bool(sys.executable)
#: Events and bytes of one request.
_MAX_EVENTS: Final = 4000
_MAX_BYTES: Final = 16 * 1024 * 1024


class Writer:
    """Makes all writes, in the process that writes the store or in a thread of this one.

    Until something is to be written, there is neither.
    """

    def __init__(self, settings: Settings, *, had_store: bool = False) -> None:
        """:param had_store: see :attr:`StorageContext.had_store`."""
        self._settings = settings
        self._had_store = had_store
        self._backend: WriterClient | WriterThread | None = None
        self._is_open = False

    async def open(self, create: bool) -> None:
        """Open the store; see :meth:`EventStore.open`.

        A store that was open before is not created again: if it is missing, it was moved away, and
        what is written to another one in its place would be lost when it comes back.
        """
        self._is_open = True
        if not create:
            return
        try:
            backend = self._make_backend()
            backend.serving = True
            await backend.call(OPEN, not self._had_store)
            self._had_store = True
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Finish the calls that were requested, and close the store."""
        self._is_open = False
        backend, self._backend = self._backend, None
        if backend is not None:
            await backend.close()

    def _make_backend(self) -> WriterClient | WriterThread:
        if self._backend is None:
            store = os.path.realpath(self._settings.path)
            require_owner(store)
            kind = WriterClient if self._is_in_process(store) else WriterThread
            self._backend = kind(self._settings, store)
        return self._backend

    def _is_in_process(self, store: str) -> bool:
        """Return whether a process writes the store, rather than a thread of this one."""
        if not AVAILABLE or self._settings.writer == "thread":
            return False
        if self._settings.writer == "process" or takes_sockets(store):
            return True
        _log.warning(
            "%s: its folder takes no sockets, so a thread of this process writes to it, and no"
            " other process can: use one worker",
            store,
        )
        return False

    @property
    def is_connected(self) -> bool:
        """Whether a call now needs neither a process nor a thread to be started."""
        return self._backend is not None and self._backend.is_connected

    def gauges(self) -> Mapping[str, float]:
        """Return what the writer process uses; nothing if there is none."""
        process = self._backend.process if isinstance(self._backend, WriterClient) else None
        return {} if process is None else writer_gauges(process)

    async def call(self, operation: Operation[Result], *arguments: Any) -> Result:
        """Run an operation: ``await writer.call(operations.CHECK)``.

        :raises StorageError: as the operation does, or if the writer does not answer in time.
        """
        if not self._is_open:
            raise StorageUnavailable("the storage is not open")
        return await (self._backend or self._make_backend()).call(operation, *arguments)

    async def write(self, events: Sequence[Event]) -> tuple[Sequence[Outcome], int]:
        """Store events, in several transactions if they are many; see :meth:`Engine.write`.

        :return: one outcome for each event, in their order, and how many changes of profiles were
            dropped.
        :raises StorageUnavailable: if the events may not be durable.
        """
        rows, refused = _rows(events)
        outcomes: list[Outcome] = []
        dropped = 0
        for part in _parts(rows):
            values, count = await self.call(WRITE, part)
            outcomes += decode_outcomes(values, len(part))
            dropped += count
        if refused:
            stored = iter(outcomes)
            outcomes = [refused.get(index) or next(stored) for index in range(len(events))]
        return outcomes, dropped


def _rows(events: Sequence[Event]) -> tuple[list[Row], dict[int, Outcome]]:
    """Return the rows of events, and the outcomes of those that can never be stored.

    :return: rows in the order of the events, and index → outcome of the events without a row.
    """
    rows: list[Row] = []
    refused: dict[int, Outcome] = {}
    for index, event in enumerate(events):
        try:
            rows.append(row_of(event))
        except UnstorableError as reason:
            refused[index] = Outcome(Status.REFUSED, str(reason))
    return rows, refused


def _parts(rows: list[Row]) -> list[list[Row]]:
    """Return the rows in parts that each fit into a request."""
    size = sum([len(row[-1]) for row in rows])
    if len(rows) <= _MAX_EVENTS and size <= _MAX_BYTES:
        return [rows] if rows else []
    parts: list[list[Row]] = []
    size = 0
    for row in rows:
        if not parts or len(parts[-1]) >= _MAX_EVENTS or size + len(row[-1]) > _MAX_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(row)
        size += len(row[-1])
    return parts
