# SPDX-License-Identifier: Apache-2.0
"""The loop of a writer in a thread of the test, and clients that are sockets."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from engage_plugins.sqlite.writer.operations import Operation
from engage_plugins.sqlite.writer.protocol import PROTOCOL, Frames, answer_decoder, encode
from engage_plugins.sqlite.writer.server import Server
from engage_plugins.sqlite.writer.sockets import connected_socket
from support.sqlite import settings
from support.waiting import wait_for


class Client:
    """A client that sends what the test wants."""

    def __init__(self, path: Path) -> None:
        self.sock = wait_for(lambda: connected_socket(str(path)), what="the writer to listen")
        self.sock.settimeout(20)
        self._frames = Frames()
        self._bodies: list[bytes] = []
        self._number = 0
        assert msgspec.json.decode(self.body())["protocol"] == PROTOCOL

    def request(
        self, operation: Operation[Any], *arguments: Any, seconds: float = 20, name: str = ""
    ) -> bytes:
        """Return the message of the next request."""
        self._number += 1
        message: bytes = encode(
            self._number, name or operation.name, time.monotonic() + seconds, arguments
        )
        return message

    def body(self) -> bytes:
        """Return the next message."""
        while not self._bodies:
            data = self.sock.recv(65536)
            if not data:
                raise EOFError
            self._bodies += self._frames.feed(data)
        return self._bodies.pop(0)

    def answer(self) -> tuple[int, int, Any]:
        """Return the number, the kind and the value of the next answer."""
        number, kind, value = answer_decoder.decode(self.body())
        return number, kind, msgspec.msgpack.decode(value)

    def call(self, operation: Operation[Any], *arguments: Any) -> tuple[int, Any]:
        """Send a request, and return the kind and the value of its answer."""
        self.sock.sendall(self.request(operation, *arguments))
        _, kind, value = self.answer()
        return kind, value


class Loop:
    """A loop in a thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._control, self._end = socket.socketpair()
        self.server = Server(settings(path), self._end, listens=True, serving=True)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        self.clients: list[Client] = []

    def client(self) -> Client:
        """Connect another client."""
        self.clients.append(Client(self.path))
        return self.clients[-1]

    def end(self) -> None:
        """End the loop; its clients have to be disconnected."""
        self._control.close()
        self.thread.join(20)
        assert not self.thread.is_alive()
        self._end.close()
        for client in self.clients:
            client.sock.close()
