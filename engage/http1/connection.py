# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 for a Tornado application, with a parser written in C.

Tornado's routing and handlers are kept whole; only its own parser, most of the cost of a small
request, is replaced. A :class:`Connection` cuts heads and bodies out of what a client sends: heads
are taken apart by :mod:`engage.http1.head`, bodies by their length or by
:mod:`engage.http1.chunked`. Each request and its answer is an
:class:`engage.http1.exchange.Exchange`, the ``HTTPConnection`` that Tornado writes to.

Requests of one connection are handled one after the other; what a client pipelines waits unread.
Everything is bounded before it is parsed: heads in bytes and in number, bodies in bytes and in
memory (:class:`engage.http1.listener.Listener`), each state in time. A request that is refused
before its body has arrived is answered at once, and the body is read and thrown away, so that the
client gets the answer rather than a reset. What is not HTTP gets a bare 400, and the connection is
closed.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING, Final, cast

from tornado import httputil

from engage.http1 import early_errors
from engage.http1.chunked import BadChunkError, ChunkedBody
from engage.http1.exchange import Exchange, Failure
from engage.http1.head import (
    MAX_ARGUMENTS,
    MAX_HEADERS,
    BadRequestError,
    Head,
    TooManyArgumentsError,
    TooManyHeadersError,
    check_beginning,
    glimpse,
)

if TYPE_CHECKING:
    from engage.errors import ApiError
    from engage.http1.listener import Listener

__all__ = ["Connection"]

_log = logging.getLogger(__name__)

#: What is thrown away of a refused body, so that the client gets its answer.
THROWN_BYTES: Final = 20 * 1024 * 1024
THROWN_SECONDS: Final = 5.0
#: A handler bounds its own time; this is for one that does not.
HANDLER_SECONDS: Final = 120.0
#: So much may wait in memory behind the request that is being handled.
_AHEAD_BYTES: Final = 65536

# What is read next.
_HEAD = 0  #: a request's head, or nothing yet
_BODY = 1  #: the body of a request that was not answered
_BUSY = 2  #: nothing: a handler has the request
_REST = 3  #: the rest of a body whose request is answered
_LINGER = 4  #: whatever comes until the client has our last answer
_CLOSED = 5


