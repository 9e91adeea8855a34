# SPDX-License-Identifier: Apache-2.0
"""The loop of the writer process in a thread of the test, and clients that are sockets."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from engage_plugins.sqlite.writer.host import WriterHost
from engage_plugins.sqlite.writer.link import connected_socket
from engage_plugins.sqlite.writer.lock import WriterLock
from engage_plugins.sqlite.writer.operations import Operation
from engage_plugins.sqlite.writer.protocol import (
    PROTOCOL,
    Frames,
    Hello,
    decode_answer,
    encode_first,
    encode_request,
    encode_settings,
)
from engage_plugins.sqlite.writer.server import WriterServer
from support.sqlite import settings


class Client:
    """A client that sends what the test wants."""

    def __init__(self, path: Path) -> None:
        self._path = path
        found = connected_socket(str(path))
        assert found is not None
        self.sock = found
        self.sock.settimeout(20)
        self._frames = Frames(2**30)
        self._bodies: list[bytes] = []
        self._number = 0

    def greet(self, **changes: Any) -> dict[str, Any]:
        """Send the first message, and return the answer."""
        values: dict[str, Any] = {
            "protocol": PROTOCOL,
            "settings": encode_settings(settings(self._path)),
            "serving": True,
        }
        self.sock.sendall(encode_first(Hello(**(values | changes))))
        welcome: dict[str, Any] = msgspec.json.decode(self.body())
        return welcome

    def request(
        self, operation: Operation[Any], *arguments: Any, seconds: float = 20, name: str = ""
    ) -> bytes:
        """Return the message of the next request."""
        self._number += 1
        message: bytes = encode_request(
            self._number,
            name or operation.name,
            time.monotonic() + seconds,
            operation.encode_arguments(arguments),
        )
        return message

    def body(self) -> bytes:
        """Return the next message."""
        while not self._bodies:
            data = self.sock.recv(65536)
            if not data:
                raise EOFError
            self._bodies += self._frames.feed(data)
        body = self._bodies[0]
        del self._bodies[0]
        return body

    def answer(self) -> tuple[int, int, Any]:
        """Return the number, the kind and the value of the next answer."""
        number, kind, value = decode_answer(self.body())
        return number, kind, msgspec.msgpack.decode(value)

    def call(self, operation: Operation[Any], *arguments: Any) -> tuple[int, Any]:
        """Send a request, and return the kind and the value of its answer."""
        self.sock.sendall(self.request(operation, *arguments))
        _, kind, value = self.answer()
        return kind, value

    def close(self) -> None:
        self.sock.close()


class Loop:
    """A loop in a thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lock = WriterLock.acquire(str(path))
        assert lock is not None
        self.host = WriterHost(lock)
        self.server = WriterServer(lock, self.host)
        self.server.listen()
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        self.clients: list[Client] = []

    def connect(self) -> Client:
        """Connect another client."""
        self.clients.append(Client(self.path))
        return self.clients[-1]

    def client(self) -> Client:
        """Connect another client, which is accepted."""
        client = self.connect()
        assert client.greet()["protocol"] == PROTOCOL
        return client
