# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 behind Tornado's interfaces, with a parser written in C.

The interfaces are those of ``tornado.httputil``, so any Tornado application can answer the
requests. Tornado's parser, which was most of the cost of a small request, is replaced. A
:class:`Connection` cuts heads and bodies out of the bytes of a client (:mod:`engage.http1.request`,
:mod:`engage.http1.body`). Each request and its answer is an
:class:`engage.http1.exchange.Exchange`, the ``HTTPConnection`` that a handler writes to.

Requests of one connection are handled one after the other; pipelined requests wait unread.
Everything is limited before it is parsed: heads in bytes and number, bodies in bytes, each state in
time (:class:`engage.http1.shared.Bounds`), and in memory all that a connection holds
(:class:`engage.http1.capacity.Capacity`). A request that is refused before its body has arrived is
answered at once, and the body is read and discarded, so that the client gets the answer instead of
a reset. Bytes that are not HTTP get a bare 400, and the connection is closed.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Final, cast

from tornado import httputil

from engage.errors import ApiError
from engage.http1 import early_errors
from engage.http1.body import BadChunkError, Body, BodyTooLargeError
from engage.http1.exchange import Exchange, Failure
from engage.http1.request import (
    BadRequestError,
    Request,
    check_beginning,
    new_request_id,
    peek,
)

if TYPE_CHECKING:
    from engage.http1.shared import SharedState

__all__ = ["Connection"]

#: How much of a refused body is discarded, and for how long, so that the client gets its answer.
DISCARD_BYTES: Final = 20 * 1024 * 1024
DISCARD_SECONDS: Final = 5.0
#: When more than this of a connection's answers is waiting for the client, all of it counts as
#: held, and no other request of the connection begins.
UNREAD_BYTES: Final = 16 * 1024
#: A larger head is parsed in turn with those of other connections: one of 64 KiB takes 2 ms.
LARGE_HEAD: Final = 8 * 1024

#: The content of a buffer while no request has begun to arrive: perhaps half of an empty line.
_NOTHING: Final = (bytearray(), bytearray(b"\r"))
_NO_BODY: Final = Body(0, chunked=False)

# The part that is read next: a request's head, or nothing yet; the body of a request that is not
# answered; nothing, because a handler has the request; the rest of a body whose request is
# answered; anything, until the client has the last answer; nothing, because it is closed.
_HEAD, _BODY, _BUSY, _REST, _LINGER, _CLOSED = range(6)


