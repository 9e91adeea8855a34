# SPDX-License-Identifier: Apache-2.0
"""The queue of each partition, and the batches that are sent.

A partition has one batch in flight at a time. Calls that come before its answer share the next one,
so a call waits only for the partitions of its own records.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from engage.api import LogRecord, Outcome, Status, StorageUnavailable

from .client import PAUSE, Sender, SendFailed
from .topics import DEFAULT_MESSAGE

_log = logging.getLogger("engage.log.kafka")

#: Bytes of a batch, unless one record is larger.
_BATCH: Final = 1024 * 1024
#: Bytes of an empty batch, and the most that the framing of a record and of a header takes.
_BATCH_HEADER: Final = 61
_RECORD_OVERHEAD: Final = 36
_HEADER_OVERHEAD: Final = 10
#: The number of records after which a sender is replaced.
_MAX_SENT: Final = 2**30

_STORED: Final = Outcome(Status.STORED)

#: What :meth:`Appender.gauges` returns before there is an appender.
NO_GAUGES: Final = {
    **dict.fromkeys(("waiting_calls", "sent_batches", "sending_batches"), 0.0),
    **dict.fromkeys(("oldest_batch_seconds", "replaced_senders"), 0.0),
}


class _Call:
    """A call of :meth:`Appender.append`, which waits for all of its partitions."""

    __slots__ = ("done", "left")

    def __init__(self) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        #: Partitions that have not taken all of their records.
        self.left = 0

    def finished(self) -> None:
        """Note that one partition has taken its records."""
        self.left -= 1
        if not self.left and not self.done.done():
            self.done.set_result(None)

    def failed(self, error: StorageUnavailable) -> None:
        """Let the call fail."""
        if not self.done.done():
            self.done.set_exception(error)


class _Share:
    """The records of a call for one partition, and how many of them are in the log."""

    __slots__ = ("call", "next", "records")

    def __init__(self, call: _Call) -> None:
        self.call = call
        self.records: list[tuple[LogRecord, int]] = []
        self.next = 0


class _Lane:
    """The queue of one partition."""

    def __init__(self, topic: str, partition: int) -> None:
        self.topic = topic
        self.partition = partition
        self.queue: collections.deque[_Share] = collections.deque()
        self.filled = asyncio.Event()
        #: When the batch that is under way was sent first; 0: there is none.
        self.since = 0.0
        #: The calls that have records in that batch.
        self.sending: list[_Share] = []

    @property
    def awaited(self) -> bool:
        """Whether a call waits for something that is in the queue or under way."""
        return any(not share.call.done.done() for share in (*self.queue, *self.sending))

    def put(self, share: _Share) -> None:
        """Add records to the queue."""
        queue = self.queue
        while queue and queue[0].call.done.done():
            # Their call has ended. Otherwise, records would pile up during an outage.
            queue.popleft()
        queue.append(share)
        self.filled.set()

    def take(self, batch: Any, room: int) -> tuple[list[_Share], list[tuple[_Share, int]]]:
        """Move records from the queue to a batch.

        :param room: bytes of the batch; its first record may exceed it.
        :return: the shares whose last record it has, and the place in each share where it began.
        """
        now = int(time.time() * 1000)
        room -= _BATCH_HEADER
        complete: list[_Share] = []
        begun: list[tuple[_Share, int]] = []
        queue, append, empty = self.queue, batch.append, True
        while queue:
            share = queue[0]
            if share.call.done.done():
                # The call has failed, or was cancelled.
                queue.popleft()
                continue
            records, first = share.records, share.next
            place = first
            for record, size in records[first:] if first else records:
                if size > room and not empty:
                    break
                added = append(
                    timestamp=now,
                    key=record.key,
                    value=record.value,
                    headers=list(record.headers.items()),
                )
                if added is None:
                    raise RuntimeError("aiokafka did not add a record to a batch")
                room -= size
                empty = False
                place += 1
            if place > first:
                begun.append((share, first))
                share.next = place
            if place < len(records):
                break
            queue.popleft()
            complete.append(share)
        return complete, begun


class Appender:
    """Sends records to the partitions.

    :param make_sender: makes a sender that is not connected yet.
    :param timeout: seconds of a call.
    :param too_large: called when a broker refuses a batch for its size, which the settings allow.
    """

    def __init__(
        self,
        make_sender: Callable[[], Sender],
        *,
        timeout: float,
        too_large: Callable[[], None],
    ) -> None:
        self._make_sender = make_sender
        self._timeout = timeout
        self._too_large = too_large
        #: Topic → the bytes of the largest record that it takes, with its batch, and of a batch.
        self._limits: dict[str, int] = {}
        self._rooms: dict[str, int] = {}
        self._lanes: dict[tuple[str, int], _Lane] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._sender: Sender | None = None
        #: Senders that are used for no new batch, and are not stopped yet.
        self._retired: set[Sender] = set()
        self._starting = asyncio.Lock()
        #: Batches that were acknowledged, and senders that were replaced.
        self.sent = 0
        self.replaced = 0
        self._closing = False

    def set_limit(self, topic: str, limit: int) -> None:
        """Note the largest batch that a topic takes, in bytes; before, it is Kafka's default."""
        self._limits[topic] = limit
        self._rooms[topic] = min(_BATCH, limit)

    # -------------------------------------------------------------------------------- calls
    async def append(
        self,
        topic: str,
        partitions: int,
        records: Sequence[LogRecord],
        *,
        seconds: float | None = None,
    ) -> Sequence[Outcome]:
        """Append records to a topic, and return when all of them are durable.

        The CRC-32 of the key, modulo the number of partitions, is the number of the partition.

        :param seconds: how long it may take; by default as long as a call.
        :raises StorageUnavailable: if at least one may not be durable.
        """
        if self._closing:
            raise StorageUnavailable("the log is closing")
        call = _Call()
        limit = self._limits.get(topic, DEFAULT_MESSAGE) - _BATCH_HEADER
        shares: dict[int, _Share] = {}
        refused: list[int] = []
        for index, record in enumerate(records):
            size = _RECORD_OVERHEAD + len(record.key) + len(record.value)
            for name, value in record.headers.items():
                size += _HEADER_OVERHEAD + len(name) + len(value)
            if size > limit:
                refused.append(index)
                continue
            number = zlib.crc32(record.key) % partitions
            share = shares.get(number)
            if share is None:
                share = shares[number] = _Share(call)
            share.records.append((record, size))
        if shares:
            call.left = len(shares)
            for number, share in shares.items():
                self._lane(topic, number).put(share)
            await self._wait(call, self._timeout if seconds is None else seconds)
        outcomes = [_STORED] * len(records)
        for index in refused:
            outcomes[index] = Outcome(
                Status.REFUSED, f"The event is larger than the log accepts ({limit} bytes)."
            )
        return outcomes

    async def _wait(self, call: _Call, seconds: float) -> None:
        expired = asyncio.get_running_loop().call_later(
            seconds,
            call.failed,
            StorageUnavailable(f"Kafka did not acknowledge a record within {seconds:g} s"),
        )
        try:
            await call.done
        finally:
            expired.cancel()

    def _lane(self, topic: str, partition: int) -> _Lane:
        lane = self._lanes.get((topic, partition))
        if lane is None:
            lane = self._lanes[topic, partition] = _Lane(topic, partition)
            task = asyncio.create_task(self._serve(lane))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return lane

    # -------------------------------------------------------------------------------- lanes
    async def _serve(self, lane: _Lane) -> None:
        """Send the records in the queue of a partition, one batch after the other."""
        while True:
            if not lane.queue:
                lane.filled.clear()
                await lane.filled.wait()
            sender = await self._current()
            try:
                await self._send(lane, sender)
            except Exception:
                # Without this, the partition would never take records again.
                _log.exception("%s, partition %d: a batch was not sent", lane.topic, lane.partition)
                self._retire(sender)
                if lane.queue:
                    error = StorageUnavailable("the records could not be sent")
                    lane.queue.popleft().call.failed(error)

    async def _send(self, lane: _Lane, sender: Sender) -> None:
        """Send one batch."""
        batch = sender.batch()
        complete, begun = lane.take(batch, self._rooms.get(lane.topic, _BATCH))
        if not begun:
            return
        lane.since = time.monotonic()
        lane.sending = [share for share, _ in begun]
        try:
            await sender.send(batch, lane.topic, lane.partition)
        except SendFailed as error:
            _log.warning("%s, partition %d: %s", lane.topic, lane.partition, error)
            self._failed(lane, error, complete, begun)
            self._retire(sender)
            await asyncio.sleep(PAUSE)
        else:
            self.sent += 1
            for share in complete:
                share.call.finished()
        finally:
            lane.since = 0.0
            lane.sending = []

    def _failed(
        self,
        lane: _Lane,
        error: SendFailed,
        complete: Sequence[_Share],
        begun: Sequence[tuple[_Share, int]],
    ) -> None:
        """Put the records back into their places, to be sent again while their callers wait."""
        again = not error.permanent
        if error.too_large:
            # If the settings cannot be read, nothing else shows the limits of the topic.
            sizes = [size for share, at in begun for _, size in share.records[at : share.next]]
            again = len(sizes) > 1
            limits = self._rooms if again else self._limits
            limits[lane.topic] = _BATCH_HEADER + (sum(sizes) // 2 if again else sizes[0] - 1)
        if error.permanent:
            self._too_large()
        if not again:
            for share, _ in begun:
                share.call.failed(StorageUnavailable(f"Kafka refuses the records: {error}"))
            return
        for share, first in begun:
            share.next = first
        lane.queue.extendleft(reversed(complete))

    # ------------------------------------------------------------------------------ senders
    async def _current(self) -> Sender:
        """Return a connected sender; try until there is one."""
        while True:
            sender = self._sender
            if sender is not None and sender.sent < _MAX_SENT:
                return sender
            async with self._starting:
                if self._sender is not sender:
                    continue
                if sender is not None:
                    self._retire(sender)
                made = self._make_sender()
                try:
                    await made.start(self._timeout)
                except StorageUnavailable as error:
                    _log.warning("%s", error)
                    self._stop_soon(made)
                except BaseException:
                    await made.stop(0)
                    raise
                else:
                    self._sender = made
                    continue
            await asyncio.sleep(PAUSE)

    def _retire(self, sender: Sender) -> None:
        """Use a sender for no new batch, and stop it when its last one has been answered."""
        if self._sender is sender:
            self._sender = None
            self.replaced += 1
            self._stop_soon(sender)

    def _stop_soon(self, sender: Sender) -> None:
        """Stop a sender. The next one does not wait for that: it may take as long as a call."""
        self._retired.add(sender)
        task = asyncio.create_task(self._stop(sender))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _stop(self, sender: Sender) -> None:
        try:
            while sender.in_flight:  # noqa: ASYNC110
                await asyncio.sleep(PAUSE)
        finally:
            await sender.stop(self._timeout)
            self._retired.discard(sender)

    # --------------------------------------------------------------------------------- life
    async def close(self) -> None:
        """Send the records in the queues, then disconnect. Idempotent."""
        self._closing = True
        lanes = self._lanes.values()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeout):
                while any(lane.awaited for lane in lanes):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # A task that was cancelled before its first step has stopped no sender.
        for retired in tuple(self._retired):
            await retired.stop(self._timeout)
        for lane in lanes:
            for share in lane.queue:
                share.call.failed(StorageUnavailable("the log was closed"))
        sender, self._sender = self._sender, None
        if sender is not None:
            await sender.stop(self._timeout)

    def gauges(self) -> Mapping[str, float]:
        """Return numbers for the metrics."""
        lanes = self._lanes.values()
        now = time.monotonic()
        since = [lane.since for lane in lanes if lane.since]
        return {
            "waiting_calls": sum(len(lane.queue) for lane in lanes),
            "sent_batches": self.sent,
            "sending_batches": len(since),
            "oldest_batch_seconds": now - min(since, default=now),
            "replaced_senders": self.replaced,
        }
