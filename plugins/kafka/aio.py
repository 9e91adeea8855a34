# SPDX-License-Identifier: Apache-2.0
"""The classes of aiokafka, as engage needs them.

All that depends on aiokafka's private parts is here, in subclasses: aiokafka itself stays as it is
for other users of it in the same process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka import errors as kafka_errors
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.client import AIOKafkaClient
from aiokafka.protocol.metadata import MetadataRequest

#: A node that fails like this may still be in the list of nodes: it stays there for some seconds.
_UNREACHABLE: Final = (
    kafka_errors.NodeNotReadyError,
    kafka_errors.KafkaConnectionError,
    kafka_errors.RequestTimedOutError,
)
#: How often closing a part of aiokafka is tried. Each attempt ends at least one of its tasks.
_CLOSE_ATTEMPTS: Final = 5
#: Seconds between two equal messages of aiokafka, which logs each attempt of each partition.
_QUIET: Final = 60.0
_LOGGERS: Final = (
    *("aiokafka", "aiokafka.cluster", "aiokafka.conn"),
    *("aiokafka.producer.producer", "aiokafka.producer.sender"),
    *("aiokafka.consumer.consumer", "aiokafka.consumer.fetcher"),
    *("aiokafka.consumer.subscription_state", "aiokafka.consumer.group_coordinator"),
)
#: An error of aiokafka that engage logs in its own words (:meth:`.client.Member.commit`).
_REBALANCED: Final = "OffsetCommit failed for group %s due to group error (%s), will rejoin"


class _Rarely(logging.Filter):
    """Passes an equal warning once a minute, and no news."""

    def __init__(self) -> None:
        super().__init__()
        self._passed: set[str] = set()
        self._since = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return record.levelno < logging.INFO
        if record.msg == _REBALANCED:
            return False
        now = time.monotonic()
        if now - self._since >= _QUIET:
            self._since = now
            self._passed.clear()
        message = record.getMessage()
        passes = message not in self._passed
        self._passed.add(message)
        return passes


_rarely: Final = _Rarely()


def limit_warnings() -> None:
    """Log an equal warning of aiokafka once a minute only: an outage repeats it all the time."""
    for name in _LOGGERS:
        # Adding it again has no effect.
        logging.getLogger(name).addFilter(_rarely)


async def closed(close: Callable[[], Awaitable[Any]], seconds: float) -> bool:
    """Close a part of aiokafka.

    aiokafka waits for tasks that it has cancelled, and lets their ``CancelledError`` escape.

    :return: whether that succeeded within this number of seconds.
    """
    try:
        async with asyncio.timeout(seconds):
            await close()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return False
    except Exception:
        return False
    return True


class _Client(AIOKafkaClient):  # type: ignore[misc] # aiokafka has no types
    """Asks about topics without creating them, for which aiokafka has no option.

    Otherwise brokers with ``auto.create.topics.enable``, which is Kafka's default, would create a
    missing or deleted topic with one partition and one replica, and acknowledge events in it.

    If a connection has just been closed, uvloop raises a plain ``RuntimeError``. aiokafka's tasks
    would end with it: they expect its own errors, which are subclasses of it.
    """

    async def send(self, *arguments: Any, **options: Any) -> Any:
        try:
            return await super().send(*arguments, **options)
        except kafka_errors.KafkaError:
            raise
        except RuntimeError as error:
            raise kafka_errors.KafkaConnectionError(str(error)) from error

    async def _metadata_update(self, cluster_metadata: Any, topics: Iterable[str]) -> bool:
        nodes = [node.nodeId for node in self.cluster.brokers()]
        if not nodes:
            # Asking about all topics names none, so this creates none.
            return bool(await super()._metadata_update(cluster_metadata, ()))
        request = MetadataRequest(list(topics) if topics else None, allow_auto_topic_creation=False)
        random.shuffle(nodes)
        for node in nodes:
            connection = await self._get_conn(node)
            if connection is None:
                continue
            try:
                answer = await connection.send(request)
            except (RuntimeError, TimeoutError):
                continue
            if not answer.brokers:
                return False
            cluster_metadata.update_metadata(answer)
            return True
        cluster_metadata.failed_update(None)
        return False


def _without_creating(client: AIOKafkaClient) -> None:
    """Make a client of aiokafka's own a :class:`_Client`: its constructors take none of ours."""
    client.__class__ = _Client


