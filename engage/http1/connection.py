# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 for a Tornado application, with a parser written in C.

Tornado's routing and handlers are used unchanged. Only its parser, which was most of the cost of a
small request, is replaced. A :class:`Connection` cuts heads and bodies out of what a client sends
(:mod:`engage.http1.head`, :mod:`engage.http1.body`). Each request and its answer is an
:class:`engage.http1.exchange.Exchange`, the ``HTTPConnection`` that Tornado writes to.

Requests of one connection are handled one after the other; pipelined requests wait unread.
Everything is limited before it is parsed: heads in bytes and number, bodies in bytes and in memory
(:class:`engage.http1.shared.Bounds`), each state in time. A request that is refused before its body
has arrived is answered at once, and the body is read and discarded, so that the client gets the
answer instead of a reset. What is not HTTP gets a bare 400, and the connection is closed.

Length: one state machine. Every method reads or changes the same state, so a further cut would
spread its transitions over two files.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, cast

from tornado import httputil

from engage.http1 import early_errors
from engage.http1.body import Body, BodyTooLargeError
from engage.http1.chunked import BadChunkError
from engage.http1.exchange import Exchange, Failure
from engage.http1.head import (
    MAX_ARGUMENTS,
    MAX_HEADERS,
    BadRequestError,
    Head,
    TooManyArgumentsError,
    TooManyHeadersError,
    check_beginning,
    peek,
)

if TYPE_CHECKING:
    from engage.errors import ApiError
    from engage.http1.shared import SharedState

__all__ = ["Connection"]

_log = logging.getLogger(__name__)

#: How much of a refused body is discarded, and for how long, so that the client gets its answer.
DISCARD_BYTES: Final = 20 * 1024 * 1024
DISCARD_SECONDS: Final = 5.0
#: For a handler that does not limit its time itself.
HANDLER_SECONDS: Final = 120.0
#: How much is read ahead of the request that is being handled.
_AHEAD_BYTES: Final = 65536

# What is read next.
_HEAD = 0  #: a request's head, or nothing yet
_BODY = 1  #: the body of a request that is not answered
_BUSY = 2  #: nothing: a handler has the request
_REST = 3  #: the rest of a body whose request is answered
_LINGER = 4  #: anything, until the client has the last answer
_CLOSED = 5


