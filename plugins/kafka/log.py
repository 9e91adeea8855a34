# SPDX-License-Identifier: Apache-2.0
"""The interface that the core calls: opening, readiness, backlog."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from engage.api import (
    Backlog,
    EventLog,
    LogContext,
    LogReader,
    LogRecord,
    Outcome,
    Status,
    StorageIncompatible,
    StorageMissing,
    StorageUnavailable,
)

from . import INSTALL
from .appending import NO_GAUGES, Appender
from .client import Cluster, Member, Sender, TooFewBrokers, readable
from .options import DEFAULT_TOPIC, Address, address
from .reading import KafkaReader
from .topics import DEFAULT_MESSAGE, NewTopic, retention, topics_of, weaknesses

_log = logging.getLogger("engage.log.kafka")

#: Seconds between two reads of the settings, and between two attempts to connect.
_LOOK: Final = 60.0
_RETRY: Final = 1.0
#: Seconds of each of the two questions of a check.
_CHECK: Final = 3.0
#: The part of a call's time after which a request is sent again: a suspended broker keeps its
#: connections and does not answer.
_REQUEST: Final = 0.3


class KafkaLog(EventLog):
    """A topic of Apache Kafka."""

    def __init__(
        self, where: Address, *, topic: str, allow_weak: bool, context: LogContext
    ) -> None:
        self._where = where
        self._topic = topic
        self._allow_weak = allow_weak
        self._context = context
        self._timeout = context.write_timeout
        self._request_timeout = max(1.0, context.write_timeout * _REQUEST)
        self._cluster = Cluster(
            where, request_timeout=self._request_timeout, timeout=context.write_timeout
        )
        self._appender: Appender | None = None
        #: The process that opened the log. A fork has the same sender: the brokers would take its
        #: records for repeated ones, and acknowledge them without keeping them.
        self._pid = 0
        self._partitions = 0
        self._min_in_sync = 1
        #: Topic → its ``max.message.bytes``; those whose settings cannot be read are missing.
        self._max_batches: dict[str, int] = {}
        self._retention: int | None = None
        #: Why the log accepts nothing now.
        self._refusal: str | None = "the log is not open"
        self._create = False
        self._watcher: asyncio.Task[None] | None = None
        self._look = asyncio.Event()
        #: The check in progress. Callers that come before its end share it.
        self._checking: asyncio.Task[str | None] | None = None
        self._unavailable = 0
        #: Partition → an offset, and when its first record was appended.
        self._oldest: dict[int, tuple[int, int]] = {}
        self._warned: set[str] = set()

    @classmethod
    def from_options(cls, options: Mapping[str, Any], context: LogContext) -> KafkaLog:
        """Make the log.

        :param options: valid according to ``schemas/plugins/kafka.json``.
        :raises ConfigError: if options do not fit together, or a file of TLS cannot be used.
        """
        return cls(
            address(options, context.base_dir),
            topic=options.get("topic", DEFAULT_TOPIC),
            allow_weak=options.get("allow_weak_acknowledgement", False),
            context=context,
        )

    # ------------------------------------------------------------------------------------ life
    async def open(self, *, create: bool) -> None:
        if self._watcher is not None:
            return
        self._pid = os.getpid()
        self._create = create
        self._appender = Appender(
            self._make_sender, timeout=self._timeout, too_large=self._look.set
        )
        try:
            await self._prepare()
        except StorageUnavailable as error:
            if not create:
                await self.close()
                raise
            self._refusal = str(error)
            _log.warning("%s; engage retries until it is available", error)
        except BaseException:
            await self.close()
            raise
        self._watcher = asyncio.create_task(self._watch())

    async def close(self) -> None:
        watcher, self._watcher = self._watcher, None
        checking, self._checking = self._checking, None
        tasks = [task for task in (watcher, checking) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        appender, self._appender = self._appender, None
        self._refusal = "the log is not open"
        if appender is not None:
            await appender.close()
        await self._cluster.close()

    async def _prepare(self) -> None:
        """Connect, create the topics, and look at their settings.

        :raises StorageIncompatible: if they allow acknowledged events to be lost.
        """
        await self._cluster.start()
        for topic in topics_of(self._topic, max_value=self._context.max_value_bytes):
            partitions = await self._cluster.partitions(topic.name)
            if not partitions:
                if not self._create:
                    raise StorageMissing(
                        f"topic {topic.name} does not exist; `engage serve` and `engage load` "
                        "create it"
                    )
                await self._make(topic)
                partitions = await self._cluster.await_partitions(topic.name)
            if topic.name == self._topic:
                self._partitions = len(partitions)
            if not topic.name.endswith(".ready"):
                replicas = min(replicas for _, replicas, _ in partitions.values())
                await self._inspect(topic.name, replicas)
        assert self._appender is not None
        for name, most in self._max_batches.items():
            self._appender.set_limit(name, most)
        self._refusal = None

    async def _make(self, topic: NewTopic) -> None:
        try:
            await self._cluster.create(topic)
        except TooFewBrokers as error:
            (brokers,) = error.args
            if not self._allow_weak:
                raise StorageUnavailable(
                    f"topic {topic.name} cannot be created with {topic.replicas} replicas: "
                    f"there are {brokers} brokers now"
                ) from None
            settings = {**topic.settings, "min.insync.replicas": "1"}
            await self._cluster.create(
                dataclasses.replace(topic, replicas=brokers, settings=settings)
            )
        except StorageUnavailable:
            if not self._allow_weak:
                raise
            await self._cluster.let_create(topic.name)

    async def _inspect(self, topic: str, replicas: int) -> None:
        try:
            settings = await self._cluster.settings(topic)
        except StorageUnavailable as error:
            if not self._allow_weak:
                raise
            self._warn(str(error))
            return
        for weakness in weaknesses(topic, settings, replicas=replicas):
            if not self._allow_weak:
                raise StorageIncompatible(
                    f"{weakness} (or set log.kafka.allow_weak_acknowledgement = true)"
                )
            self._warn(f"weak acknowledgement: {weakness}")
        codec = settings.get("compression.type", "producer")
        if not readable(codec):
            raise StorageIncompatible(
                f"{topic} has compression.type={codec}, which cannot be read: {INSTALL} (or set it"
                " to producer)"
            )
        is_main = topic == self._topic
        if is_main:
            self._min_in_sync = int(settings.get("min.insync.replicas", 1))
            self._retention = retention(settings)
        most = self._max_batches[topic] = int(settings.get("max.message.bytes", DEFAULT_MESSAGE))
        if most < self._context.max_value_bytes:
            self._warn(
                f"{topic} has max.message.bytes={most}: "
                f"{'larger events are refused' if is_main else 'larger dead letters are cut off'}; "
                f"the limits of engage allow {self._context.max_value_bytes}"
            )

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            _log.warning("%s", message)

    async def _watch(self) -> None:
        """Connect if that has failed so far, and look at the settings every minute."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RETRY if self._partitions == 0 else _LOOK):
                    await self._look.wait()
                # Many batches may be refused at the same time.
                await asyncio.sleep(_RETRY)
            self._look.clear()
            try:
                await self._prepare()
            except (StorageIncompatible, StorageMissing) as error:
                if self._refusal != str(error):
                    _log.error("%s", error)
                self._refusal = str(error)
            except StorageUnavailable as error:
                # The settings are as they were: batches show whether Kafka can be reached.
                _log.debug("%s", error)
            except Exception:
                _log.exception("the topic could not be looked at")

    def _ready(self) -> Appender:
        if self._appender is None or self._refusal is not None:
            raise StorageUnavailable(self._refusal or "the log is not open")
        if os.getpid() != self._pid:
            raise StorageUnavailable("the log was opened before a fork; open it after the fork")
        return self._appender

    def _make_sender(self) -> Sender:
        return Sender(self._where, request_timeout=self._request_timeout)

    # ------------------------------------------------------------------------------- appending
    async def append(self, records: Sequence[LogRecord]) -> Sequence[Outcome]:
        return await self._ready().append(self._topic, self._partitions, records)

    async def append_dead(self, records: Sequence[LogRecord]) -> Sequence[Outcome]:
        topic = f"{self._topic}.dead"
        outcomes = await self._ready().append(topic, 1, records)
        refused = Outcome(
            Status.REFUSED, f"it is larger than max.message.bytes of topic {topic} allows"
        )
        return [refused if outcome.status is Status.REFUSED else outcome for outcome in outcomes]

    async def check(self) -> None:
        appender = self._ready()
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._problem(appender))
        reason = await asyncio.shield(self._checking)
        if reason is not None:
            raise StorageUnavailable(reason)

    async def _problem(self, appender: Appender) -> str | None:
        """Return why no record could be appended now, or ``None``."""
        try:
            async with asyncio.timeout(_CHECK):
                partitions = await self._cluster.await_partitions(self._topic)
        except (StorageUnavailable, TimeoutError) as error:
            return str(error) or "Kafka did not answer in time"
        self._partitions = max(self._partitions, len(partitions))
        without = [
            str(number)
            for number, (leader, _, in_sync) in sorted(partitions.items())
            if leader < 0 or in_sync < self._min_in_sync
        ]
        self._unavailable = len(without)
        if without:
            return f"without a leader or enough replicas in sync: partition {', '.join(without)}"
        # The remaining brokers repeat the state from before they lost the majority.
        try:
            record = LogRecord(key=b"", value=b"", headers={})
            await appender.append(f"{self._topic}.ready", 1, [record], seconds=_CHECK)
        except StorageUnavailable as error:
            return str(error)
        return None

    # ---------------------------------------------------------------------------------- offsets
    async def ends(self) -> Mapping[int, int]:
        return await self._cluster.ends(self._topic, await self._numbers())

    async def firsts(self) -> Mapping[int, int]:
        return await self._cluster.firsts(self._topic, await self._numbers())

    async def committed(self, group: str) -> Mapping[int, int]:
        return await self._cluster.committed(self._topic, group, await self._numbers())

    async def backlog(self, group: str) -> Backlog:
        numbers = await self._numbers()
        # The offsets first: a commit in between may be after an end that was read before.
        offsets = await self._cluster.committed(self._topic, group, numbers)
        ends, firsts = await asyncio.gather(
            self._cluster.ends(self._topic, numbers),
            self._cluster.firsts(self._topic, numbers),
        )
        late = {
            number: max(offsets.get(number, 0), firsts[number])
            for number in numbers
            if ends[number] > max(offsets.get(number, 0), firsts[number])
        }
        oldest = {n: at for n, (offset, at) in self._oldest.items() if late.get(n) == offset}
        unknown = {number: offset for number, offset in late.items() if number not in oldest}
        if unknown:
            times = await self._cluster.appended_at(self._topic, unknown, ends)
            late = {number: offset for number, offset in late.items() if times.get(number, 0) >= 0}
            oldest |= {number: at for number, at in times.items() if at >= 0}
        self._oldest = {number: (late[number], at) for number, at in oldest.items()}
        if late and not oldest:
            raise StorageUnavailable("the oldest record could not be read")
        return Backlog(
            records=sum(ends[number] - offset for number, offset in late.items()),
            oldest_at=min(oldest.values(), default=None),
            retention=self._retention,
            gaps={
                number: (offset, firsts[number])
                for number, offset in offsets.items()
                if number in firsts and not firsts[number] <= offset <= ends[number]
            },
        )

    async def _numbers(self) -> list[int]:
        """Return the numbers of all partitions."""
        if self._partitions == 0 or self._appender is None:
            raise StorageUnavailable(self._refusal or "the log is not open")
        return sorted(await self._cluster.await_partitions(self._topic))

    def reader(self, group: str, *, since: int | None = None) -> LogReader:
        return KafkaReader(
            self._cluster,
            lambda revoked, assigned: Member(
                self._where,
                topic=self._topic,
                group=group,
                max_batch=self._max_batches.get(self._topic, DEFAULT_MESSAGE),
                revoked=revoked,
                assigned=assigned,
            ),
            topic=self._topic,
            since=since,
            timeout=self._timeout,
        )

    gauge_texts = {  # noqa: RUF012 (typed by the base class)
        "waiting_calls": "Calls that wait until their events can be sent to Kafka",
        "sent_batches": "Batches that were sent to Kafka since the process started",
        "sending_batches": "Batches that Kafka has not acknowledged yet",
        "oldest_batch_seconds": "Time for which the oldest of these batches has waited",
        "replaced_senders": "Producers that were replaced because a batch failed",
        "topic_partitions": "Partitions of the topic of events",
        "unavailable_partitions": "Partitions of the topic that take no events now",
    }

    def gauges(self) -> Mapping[str, float]:
        numbers = NO_GAUGES if self._appender is None else self._appender.gauges()
        return {
            **numbers,
            "topic_partitions": self._partitions,
            "unavailable_partitions": self._unavailable,
        }
