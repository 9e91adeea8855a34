# SPDX-License-Identifier: Apache-2.0
"""The requests of all clients of a writer, in turns, on its engine.

Each round writes the events of all clients in one transaction, and makes one other call for each.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from engage.api import StorageError, StorageIncompatible, StorageMissing, StorageUnavailable
from engage.store import events

from ..connection import SQLITE, Settings
from ..engine import Engine
from ..schema import has_log
from .operations import OPEN, WRITE
from .session import Session, WaitingRequest

#: Events and bytes of one transaction, of all clients together; also of one request, because a
#: request is not divided.
MAX_EVENTS: Final = 4000
MAX_BYTES: Final = 16 * 1024 * 1024
#: Seconds after which a failed write of several clients is not repeated for each: the store is
#: down.
_QUICK_FAILURE: Final = 1.0
#: Seconds that the loop waits for the store to be opened. After that, it continues in between.
_OPENING: Final = 0.2
#: Seconds between two reports to the clients that opening takes long, and between two log lines.
_PROGRESS: Final = 0.5
_LOG_PROGRESS: Final = 10.0

_log = logging.getLogger("engage.storage.sqlite")


class Scheduler:
    """Takes the requests of clients in turns, runs them, and answers them.

    :param settings: of the process that writes; those of the clients do not matter.
    :param serving: whether the store is prepared for a server even before one opens it.
    """

    def __init__(self, settings: Settings, *, serving: bool) -> None:
        self.engine = Engine(settings)
        if has_log(settings.path):
            # The writer before this one did not close the store.
            self.engine.require_checkpoint()
        self._timeout = settings.timeout
        self._serving = serving
        self._is_open = False
        #: The clients in the order of their turns.
        self._sessions: collections.deque[Session] = collections.deque()
        #: Set while the store is being opened. No request is run in that time.
        self._opening: _Opening | None = None

    @property
    def is_opening(self) -> bool:
        """Whether the store is being opened."""
        return self._opening is not None

    def add(self, session: Session) -> None:
        """Take the requests of a client from now on."""
        self._sessions.append(session)

    def remove(self, session: Session) -> None:
        """Forget a client and its requests."""
        self._sessions.remove(session)

    def has_requests(self) -> bool:
        """Return whether a request can be run now."""
        now = time.monotonic()
        return self._opening is None and any(x.next_request(now) for x in self._sessions)

    def should_wait(self) -> bool:
        """Return whether the next commit should wait for a client that will send a write soon.

        A commit costs nearly as much for few events as for many. Without this, two busy workers
        often write in turns, each of them half as many events as both could write together.
        """
        if len(self._sessions) < 2 or self._opening is not None:
            return False
        now = time.monotonic()
        return any(x.is_expected(now) for x in self._sessions) and any(
            x.requests and x.requests[0].operation is WRITE for x in self._sessions
        )

    def serve(self) -> None:
        """Write the events of all clients, and make one other call for each."""
        if self._opening is not None:
            self._look_at_opening()
            return
        now = time.monotonic()
        if self._is_open and (group := self._next_group(now)):
            self._write(group)
        for session in list(self._sessions):
            request = session.next_request(now)
            if request is None:
                continue
            if request.operation is OPEN or not self._is_open:
                self._open(session.take() if request.operation is OPEN else request)
                return
            if request.operation is not WRITE:
                self._call(session.take())

    def work(self) -> bool:
        """Do a part of the work that no request waits for, and return whether there is more."""
        return self._is_open and self._opening is None and self.engine.work()

    def close(self) -> None:
        """Run the requests that were received, and close the store."""
        while self._opening is not None or self.has_requests():
            if self._opening is not None:
                self._opening.thread.join()
            self.serve()
        self.engine.close()

    # ----------------------------------------------------------------------------- requests
    def _next_group(self, now: float) -> list[WaitingRequest]:
        """Return writes whose turn it is, of all clients, for one transaction."""
        group: list[WaitingRequest] = []
        events = size = 0
        idle = 0
        turns = self._sessions
        while idle < len(turns):
            session = turns[0]
            request = session.next_request(now)
            if request is None or request.operation is not WRITE:
                turns.rotate(-1)
                idle += 1
                continue
            try:
                count = len(request.decode()[0])
            except (ValueError, msgspec.DecodeError) as error:
                session.take().failed(error)
                continue
            if group and (events + count > MAX_EVENTS or size + request.size > MAX_BYTES):
                break
            turns.rotate(-1)
            idle = 0
            group.append(session.take())
            events += count
            size += request.size
        return group

    def _write(self, group: Sequence[WaitingRequest]) -> None:
        if len(group) == 1:
            self._call(group[0])
            return
        rows = [row for request in group for row in request.decode()[0]]
        started = time.monotonic()
        try:
            others, dropped = self.engine.run(events.write, [rows])
        except Exception as error:
            if (
                isinstance(error, StorageUnavailable)
                and time.monotonic() - started > _QUICK_FAILURE
            ):
                for request in group:
                    request.failed(error)
            else:
                self._write_one_by_one(group)
            return
        start = 0
        for request in group:
            end = start + len(request.decode()[0])
            own = {index - start: others[index] for index in others if start <= index < end}
            request.done((own, dropped))
            start, dropped = end, 0

    def _write_one_by_one(self, group: Sequence[WaitingRequest]) -> None:
        """Write each request by itself, so that one cannot fail the others. If the store is
        unavailable twice in a row, it is down."""
        unavailable = 0
        for index, request in enumerate(group):
            error = self._call(request)
            unavailable = unavailable + 1 if isinstance(error, StorageUnavailable) else 0
            if unavailable == 2:
                for other in group[index + 1 :]:
                    other.failed(error or StorageUnavailable("not written"))
                return

    def _call(self, request: WaitingRequest) -> Exception | None:
        """Run one request and answer it. Return the error, if it failed."""
        try:
            plan, arguments = request.operation.plan, request.decode()
            if plan is not None:
                result = self.engine.run(plan, arguments)
            else:
                result = getattr(self.engine, request.operation.name)(*arguments)
            request.done(result)
        except Exception as error:
            if not isinstance(error, StorageError):
                _log.exception("SQLite: the writer met an unexpected error")
            request.failed(error)
            return error
        return None

    # ------------------------------------------------------------------------------ opening
    def _open(self, request: WaitingRequest) -> None:
        """Open the store, because a client opens it or because a request needs it."""
        create = False
        if request.operation is OPEN:
            try:
                (create,) = request.decode()
            except msgspec.DecodeError as error:
                request.failed(error)
                return
            self._serving = True
        self._opening = _Opening(self.engine, request, create=create, serving=self._serving)
        self._opening.thread.join(_OPENING)
        self._look_at_opening()

    def _look_at_opening(self) -> None:
        opening = self._opening
        assert opening is not None
        if opening.thread.is_alive():
            if self.engine.is_preparing:
                opening.report(self._sessions, self._timeout)
            return
        self._opening = None
        error = opening.error
        if self._serving and not self._is_open and error is None:
            _log.info("SQLite %s writes %s", SQLITE, self.engine.settings.path)
        self._is_open = self._is_open or error is None
        if opening.request.operation is OPEN:
            if error is None:
                opening.request.done(None)
            else:
                opening.request.failed(error)
        elif error is not None and opening.request in opening.request.session.requests:
            if isinstance(error, StorageMissing | StorageIncompatible):
                # The clients had it open before: it is unavailable now.
                error = StorageUnavailable(str(error))
            opening.request.session.take().failed(error)


class _Opening:
    """Opens the store in a thread, because this takes long if the tables or the log have to be
    changed. The loop continues in between, but runs no request.

    :param engine: opens the store.
    :param request: the request of a client.
    """

    def __init__(
        self, engine: Engine, request: WaitingRequest, *, create: bool, serving: bool
    ) -> None:
        self.request = request
        self.error: Exception | None = None
        self._next_report = 0.0
        self._next_line = time.monotonic() + _LOG_PROGRESS
        self.thread = threading.Thread(
            target=self._run,
            args=(engine, create, serving),
            name="engage-sqlite-opening",
            daemon=True,
        )
        self.thread.start()

    def report(self, sessions: Sequence[Session], timeout: float) -> None:
        """Report now and then that opening takes long: to the clients, and in the log."""
        now = time.monotonic()
        if now >= self._next_line:
            self._next_line = now + _LOG_PROGRESS
            _log.warning("SQLite: the store is being prepared; nothing is written until then")
        if now >= self._next_report:
            self._next_report = now + _PROGRESS
            for session in sessions:
                session.progress(now + timeout)

    def _run(self, engine: Engine, create: bool, serving: bool) -> None:
        try:
            engine.open(create, serving)
        except Exception as error:
            self.error = error
