# SPDX-License-Identifier: Apache-2.0
"""A process that writes events, for a busy server.

A thread that writes shares Python's lock with the event loop: each waits for the other at every
statement. A separate process does not. A pair of sockets ties it to its parent: when the parent has
ended, in whatever way, the process reads the end of file and ends, too.

Both sides send frames: four bytes of length, then a value in the format of :mod:`marshal` (both
ends are the same Python, and no other process can reach the sockets).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
import marshal
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, BinaryIO, Final

from engage.api import Outcome, Status, StorageError, StorageUnavailable

from .connection import Settings
from .engine import Engine
from .events import STORED, Row

#: Whether this system can run the process: it needs sockets that a child inherits.
AVAILABLE: Final = sys.platform != "win32" and bool(sys.executable)

#: How many new containers make the garbage collector run.
GC_THRESHOLD: Final = 10_000


class WriterGoneError(StorageUnavailable):
    """The process ended: what it was writing may be stored or not."""


class WriterProcess(asyncio.Protocol):
    """The process, as its parent sees it."""

    def __init__(self, process: subprocess.Popen[bytes], timeout: float) -> None:
        self._process = process
        self._timeout = timeout
        self._transport: asyncio.Transport | None = None
        self._waiting: collections.deque[asyncio.Future[Any]] = collections.deque()
        self._received = bytearray()

    @classmethod
    async def start(cls, settings: Settings) -> WriterProcess:
        """Start the process and wait until it has opened the store.

        :raises StorageUnavailable: if it cannot be started, or cannot open the store.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            loop = asyncio.get_running_loop()
            spawning = loop.run_in_executor(None, _spawn, theirs.fileno())
            try:
                process = await asyncio.shield(spawning)
            except OSError as error:
                ours.close()
                raise StorageUnavailable(f"the process cannot be started: {error}") from error
            except BaseException:
                ours.close()
                # The thread cannot be cancelled: without this, its process would be left behind.
                await asyncio.wait([spawning])
                if spawning.exception() is None:
                    await cls(spawning.result(), settings.timeout).stop()
                raise
        self = cls(process, settings.timeout)
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)
            await self._request(pickle.dumps(settings))
        except BaseException:
            await self.stop()
            raise
        return self

    async def write(self, rows: list[Row]) -> tuple[Sequence[Outcome], int]:
        """Store events; see :meth:`Engine.write`.

        :raises WriterGoneError: if the process ended meanwhile.
        """
        outcomes, dropped = await self._request(marshal.dumps(rows))
        if outcomes is None:
            return [STORED] * len(rows), dropped
        return [_outcome(values) for values in outcomes], dropped

    async def stop(self) -> None:
        """End the process; what it was writing is stored or not."""
        if self._transport is not None:
            self._transport.abort()
        self._process.kill()
        await asyncio.to_thread(self._process.wait)

    async def _request(self, message: bytes) -> Any:
        if self._transport is None or self._transport.is_closing():
            raise WriterGoneError("the writer process has ended")
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._transport.write(len(message).to_bytes(4, "big") + message)
        try:
            async with asyncio.timeout(self._timeout):
                return await future
        except TimeoutError:
            raise StorageUnavailable(f"no answer within {self._timeout:g} s") from None

    # -------------------------------------------------------------------- asyncio.Protocol
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        while len(received) >= 4:
            end = 4 + int.from_bytes(received[:4], "big")
            if len(received) < end:
                return
            succeeded, answer = marshal.loads(received[4:end])
            del received[:end]
            future = self._waiting.popleft()
            if future.done():
                continue
            if succeeded:
                future.set_result(answer)
            else:
                future.set_exception(StorageUnavailable(answer))

    def connection_lost(self, error: Exception | None) -> None:
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_exception(WriterGoneError("the writer process ended"))


def _spawn(descriptor: int) -> subprocess.Popen[bytes]:
    # -P: the process must not import modules from the current folder.
    command = [sys.executable, "-P", "-m", "engage_plugins.sqlite.writer_process", str(descriptor)]
    return subprocess.Popen(
        command, pass_fds=[descriptor], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )


def _outcome(values: Any) -> Outcome:
    return STORED if values is None else Outcome(Status(values[0]), values[1], values[2])


# ------------------------------------------------------------------------------------ the process
def main(descriptor: int) -> None:
    """Write the events that the parent sends, until the parent has ended.

    :param descriptor: the socket to the parent.
    """
    # A terminal's ^C and a service manager's SIGTERM reach the whole process group; the parent,
    # which may have events to flush, ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Nothing here makes cycles, and the rows of a write are many containers that are soon freed.
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    parent = socket.socket(fileno=descriptor)
    stream = parent.makefile("rb")
    engine: Engine | None = None
    while (message := _read_message(stream)) is not None:
        try:
            if engine is None:
                engine = Engine(pickle.loads(message))
                engine.open(False, True)
                answer: Any = (True, None)
            else:
                answer = (True, _write(engine, message))
        except StorageError as error:
            answer = (False, str(error))
        reply = marshal.dumps(answer)
        try:
            parent.sendall(len(reply).to_bytes(4, "big") + reply)
        except OSError:
            break
        if engine is not None:
            engine.maintain()
    if engine is not None:
        engine.close()


def _read_message(stream: BinaryIO) -> bytes | None:
    """Return the next message, or ``None`` if the parent has ended, perhaps while sending one."""
    try:
        start = stream.read(4)
        size = int.from_bytes(start, "big")
        message = stream.read(size) if len(start) == 4 else b""
    except OSError:  # The parent was killed before it had read all answers.
        return None
    return message if message and len(message) == size else None


def _write(engine: Engine, message: bytes) -> tuple[Any, int]:
    """Return plain values: ``None`` for the outcome of a stored event, and instead of a list that
    would hold nothing else."""
    outcomes, dropped = engine.write(marshal.loads(message))
    if all(outcome is STORED for outcome in outcomes):
        return None, dropped
    return [
        None
        if outcome.status is Status.STORED
        else (outcome.status.value, outcome.reason, outcome.stored)
        for outcome in outcomes
    ], dropped


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(int(sys.argv[1]))
