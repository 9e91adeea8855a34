# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy that cuts or holds its connections on demand, whatever they carry."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Self


class TcpProxy:
    """A proxy on a port of 127.0.0.1, in separate threads. Use it as a context manager.

    :param target: host and port of the server.
    :param port: where it listens; 0: on a free port, which :meth:`up` finds.
    """

    def __init__(self, target: tuple[str, int], *, port: int = 0) -> None:
        self.target = target
        self.port = port
        #: Bytes that the server has sent.
        self.answered = 0
        self._flows = threading.Event()
        self._flows.set()
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._listener: socket.socket | None = None

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.flow()
        self.down()

    def up(self) -> None:
        """Accept connections (again, on the same port)."""
        if self._listener is not None:
            return
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(64)
        self.port = listener.getsockname()[1]
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def down(self) -> None:
        """Refuse new connections, and close the open ones."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            listener.close()
        self.cut()

    def cut(self) -> None:
        """Close all connections; new ones are still accepted."""
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def hold(self) -> None:
        """Keep the connections open and pass nothing on, until :meth:`flow`."""
        self._flows.clear()

    def flow(self) -> None:
        """Pass on what was held, and what comes."""
        self._flows.set()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """Serve one connection, in a thread."""
        try:
            server = socket.create_connection(self.target)
        except OSError:
            client.close()
            return
        for one, other in ((client, server), (server, client)):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._connections.add(one)
            threading.Thread(
                target=self._pump, args=(one, other), kwargs={"back": one is server}, daemon=True
            ).start()

    def _pump(self, source: socket.socket, sink: socket.socket, *, back: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._flows.wait()
                if back:
                    with self._lock:
                        self.answered += len(data)
                sink.sendall(data)
        for connection in (source, sink):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._connections.discard(source)
        source.close()
