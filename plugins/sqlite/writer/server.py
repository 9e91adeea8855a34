# SPDX-License-Identifier: Apache-2.0
"""The loop that writes a store for all of its clients.

Each round reads what the clients have sent, runs requests (``scheduler.py``), and does a part of
the other work. The loop never waits for a client: what a client does not read is kept within
limits, and then the client is disconnected.

It runs in the helper process of a server, or in a thread of a process without one.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import gc
import logging
import selectors
import socket
import threading
import time
from typing import ClassVar, Final

import msgspec

from engage.api import StorageUnavailable

from ..connection import ALIVE_SECONDS, Settings, unavailable
from .lock import WriterLock, alone_message, holder, require_writable
from .scheduler import Scheduler
from .session import PROMPT_SECONDS, Session
from .sockets import WriterSocket, is_foreign, socket_path

#: Seconds between two attempts to get the lock. ``flock`` could wait for it, but not for the end as
#: well, nor for the lock of a file that was deleted and made again.
_RETRY: Final = 0.05
#: Seconds between two looks at the lock and the socket; the pause after an error.
_TICK: Final = 1.0
#: Seconds of one wait while the store is being opened.
_OPENING: Final = 0.02
#: While requests wait, other work takes at most this part of the time.
_WORK_SHARE: Final = 0.25
#: How many new containers make the garbage collector run. Nothing here makes cycles, and the rows
#: of a write are many containers that are soon freed.
GC_THRESHOLD: Final = 10_000

_log = logging.getLogger("engage.storage.sqlite")


class Server:
    """Takes the lock of a store, and then writes for all clients until it is told to end.

    :param settings: those that apply as long as it has the lock.
    :param control: it ends when this can be read or is closed; only :meth:`connect` sends zeros.
    :param listens: whether other processes can reach it.
    :param serving: see :class:`Scheduler`.
    """

    def __init__(
        self, settings: Settings, control: socket.socket, *, listens: bool, serving: bool
    ) -> None:
        self._settings = settings
        self._control = control
        self._listens = listens
        self._serving = serving
        self._selector = selectors.DefaultSelector()
        self._sessions: dict[socket.socket, Session] = {}
        self._arriving: collections.deque[socket.socket] = collections.deque()
        self._scheduler: Scheduler | None = None
        self._listening: WriterSocket | None = None
        self._is_ending = False
        self._next_tick = 0.0
        self._work_after = 0.0
        #: Why it cannot have the lock, if that will not pass by itself.
        self.refusal = ""

    @property
    def scheduler(self) -> Scheduler | None:
        """Runs the requests; ``None`` without the lock."""
        return self._scheduler

    def accept(self, sock: socket.socket) -> None:
        """Serve a client of this process. It is called by other threads."""
        self._arriving.append(sock)

    def run(self) -> None:
        """Take the lock and serve, again if the file of the lock or the socket was deleted."""
        self._control.setblocking(False)
        self._selector.register(self._control, selectors.EVENT_READ, self._control)
        with self._selector:
            while not self._is_ending:
                pause = _RETRY
                try:
                    if (lock := self._acquire()) is not None:
                        self._serve(lock)
                        continue
                    self.refusal = ""
                except StorageUnavailable as error:
                    self.refusal = str(error)
                except Exception:
                    _log.exception("SQLite: the writer met an unexpected error; it starts again")
                    pause = _TICK
                self._select(pause)

    def _acquire(self) -> WriterLock | None:
        store = self._settings.path
        require_writable(store)
        lock = WriterLock.acquire(store, alone=not self._listens)
        if lock is None and (other := holder(store)) is not None and other.alone:
            raise StorageUnavailable(alone_message(store, other))
        return lock

    def _serve(self, lock: WriterLock) -> None:
        scheduler = self._scheduler = Scheduler(self._settings, serving=self._serving)
        try:
            self._listen()
            self.refusal = ""
            busy = False
            while not self._is_ending:
                self._exchange(busy)
                while scheduler.should_wait():
                    self._exchange(False, PROMPT_SECONDS)
                now = time.monotonic()
                if now >= self._next_tick and not self._look_around(lock, now):
                    break
                scheduler.serve()
                waiting = scheduler.has_requests()
                busy = self._work(scheduler, waiting) or waiting
            if self._sessions:
                self._exchange(True)
        finally:
            self._end(lock, scheduler)

    def _listen(self) -> None:
        if not self._listens:
            return
        try:
            self._listening = WriterSocket(self._settings.path)
        except OSError as error:
            reason = unavailable(socket_path(self._settings.path), error)
            # The clients of a helper process only know that none answers.
            if self._serving and str(reason) != self.refusal:
                _log.error("SQLite: the writer cannot listen: %s", reason)
            raise reason from error
        self._selector.register(self._listening.sock, selectors.EVENT_READ, None)

    def _end(self, lock: WriterLock, scheduler: Scheduler) -> None:
        """Answer what was received, close the store, and let the next one be the writer."""
        self._scheduler = None
        try:
            scheduler.close()
        finally:
            if self._listening is not None:
                self._selector.unregister(self._listening.sock)
                self._listening.close()
                self._listening = None
            lock.release()
            # Last: when a client sees the end of its connection, everything above is done.
            for session in list(self._sessions.values()):
                self._drop(session)

    def _look_around(self, lock: WriterLock, now: float) -> bool:
        """Return whether this is still the writer, and can be found."""
        self._next_tick = now + _TICK
        if lock.is_current() and (not self._listening or self._listening.is_current()):
            return True
        _log.warning("SQLite: the file of the writer's lock or its socket was deleted")
        return False

    def _work(self, scheduler: Scheduler, waiting: bool) -> bool:
        """Do other work, and return whether there is more.

        :param waiting: whether requests wait, so that this may not take much of the time.
        """
        started = time.monotonic()
        if waiting and started < self._work_after:
            return True
        more = scheduler.work()
        ended = time.monotonic()
        self._work_after = ended + (ended - started) * (1 / _WORK_SHARE - 1)
        return more

    # -------------------------------------------------------------------------- connections
    def _exchange(self, busy: bool, at_most: float = _TICK) -> None:
        """Read and send what is possible now; wait for it if there is nothing else to do.

        :param busy: whether there is something else to do.
        :param at_most: seconds to wait.
        """
        for session in self._sessions.values():
            self._register(session)
        timeout = 0.0 if busy else min(at_most, max(0.0, self._next_tick - time.monotonic()))
        if self._scheduler is not None and self._scheduler.is_opening:
            timeout = min(timeout, _OPENING)
        self._select(timeout)

    def _select(self, timeout: float) -> None:
        self._settings.alive()
        for key, mask in self._selector.select(timeout):
            session: Session | socket.socket | None = key.data
            if session is None:
                self._accept()
                continue
            if not isinstance(session, Session):
                self._obey()
                continue
            if mask & selectors.EVENT_WRITE:
                session.flush()
            if mask & selectors.EVENT_READ:
                self._receive(session)
            if session.gone:
                self._drop(session)

    def _obey(self) -> None:
        try:
            data = self._control.recv(64)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        self._is_ending = self._is_ending or not data or bool(data.strip(b"\0"))
        while self._arriving:
            self._add(self._arriving.popleft())

    def _accept(self) -> None:
        assert self._listening is not None
        try:
            sock = self._listening.sock.accept()[0]
        except OSError:
            return
        if is_foreign(sock):
            sock.close()
        else:
            self._add(sock)

    def _add(self, sock: socket.socket) -> None:
        if self._scheduler is None:
            sock.close()
            return
        self._sessions[sock] = session = Session(sock)
        self._scheduler.add(session)
        self._register(session)

    def _register(self, session: Session) -> None:
        events = selectors.EVENT_READ if session.wants_reading else 0
        if session.wants_writing:
            events |= selectors.EVENT_WRITE
        if events == session.events:
            return
        if not session.events:
            self._selector.register(session.sock, events, session)
        elif not events:
            self._selector.unregister(session.sock)
        else:
            self._selector.modify(session.sock, events, session)
        session.events = events

    def _receive(self, session: Session) -> None:
        try:
            session.receive()
        except (ValueError, msgspec.DecodeError) as error:
            _log.warning("SQLite: a process does not speak the writer's protocol: %s", error)
            session.gone = True

    def _drop(self, session: Session) -> None:
        if self._sessions.pop(session.sock, None) is None:
            return
        if session.events:
            self._selector.unregister(session.sock)
        if self._scheduler is not None:
            self._scheduler.remove(session)
        session.close()


def run_helper(settings: Settings, control: socket.socket) -> None:
    """Write a store in the helper process of a server; see :meth:`Storage.helper`."""
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    settings = dataclasses.replace(settings, alive=Heartbeat(control))
    Server(settings, control, listens=True, serving=True).run()


class Heartbeat:
    """Tells the parent of a helper process that the process works; see :data:`Helper`.

    :param channel: to the parent. It does not block: a parent that is stopped reads nothing.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._next = 0.0

    def __call__(self) -> None:
        """Send a heartbeat, unless one was sent a moment ago. May be called from any thread."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + ALIVE_SECONDS
            with contextlib.suppress(OSError):
                self._channel.send(b"beat\n")


class ServerThread:
    """A server in a thread, for all storages of this process that have the same file."""

    _running: ClassVar[dict[str, ServerThread]] = {}
    _guard: ClassVar = threading.Lock()

    def __init__(self, settings: Settings, *, listens: bool) -> None:
        self._store = settings.path
        self._users = 0
        self._control, control = socket.socketpair()
        self.server = Server(settings, control, listens=listens, serving=False)
        # A daemon thread: a disk that hangs must not prevent the process from exiting.
        self._thread = threading.Thread(
            target=self._run, args=(control,), name="engage-sqlite-writer", daemon=True
        )
        self._thread.start()

    @classmethod
    def of(cls, settings: Settings, *, listens: bool) -> ServerThread:
        """Return the thread of a store, which is started if there is none; :meth:`close` it."""
        with cls._guard:
            if settings.path not in cls._running:
                cls._running[settings.path] = cls(settings, listens=listens)
            thread = cls._running[settings.path]
            thread._users += 1
            return thread

    def _run(self, control: socket.socket) -> None:
        with control:
            self.server.run()

    def connect(self) -> socket.socket | None:
        """Return a socket that is connected to the server, or ``None`` if it is not the writer."""
        if self.server.scheduler is None:
            return None
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self.server.accept(theirs)
        with contextlib.suppress(OSError):
            self._control.send(b"\0")
        return ours

    async def close(self, seconds: float) -> None:
        """Use the thread no longer; the last storage ends it, and waits until it has ended.

        :param seconds: how long to wait. If the thread hangs, another one takes over later.
        """
        with self._guard:
            self._users -= 1
            if self._users:
                return
            if self._running.get(self._store) is self:
                del self._running[self._store]
        self._control.close()
        await asyncio.to_thread(self._thread.join, seconds)
