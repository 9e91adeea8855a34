# SPDX-License-Identifier: Apache-2.0
"""``python -m engage.server.child``: a worker that was started by :mod:`engage.server.supervisor`.

A fresh interpreter, not a fork: a fork would share the parent's event loop, threads and locks.

The child and its parent talk over a socket pair. The child gets its :class:`Setup` there and later
perhaps the line ``drain``; it says ``ready``, or ``failed`` and why. When the channel ends the
parent is gone, and the child ends too, at once, whatever it is doing: nothing was acknowledged that
is not durable, and an orphan would keep the port and the file from whoever comes next.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import json
import logging
import os
import pickle
import signal
import socket
import struct
import sys
from typing import TYPE_CHECKING

from engage import logs
from engage.api import EngageError
from engage.server.worker import Worker, new_event_loop

if TYPE_CHECKING:
    from engage.config import Config

__all__ = ["BLOCKED", "Setup", "main", "receive_setup", "send_setup"]

_log = logging.getLogger(__name__)
#: Signals that the parent has blocked in a new child until it can take them.
BLOCKED = {signal.SIGINT, signal.SIGTERM}

_LENGTH = struct.Struct("!I")
_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """What a child is told by its parent. The config is the parent's: the file may have changed."""

    config: Config
    #: 0, 1 …; a child that replaces another has its number.
    number: int
    #: Whether the server runs already.
    joins: bool
    #: Masked in the log.
    secrets: tuple[str, ...]


def send_setup(channel: socket.socket, setup: Setup) -> None:
    """Tell a child its setup. ``channel`` must block, or the setup be small."""
    data = pickle.dumps(setup)
    channel.sendall(_LENGTH.pack(len(data)) + data)


def receive_setup(channel: socket.socket) -> Setup:
    """:return: what :func:`send_setup` sent.

    :raises EOFError: the parent is gone.
    """

    def exactly(count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            more = channel.recv(count - len(data))
            if not more:
                raise EOFError
            data += more
        return bytes(data)

    # From our own parent, over a socket pair that nobody else has.
    setup: Setup = pickle.loads(exactly(*_LENGTH.unpack(exactly(_LENGTH.size))))  # noqa: S301
    return setup


def main(listening_fd: int, channel_fd: int) -> int:
    """Be a worker.

    :param listening_fd: the inherited listening socket.
    :param channel_fd: the inherited end of the channel to the parent.
    :return: the exit status.
    """
    # The parent alone answers to the terminal and tells us; SIGTERM drains this worker only.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(fileno=channel_fd)
    try:
        setup = receive_setup(channel)
    except EOFError:
        return 1
    if sys.platform == "linux":
        # Should the loop hang, the channel's end is not seen: then the kernel does it.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    logging_ = setup.config.logging
    logs.configure(logging_.level, logging_.format, secrets=setup.secrets)
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(_run(setup, socket.socket(fileno=listening_fd), channel))
    except (EngageError, OSError) as error:
        channel.setblocking(True)
        channel.sendall(b"failed " + json.dumps(str(error)).encode() + b"\n")
        return 1
    finally:
        logs.flush()


async def _run(setup: Setup, sock: socket.socket, channel: socket.socket) -> int:
    from engage.registry import load_plugins

    reader, writer = await asyncio.open_connection(sock=channel.dup())
    worker = Worker(
        setup.config,
        load_plugins(),
        sock,
        number=setup.number,
        joins=setup.joins,
        ready=lambda: writer.write(b"ready\n"),
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)

    async def obey() -> None:
        while line := await reader.readline():
            if line == b"drain\n":
                worker.stop()
        os._exit(1)

    listening = asyncio.create_task(obey(), name="obey")
    try:
        return await worker.run()
    finally:
        listening.cancel()
        writer.close()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
