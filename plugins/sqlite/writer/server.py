# SPDX-License-Identifier: Apache-2.0
"""The loop of the writer process.

Each round reads what the clients have sent, runs requests (``turns.py``), and does a part of
the other work. The loop never waits for a client: what a client does not read is kept within
limits, and then the client is disconnected.
"""

from __future__ import annotations

import collections
import logging
import os
import selectors
import socket
import time
from typing import Final

import msgspec

from .host import WriterHost
from .listening import WriterSocket
from .lock import Note, WriterLock
from .peer import Connection
from .protocol import (
    PROTOCOL,
    Hello,
    Welcome,
    decode_settings,
    encode_first,
    encode_log,
    peer_uid,
)
from .turns import Turns

#: Seconds between two looks at the lock, the socket and the clients.
_TICK: Final = 1.0
#: Seconds of one wait for a client that will send a write soon; the least that a selector can wait.
_PROMPT: Final = 0.001
#: Seconds that the process waits for its first client, and for the first message of a client.
FIRST_CLIENT: Final = 5.0
#: Seconds that clients have to read their last answers.
_FAREWELL: Final = 2.0
#: While requests wait, other work takes at most this part of the time.
_WORK_SHARE: Final = 0.25
#: Lines for the log that are kept until there is a client.
_MAX_LINES: Final = 100

_log = logging.getLogger("engage.storage.sqlite")