class Connection(asyncio.Protocol):
    """One client's connection, from accept to close."""

    #: Tornado looks for it in a connection's context.
    protocol = "http"

    def __init__(self, shared: SharedState) -> None:
        #: When :meth:`expired` will be called, by the event loop's clock.
        self.deadline = math.inf
        #: Whether the client has finished sending, as the workers count it.
        self.ended = False
        #: Bytes that count against ``limits.inflight_bytes``.
        self.held = 0
        self.remote_ip: str | None = None
        self._shared = shared
        self._capacity = shared.capacity
        self._loop = shared.loop
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._state = _HEAD
        #: Bytes that have arrived and are not parsed.
        self._buffer = bytearray()
        #: How much of the buffer has no end of a head in it.
        self._searched = 0
        #: When the head began to arrive.
        self._began = 0.0
        #: The current request, its handler, and its body while it arrives.
        self._exchange: Exchange | None = None
        self._delegate: httputil.HTTPMessageDelegate | None = None
        self._body = _NO_BODY
        #: Bytes of its head and body that were taken out of the buffer.
        self._taken = 0
        #: Bytes of its body that were discarded.
        self._discarded = 0
        #: Whether a large head or many chunks wait for a turn of the event loop …
        self._deferred = False
        #: … and whether this is it.
        self._has_turn = False
        #: Whether the bytes after the current request are discarded.
        self._overrun = False
        self._half_closed = False
        #: Whether answers are waiting for the client to read them.
        self._slow_reader = False
        self._paused = False

    # ------------------------------------------------------------------- called by the event loop
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(UNREAD_BYTES)
        peer = transport.get_extra_info("peername")
        self.remote_ip = peer[0] if isinstance(peer, tuple) else None
        bounds = self._shared.bounds
        self.deadline = self._loop.time() + min(bounds.head_timeout, bounds.idle_timeout)
        self._capacity.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection. A handler that has its request continues."""
        unread = self._state == _BODY
        delegate = self._delegate
        self._state = _CLOSED
        self._slow_reader = False
        self._release()
        self._capacity.forget(self)
        if unread and delegate is not None:
            delegate.on_connection_close()
        self._delegate = None

    def data_received(self, data: bytes) -> None:
        state = self._state
        if state == _LINGER or self._overrun:
            self._discard(len(data))
            return
        if state == _CLOSED:
            return
        self._buffer += data
        if state == _BUSY or self._deferred:
            self._hold()
            self._pace()
        else:
            self._advance()

    def eof_received(self) -> bool:
        """Note that the client has finished sending; it may still read (``nc -N``)."""
        self._half_closed = True
        self._capacity.end(self)
        if self._state == _BODY:
            # Whether all of an unread body has arrived shows only when it is read.
            unread = self._exchange is not None and self._exchange.unread
            if not (unread or self._deferred):
                self._fail(Failure.TRUNCATED)
            return True
        if self._state in (_HEAD, _REST) and self._buffer:
            self._loop.call_soon(self._advance)
            return True
        return self._state == _BUSY

    def pause_writing(self) -> None:
        """Note that the client does not read its answers. They count as held until it does."""
        self._slow_reader = True

    def resume_writing(self) -> None:
        """Continue: the client has read its answers."""
        self._slow_reader = False
        self._hold()
        if self._state == _HEAD:
            self._loop.call_soon(self._advance)

    # -------------------------------------------------------- called by the listener, the capacity
    @property
    def idle(self) -> bool:
        """Whether no request has begun to arrive and no answer is due."""
        return self._state == _HEAD and self._buffer in _NOTHING

    @property
    def serving(self) -> bool:
        """Whether a request has begun to arrive and is not answered."""
        return self._state in (_BODY, _BUSY)

    def close(self) -> None:
        """Close once everything written is sent."""
        if self._state != _CLOSED:
            self._state = _CLOSED
            self._release()
            self._capacity.waiting[self] = None
            self._last_deadline()
            self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._state = _CLOSED
        self._slow_reader = False
        self._release()
        self._capacity.forget(self)
        self._transport.abort()

    def give_way(self) -> None:
        """Free the memory of an incomplete request, with a 503 if its client can get one."""
        if self._state == _BODY and self._exchange is not None and not self._exchange.failure:
            self._fail(Failure.OVERLOADED)
        elif self._state == _HEAD and not (self.idle or self._transport.get_write_buffer_size()):
            self._refuse_for_room()
        else:
            self.abort()

    def expired(self) -> None:
        """End the current read or answer: its deadline is over."""
        if self._state == _BODY and self._exchange is not None and not self._exchange.failure:
            self.deadline = self._loop.time() + DISCARD_SECONDS
            self._fail(Failure.TIMEOUT)
        elif self._state == _HEAD and not (self.idle or self._slow_reader):
            self._refuse(early_errors.slow_head(self._shared.bounds))
        elif self._state in (_HEAD, _REST, _LINGER) and not self._slow_reader:
            self.close()
        else:
            self.abort()

    # ------------------------------------------------------------------------------------- memory
    def _hold(self) -> bool:
        """Count the memory that the connection holds for requests without an answer.

        :return: false if there is no room for it in this process; the request then has an answer.
        """
        count = self._taken + len(self._buffer) + len(self._body.decoded)
        if self._slow_reader:
            count += self._transport.get_write_buffer_size()
        capacity = self._capacity
        capacity.held += count - self.held
        self.held = count
        if capacity.held <= capacity.limit or not count or capacity.make_room(self):
            return True
        if self._state != _BUSY:
            self.give_way()
        elif not self._overrun:
            # The request goes on. Bytes after it are discarded, and its answer is the last one.
            self._overrun = True
            self._discard(len(self._buffer))
            self._buffer.clear()
            self._hold()
        return False

    def _release(self) -> None:
        """Free everything except answers that the client has not read."""
        self._buffer.clear()
        self._body = _NO_BODY
        self._taken = 0
        self._hold()

    # ------------------------------------------------------------------------------------ reading
    def _advance(self) -> None:
        """Process the buffer as far as possible."""
        if self._deferred:
            return
        try:
            more = True
            while more:
                if self._state == _HEAD:
                    more = self._read_head()
                elif self._state == _BODY:
                    more = self._read_body()
                else:
                    more = self._state == _REST and self._read_rest()
            if self._state in (_BODY, _REST) and self._body.stopped:
                self._defer()
            if self._buffer or self._paused:
                self._pace()
        except (BadRequestError, BadChunkError, httputil.HTTPInputError):
            if self._state == _REST:
                self.close()  # The request is answered already.
                return
            unread, delegate = self._state == _BODY, self._delegate
            self._refuse(None)
            if unread and delegate is not None:
                delegate.on_connection_close()

    def _defer(self) -> None:
        """Go on in a later turn of the event loop, which all connections share."""
        self._deferred = True
        self._shared.defer(self._resume)

    def _resume(self) -> None:
        self._deferred = False
        self._has_turn = True
        try:
            self._advance()
        finally:
            self._has_turn = False

    def _pace(self) -> None:
        """Pause or resume reading. No other method decides that.

        Reading is paused while more than ``limits.header_bytes`` wait behind a request that is
        being handled, behind answers that the client does not read, in a body that the handler
        leaves unread, or for a turn of the event loop.
        """
        behind = (
            self._state == _BUSY
            or self._deferred
            or (self._state == _HEAD and self._slow_reader)
            or (self._state == _BODY and self._exchange is not None and self._exchange.unread)
        )
        pause = behind and len(self._buffer) > self._shared.bounds.pipelined_bytes
        if pause is not self._paused and self._state != _CLOSED:
            self._paused = pause
            if pause:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def _read_head(self) -> bool:
        buffer = self._buffer
        if self._slow_reader:  # It waits until the answers before are read.
            self._hold()
            return False
        while buffer.startswith(b"\r\n"):  # Some clients send an empty line after a body.
            del buffer[:2]
        if buffer in _NOTHING:
            self._searched = 0
            self._hold()
            if self._half_closed:
                self.close()
            return False
        bounds = self._shared.bounds
        if not self._searched:
            if buffer[0] <= 0x20:
                raise BadRequestError
            self._began = self._loop.time()
            self.deadline = self._began + min(bounds.head_timeout, bounds.request_timeout)
        end = buffer.find(b"\r\n\r\n", max(0, self._searched - 3)) + 4
        if end > bounds.header_bytes or (end < 4 and len(buffer) > bounds.header_bytes):
            self._refuse(early_errors.headers_too_large(bounds.header_bytes))
            return False
        if end < 4:
            check_beginning(buffer, self._searched)
            self._searched = len(buffer)
            if self._half_closed:
                raise BadRequestError
            self._capacity.waiting.move_to_end(self)
            self._hold()
            return False
        if end > LARGE_HEAD and not self._has_turn:
            self._searched = end - 4
            self._defer()
            self._hold()
            return False
        self._has_turn = False
        self._searched = 0
        raw = bytes(buffer[:end])
        del buffer[:end]
        self._begin(raw)
        return self._state == _BODY

    def _begin(self, raw: bytes) -> None:
        """Hand a complete head to a handler."""
        try:
            request = Request(raw)
        except ApiError as error:
            self._refuse(error, raw)
            return
        if self._capacity.full:
            self._refuse(early_errors.crowded(), raw)
            return
        self._body = Body(request.length, chunked=request.chunked)
        self._taken = len(raw)
        self._discarded = 0
        self._exchange = exchange = Exchange(self, self._shared, request)
        start_line = httputil.RequestStartLine(request.method, request.target, request.version)
        delegate = self._shared.application.start_request(self, exchange)
        prepared = delegate.headers_received(start_line, request.headers)
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
            self.deadline = self._began + self._shared.bounds.request_timeout
            self._hold()
            return False
        if buffer:
            exchange.expects_continue = False
        try:
            body = self._body.take(buffer, exchange.max_body)
        except BodyTooLargeError:
            self._fail(Failure.TOO_LARGE)
            return False
        if body is None:
            self.deadline = self._began + self._shared.bounds.request_timeout
            self._capacity.waiting.move_to_end(self)
            if self._hold() and self._half_closed and not self._body.stopped:
                self._fail(Failure.TRUNCATED)
            return False
        self._taken += len(body)
        # The bytes that follow are also held while the handler works.
        if not self._hold():
            return False
        self._state = _BUSY
        self._capacity.waiting.pop(self, None)
        self.deadline = math.inf  # Handlers limit their time themselves.
        if body:
            delegate.data_received(body)
        delegate.finish()
        # If the handler has answered already, the loop continues with the next request.
        return True

    def _read_rest(self) -> bool:
        if not self._discard_body():
            if self._half_closed and not self._body.stopped:
                self.close()
            return False
        if self._exchange is not None and self._exchange.closes:
            self.close()
            return False
        self._next()
        return True

    def _discard_body(self) -> bool:
        """Discard the part of the body that has arrived.

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

    # ---------------------------------------------------------------------------------- answering
    def _fail(self, failure: Failure) -> None:
        """Let the handler answer why the body will not be complete."""
        exchange, delegate = self._exchange, self._delegate
        if exchange is None or delegate is None or exchange.failure:
            return
        exchange.failure = failure
        self._body.forget(self._buffer)
        self._taken = 0
        self._hold()
        delegate.on_connection_close()

    def is_last(self, exchange: Exchange) -> bool:
        if self._state != _BODY:
            return self._overrun or (self._half_closed and not self._buffer)
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
        self._taken = 0
        self._hold()
        self._delegate = None
        if self._state == _BODY:
            if self.is_last(exchange):
                self._linger()
                return
            self._state = _REST
            self.deadline = self._loop.time() + DISCARD_SECONDS
        elif exchange.closes or self._overrun:
            if self._buffer or self._overrun:
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
        self._capacity.waiting[self] = None
        self._exchange = None
        self._delegate = None
        bounds = self._shared.bounds
        self.deadline = self._loop.time() + (
            bounds.request_timeout if self._slow_reader else bounds.idle_timeout
        )

    def _refuse_for_room(self) -> None:
        """Answer 503 to an incomplete head, and close without waiting for the client."""
        full = self._capacity.held > self._capacity.limit
        self._refuse(early_errors.too_many_bytes() if full else early_errors.crowded())
        self.close()
        self._capacity.forget(self)

    def _refuse(self, error: ApiError | None, head: bytes | None = None) -> None:
        """Answer without a handler, and close.

        :param error: ``None`` if the bytes are not HTTP; the answer is then a bare 400.
        :param head: the request's head; ``None`` if what there is of it is in the buffer.
        """
        if self._state == _CLOSED:
            return
        identity = new_request_id()
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
        self._release()
        if self._half_closed:
            self.close()
            return
        self._state = _LINGER
        self._capacity.waiting[self] = None
        self._pace()
        self._last_deadline()
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def _last_deadline(self) -> None:
        """Limit how long the client may take to read the last answer."""
        slow = self._shared.bounds.request_timeout if self._slow_reader else 0.0
        self.deadline = self._loop.time() + max(slow, DISCARD_SECONDS)
