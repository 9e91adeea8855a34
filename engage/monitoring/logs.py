# SPDX-License-Identifier: Apache-2.0
"""The log on standard error: a line for each request, and lines about the server itself.

Lines are text on a terminal and JSON objects elsewhere. They never contain a write key, a secret, a
payload, a path or a query (the query of a beacon contains its write key).

A thread writes the lines, so the server does not wait for a slow reader of its log. There may be
ten thousand requests a second: :func:`log_request` passes their lines to the handler of the logger
``engage.access`` without a :class:`logging.LogRecord`, and the thread writes many of them at once.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import queue
import select
import sys
import threading
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TextIO

import orjson

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["ACCESS", "configure", "flush", "log_request", "mask"]

#: Name of the logger for requests.
ACCESS: Final = "engage.access"
#: The lines of requests are collected for this time, because a write costs more than a line.
COLLECT_SECONDS: Final = 0.2
#: Lines that wait for a slow reader of the log, about one megabyte; later lines are dropped.
BACKLOG_LINES: Final = 5_000
#: A process that ends waits this long for the reader of its last lines.
FLUSH_SECONDS: Final = 1.0
#: Bytes that a pipe accepts without mixing them with the output of other processes.
_PIECE: Final[int] = getattr(select, "PIPE_BUF", 4096)

_access = logging.getLogger(ACCESS)
_formatter = logging.Formatter()

#: The attributes of every :class:`logging.LogRecord`; any other was passed as ``extra``.
_RECORD_FIELDS = frozenset(
    {*vars(logging.LogRecord("", 0, "", 0, "", (), None)), "message", "asctime", "taskName"}
)


def configure(
    level: str, style: str, *, secrets: Iterable[str] = (), stream: TextIO | None = None
) -> None:
    """Set up the logging of this process, in place of any earlier setup.

    :param level: ``debug``, ``info``, ``warning`` or ``error``.
    :param style: ``json``, ``text``, or ``auto``, which means text on a terminal, else JSON.
    :param secrets: strings that are masked wherever they occur in a line.
    :param stream: where to write; standard error by default.
    """
    stream = sys.stderr if stream is None else stream
    root = logging.getLogger()
    if (old := _handler()) is not None:
        root.removeHandler(old)
        _access.removeHandler(old)
        old.close()
    handler = _Handler(stream, style == "text" or (style == "auto" and stream.isatty()))
    handler.mask(secrets)
    root.addHandler(handler)
    root.setLevel(level.upper())
    _access.addHandler(handler)
    _access.propagate = False
    # The line of log_request replaces it: that has the request id and the workspace, and no query.
    logging.getLogger("tornado.access").setLevel(logging.CRITICAL)


def mask(secrets: Iterable[str]) -> None:
    """Also mask these strings wherever they occur in a line, until the next :func:`configure`."""
    if (handler := _handler()) is not None:
        handler.mask(secrets)


def flush() -> None:
    """Wait until all lines are written, at most :data:`FLUSH_SECONDS`."""
    if (handler := _handler()) is not None:
        handler.flush()


def log_request(
    *,
    request_id: str,
    method: str,
    route: str,
    status: int,
    seconds: float,
    workspace: str | None = None,
    key_id: str | None = None,
    code: str | None = None,
    events: int | None = None,
) -> None:
    """Log an answered request at level ``info``.

    :param request_id: the id that the answer has in ``X-Request-Id``.
    :param method: a method that HTTP defines.
    :param route: the name of the route, never the path.
    :param status: the HTTP status of the answer.
    :param seconds: the time that the request took.
    :param workspace: id of the workspace, if the request is authenticated.
    :param key_id: id of the write key, never the key.
    :param code: error code of the answer, if the answer is an error.
    :param events: number of events in the request, if it is known.
    """
    if not _access.isEnabledFor(logging.INFO):
        return
    fields = {
        "requestId": request_id,
        "method": method,
        "route": route,
        "status": status,
        "ms": round(seconds * 1000, 2),
        "workspace": workspace,
        "writeKeyId": key_id,
        "code": code,
        "events": events,
    }
    fields = {name: value for name, value in fields.items() if value is not None}
    if (handler := _handler()) is not None:
        handler.add(handler.request(fields))
    else:
        _access.info("request", extra=fields)  # Logging is not configured, as in tests.


def _handler() -> _Handler | None:
    return next((handler for handler in _access.handlers if isinstance(handler, _Handler)), None)


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%H:%M:%S")


class _Handler(logging.Handler):
    """Formats lines and hands them to a thread, which writes them."""

    def __init__(self, stream: TextIO, as_text: bool) -> None:
        super().__init__()
        self._stream = stream
        self._as_text = as_text
        self._secrets: list[str] = []
        #: Lines, the events of :meth:`flush`, and ``None`` after the last line.
        self._waiting: queue.SimpleQueue[bytes | threading.Event | None] = queue.SimpleQueue()
        #: Number of dropped lines; threads that change it hold the lock.
        self._dropped = 0
        self._counting = threading.Lock()
        #: Tells the thread to collect no more lines before it writes.
        self._urgent = threading.Event()
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def mask(self, secrets: Iterable[str]) -> None:
        """Also mask these strings."""
        # Longest first, because a secret may be the beginning of another.
        self._secrets = sorted({*self._secrets, *secrets} - {""}, key=len, reverse=True)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.add(self.format(record).encode("utf-8", "backslashreplace"))
        except Exception:
            self.handleError(record)
        self._urgent.set()

    def add(self, line: bytes) -> None:
        """Write a line soon; drop it if too many are waiting."""
        with self._counting:
            if self._waiting.qsize() < BACKLOG_LINES:
                self._waiting.put(line + b"\n")
            else:
                self._dropped += 1

    def flush(self) -> None:
        written = threading.Event()
        self._waiting.put(written)
        self._urgent.set()
        written.wait(FLUSH_SECONDS)

    def close(self) -> None:
        self._waiting.put(None)
        self._urgent.set()
        super().close()

    def _run(self) -> None:
        # A pipe accepts a piece of this size whole, so lines of several workers are not mixed.
        piece = b""
        while True:
            try:
                item = self._waiting.get_nowait()
            except queue.Empty:
                self._write(piece + self._dropped_line())
                piece, item = b"", self._waiting.get()
                self._urgent.wait(COLLECT_SECONDS)
                self._urgent.clear()
            if not isinstance(item, bytes):
                self._write(piece + self._dropped_line())
                piece = b""
                if item is None:
                    return
                item.set()
            elif len(piece) + len(item) <= _PIECE:
                piece += item
            else:
                self._write(piece)
                piece = item

    def _write(self, data: bytes) -> None:
        while data:
            try:
                # Not by the stream: a thread that waits in there holds a lock that an exit needs.
                data = data[os.write(self._stream.fileno(), data) :]
            except io.UnsupportedOperation:  # The stream is in memory.
                with contextlib.suppress(ValueError):
                    self._stream.write(data.decode())
                return
            except BlockingIOError:  # Another process made the terminal or the pipe non-blocking.
                time.sleep(COLLECT_SECONDS)
            except (OSError, ValueError):  # Standard error is closed.
                return

    def _dropped_line(self) -> bytes:
        with self._counting:
            count, self._dropped = self._dropped, 0
        if not count:
            return b""
        text = "lines of the log were dropped"
        record = logging.LogRecord(__name__, logging.WARNING, "", 0, text, (), None)
        record.lines = count
        return self.format(record).encode() + b"\n"

    def request(self, fields: dict[str, Any]) -> bytes:
        """Return the line of a request."""
        now = time.time()
        if not self._as_text:
            line = {"time": _utc(now), "level": "info", "message": "request", **fields}
            return orjson.dumps(line, default=repr)
        who = fields.get("workspace", "-")
        if "writeKeyId" in fields:
            who = f"{who}/{fields['writeKeyId']}"
        result = f"{fields['status']}" + (f" {fields['code']}" if "code" in fields else "")
        if "events" in fields:
            result += f" {fields['events']} events"
        took = f"{fields['ms']:.2f} ms {who} {fields['requestId']}"
        return f"{_clock(now)} {fields['method']:<4} {fields['route']} {result} {took}".encode()

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines of a record: only text has more than one, if it has an exception."""
        extra = {name: value for name, value in vars(record).items() if name not in _RECORD_FIELDS}
        level, message = record.levelname.lower(), self._masked(record.getMessage())
        exception = ""
        if record.exc_info and record.exc_info[0] is not None:
            exception = self._masked(_formatter.formatException(record.exc_info))
        if self._as_text:
            said = "".join(f" {name}={value}" for name, value in extra.items())
            line = f"{_clock(record.created)} {level:<7} {message}{self._masked(said)}"
            return f"{line}\n{exception}" if exception else line
        fields = {
            "time": _utc(record.created),
            "level": level,
            "logger": record.name,
            "message": message,
        }
        for name, value in extra.items():
            fields[name] = self._masked(value) if isinstance(value, str) else value
        if exception:
            fields["exception"] = exception
        return orjson.dumps(fields, default=repr, option=orjson.OPT_NON_STR_KEYS).decode()

    def _masked(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text