class WriterServer:
    """Serves clients until the last one disconnects.

    :param lock: held by this process.
    :param host: runs the operations.
    """

    def __init__(self, lock: WriterLock, host: WriterHost) -> None:
        self._lock = lock
        self._host = host
        self._selector = selectors.DefaultSelector()
        self._clients: dict[socket.socket, Connection] = {}
        self._turns = Turns(host)
        self._lines: collections.deque[bytes] = collections.deque(maxlen=_MAX_LINES)
        self._socket = WriterSocket(lock)
        self._next_tick = 0.0
        self._work_after = 0.0
        self._started_at = time.monotonic()
        self._had_client = False
        #: A client that disconnected when it was the last one. Its connection stays open until the
        #: store is closed, or until there is another client.
        self._last: list[Connection] = []
        #: Whether another process is the writer now, or will be.
        self._is_ending = False

    # --------------------------------------------------------------------------------- life
    def listen(self) -> None:
        """Accept connections from now on.

        :raises OSError: if there can be no socket.
        """
        self._selector.register(self._socket.listen(), selectors.EVENT_READ, None)
        self._lock.write(Note(pid=os.getpid()))

    def run(self) -> bool:
        """Serve until there are no clients, or another process is the writer.

        :return: false if it ended because of an unexpected error.
        """
        busy = False
        failure = ""
        try:
            while not self._is_ending and (self._clients or not self._is_over()):
                self._wait(busy)
                while self._turns.should_wait():
                    self._wait(False, at_most=_PROMPT)
                now = time.monotonic()
                while self._last and self._clients:
                    self._last.pop().close()
                if now >= self._next_tick:
                    self._tick(now)
                self._turns.serve()
                if self._turns.superseded:
                    _log.warning("SQLite: another process is the writer now; this one ends")
                    self._is_ending = True
                waiting = self._turns.has_requests()
                busy = self._work(waiting) or waiting
        except Exception as error:
            _log.exception("SQLite: the writer process ends because of an unexpected error")
            failure = f"{type(error).__name__}: {error}"
        finally:
            self._end(failure)
        return not failure

    def _is_over(self) -> bool:
        return self._had_client or time.monotonic() - self._started_at > FIRST_CLIENT

    def _end(self, failure: str) -> None:
        """Answer what was not begun, close the store, and let the next process be the writer.

        :param failure: the error because of which the process ends.
        """
        if self._clients:
            self._wait(True)
        self._turns.give_back()
        deadline = time.monotonic() + _FAREWELL
        while any(x.wants_writing for x in self._turns.clients) and time.monotonic() < deadline:
            self._wait(False, reading=False)
        if self._turns.opening is not None:
            self._turns.opening.thread.join()
        self._host.close()
        # A later process that has replaced the lock's file also has a later socket.
        if self._lock.is_current():
            self._socket.remove()
            self._lock.write(Note(pid=os.getpid(), failure=failure))
        self._socket.close()
        self._selector.close()
        self._lock.release()
        # Last: when a client sees the end of its connection, everything above is done.
        for client in (*self._clients.values(), *self._last):
            client.close()

    def _tick(self, now: float) -> None:
        self._next_tick = now + _TICK
        if not self._lock.is_current():
            _log.warning("SQLite: the lock's file was deleted; the writer process ends")
            self._is_ending = True
            return
        if not self._socket.is_current():
            _log.warning("SQLite: the socket of the writer process was deleted; there is a new one")
            self._selector.unregister(self._socket.sock)
            self._socket.remove()
            self._socket.close()
            self.listen()
        for client in list(self._clients.values()):
            if client.is_stuck(now):
                _log.warning("SQLite: a process does not read the answers of the writer process")
                self._drop(client)
            elif client.hello is None and now - client.connected_at > FIRST_CLIENT:
                self._drop(client)

    # -------------------------------------------------------------------------- connections
    def _wait(self, busy: bool, *, reading: bool = True, at_most: float = _TICK) -> None:
        """Read and send what is possible now; wait for it if there is nothing else to do.

        :param busy: whether there is something else to do.
        :param reading: whether to read from clients and to accept connections.
        :param at_most: seconds to wait.
        """
        for known in self._clients.values():
            self._register(known, reading)
        timeout = 0.0 if busy else min(at_most, max(0.0, self._next_tick - time.monotonic()))
        if self._turns.opening is not None:
            timeout = min(timeout, 0.02)
        for key, mask in self._selector.select(timeout):
            client: Connection | None = key.data
            if client is None:
                if reading:
                    self._accept()
                continue
            if mask & selectors.EVENT_WRITE:
                client.flush()
            if mask & selectors.EVENT_READ:
                self._receive(client)
            if client.gone:
                self._drop(client)

    def _register(self, client: Connection, reading: bool) -> None:
        events = selectors.EVENT_READ if reading and client.wants_reading else 0
        if client.wants_writing:
            events |= selectors.EVENT_WRITE
        if events == client.events:
            return
        if not client.events:
            self._selector.register(client.sock, events, client)
        elif not events:
            self._selector.unregister(client.sock)
        else:
            self._selector.modify(client.sock, events, client)
        client.events = events

    def _accept(self) -> None:
        try:
            sock = self._socket.sock.accept()[0]
        except OSError:
            return
        uid = peer_uid(sock)
        if uid is not None and uid != os.geteuid():
            sock.close()
            return
        self._clients[sock] = client = Connection(sock)
        self._register(client, True)

    def _receive(self, client: Connection) -> None:
        try:
            hello = client.receive()
            if hello is not None:
                self._greet(client, hello)
        except (ValueError, msgspec.DecodeError) as error:
            _log.warning("SQLite: a process does not speak the writer's protocol: %s", error)
            client.gone = True

    def _greet(self, client: Connection, hello: Hello) -> None:
        self._had_client = True
        client.send(encode_first(Welcome(PROTOCOL, os.getpid())))
        # A client of another protocol disconnects.
        if hello.protocol == PROTOCOL:
            self._host.adopt(decode_settings(hello.settings), serving=hello.serving)
            self._turns.add(client)
            while self._lines:
                client.send(self._lines.popleft())

    def _drop(self, client: Connection) -> None:
        if self._clients.pop(client.sock, None) is None:
            return
        if client.events:
            self._selector.unregister(client.sock)
        self._turns.remove(client)
        if not self._clients:
            # It sees the end of its connection after the store is closed.
            self._last.append(client)
        else:
            client.close()

    def log(self, name: str, level: int, text: str) -> None:
        """Send a line for the log to a client, if possible of a server."""
        line = encode_log(name, level, text)
        client = max(
            self._turns.clients,
            key=lambda x: x.hello is not None and x.hello.serving,
            default=None,
        )
        if client is None:
            self._lines.append(line)
        else:
            client.send(line)

    def _work(self, waiting: bool) -> bool:
        """Do other work, and return whether there is more.

        :param waiting: whether requests wait, so that this may not take much of the time.
        """
        if self._turns.opening is not None:
            return False
        started = time.monotonic()
        if waiting and started < self._work_after:
            return True
        more = self._host.work()
        ended = time.monotonic()
        self._work_after = ended + (ended - started) * (1 / _WORK_SHARE - 1)
        return more
