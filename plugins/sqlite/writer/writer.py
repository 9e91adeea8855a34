# SPDX-License-Identifier: Apache-2.0
"""What the storage calls for all writes: a client of the one writer of the store.

The writer is the helper process of a server. In a process without one, a thread waits to become the
writer, and writes for all other processes as long as no other process does.

If the connection is lost, the client connects again, to the next writer, and sends again what was
not answered: callers notice only that it takes longer. Each request has a deadline, which includes
all of that.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from engage.api import Outcome, StorageError, StorageUnavailable
from engage.store.keys import key_of
from engage.store.tables import Row

from ..connection import SQLITE, Settings
from .channel import Channel, WaitingCall
from .lock import WriterLock, alone_message, holder, require_writable
from .operations import OPEN, WRITE, Operation
from .protocol import PROTOCOL, Kind, encode, error_of
from .scheduler import MAX_BYTES, MAX_EVENTS
from .server import ServerThread, run_helper
from .sockets import AVAILABLE, connected_socket, is_foreign, process_gauges, takes_sockets

Result = TypeVar("Result")

#: Seconds between two attempts to connect.
_RETRY: Final = 0.01
#: Seconds that the writer has to send the first message.
_GREETING: Final = 5.0

_log = logging.getLogger("engage.storage.sqlite")


class Writer:
    """Makes all writes.

    Until something is to be written, there is neither a connection nor a thread.
    """

    def __init__(
        self, settings: Settings, *, had_store: bool = False, supervised: bool = False
    ) -> None:
        """
        :param settings: those of the writer, if it is in this process.
        :param had_store: see :attr:`StorageContext.had_store`.
        :param supervised: see :attr:`StorageContext.supervised`.
        """
        self._settings = settings
        self._had_store = had_store
        self._supervised = supervised
        self._is_open = False
        self._loop: asyncio.AbstractEventLoop
        self._thread: ServerThread | None = None
        self._channel: Channel | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._pending: dict[int, WaitingCall] = {}
        self._numbers = itertools.count(1)
        #: Why no writer answers, if that is known; for messages.
        self._reason = ""

    async def open(self, create: bool) -> None:
        """Open the store; see :meth:`Storage.open`.

        A store that was open before is not created again: if it is missing, it was moved away, and
        what is written to another one in its place would be lost when it comes back.
        """
        # ``get_running_loop`` is a system call (getpid) in Python 3.11.
        self._loop = asyncio.get_running_loop()
        self._is_open = True
        if not create:
            return
        try:
            await self.call(OPEN, not self._had_store)
            self._had_store = True
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Wait for the requests that were made, and disconnect. If the writer is a thread of this
        process, wait until it has closed the store."""
        self._is_open = False
        pending = [request.future for request in self._pending.values()]
        if pending:
            await asyncio.wait(pending)
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.cancel()
            await asyncio.wait([connecting])
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.abort()
        thread, self._thread = self._thread, None
        if thread is not None:
            await thread.close(self._settings.timeout)

    def helper(self) -> Callable[[socket.socket], None] | None:
        """Return what a helper process runs; see :meth:`Storage.helper`."""
        return functools.partial(run_helper, self._settings) if self._listens else None

    @functools.cached_property
    def _listens(self) -> bool:
        """Whether other processes can reach the writer."""
        if not AVAILABLE or self._settings.writer == "thread":
            return False
        store = self._settings.path
        if self._settings.writer == "process" or takes_sockets(store):
            return True
        if not self._supervised:  # The parent has logged it.
            _log.warning(
                "%s: its folder takes no sockets, so a thread of this process writes to it, and no"
                " other process can: use one worker",
                store,
            )
        return False

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection to a writer now."""
        return self._channel is not None

    @property
    def version(self) -> str:
        """The version of SQLite that writes; of this process if there is no connection."""
        return (self._channel.welcome.sqlite if self._channel else "") or SQLITE

    def gauges(self) -> Mapping[str, float]:
        """Return what the process of the writer uses; nothing if it is this one."""
        process = 0 if self._channel is None else self._channel.process
        return process_gauges(process) if process else {}

    # ----------------------------------------------------------------------------- requests
    async def call(self, operation: Operation[Result], *arguments: Any) -> Result:
        """Run an operation: ``await writer.call(operations.CHECK)``.

        :raises StorageError: as the operation does.
        :raises StorageUnavailable: if there is no answer in time. The operation may have been run.
        """
        if not self._is_open:
            raise StorageUnavailable("the storage is not open")
        seconds = self._settings.timeout
        number = next(self._numbers)
        message = encode(number, operation.name, time.monotonic() + seconds, arguments)
        request = WaitingCall(operation, message, self._loop.create_future())
        request.timer = self._loop.call_later(seconds, self._time_out, request)
        self._pending[number] = request
        try:
            if self._channel is not None:
                self._channel.send(request)
            else:
                self._connect_soon()
            return await request.future  # type: ignore[no-any-return]
        finally:
            request.timer.cancel()
            del self._pending[number]

    def _time_out(self, request: WaitingCall) -> None:
        if not request.future.done():
            request.future.set_exception(StorageUnavailable(self._silence()))

    def _silence(self) -> str:
        """Return why there is no answer."""
        within = f"within {self._settings.timeout:g} s"
        if self._channel is not None:
            return f"no answer from the writer process {self._channel.welcome.pid} {within}"
        try:
            # What prevents a helper process from taking the lock prevents this one as well.
            if (lock := WriterLock.acquire(self._settings.path)) is not None:
                lock.release()
            elif (other := holder(self._settings.path)) is not None and other.alone:
                return alone_message(self._settings.path, other)
        except StorageUnavailable as error:
            return str(error)
        return f"no answer from the writer process {within}{self._reason}"

    def _answered(self, number: int, kind: int, value: msgspec.Raw) -> None:
        """Handle an answer.

        :param number: of the request.
        :param kind: a :class:`~.protocol.Kind`.
        :param value: MessagePack.
        """
        if kind == Kind.PROGRESS:
            for waiting in self._pending.values():
                waiting.timer.cancel()
                waiting.timer = self._loop.call_later(
                    self._settings.timeout, self._time_out, waiting
                )
            return
        request = self._pending.get(number)
        if request is None or request.future.done():
            return
        if kind == Kind.DONE:
            request.future.set_result(request.operation.result.decode(value))
        else:
            request.future.set_exception(error_of(kind, value))

    def _lost(self, channel: Channel) -> None:
        """Handle the end of a connection: connect again, and send repeatable requests again."""
        if self._channel is not channel:
            return
        self._channel = None
        for request in self._pending.values():
            if request.sent and not request.operation.repeatable and not request.future.done():
                error = StorageUnavailable("the writer process ended; it may have made the change")
                request.future.set_exception(error)
            request.sent = False
        if self._pending:
            self._connect_soon()

    # --------------------------------------------------------------------------- connecting
    def _connect_soon(self) -> None:
        if self._connecting is None:
            self._connecting = self._loop.create_task(self._connect())

    async def _connect(self) -> None:
        try:
            require_writable(self._settings.path)
            if self._thread is None and not (self._supervised and self._listens):
                self._thread = ServerThread.of(self._settings, listens=self._listens)
            # Each request fails at its deadline. Without requests, no connection is needed.
            while any(not request.future.done() for request in self._pending.values()):
                channel = await self._try_to_connect()
                if channel is not None:
                    self._channel, self._reason = channel, ""
                    for request in self._pending.values():
                        channel.send(request)
                    return
                await asyncio.sleep(_RETRY)
        except StorageError as error:
            self._fail(error)
        except Exception as error:
            _log.exception("SQLite: cannot connect to the writer")
            self._fail(StorageUnavailable(str(error)))
        finally:
            self._connecting = None

    def _fail(self, error: StorageError) -> None:
        for request in self._pending.values():
            if not request.future.done():
                request.future.set_exception(error)

    async def _try_to_connect(self) -> Channel | None:
        """Connect to the writer.

        :return: ``None`` if it is to be tried again.
        :raises StorageError: if it need not be tried again.
        """
        sock = self._connected_socket()
        if sock is None:
            return None
        channel = Channel(self._answered, self._lost)
        try:
            async with asyncio.timeout(_GREETING):
                await channel.connect(sock)
        except (OSError, TimeoutError):
            channel.abort()
            return None
        except BaseException:
            channel.abort()
            raise
        welcome = channel.welcome
        if welcome.protocol == PROTOCOL:
            return channel
        channel.abort()
        self._reason = (
            f": the writer process {welcome.pid} is of another version of engage; it ends with the"
            " server or the command that started it"
        )
        return None

    def _connected_socket(self) -> socket.socket | None:
        store = self._settings.path
        if self._thread is not None:
            sock = self._thread.connect()
            if sock is not None:
                return sock
            if self._thread.server.refusal:
                raise StorageUnavailable(self._thread.server.refusal)
        sock = connected_socket(store) if AVAILABLE else None
        if sock is not None and is_foreign(sock):
            sock.close()
            require_writable(store)
            raise StorageUnavailable(f"{store}: a process of another user writes to it")
        return sock

    # ------------------------------------------------------------------------------- events
    async def write(self, rows: Sequence[Row]) -> tuple[dict[int, Outcome], int]:
        """Run :func:`engage.store.events.write`, in several transactions if the events are many."""
        others: dict[int, Outcome] = {}
        dropped = start = 0
        for part in _parts([(*row, key_of(*row[:3])) for row in rows]):
            outcomes, count = await self.call(WRITE, part)
            others.update({start + index: outcomes[index] for index in outcomes})
            dropped += count
            start += len(part)
        return others, dropped


def _parts(rows: list[Row]) -> list[list[Row]]:
    """Return the rows in parts that each fit into a request."""
    sizes = [len(row[-2]) for row in rows]
    if len(rows) <= MAX_EVENTS and sum(sizes) <= MAX_BYTES:
        return [rows] if rows else []
    parts: list[list[Row]] = []
    total = 0
    for row, size in zip(rows, sizes, strict=True):
        if not parts or len(parts[-1]) >= MAX_EVENTS or total + size > MAX_BYTES:
            parts.append([])
            total = 0
        parts[-1].append(row)
        total += size
    return parts
