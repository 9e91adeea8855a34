# SPDX-License-Identifier: Apache-2.0
"""The log on standard error: a line for each request, and lines about the server itself.

Lines are text on a terminal and JSON objects elsewhere. They never contain a write key, a secret, a
payload, a path or a query (the query of a beacon contains its write key).

There may be ten thousand requests a second, so their lines bypass most of :mod:`logging`:
:func:`log_request` passes them to the handler of the logger ``engage.access``, which collects them
and writes many at once, at most :data:`FLUSH_SECONDS` later and always before any other line.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import select
import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TextIO

import orjson

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = ["ACCESS", "configure", "flush", "log_request", "mask"]

#: Name of the logger for requests.
ACCESS: Final = "engage.access"
#: Lines of requests are written after this time, or when there are this many.
FLUSH_SECONDS: Final = 0.2
FLUSH_LINES: Final = 200
#: Characters of lines that wait for a slow reader of the log; more lines are dropped.
BACKLOG_SIZE: Final = 1024 * 1024
#: Bytes that a pipe accepts without mixing them with the output of other processes.
_PIECE: Final[int] = getattr(select, "PIPE_BUF", 4096)

_access = logging.getLogger(ACCESS)

#: The attributes of every :class:`logging.LogRecord`; any other was passed as ``extra``.
_RECORD_FIELDS = frozenset(
    {*vars(logging.LogRecord("", 0, "", 0, "", (), None)), "message", "asctime", "taskName"}
)


def configure(
    level: str,
    style: str,
    *,
    secrets: Iterable[str] = (),
    stream: TextIO | None = None,
    process: str = "",
) -> None:
    """Set up the logging of this process, in place of any earlier setup.

    :param level: ``debug``, ``info``, ``warning`` or ``error``.
    :param style: ``json``, ``text``, or ``auto``, which means text on a terminal, else JSON.
    :param secrets: strings that are masked wherever they occur in a line.
    :param stream: where to write; standard error by default.
    :param process: what this process is, such as ``worker``. All lines have it, except those of
        requests, which come from workers only; ``""``: there are no other processes.
    """
    stream = sys.stderr if stream is None else stream
    as_text = style == "text" or (style == "auto" and stream.isatty())
    handler = _Handler(stream, as_text)
    handler.setFormatter((_Text if as_text else _Json)(secrets, process))
    root = logging.getLogger()
    for old in (*root.handlers, *_access.handlers):
        if isinstance(old, _Handler):
            root.removeHandler(old)
            _access.removeHandler(old)
            old.close()
    root.addHandler(handler)
    root.setLevel(level.upper())
    _access.addHandler(handler)
    _access.propagate = False
    # The line of log_request replaces it: that has the request id and the workspace, and no query.
    logging.getLogger("tornado.access").setLevel(logging.CRITICAL)


def mask(secrets: Iterable[str]) -> None:
    """Also mask these strings wherever they occur in a line, until the next :func:`configure`."""
    for handler in _access.handlers:
        if isinstance(handler, _Handler) and isinstance(handler.formatter, _Formatter):
            handler.formatter.mask(secrets)


def flush() -> None:
    """Write the lines of requests that have been collected."""
    for handler in _access.handlers:
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
    more: Mapping[str, str] | None = None,
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
    :param more: further fields: of a webhook delivery its ``provider``, ``type`` and ``outcome``.
    """
    if not _access.isEnabledFor(logging.INFO):
        return
    fields: dict[str, Any] = {
        "requestId": request_id,
        "method": method,
        "route": route,
        "status": status,
        "ms": round(seconds * 1000, 2),
    }
    if workspace is not None:
        fields["workspace"] = workspace
    if key_id is not None:
        fields["writeKeyId"] = key_id
    if code is not None:
        fields["code"] = code
    if events is not None:
        fields["events"] = events
    if more:
        fields |= more
    for handler in _access.handlers:
        if isinstance(handler, _Handler):
            handler.request(fields)
            return
    _access.info("request", extra=fields)  # Logging is not configured, as in tests.