class Connection(asyncio.Protocol):
    """One client's connection, from accept to close."""

    #: As Tornado wants it of a connection's context.
    protocol = "http"

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.remote_ip: str | None = None
        #: When :meth:`expired` is to be called; by the event loop's clock.
        self.deadline = math.inf
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._state = _HEAD
        self._buffer = bytearray()
        #: How much of the buffer has no end of a head in it.
        self._searched = 0
        self._exchange: Exchange | None = None
        self._delegate: httputil.HTTPMessageDelegate | None = None
        #: Bytes of the body that are still to come, if it has a length …
        self._length = 0
        #: … and its decoder, if it is chunked.
        self._chunks: ChunkedBody | None = None
        self._chunked = bytearray()
        #: Bytes of this request's body that count against ``limits.inflight_bytes``.
        self._held = 0
        self._thrown = 0
        self._crowded = False
        self._half_closed = False
        self._paused = False
        self._slow_reader = False

    # ------------------------------------------------------------------- called by the event loop
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See :class:`asyncio.BaseProtocol`."""
        self._transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        self.remote_ip = peer[0] if isinstance(peer, tuple) else None
        self.deadline = self._loop.time() + self.listener.bounds.idle_timeout
        if not self.listener.admit(self):
            self._crowded = True
            self.deadline = self._loop.time() + THROWN_SECONDS

    def connection_lost(self, exc: Exception | None) -> None:
        """See :class:`asyncio.BaseProtocol`. What a handler is doing goes on."""
        unread = self._state == _BODY
        delegate = self._delegate
        self._state = _CLOSED
        self._buffer.clear()
        self._hold(0)
        self.listener.forget(self)
        if unread and delegate is not None:
            delegate.on_connection_close()
        self._delegate = None

    def data_received(self, data: bytes) -> None:
        """See :class:`asyncio.Protocol`."""
        state = self._state
        if state == _LINGER:
            self._throw(len(data))
            return
        self._buffer += data
        if state == _BUSY:
            self._pace()
        elif state != _CLOSED:
            self._advance()

    def eof_received(self) -> bool:
        """The client says no more; it may still listen (``nc -N``)."""
        self._half_closed = True
        if self._state == _BODY:
            self._fail(Failure.TRUNCATED)
            return True
        if self._state == _HEAD and self._buffer:
            self._loop.call_soon(self._advance)
            return True
        return self._state == _BUSY

    def pause_writing(self) -> None:
        """The client does not read its answers."""
        self._slow_reader = True

    def resume_writing(self) -> None:
        """The client has read."""
        self._slow_reader = False
        if self._state == _HEAD:
            self._loop.call_soon(self._advance)

    # --------------------------------------------------------------------- called by the listener
    @property
    def idle(self) -> bool:
        """Whether the client waits for nothing and has not begun to ask."""
        return self._state == _HEAD and not self._buffer and not self._crowded

    @property
    def serving(self) -> bool:
        """Whether a request has begun to arrive and has no answer."""
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
        """The deadline of what the connection was doing is over."""
        if self._state == _BODY and self._exchange is not None and not self._exchange.failure:
            self.deadline = self._loop.time() + THROWN_SECONDS
            self._fail(Failure.TIMEOUT)
        elif self._state == _HEAD and self._buffer and not self._slow_reader:
            self._refuse(early_errors.request_timeout(self.listener.bounds.request_timeout))
        elif self._state in (_HEAD, _REST, _LINGER) and not self._slow_reader:
            self.close()
        else:
            if self._state == _BUSY:
                _log.error(
                    "a request was given up: its handler took more than %d s", HANDLER_SECONDS
                )
            self.abort()

    # ------------------------------------------------------------------------------------ reading
    def _advance(self) -> None:
        """Go as far as the buffer allows."""
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
                self.close()  # It has its answer.
                return
            unread, delegate = self._state == _BODY, self._delegate
            self._refuse(None)
            if unread and delegate is not None:
                delegate.on_connection_close()

    def _pace(self) -> None:
        """Read on only if what has been read is not enough."""
        if self._state == _BUSY:
            if len(self._buffer) > _AHEAD_BYTES and not self._paused:
                self._paused = True
                self._transport.pause_reading()
        elif self._paused and self._state != _CLOSED:
            self._paused = False
            self._transport.resume_reading()

    def _read_head(self) -> bool:
        buffer = self._buffer
        while buffer.startswith(b"\r\n"):  # Some clients end a body with an empty line too many.
            del buffer[:2]
        if not buffer:
            self._searched = 0
            if self._half_closed:
                self.close()
            return False
        if not self._searched:
            if buffer[0] <= 0x20:
                raise BadRequestError
            self.deadline = self._loop.time() + self.listener.bounds.request_timeout
            if self._crowded:
                self._refuse(early_errors.crowded())
                return False
        end = buffer.find(b"\r\n\r\n", max(0, self._searched - 3)) + 4
        if end > self.listener.bounds.header_bytes or (
            end < 4 and len(buffer) > self.listener.bounds.header_bytes
        ):
            self._refuse(early_errors.headers_too_large(self.listener.bounds.header_bytes))
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
        self._length = head.length
        self._chunks = ChunkedBody() if head.chunked else None
        exchange = Exchange(self, head.version, head.method, keep_alive=head.keep_alive)
        exchange.expects_continue = head.expects_continue
        self._exchange = exchange
        self._thrown = 0
        start_line = httputil.RequestStartLine(head.method, head.target, head.version)
        delegate = self.listener.application.start_request(self, exchange)
        prepared = delegate.headers_received(start_line, head.headers)
        self._delegate = delegate
        self._state = _BODY
        if exchange.expects_continue and prepared is not None and not self._buffer:
            # Only once the handler wants the body: what it refuses by the head is not even sent.
            asyncio.ensure_future(prepared).add_done_callback(lambda _: self._continue(exchange))

    def _continue(self, exchange: Exchange) -> None:
        if (
            self._exchange is exchange
            and self._state == _BODY
            and not exchange.answering
            and (self._length or self._chunks is not None)
        ):
            exchange.expects_continue = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _read_body(self) -> bool:
        exchange, delegate, buffer = self._exchange, self._delegate, self._buffer
        if exchange is None or delegate is None or exchange.failure:
            self._throw_body()
            return False
        if buffer:
            exchange.expects_continue = False
        if self._chunks is None:
            if self._length > exchange.max_body:
                self._fail(Failure.TOO_LARGE)
                return False
            if len(buffer) < self._length:
                return self._wait(len(buffer))
            body = bytes(buffer[: self._length])
            del buffer[: self._length]
            self._length = 0
        else:
            complete = self._chunks.take(buffer, self._chunked)
            if len(self._chunked) > exchange.max_body:
                self._fail(Failure.TOO_LARGE)
                return False
            if not complete:
                return self._wait(len(self._chunked))
            body = bytes(self._chunked)
            self._chunked.clear()
            self._chunks = None
        # What follows is held as well, while the handler works.
        if not self._hold(len(body) + len(buffer)):
            return False
        self._state = _BUSY
        self.deadline = self._loop.time() + HANDLER_SECONDS
        if body:
            delegate.data_received(body)
        delegate.finish()
        # It may be answered already; then the loop goes on with what follows.
        return True

    def _wait(self, held: int) -> bool:
        """Wait for more of the body."""
        if self._hold(held) and self._half_closed:
            self._fail(Failure.TRUNCATED)
        return False

    def _read_rest(self) -> bool:
        if not self._throw_body():
            return False
        if self._exchange is not None and self._exchange.closes:
            self.close()
            return False
        self._next()
        return True

    def _throw_body(self) -> bool:
        """Throw away what has come of the body.

        :return: whether that was the end of it.
        """
        buffer = self._buffer
        before = len(buffer)
        if self._chunks is not None:
            complete = self._chunks.take(buffer, self._chunked)
            self._chunked.clear()
            if complete:
                self._chunks = None
        else:
            thrown = min(before, self._length)
            del buffer[:thrown]
            self._length -= thrown
            complete = not self._length
        self._throw(before - len(buffer))
        return complete

    def _throw(self, count: int) -> None:
        self._thrown += count
        if self._thrown > THROWN_BYTES:
            self.close()

    def _hold(self, count: int) -> bool:
        """Count ``count`` bytes of this request as held in memory.

        :return: false if that is too much for this process; the request has then failed.
        """
        listener = self.listener
        listener.inflight += count - self._held
        self._held = count
        if count and listener.inflight > listener.bounds.inflight_bytes:
            self._fail(Failure.OVERLOADED)
            return False
        return True

    # ---------------------------------------------------------------------------------- answering
    def _fail(self, failure: Failure) -> None:
        """The body will not be complete: let the handler say so."""
        exchange, delegate = self._exchange, self._delegate
        if exchange is None or delegate is None or exchange.failure:
            return
        exchange.failure = failure
        self._hold(0)
        self._chunked.clear()
        delegate.on_connection_close()

    def is_last(self, exchange: Exchange) -> bool:
        """:return: whether no other request can follow on this connection."""
        if self._state != _BODY:
            return self._half_closed and not self._buffer
        # The rest of the body cannot be skipped: it is too long, it never comes, or (``Expect``)
        # nobody knows whether the client will send it.
        return (
            exchange.failure is not None or exchange.expects_continue or self._length > THROWN_BYTES
        )

    def send(self, exchange: Exchange, data: bytes) -> None:
        """Write a part of an answer, unless nobody waits for it any more."""
        if exchange is self._exchange and self._state in (_BODY, _BUSY):
            self._transport.write(data)

    def answered(self, exchange: Exchange) -> None:
        """The answer is complete: go on with what the client sent after the request."""
        if exchange is not self._exchange or self._state not in (_BODY, _BUSY):
            return
        self._hold(0)
        self._delegate = None
        if self._state == _BODY:
            if self.is_last(exchange):
                self._linger()
                return
            self._state = _REST
            self.deadline = self._loop.time() + THROWN_SECONDS
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
        bounds = self.listener.bounds
        self.deadline = self._loop.time() + (
            bounds.request_timeout if self._slow_reader else bounds.idle_timeout
        )

    def _refuse(self, error: ApiError | None, head: bytes | None = None) -> None:
        """Answer without a handler, and close.

        :param error: ``None``: what came is not HTTP, so neither is much of the answer.
        :param head: the request's; ``None``: what there is of it is in the buffer.
        """
        if self._state == _CLOSED:
            return
        identity = early_errors.request_id()
        self.listener.refused(error, identity)
        if error is None:
            self._transport.write(early_errors.BARE_400)
        else:
            path, origin = glimpse(bytes(self._buffer) if head is None else head)
            cors = self.listener.cors(path, origin)
            self._transport.write(early_errors.refusal(error, identity, cors))
        self._exchange = None
        self._delegate = None
        self._linger()

    def _linger(self) -> None:
        """Close for writing, and read on for a while: a close with unread input would be a reset,
        which may take our answer from the client."""
        self._hold(0)
        self._buffer.clear()
        self._chunked.clear()
        if self._half_closed:
            self.close()
            return
        self._state = _LINGER
        self._pace()
        self._last_deadline()
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def _last_deadline(self) -> None:
        """How long the client may take to read our last answer."""
        slow = self.listener.bounds.request_timeout if self._slow_reader else 0.0
        self.deadline = self._loop.time() + max(slow, THROWN_SECONDS)
