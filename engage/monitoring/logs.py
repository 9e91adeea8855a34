# SPDX-License-Identifier: Apache-2.0
"""The log on standard error: a line for each request, and lines about the server itself.

Lines are text on a terminal and JSON objects elsewhere. They never contain a write key, a secret, a
payload, a path or a query (the query of a beacon contains its write key).

There may be ten thousand requests a second, so their lines bypass most of :mod:`logging`:
:func:`log_request` passes them to the handler of the logger ``engage.access``, which collects them
and writes many at once, at most :data:`FLUSH_SECONDS` later and always before any other line.

A thread that writes, such as that of :class:`logging.handlers.QueueListener`, would only replace
asking whether a write would block. Its queue would need the same bound and the same count of
dropped lines, requests would still have to be collected, and its end would need a time limit.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import logging
import select
import sys
import time
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
#: The line that says how many were dropped.
_LOST: Final = {"name": __name__, "levelname": "WARNING", "msg": "lines of the log were dropped"}


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
    handler = _Handler(stream, _Lines(as_text, secrets, process))
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
        if isinstance(handler, _Handler):
            handler.lines.mask(secrets)


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


@functools.lru_cache(1)
def _second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def _now(seconds: float) -> str:
    return f"{_second(int(seconds))}.{int(seconds % 1 * 1000):03d}Z"


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


class _Lines(logging.Formatter):
    """Makes lines of text, or lines that are JSON objects.

    As text, the lines of an exception follow its own.
    """

    def __init__(self, as_text: bool, secrets: Iterable[str], process: str) -> None:
        super().__init__()
        self._as_text = as_text
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

    def format(self, record: logging.LogRecord) -> str:
        level = record.levelname.lower()
        parts = {"message": record.getMessage()}
        parts |= {name: value for name, value in vars(record).items() if name not in _RECORD_FIELDS}
        if record.exc_info and record.exc_info[0] is not None:
            parts["exception"] = self.formatException(record.exc_info)
        if self._as_text:
            who = f"{self._process}: " if self._process else ""
            message, error = parts.pop("message"), parts.pop("exception", None)
            extra = "".join(f" {name}={value}" for name, value in parts.items())
            line = f"{_clock(record.created)} {level:<7} {who}{message}{extra}"
            return self._masked(line if error is None else f"{line}\n{error}")
        fields: dict[str, Any] = {
            "time": _now(record.created),
            "level": level,
            "logger": record.name,
            **({"process": self._process} if self._process else {}),
        }
        for name, value in parts.items():
            fields[name] = self._masked(value) if isinstance(value, str) else value
        return orjson.dumps(fields, default=repr, option=orjson.OPT_NON_STR_KEYS).decode()

    def request(self, fields: Mapping[str, Any]) -> str:
        """Make the line of a request."""
        now = time.time()
        if not self._as_text:
            fields = {"time": _now(now), "level": "info", "message": "request", **fields}
            return orjson.dumps(fields, default=repr).decode()
        names = ("route", "provider", "type", "outcome", "status", "code")
        what = " ".join(str(fields[name]) for name in names if name in fields)
        events = f" {fields['events']} events" if "events" in fields else ""
        who = "/".join(fields[name] for name in ("workspace", "writeKeyId") if name in fields)
        return (
            f"{_clock(now)} {fields['method']:<4} {what}{events} {fields['ms']:.2f} ms"
            f" {who or '-'} {fields['requestId']}"
        )


def _pieces(lines: Iterable[str]) -> Iterator[str]:
    """Join lines to pieces that a pipe accepts whole, so that lines of workers are not mixed."""
    piece, size = "", 0
    for line in lines:
        length = len(line.encode())
        if piece and size + length > _PIECE:
            yield piece
            piece, size = "", 0
        piece += line
        size += length
    if piece:
        yield piece


def _pollable(stream: TextIO) -> select.poll | None:
    """Return an object that reports whether a write would block, or ``None`` if none ever does."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), select.POLLOUT)
    except (OSError, ValueError, AttributeError):  # Windows, or a stream in memory.
        return None
    return poll


class _Handler(logging.StreamHandler[TextIO]):
    """Writes records immediately, and the lines of requests many at once.

    The server does not wait for a reader of the log that is slow or has stopped reading. Lines wait
    for it instead, up to :data:`BACKLOG_SIZE`.
    """

    def __init__(self, stream: TextIO, lines: _Lines) -> None:
        super().__init__(stream)
        self.lines = self.formatter = lines
        self._poll = _pollable(stream)
        #: Pieces that could not be written yet, and their size in characters.
        self._backlog: collections.deque[str] = collections.deque()
        self._backlog_size = 0
        self._dropped = 0
        self._requests: list[str] = []
        self._timer: asyncio.TimerHandle | None = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        self._send(line + "\n")

    def request(self, fields: Mapping[str, Any]) -> None:
        """Collect the line of a request, to be written soon."""
        self._requests.append(self.lines.request(fields) + "\n")
        if len(self._requests) >= FLUSH_LINES or not self._schedule_flush():
            self.flush()

    def flush(self) -> None:
        with self.lock or contextlib.nullcontext():
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._send()

    def _send(self, *line: str) -> None:
        """Write the collected lines, then this one: what can be written now."""
        requests, self._requests = self._requests, []
        for piece in (*_pieces(requests), *line):
            self._enqueue(piece)
        backlog = self._backlog
        # A closed standard error must not make requests fail.
        with contextlib.suppress(OSError, ValueError):
            while backlog and (self._poll is None or self._poll.poll(0)):
                piece = backlog.popleft()
                self._backlog_size -= len(piece)
                self.stream.write(piece)
                self.stream.flush()
                if self._dropped and not backlog:
                    record = logging.makeLogRecord({**_LOST, "lines": self._dropped})
                    self._dropped = 0
                    self._enqueue(self.format(record) + "\n")
        if backlog:
            self._schedule_flush()

    def _enqueue(self, piece: str) -> None:
        if self._backlog_size > BACKLOG_SIZE:
            self._dropped += piece.count("\n")
            return
        self._backlog.append(piece)
        self._backlog_size += len(piece)

    def _schedule_flush(self) -> bool:
        """Write what waits soon; return whether there is an event loop that will."""
        if self._timer is None:
            with contextlib.suppress(RuntimeError):
                self._timer = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self.flush)
        return self._timer is not None
