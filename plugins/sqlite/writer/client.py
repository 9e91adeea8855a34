# SPDX-License-Identifier: Apache-2.0
"""The client of a writer process: finds or starts it, and sends it requests.

If the connection is lost, the client connects again, to the next writer, and sends again what was
not answered: callers notice only that it takes longer. Each request has a deadline, which includes
all of that.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from typing import Any, Final, TypeVar

import msgspec

from engage.api import StorageError, StorageUnavailable

from ..connection import Settings
from .link import WaitingCall, WriterLink, connected_socket
from .lock import Note, WriterLock, read_note, require_owner
from .operations import Operation
from .protocol import (
    PROTOCOL,
    Hello,
    Kind,
    encode_request,
    encode_settings,
    error_of,
    peer_pid,
    peer_uid,
)
from .start import StartedProcess, start_process

Result = TypeVar("Result")

#: Seconds between two attempts to connect.
_RETRY: Final = 0.01
#: Seconds that the writer has to answer the first message.
_GREETING: Final = 5.0
#: Seconds that the last client waits until the writer has closed the store (a worker has two).
_CLOSING: Final = 1.5
#: Bytes of requests that wait for their answers; with more, further ones fail.
_MAX_PENDING_BYTES: Final = 128 * 1024 * 1024
#: Seconds until a process that could not start is tried again: at first, and at most. The pause
#: doubles each time.
_BACK_OFF: Final = (0.5, 30.0)

_log = logging.getLogger("engage.storage.sqlite")


class WriterClient:
    """Makes calls in the writer process.

    :param settings: of this process.
    :param store: the real path of the store.
    """

    def __init__(self, settings: Settings, store: str) -> None:
        self._settings = settings
        self._store = store
        # ``get_running_loop`` is a system call (getpid) in Python 3.11.
        self._loop = asyncio.get_running_loop()
        #: Whether this process belongs to a server, whose settings matter.
        self.serving = False
        #: The process that answers, for messages; 0: not known.
        self.pid = 0
        #: Why no process answers, if that is known; for messages.
        self._reason = ""
        #: The same process as the system sees it, for its usage; ``None``: not known.
        self.process: int | None = None
        self._connection: WriterLink | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._pending: dict[int, WaitingCall] = {}
        self._pending_bytes = 0
        self._numbers = itertools.count(1)
        self._process: StartedProcess | None = None
        self._pause = _BACK_OFF[0]
        self._failed_until = 0.0
        self._failure: StorageError | None = None

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection to a writer now."""
        return self._connection is not None

    async def call(self, operation: Operation[Result], *arguments: Any) -> Result:
        """Run an operation in the writer process.

        :raises StorageUnavailable: if there is no answer in time. The operation may have been run.
        """
        loop = self._loop
        seconds = self._settings.timeout
        number = next(self._numbers)
        message = encode_request(
            number,
            operation.name,
            time.monotonic() + seconds,
            operation.encode_arguments(arguments),
        )
        if self._pending and self._pending_bytes + len(message) > _MAX_PENDING_BYTES:
            raise StorageUnavailable("too many requests wait for the writer process")
        request = WaitingCall(operation, message, loop.create_future())
        request.timer = loop.call_later(seconds, self._time_out, request)
        self._pending[number] = request
        self._pending_bytes += len(message)
        try:
            if self._connection is not None:
                self._connection.send(request)
            else:
                self._connect_soon()
            return await request.future  # type: ignore[no-any-return]
        finally:
            request.timer.cancel()
            del self._pending[number]
            self._pending_bytes -= len(message)

    async def close(self) -> None:
        """Wait for the requests that were made, and disconnect. If this was the last client, wait
        until the writer has closed the store."""
        pending = [request.future for request in self._pending.values()]
        if pending:
            await asyncio.wait(pending)
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.cancel()
            await asyncio.wait([connecting])
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close(min(_CLOSING, self._settings.timeout))

    def _time_out(self, request: WaitingCall) -> None:
        if not request.future.done():
            who = f"the writer process {self.pid}" if self.pid else "the writer process"
            request.future.set_exception(
                StorageUnavailable(
                    f"no answer from {who} within {self._settings.timeout:g} s{self._reason}"
                )
            )

    # ---------------------------------------------------------------------------- answers
    def answered(self, number: int, kind: int, value: msgspec.Raw) -> None:
        """Handle a message of the writer: an answer to a request, or a line for the log.

        :param number: of the request.
        :param kind: a :class:`~.protocol.Kind`.
        :param value: MessagePack.
        """
        if kind == Kind.DONE:
            request = self._pending.get(number)
            if request is not None and not request.future.done():
                request.future.set_result(request.operation.decode_result(value))
        elif kind == Kind.LOG:
            name, level, text = msgspec.msgpack.decode(value)
            logging.getLogger(name).log(level, "%s", text)
        elif (request := self._pending.get(number)) is None or request.future.done():
            return
        elif kind == Kind.AGAIN:
            # The connection ends soon; then the request is sent to the next writer.
            request.sent = False
        elif kind == Kind.PROGRESS:
            request.timer.cancel()
            seconds = self._settings.timeout
            request.timer = self._loop.call_later(seconds, self._time_out, request)
        else:
            request.future.set_exception(error_of(kind, value))

    def lost(self, connection: WriterLink) -> None:
        """Handle the end of a connection: connect again, and send repeatable requests again."""
        if self._connection is not connection:
            return
        self._connection = None
        self.pid, self.process = 0, None
        for request in self._pending.values():
            if request.sent and not request.operation.repeatable and not request.future.done():
                error = StorageUnavailable("the writer process ended; it may have made the change")
                request.future.set_exception(error)
            request.sent = False
        if self._pending:
            self._connect_soon()

    # ------------------------------------------------------------------------- connecting
    def _connect_soon(self) -> None:
        if self._connecting is None:
            self._connecting = self._loop.create_task(self._connect())

    async def _connect(self) -> None:
        try:
            # Each request fails at its deadline. Without requests, no connection is needed.
            while self._waiting():
                connection = await self._try_to_connect()
                if connection is not None:
                    self._connection = connection
                    self.pid = connection.welcome.pid
                    self._process, self._pause = None, _BACK_OFF[0]
                    for request in self._pending.values():
                        connection.send(request)
                    return
                await asyncio.sleep(_RETRY)
        except StorageError as error:
            self._fail(error)
        except Exception as error:
            _log.exception("SQLite: cannot connect to the writer process")
            self._fail(StorageUnavailable(str(error)))
        finally:
            self._connecting = None

    def _waiting(self) -> bool:
        return any(not request.future.done() for request in self._pending.values())

    def _fail(self, error: StorageError) -> None:
        for request in self._pending.values():
            if not request.future.done():
                request.future.set_exception(error)

    async def _try_to_connect(self) -> WriterLink | None:
        """Connect to the writer, or start one.

        :return: ``None`` if it is to be tried again.
        :raises StorageError: if it need not be tried again.
        """
        connection = await self._greet()
        if connection is not None:
            return connection
        await self._start()
        return None

    async def _greet(self) -> WriterLink | None:
        sock = connected_socket(self._store)
        if sock is None:
            return None
        uid, process = peer_uid(sock), peer_pid(sock)
        if uid is not None and uid != os.geteuid():
            sock.close()
            require_owner(self._store)
            raise StorageUnavailable(f"{self._store}: a process of another user writes to it")
        try:
            _, connection = await self._loop.create_unix_connection(
                lambda: WriterLink(self, self._hello()), sock=sock
            )
        except OSError:
            sock.close()
            return None
        try:
            async with asyncio.timeout(_GREETING):
                await connection.greeted
        except (OSError, TimeoutError):
            connection.abort()
            return None
        except BaseException:
            connection.abort()
            raise
        welcome = connection.welcome
        if welcome.protocol != PROTOCOL:
            connection.abort()
            self._reason = (
                f": the writer process {welcome.pid} is of another version of engage; it ends with"
                " the processes of that version"
            )
            return None
        self.process, self._reason = process, ""
        return connection

    def _hello(self) -> Hello:
        return Hello(PROTOCOL, encode_settings(self._settings), self.serving)

    async def _start(self) -> None:
        """Start a writer process, if there is none.

        :raises StorageError: if it cannot start, or if a thread of another process is the writer.
        """
        process = self._process
        if process is not None and process.failure is not None:
            self._process = None
            self._failure = StorageUnavailable(
                f"the writer process cannot be started: {process.failure}"
            )
            self._failed_until = time.monotonic() + self._pause
            self._pause = min(self._pause * 2, _BACK_OFF[1])
        if self._failure is not None:
            if time.monotonic() < self._failed_until:
                raise self._failure
            self._failure = None
        lock = WriterLock.acquire(self._store)
        if lock is None:
            note = read_note(self._store)
            if note is not None and note.thread:
                raise StorageUnavailable(thread_message(self._store, note))
            return
        try:
            # The earlier holder may have been a thread.
            lock.write(Note(pid=os.getpid()))
            starting = self._loop.run_in_executor(None, start_process, lock)
            lock = None
        finally:
            if lock is not None:
                lock.release()
        try:
            self._process = await starting
        except OSError as error:
            raise StorageUnavailable(f"the writer process cannot be started: {error}") from error


def thread_message(store: str, note: Note) -> str:
    """Return why this process cannot write: a thread of another one does."""
    return (
        f"{store}: process {note.pid} writes in a thread, so no other process can write: set "
        'storage.sqlite.writer = "process" there if its folder takes sockets, or stop that process'
    )
