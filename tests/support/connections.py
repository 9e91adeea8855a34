# SPDX-License-Identifier: Apache-2.0
"""Connections to a server of which it is known which worker has them."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import socket
from collections.abc import Iterator
from typing import Any

from support.processes import descendants, holder
from support.server_process import Server
from support.waiting import wait_for


class Connection:
    """A connection that one worker has."""

    def __init__(self, server: Server) -> None:
        self._socket = socket.create_connection(("127.0.0.1", server.port), timeout=120)
        self.port: int = self._socket.getsockname()[1]

    def send(self, path: str, key: str | None, method: str = "POST") -> tuple[int, Any]:
        """Send an event, and return the status and the JSON of the answer."""
        body = b'{"userId": "u", "event": "E"}' if method == "POST" else b""
        head = f"{method} {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n"
        if key is not None:
            credential = base64.b64encode(f"{key}:".encode()).decode()
            head += f"Authorization: Basic {credential}\r\n"
        self._socket.sendall(head.encode() + b"\r\n" + body)
        data = b""
        while b"\r\n\r\n" not in data:
            data += self._socket.recv(65536)
        answer, _, content = data.partition(b"\r\n\r\n")
        length = int(re.search(rb"Content-Length: (\d+)", answer)[1])  # type: ignore[index]
        while len(content) < length:
            content += self._socket.recv(65536)
        return int(answer.split()[1]), json.loads(content)

    def status(self, key: str) -> int:
        """Send an event with a key in the header, and return the status."""
        return self.send("/v1/track", key)[0]

    def close(self) -> None:
        self._socket.close()


@contextlib.contextmanager
def one_to_each_worker(server: Server, workers: int = 2) -> Iterator[dict[int, Connection]]:
    """Open a connection to every process of the server that answers requests.

    Each stays with its process, because none has more connections than another.
    """
    assert server.process is not None
    parent = server.process.pid
    opened: list[Connection] = []

    def complete() -> dict[int, Connection] | None:
        if len(opened) < workers:
            opened.append(Connection(server))
        for connection in opened:
            assert connection.send("/readyz", None, "GET")[0] == 200
        pids = {*descendants(parent), parent}
        # A process may have handed a connection to another, with a smaller number.
        found = {holder(pids, connection.port): connection for connection in opened}
        for connection in opened:
            if connection not in found.values():
                connection.close()
        alone = len(found) == len(opened) == workers
        opened[:] = found.values()
        return {pid: value for pid, value in found.items() if pid is not None} if alone else None

    try:
        yield wait_for(complete, what="a connection to each worker")
    finally:
        for connection in opened:
            connection.close()
