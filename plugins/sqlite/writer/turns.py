# SPDX-License-Identifier: Apache-2.0
"""The requests of all clients of a writer process, in turns.

Each round writes the events of all clients in one transaction, and makes one other call for each.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from engage.api import StorageError, StorageUnavailable

from ..tables.events import Row
from ..transactions import SupersededError
from .host import WriterHost
from .operations import OPEN, WRITE, encode_outcomes
from .peer import Connection, WaitingRequest

#: Events and bytes of one transaction, of all clients together.
MAX_EVENTS: Final = 4000
MAX_BYTES: Final = 16 * 1024 * 1024
#: Seconds after which a failed write of several clients is not repeated for each: the store is
#: down.
_QUICK_FAILURE: Final = 1.0
#: Seconds that the loop waits for the store to be opened. After that, it continues meanwhile.
_OPENING: Final = 0.2

_log = logging.getLogger("engage.storage.sqlite")


class Turns:
    """Takes the requests of clients in turns, and answers them.

    :param host: runs them.
    """

    def __init__(self, host: WriterHost) -> None:
        self._host = host
        #: The clients in the order of their turns.
        self._clients: collections.deque[Connection] = collections.deque()
        #: Set while the store is being opened. No request is run meanwhile.
        self.opening: Opening | None = None
        #: Whether another process is the writer now, so that this one must end.
        self.superseded = False

    @property
    def clients(self) -> Sequence[Connection]:
        """The clients."""
        return self._clients

    def add(self, client: Connection) -> None:
        """Take the requests of a client from now on."""
        self._clients.append(client)

    def remove(self, client: Connection) -> None:
        """Forget a client and its requests."""
        if client in self._clients:
            self._clients.remove(client)

    def has_requests(self) -> bool:
        """Return whether a request can be run now."""
        now = time.monotonic()
        return self.opening is None and any(x.next_request(now) for x in self._clients)

    def should_wait(self) -> bool:
        """Return whether the next commit should wait for a client that will send a write soon.

        A commit costs nearly as much for few events as for many. Without this, two busy workers
        often write in turns, each of them half as many events as both could write together.
        """
        if len(self._clients) < 2 or self.opening is not None:
            return False
        now = time.monotonic()
        return any(x.is_expected(now) for x in self._clients) and any(
            x.requests and x.requests[0].operation is WRITE for x in self._clients
        )

    def give_back(self) -> None:
        """Answer all requests that were not begun, so that their clients send them to the next
        writer."""
        for client in self._clients:
            while client.requests:
                client.take().again()

    def serve(self) -> None:
        """Write the events of all clients, and make one other call for each."""
        if self.opening is not None:
            self._look_at_opening()
            return
        now = time.monotonic()
        group = self._next_group(now)
        if group:
            self._write(group)
        for client in list(self._clients):
            if self.opening is not None or self.superseded:
                return
            request = client.next_request(now)
            if request is not None and request.operation is not WRITE:
                self._call(client.take())

    def _next_group(self, now: float) -> list[WaitingRequest]:
        """Return writes whose turn it is, of all clients, for one transaction."""
        group: list[WaitingRequest] = []
        events = size = 0
        idle = 0
        turns = self._clients
        while idle < len(turns):
            client = turns[0]
            request = client.next_request(now)
            if request is None or request.operation is not WRITE:
                turns.rotate(-1)
                idle += 1
                continue
            try:
                count = len(request.decode()[0])
            except msgspec.DecodeError as error:
                client.take().failed(error)
                continue
            if group and (events + count > MAX_EVENTS or size + request.size > MAX_BYTES):
                break
            turns.rotate(-1)
            idle = 0
            group.append(client.take())
            events += count
            size += request.size
        return group

    def _write(self, group: Sequence[WaitingRequest]) -> None:
        if len(group) == 1:
            self._call(group[0])
            return
        rows: list[Row] = []
        for request in group:
            rows += request.decode()[0]
        started = time.monotonic()
        try:
            outcomes, dropped = self._host.write(rows)
        except SupersededError:
            self.superseded = True
            for request in group:
                request.again()
            return
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
            request.done((encode_outcomes(outcomes[start:end]), dropped))
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
            arguments = request.decode()
            if request.operation is OPEN:
                self.opening = Opening(self._host, request)
                self.opening.thread.join(_OPENING)
                self._look_at_opening()
                return None
            if request.operation is WRITE:
                outcomes, dropped = self._host.write(arguments[0])
                request.done((encode_outcomes(outcomes), dropped))
            else:
                request.done(self._host.call(request.operation, arguments))
        except SupersededError:
            self.superseded = True
            request.again()
        except Exception as error:
            if not isinstance(error, StorageError):
                _log.exception("SQLite: the writer process met an unexpected error")
            request.failed(error)
            return error
        return None

    def _look_at_opening(self) -> None:
        opening = self.opening
        if opening is None:
            return
        if opening.thread.is_alive():
            if self._host.is_preparing and opening.progress_is_due():
                opening.request.progress()
                for client in self._clients:
                    for request in client.requests:
                        if request.operation is OPEN:
                            request.progress()
            return
        self.opening = None
        if opening.error is None:
            opening.request.done(None)
        elif isinstance(opening.error, SupersededError):
            self.superseded = True
            opening.request.again()
        else:
            opening.request.failed(opening.error)


class Opening:
    """Opens the store in a thread, because this takes long if the tables have to be changed. The
    loop continues meanwhile, but runs no request.

    :param host: opens the store.
    :param request: the client's request to open it.
    """

    def __init__(self, host: WriterHost, request: WaitingRequest) -> None:
        self.request = request
        self.error: Exception | None = None
        self._host = host
        self._next_progress = 0.0
        self.thread = threading.Thread(target=self._run, name="engage-sqlite-opening", daemon=True)
        self.thread.start()

    def progress_is_due(self) -> bool:
        """Return whether to report now that opening takes long; at most every half second."""
        now = time.monotonic()
        if now < self._next_progress:
            return False
        self._next_progress = now + 0.5
        return True

    def _run(self) -> None:
        arguments: Any = self.request.decode()
        try:
            self._host.open(arguments[0])
        except Exception as error:
            self.error = error