class Admin(AIOKafkaAdminClient):  # type: ignore[misc] # aiokafka has no types
    """Asks one node after the other for data that every node has, until one answers.

    aiokafka asks one at random, also one that has just died.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        _without_creating(self._client)
        self._failed: set[int] = set()

    async def let_create(self, topic: str) -> None:
        """Ask about a topic so that brokers create it which do this, and have no other way."""
        await self._send_request(MetadataRequest([topic], allow_auto_topic_creation=True))

    async def _get_cluster_metadata(self, topics: list[str] | None = None) -> Any:
        return await self._send_request(MetadataRequest(topics, allow_auto_topic_creation=False))

    async def _send_request(self, request: Any, node_id: int | None = None) -> Any:
        nodes = [node.nodeId for node in self._client.cluster.brokers()]
        if node_id is not None or not nodes:
            return await super()._send_request(request, node_id)
        random.shuffle(nodes)
        # A host that is off is noticed only when the time of the request is over.
        *others, last = sorted(nodes, key=self._failed.__contains__)
        for node in others:
            with contextlib.suppress(*_UNREACHABLE):
                return await self._send_noting(request, node)
        return await self._send_noting(request, last)

    async def _send_noting(self, request: Any, node: int) -> Any:
        try:
            answer = await super()._send_request(request, node)
        except _UNREACHABLE:
            self._failed.add(node)
            raise
        self._failed.discard(node)
        return answer


class Producer(AIOKafkaProducer):  # type: ignore[misc] # aiokafka has no types
    """A producer that can give up."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        _without_creating(self.client)

    def fail_all(self) -> None:
        """Let all batches fail that are not answered. Otherwise ``stop`` waits without limit."""
        self._message_accumulator.fail_all(kafka_errors.ProducerClosed())


class Consumer(AIOKafkaConsumer):  # type: ignore[misc] # aiokafka has no types
    """A consumer that can be stopped at any time, and that knows its positions."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        _without_creating(self._client)

    async def end(self, seconds: float) -> None:
        """Stop, even if the coordinator cannot be reached, or its task was waiting."""
        if await closed(self.stop, seconds):
            return
        # Without this, its connections would stay open. It has no fetcher before it has connected.
        for part in filter(None, (self._fetcher, self._client)):
            for _ in range(_CLOSE_ATTEMPTS):
                if await closed(part.close, 1.0):
                    break

    def check(self) -> None:
        """Raise an error if the task that fetches has ended; aiokafka would wait without limit."""
        if self._fetcher is not None and self._fetcher.error_future.done():
            raise kafka_errors.KafkaError("aiokafka fetches nothing more")

    def positions(self) -> dict[TopicPartition, int]:
        """Return the offset after all that was returned or left out, where it is known.

        ``position`` of aiokafka waits for it, and partitions may be rebalanced in that time.
        """
        subscription = self._subscription.subscription
        assignment = None if subscription is None else subscription.assignment
        if assignment is None or not assignment.active:
            return {}
        states = {tp: assignment.state_value(tp) for tp in assignment.tps}
        return {tp: state.position for tp, state in states.items() if state.has_valid_position}

    async def all_committed(self, tps: Iterable[TopicPartition]) -> dict[TopicPartition, Any]:
        """Ask once for the offsets of several partitions; ``committed`` of aiokafka takes one."""
        offsets: dict[TopicPartition, Any] = await self._coordinator.fetch_committed_offsets(
            list(tps)
        )
        return offsets