class Connection(asyncio.Protocol):
    """One client's connection, from accept to close.

    :param admit: called with a new connection; returns whether there is room for it.
    :param forget: called with a connection that is gone.
    """

    #: Tornado looks for it in a connection's context.
    protocol = "http"

    def __init__(
        self,
        shared: SharedState,
        *,
        admit: Callable[[Connection], bool],
        forget: Callable[[Connection], None],
    ) -> None:
        self.remote_ip: str | None = None
        #: When :meth:`expired` is to be called; by the event loop's clock.
        self.deadline = math.inf
        self._shared = shared
        self._admit = admit
        self._forget = forget
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._state = _HEAD
        self._buffer = bytearray()
        #: How much of the buffer has no end of a head in it.
        self._searched = 0
        self._exchange: Exchange | None = None
        self._delegate: httputil.HTTPMessageDelegate | None = None
        self._body = Body(0, chunked=False)
        #: Bytes of this request's body that count against ``limits.inflight_bytes``.
        self._held = 0
        self._discarded = 0
        self._crowded = False
        self._half_closed = False
        self._paused = False
        self._slow_reader = False

    # ------------------------------------------------------------------- called by the event loop
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        self.remote_ip = peer[0] if isinstance(peer, tuple) else None
        self.deadline = self._loop.time() + self._shared.bounds.idle_timeout
        if not self._admit(self):
            self._crowded = True
            self.deadline = self._loop.time() + DISCARD_SECONDS

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection. A handler that has its request continues."""
        unread = self._state == _BODY
        delegate = self._delegate
        self._state = _CLOSED
        self._buffer.clear()
        self._hold(0)
        self._forget(self)
        if unread and delegate is not None:
            delegate.on_connection_close()
        self._delegate = None

    def data_received(self, data: bytes) -> None:
        state = self._state
        if state == _LINGER:
            self._discard(len(data))
            return
        self._buffer += data
        if state == _BUSY:
            self._pace()
        elif state != _CLOSED:
            self._advance()

    def eof_received(self) -> bool:
        """Note that the client sends no more; it may still read (``nc -N``)."""
        self._half_closed = True
        if self._state == _BODY:
            self._fail(Failure.TRUNCATED)
            return True
        if self._state == _HEAD and self._buffer:
            self._loop.call_soon(self._advance)
            return True
        return self._state == _BUSY

    def pause_writing(self) -> None:
        """Note that the client does not read its answers."""
        self._slow_reader = True

    def resume_writing(self) -> None:
        """Continue: the client has read its answers."""
        self._slow_reader = False
        if self._state == _HEAD:
            self._loop.call_soon(self._advance)

    # --------------------------------------------------------------------- called by the listener
    @property
    def idle(self) -> bool:
        """Whether no request has begun to arrive and no answer is due."""
        return self._state == _HEAD and not self._buffer and not self._crowded

    @property
    def serving(self) -> bool:
        """Whether a request has begun to arrive and is not answered."""
        return self._state in (_BODY, _BUSY)

    def close(self) -> None:
        """Close once everything written is sent."""
        if self._state != _CLOSED:
            self._state = _CLOSED
            self._last_deadline()
            self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._state = _CLOSED
        self._transport.abort()

    def expired(self) -> None:
        """End what the connection was doing: its deadline is over."""
        if self._state == _BODY and self._exchange is not None and not self._exchange.failure:
            self.deadline = self._loop.time() + DISCARD_SECONDS
            self._fail(Failure.TIMEOUT)
        elif self._state == _HEAD and self._buffer and not self._slow_reader:
            self._refuse(early_errors.request_timeout(self._shared.bounds.request_timeout))
        elif self._state in (_HEAD, _REST, _LINGER) and not self._slow_reader:
            self.close()
        else:
            if self._state == _BUSY:
                _log.error(
                    "a request was aborted: its handler took more than %d s", HANDLER_SECONDS
                )
            self.abort()

    # ------------------------------------------------------------------------------------ reading
    def _advance(self) -> None:
        """Process the buffer as far as possible."""
        try:
            while True:
                if self._state == _HEAD:
                    if self._slow_reader or not self._read_head():
                        break
                elif self._state == _BODY:
                    if not self._read_body():
                        break
                elif self._state == _REST:
                    if not self._read_rest():
                        break
                else:
                    break
            self._pace()
        except (BadRequestError, BadChunkError, httputil.HTTPInputError):
            if self._state == _REST:
                self.close()  # The request is answered already.
                return
            unread, delegate = self._state == _BODY, self._delegate
            self._refuse(None)
            if unread and delegate is not None:
                delegate.on_connection_close()

    def _pace(self) -> None:
        """Pause reading while enough has been read ahead."""
        exchange = self._exchange
        unread = self._state == _BODY and exchange is not None and exchange.unread
        if self._state == _BUSY or unread:
            if len(self._buffer) > _AHEAD_BYTES and not self._paused:
                self._paused = True
                self._transport.pause_reading()
        elif self._paused and self._state != _CLOSED:
            self._paused = False
            self._transport.resume_reading()

    def _read_head(self) -> bool:
        buffer = self._buffer
        while buffer.startswith(b"\r\n"):  # Some clients send an empty line after a body.
            del buffer[:2]
        if not buffer:
            self._searched = 0
            if self._half_closed:
                self.close()
            return False
        bounds = self._shared.bounds
        if not self._searched:
            if buffer[0] <= 0x20:
                raise BadRequestError
            self.deadline = self._loop.time() + bounds.request_timeout
            if self._crowded:
                self._refuse(early_errors.crowded())
                return False
        end = buffer.find(b"\r\n\r\n", max(0, self._searched - 3)) + 4
        if end > bounds.header_bytes or (end < 4 and len(buffer) > bounds.header_bytes):
            self._refuse(early_errors.headers_too_large(bounds.header_bytes))
            return False
        if end < 4:
            check_beginning(buffer, self._searched)
            self._searched = len(buffer)
            if self._half_closed:
                raise BadRequestError
            return False
        self._searched = 0
        raw = bytes(buffer[:end])
        del buffer[:end]
        self._begin(raw)
        return self._state == _BODY

    def _begin(self, raw: bytes) -> None:
        """Hand a complete head to Tornado."""
        try:
            head = Head(raw)
        except TooManyHeadersError:
            self._refuse(early_errors.too_many_headers(MAX_HEADERS), raw)
            return
        except TooManyArgumentsError:
            self._refuse(early_errors.too_many_arguments(MAX_ARGUMENTS), raw)
            return
        self._body = Body(head.length, chunked=head.chunked)
        exchange = Exchange(
            self, self._shared, head.version, head.method, keep_alive=head.keep_alive
        )
        exchange.expects_continue = head.expects_continue
        self._exchange = exchange
        self._discarded = 0
        start_line = httputil.RequestStartLine(head.method, head.target, head.version)
        delegate = self._shared.application.start_request(self, exchange)
        prepared = delegate.headers_received(start_line, head.headers)
        self._delegate = delegate
        self._state = _BODY
        if exchange.expects_continue and prepared is not None and not self._buffer:
            # Only once the handler accepts the head: if it refuses it, the body is never sent.
            asyncio.ensure_future(prepared).add_done_callback(lambda _: self._continue(exchange))

    def _continue(self, exchange: Exchange) -> None:
        if (
            self._exchange is exchange
            and self._state == _BODY
            and not exchange.answering
            and not self._body.complete
        ):
            exchange.expects_continue = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _read_body(self) -> bool:
        exchange, delegate, buffer = self._exchange, self._delegate, self._buffer
        if exchange is None or delegate is None or exchange.failure:
            self._discard_body()
            return False
        if exchange.unread:
            return False
        if buffer:
            exchange.expects_continue = False
        try:
            body = self._body.take(buffer, exchange.max_body)
        except BodyTooLargeError:
            self._fail(Failure.TOO_LARGE)
            return False
        if body is None:
            if self._hold(self._body.held(buffer)) and self._half_closed:
                self._fail(Failure.TRUNCATED)
            return False
        # What follows is held, too, while the handler works.
        if not self._hold(len(body) + len(buffer)):
            return False
        self._state = _BUSY
        self.deadline = self._loop.time() + HANDLER_SECONDS
        if body:
            delegate.data_received(body)
        delegate.finish()
        # If the handler has answered already, the loop continues with what follows.
        return True

    def _read_rest(self) -> bool:
        if not self._discard_body():
            return False
        if self._exchange is not None and self._exchange.closes:
            self.close()
            return False
        self._next()
        return True

    def _discard_body(self) -> bool:
        """Discard what has arrived of the body.

        :return: whether that was the end of it.
        """
        before = len(self._buffer)
        complete = self._body.discard(self._buffer)
        self._discard(before - len(self._buffer))
        return complete

    def _discard(self, count: int) -> None:
        self._discarded += count
        if self._discarded > DISCARD_BYTES:
            self.close()

    def _hold(self, count: int) -> bool:
        """Count ``count`` bytes of this request as held in memory.

        :return: false if that is too much for this process; the request has then failed.
        """
        shared = self._shared
        shared.inflight += count - self._held
        self._held = count
        if count and shared.inflight > shared.bounds.inflight_bytes:
            self._fail(Failure.OVERLOADED)
            return False
        return True

    # ---------------------------------------------------------------------------------- answering
    def _fail(self, failure: Failure) -> None:
        """Let the handler answer why the body will not be complete."""
        exchange, delegate = self._exchange, self._delegate
        if exchange is None or delegate is None or exchange.failure:
            return
        exchange.failure = failure
        self._hold(0)
        self._body.forget()
        delegate.on_connection_close()

    def is_last(self, exchange: Exchange) -> bool:
        if self._state != _BODY:
            return self._half_closed and not self._buffer
        # The rest of the body cannot be skipped if it is too long, never comes, or (``Expect``) may
        # or may not be sent.
        return (
            exchange.failure is not None
            or exchange.expects_continue
            or self._body.left > DISCARD_BYTES
        )

    def send(self, exchange: Exchange, data: bytes) -> None:
        if exchange is self._exchange and self._state in (_BODY, _BUSY):
            self._transport.write(data)

    def read_on(self, exchange: Exchange) -> None:
        if exchange is self._exchange and self._state == _BODY:
            self._advance()

    def answered(self, exchange: Exchange) -> None:
        if exchange is not self._exchange or self._state not in (_BODY, _BUSY):
            return
        self._hold(0)
        self._delegate = None
        if self._state == _BODY:
            if self.is_last(exchange):
                self._linger()
                return
            self._state = _REST
            self.deadline = self._loop.time() + DISCARD_SECONDS
        elif exchange.closes:
            if self._buffer:
                self._linger()
            else:
                self.close()
            return
        else:
            self._next()
        if self._buffer or self._half_closed or self._paused or self._state == _REST:
            self._loop.call_soon(self._advance)

    def _next(self) -> None:
        """Be ready for another request."""
        self._state = _HEAD
        self._exchange = None
        self._delegate = None
        bounds = self._shared.bounds
        self.deadline = self._loop.time() + (
            bounds.request_timeout if self._slow_reader else bounds.idle_timeout
        )

    def _refuse(self, error: ApiError | None, head: bytes | None = None) -> None:
        """Answer without a handler, and close.

        :param error: ``None`` if what came is not HTTP; the answer is then a bare 400.
        :param head: the request's head; ``None`` if what there is of it is in the buffer.
        """
        if self._state == _CLOSED:
            return
        identity = early_errors.request_id()
        self._shared.refused(error, identity)
        if error is None:
            self._transport.write(early_errors.BARE_400)
        else:
            path, origin = peek(bytes(self._buffer) if head is None else head)
            cors = self._shared.cors(path, origin)
            self._transport.write(early_errors.refusal(error, identity, cors))
        self._exchange = None
        self._delegate = None
        self._linger()

    def _linger(self) -> None:
        """Close for writing, and read for a while: closing with unread input would be a reset,
        which may destroy the answer before the client reads it."""
        self._hold(0)
        self._buffer.clear()
        self._body.forget()
        if self._half_closed:
            self.close()
            return
        self._state = _LINGER
        self._pace()
        self._last_deadline()
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def _last_deadline(self) -> None:
        """Limit how long the client may take to read the last answer."""
        slow = self._shared.bounds.request_timeout if self._slow_reader else 0.0
        self.deadline = self._loop.time() + max(slow, DISCARD_SECONDS)