def _now(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


class _Formatter(logging.Formatter):
    def __init__(self, secrets: Iterable[str], process: str) -> None:
        super().__init__()
        self._process = process
        self._secrets: list[str] = []
        self.mask(secrets)

    def mask(self, secrets: Iterable[str]) -> None:
        """Also mask these strings."""
        further = {secret for secret in secrets if secret}.difference(self._secrets)
        if further:
            # Longest first, because a secret may be the beginning of another.
            self._secrets = sorted([*self._secrets, *further], key=len, reverse=True)

    def _masked(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    @staticmethod
    def _extra(record: logging.LogRecord) -> dict[str, Any]:
        return {name: value for name, value in vars(record).items() if name not in _RECORD_FIELDS}


class _Json(_Formatter):
    """Formats a record as a JSON object in one line."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": _now(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            **({"process": self._process} if self._process else {}),
            "message": self._masked(record.getMessage()),
        }
        for name, value in self._extra(record).items():
            fields[name] = self._masked(value) if isinstance(value, str) else value
        if record.exc_info and record.exc_info[0] is not None:
            fields["exception"] = self._masked(self.formatException(record.exc_info))
        return orjson.dumps(fields, default=repr, option=orjson.OPT_NON_STR_KEYS).decode()


class _Text(_Formatter):
    """Formats a record as text in one line. The lines of an exception follow it."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        extra = "".join(f" {name}={value}" for name, value in self._extra(record).items())
        who = f"{self._process}: " if self._process else ""
        line = f"{when} {record.levelname.lower():<7} {who}{record.getMessage()}{extra}"
        if record.exc_info and record.exc_info[0] is not None:
            line += "\n" + self.formatException(record.exc_info)
        return self._masked(line)


def _pieces(lines: Iterable[str]) -> Iterator[str]:
    """Join lines to pieces that a pipe accepts whole, so that lines of workers are not mixed."""
    piece: list[str] = []
    size = 0
    for line in lines:
        length = len(line.encode()) + 1
        if piece and size + length > _PIECE:
            yield "\n".join([*piece, ""])
            piece, size = [], 0
        piece.append(line)
        size += length
    if piece:
        yield "\n".join([*piece, ""])


def _pollable(stream: TextIO) -> select.poll | None:
    """Return an object that reports whether a write would block, or ``None`` if none ever does."""
    if not hasattr(select, "poll"):
        return None
    try:
        poll = select.poll()
        poll.register(stream.fileno(), select.POLLOUT)
    except (OSError, ValueError, AttributeError):  # The stream is not a file, but in memory.
        return None
    return poll


class _Handler(logging.StreamHandler[TextIO]):
    """Writes records immediately, and the lines of requests many at once.

    The server does not wait for a reader of the log that is slow or has stopped reading. Lines wait
    for it instead, up to :data:`BACKLOG_SIZE`.
    """

    def __init__(self, stream: TextIO, as_text: bool) -> None:
        super().__init__(stream)
        self._as_text = as_text
        self._poll = _pollable(stream)
        #: Pieces that could not be written yet, and their size in characters.
        self._backlog: collections.deque[str] = collections.deque()
        self._backlog_size = 0
        self._dropped = 0
        self._lines: list[str] = []
        self._timer: asyncio.TimerHandle | None = None
        self._second = 0
        self._clock = ""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        self._enqueue_lines()
        self._enqueue(line + "\n")
        self._send()

    def request(self, fields: dict[str, Any]) -> None:
        """Collect the line of a request, to be written soon."""
        now = time.time()
        if self._as_text:
            self._lines.append(self._text(now, fields))
        else:
            self._lines.append(
                orjson.dumps(
                    {"time": self._time(now), "level": "info", "message": "request", **fields},
                    default=repr,
                ).decode()
            )
        if len(self._lines) >= FLUSH_LINES:
            self.flush()
        elif self._timer is None:
            self._schedule_flush()
            if self._timer is None:  # No event loop.
                self.flush()

    def flush(self) -> None:
        with self.lock or contextlib.nullcontext():
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._enqueue_lines()
            self._send()

    def _enqueue_lines(self) -> None:
        lines, self._lines = self._lines, []
        for piece in _pieces(lines):
            self._enqueue(piece)

    def _enqueue(self, piece: str) -> None:
        if self._backlog_size > BACKLOG_SIZE:
            self._dropped += piece.count("\n")
            return
        self._backlog.append(piece)
        self._backlog_size += len(piece)

    def _send(self) -> None:
        """Write what can be written now, and schedule the rest."""
        backlog = self._backlog
        # A closed standard error must not make requests fail.
        with contextlib.suppress(OSError, ValueError):
            while backlog and (self._poll is None or self._poll.poll(0)):
                piece = backlog.popleft()
                self._backlog_size -= len(piece)
                self.stream.write(piece)
                self.stream.flush()
                if self._dropped and not backlog:
                    count, self._dropped = self._dropped, 0
                    self._enqueue(self._dropped_line(count))
        if backlog:
            self._schedule_flush()

    def _schedule_flush(self) -> None:
        if self._timer is None:
            with contextlib.suppress(RuntimeError):
                self._timer = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self.flush)

    def _dropped_line(self, count: int) -> str:
        record = logging.LogRecord(
            __name__, logging.WARNING, "", 0, "lines of the log were dropped", (), None
        )
        record.lines = count
        return self.format(record) + "\n"

    def _time(self, now: float) -> str:
        second = int(now)
        if second != self._second:
            self._second, self._clock = second, _now(second)[:-4]
        return f"{self._clock}{int((now - second) * 1000):03d}Z"

    @staticmethod
    def _text(now: float, fields: dict[str, Any]) -> str:
        when = datetime.fromtimestamp(now).astimezone().strftime("%H:%M:%S")
        who = fields.get("workspace", "-")
        if "writeKeyId" in fields:
            who = f"{who}/{fields['writeKeyId']}"
        code = f" {fields['code']}" if "code" in fields else ""
        events = f" {fields['events']} events" if "events" in fields else ""
        more = "".join(
            f" {fields[name]}" for name in ("provider", "type", "outcome") if name in fields
        )
        return (
            f"{when} {fields['method']:<4} {fields['route']}{more} {fields['status']}{code}{events}"
            f" {fields['ms']:.2f} ms {who} {fields['requestId']}"
        )
