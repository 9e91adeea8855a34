# SPDX-License-Identifier: Apache-2.0
"""The client: connections, errors, time limits.

Three kinds of clients: :class:`Cluster` looks up and administers, :class:`Sender` appends,
:class:`Member` reads as a member of a group.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import aiokafka.codec
from aiokafka import ConsumerRebalanceListener, TopicPartition
from aiokafka import errors as kafka_errors
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.admin.new_topic import NewTopic as _NewTopic

from engage.api import StorageError, StorageUnavailable

from .aio import Admin, Consumer, Producer, closed, limit_warnings
from .options import Address
from .topics import NewTopic

_log = logging.getLogger("engage.log.kafka")
_Answer = TypeVar("_Answer")

#: Milliseconds: after that, the brokers give the partitions of a silent member to others.
_SESSION: Final = 6000
#: Seconds of a request of a member: the answer to that which joins the group waits until all other
#: members have joined again or have lost their offset, and in a new group three seconds more.
_JOIN: Final = 10.0
#: As milliseconds, a member keeps its partitions however long the storage takes.
_UNLIMITED: Final = 2**31 - 1
#: Bytes that a member fetches of a partition at once, unless a record is larger.
_FETCH: Final = 1024 * 1024
#: Seconds until a request is sent again that no broker could answer.
PAUSE: Final = 0.2


class OutOfRange(Exception):
    """The offset of a partition is not in the log: it is before its first record, or after its end.

    Its arguments are the partition and the offset.
    """


class NoOffset(Exception):
    """The group has no committed offset in a partition, which is the argument."""


class TooFewBrokers(Exception):
    """There are fewer brokers than the replicas of a new topic; the argument is their number."""


class SendFailed(Exception):
    """A batch may not be in the log, and this sender must not send to its partition again.

    ``permanent`` is true if another attempt would fail as well, and ``too_large`` if the reason is
    the size of the batch.
    """

    def __init__(self, message: str, *, permanent: bool, too_large: bool = False) -> None:
        super().__init__(message)
        self.permanent = permanent
        self.too_large = too_large


def readable(codec: str) -> bool:
    """Return whether batches can be read that a topic's ``compression.type`` compresses."""
    has = {
        "gzip": aiokafka.codec.has_gzip,
        "snappy": aiokafka.codec.has_snappy,
        "lz4": aiokafka.codec.has_lz4,
        "zstd": aiokafka.codec.has_zstd,
    }
    return codec not in has or bool(has[codec]())


@contextlib.contextmanager
def translated(what: str) -> Iterator[None]:
    """Raise :class:`StorageUnavailable` for every error inside.

    Not only for aiokafka's own: some answers of brokers make it raise an ``AttributeError``.
    """
    try:
        yield
    except (StorageError, OutOfRange, NoOffset, TooFewBrokers):
        raise
    except Exception as error:
        raise StorageUnavailable(f"{what}: {_cause(error)}") from error


def _cause(error: Exception) -> str:
    """Say in one line why a call failed."""
    if isinstance(error, TimeoutError):
        return "Kafka did not answer in time"
    if "Unable to bootstrap" in str(error):
        return (
            "no server of log.kafka.servers answers, or none accepts how engage signs in; "
            "aiokafka has logged why"
        )
    # The text of an error of aiokafka begins with its name.
    name = f"{type(error).__name__}: "
    return " ".join(f"{name}{str(error).removeprefix(name)}".split())


def _common(address: Address, timeout: float) -> dict[str, Any]:
    """Return the arguments that all clients have."""
    limit_warnings()
    protocol = ("SASL_" if address.sasl_mechanism else "") + ("SSL" if address.tls else "PLAINTEXT")
    common: dict[str, Any] = {
        "bootstrap_servers": address.servers,
        "client_id": "engage",
        "request_timeout_ms": int(timeout * 1000),
        "metadata_max_age_ms": 5000,
        "retry_backoff_ms": 100,
        "security_protocol": protocol,
        "ssl_context": address.tls,
    }
    if address.sasl_mechanism:
        common |= {
            "sasl_mechanism": address.sasl_mechanism,
            "sasl_plain_username": address.sasl_username,
            "sasl_plain_password": address.sasl_password,
        }
    return common


class Cluster:
    """Answers about topics, offsets and groups.

    :param request_timeout: seconds after which a request is sent again, perhaps to another broker.
    :param timeout: seconds of a call.
    """

    def __init__(self, address: Address, *, request_timeout: float, timeout: float) -> None:
        self.timeout = timeout
        self._common = _common(address, request_timeout)
        self._admin: Admin | None = None
        self._offsets: Consumer | None = None
        self._lock = asyncio.Lock()

    async def start(self) -> None:
        """Connect. Idempotent.

        :raises StorageUnavailable: if no broker can be reached.
        """
        async with self._lock:
            if self._admin is not None:
                return
            admin = Admin(**self._common)
            offsets = Consumer(
                **self._common,
                auto_offset_reset="earliest",
                enable_auto_commit=False,
                fetch_max_bytes=1 << 16,
                max_partition_fetch_bytes=1 << 16,
                isolation_level="read_committed",
            )
            try:
                async with self._calling("Kafka cannot be reached"):
                    await admin.start()
                    await offsets.start()
            except BaseException:
                await self._close(admin, offsets)
                raise
            self._admin, self._offsets = admin, offsets

    @property
    def is_open(self) -> bool:
        """Whether it is connected."""
        return self._admin is not None

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        admin, self._admin = self._admin, None
        offsets, self._offsets = self._offsets, None
        if admin is not None and offsets is not None:
            await self._close(admin, offsets)

    async def _close(self, admin: Admin, offsets: Consumer) -> None:
        await offsets.end(self.timeout)
        await closed(admin.close, self.timeout)

    @contextlib.asynccontextmanager
    async def _calling(self, what: str) -> Any:
        with translated(what):
            async with asyncio.timeout(self.timeout):
                yield

    async def _answered(self, what: str, ask: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """Ask until there is an answer, or an error that asking again does not mend.

        A broker may not know a new topic yet. A group has no coordinator right after a start or a
        failure; some such answers make aiokafka raise an ``AttributeError``.
        """
        async with self._calling(what):
            while True:
                try:
                    return await ask()
                except (kafka_errors.KafkaError, AttributeError) as error:
                    if not getattr(error, "retriable", True):
                        raise
                await asyncio.sleep(PAUSE)

    @property
    def _opened(self) -> Admin:
        if self._admin is None:
            raise StorageUnavailable("the log is not open")
        return self._admin

    # ------------------------------------------------------------------------------ topics
    async def partitions(self, topic: str) -> dict[int, tuple[int, int, int]]:
        """Return partition → (leader or -1, number of replicas, number of those in sync).

        :return: empty if the topic does not exist, or if a broker does not know it yet.
        """
        async with self._calling(f"topic {topic}"):
            (description,) = await self._opened.describe_topics([topic])
            code = description["error_code"]
            if code == kafka_errors.UnknownTopicOrPartitionError.errno:
                return {}
            if code not in (0, kafka_errors.LeaderNotAvailableError.errno):
                raise kafka_errors.for_code(code)(topic)
            return {
                state["partition"]: (state["leader"], len(state["replicas"]), len(state["isr"]))
                for state in description["partitions"]
            }

    async def await_partitions(self, topic: str) -> dict[int, tuple[int, int, int]]:
        """Return the same as :meth:`partitions`, and wait until a topic that was created appears.

        :raises StorageUnavailable: if it does not.
        """
        for _ in range(10):
            if partitions := await self.partitions(topic):
                return partitions
            await asyncio.sleep(PAUSE)
        raise StorageUnavailable(f"topic {topic} does not exist")

    async def create(self, topic: NewTopic) -> None:
        """Create a topic, unless there is one.

        :raises TooFewBrokers: if there are fewer brokers than replicas.
        :raises StorageUnavailable: with the reason, if it cannot be created.
        """
        made = _NewTopic(
            topic.name, topic.partitions, topic.replicas, topic_configs=dict(topic.settings)
        )
        async with self._calling(f"topic {topic.name} does not exist and cannot be created"):
            answer = await self._opened.create_topics([made])
            for _, code, *reason in answer.topic_errors:
                if code == kafka_errors.InvalidReplicationFactorError.errno:
                    cluster = await self._opened.describe_cluster()
                    raise TooFewBrokers(len(cluster["brokers"]))
                if code not in (0, kafka_errors.TopicAlreadyExistsError.errno):
                    raise kafka_errors.for_code(code)(*reason[:1])

    async def let_create(self, topic: str) -> None:
        """Ask about a topic so that brokers create it which do this, and have no other way."""
        async with self._calling(f"topic {topic} does not exist and cannot be created"):
            await self._opened.let_create(topic)

    async def settings(self, topic: str) -> dict[str, str]:
        """Return all settings of a topic, including the defaults of the brokers."""
        resource = ConfigResource(ConfigResourceType.TOPIC, topic)

        async def ask() -> dict[str, str]:
            (answer,) = await self._opened.describe_configs([resource])
            code, reason, _, _, entries = answer.resources[0]
            if code:
                raise kafka_errors.for_code(code)(reason)
            return {entry[0]: str(entry[1]) for entry in entries}

        return await self._answered(f"the settings of topic {topic} cannot be read", ask)

    # ----------------------------------------------------------------------------- offsets
    async def firsts(self, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        """Return partition → the offset of the first record that is there."""
        async with self._calling("offsets"):
            tps = [TopicPartition(topic, number) for number in partitions]
            offsets = await self._reader.beginning_offsets(tps)
            return {tp.partition: offset for tp, offset in offsets.items()}

    async def ends(self, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        """Return partition → the offset that the next record will have."""
        async with self._calling("offsets"):
            tps = [TopicPartition(topic, number) for number in partitions]
            offsets = await self._reader.end_offsets(tps)
            return {tp.partition: offset for tp, offset in offsets.items()}

    async def since(self, topic: str, partition: int, at: int) -> int | None:
        """Return the first offset at or after a time in milliseconds; ``None``: there is none."""
        async with self._calling("offsets"):
            tp = TopicPartition(topic, partition)
            place = (await self._reader.offsets_for_times({tp: at}))[tp]
            return None if place is None else int(place.offset)

    async def committed(self, topic: str, group: str, partitions: Iterable[int]) -> dict[int, int]:
        """Return partition → the committed offset of a group, without those that have none."""
        tps = [TopicPartition(topic, number) for number in partitions]

        async def ask() -> dict[int, int]:
            places = await self._opened.list_consumer_group_offsets(group, partitions=tps)
            return {tp.partition: value.offset for tp, value in places.items() if value.offset >= 0}

        return await self._answered(f"the offsets of group {group} cannot be read", ask)

    async def appended_at(
        self, topic: str, offsets: Mapping[int, int], ends: Mapping[int, int]
    ) -> dict[int, int]:
        """Return partition → when its first record at or after an offset was appended.

        The offsets must be there; a partition whose broker does not answer is missing. -1: there
        is no record before the end, only markers of transactions.
        """
        times: dict[int, int] = {}
        async with self._lock:
            reader = self._reader
            reader.assign([TopicPartition(topic, number) for number in offsets])
            try:
                with contextlib.suppress(StorageUnavailable):
                    async with self._calling("records"):
                        for number, offset in offsets.items():
                            reader.seek(TopicPartition(topic, number), offset)
                        while len(times) < len(offsets):
                            left = [TopicPartition(topic, n) for n in offsets if n not in times]
                            batch = await reader.getmany(*left, timeout_ms=200, max_records=1)
                            for tp, records in batch.items():
                                times[tp.partition] = records[0].timestamp
                                reader.pause(tp)
                            for tp in left:
                                number = tp.partition
                                if number not in times and (
                                    await reader.position(tp) >= ends[number]
                                ):
                                    times[number] = -1
                                    reader.pause(tp)
            finally:
                reader.unsubscribe()
        return times

    @property
    def _reader(self) -> Consumer:
        if self._offsets is None:
            raise StorageUnavailable("the log is not open")
        return self._offsets


class Sender:
    """An idempotent producer: the brokers ignore records that it sends again.

    It sends one batch of a partition at a time; the caller waits for it. aiokafka drops a second
    one far too early (``MessageAccumulator.add_batch`` subtracts the same time again and again).
    A batch that failed leaves a hole in the numbers of its partition, so a new sender is needed.
    """

    def __init__(self, address: Address, *, request_timeout: float) -> None:
        self._producer = Producer(
            **_common(address, request_timeout),
            acks="all",
            enable_idempotence=True,
            linger_ms=0,
            # The caller measures: the setting of the topic may change.
            max_batch_size=_UNLIMITED,
        )
        #: Records that were sent. aiokafka counts wrongly beyond 2³¹ in a partition.
        self.sent = 0
        #: Batches that were sent and are not answered.
        self.in_flight = 0
        self.batch = self._producer.create_batch
        self._stopping: asyncio.Task[None] | None = None

    async def start(self, seconds: float) -> None:
        """Connect, and obtain the number by which the brokers know this sender."""
        with translated("Kafka cannot be reached"):
            async with asyncio.timeout(seconds):
                await self._producer.start()

    async def send(self, batch: Any, topic: str, partition: int) -> None:
        """Send a batch, and return when it is durable, however long that takes.

        :raises SendFailed: if it may not be in the log.
        """
        self.in_flight += 1
        self.sent += batch.record_count()
        batch.close()
        try:
            await (await self._producer.send_batch(batch, topic, partition=partition))
        except Exception as error:
            raise SendFailed(
                f"{type(error).__name__}: {error}",
                permanent=isinstance(error, (*_TOO_LARGE, *_FORBIDDEN)),
                too_large=isinstance(error, _TOO_LARGE),
            ) from error
        finally:
            self.in_flight -= 1

    async def stop(self, seconds: float) -> None:
        """Disconnect. Requests without an answer fail.

        It goes on if the caller is cancelled, and another call waits for it.
        """
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(seconds))
        await asyncio.shield(self._stopping)

    async def _stop(self, seconds: float) -> None:
        if self.in_flight:
            # Otherwise aiokafka would wait for the answers without limit.
            self._producer.fail_all()
        await closed(self._producer.stop, seconds)


_TOO_LARGE: Final = (
    kafka_errors.MessageSizeTooLargeError,
    kafka_errors.RecordListTooLargeError,
)
_FORBIDDEN: Final = (
    kafka_errors.TopicAuthorizationFailedError,
    kafka_errors.ClusterAuthorizationFailedError,
)


class Member(ConsumerRebalanceListener):  # type: ignore[misc] # aiokafka has no types
    """A member of a group of readers. It commits nothing by itself.

    :param revoked: called when the member loses its partitions: they are rebalanced.
    :param assigned: called when it has got some.
    """

    def __init__(
        self,
        address: Address,
        *,
        topic: str,
        group: str,
        max_batch: int,
        revoked: Callable[[], None],
        assigned: Callable[[], None],
    ) -> None:
        self._topic = topic
        self._revoked = revoked
        self._assigned = assigned
        self._consumer = Consumer(
            **_common(address, _JOIN),
            group_id=group,
            enable_auto_commit=False,
            # It must not jump: neither to the end nor, if records were deleted, over these.
            auto_offset_reset="none",
            isolation_level="read_committed",
            session_timeout_ms=_SESSION,
            heartbeat_interval_ms=_SESSION // 4,
            rebalance_timeout_ms=_SESSION,
            max_poll_interval_ms=_UNLIMITED,
            max_partition_fetch_bytes=max(_FETCH, max_batch),
            fetch_max_bytes=max(8 * _FETCH, max_batch),
        )

    async def start(self, seconds: float) -> None:
        """Join the group."""
        with translated("the group cannot be joined"):
            async with asyncio.timeout(seconds):
                await self._consumer.start()
                self._consumer.subscribe([self._topic], listener=self)

    async def stop(self, seconds: float) -> None:
        """Leave the group."""
        await self._consumer.end(seconds)

    def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        """Called by aiokafka when the partitions are rebalanced."""
        self._revoked()

    def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        """Called by aiokafka when the member has partitions."""
        _log.info(
            "reading partitions %s of topic %s",
            *(sorted(tp.partition for tp in assigned), self._topic),
        )
        self._assigned()

    @property
    def assigned(self) -> set[int]:
        """The partitions that this member has."""
        return {tp.partition for tp in self._consumer.assignment()}

    async def poll(
        self, partitions: Collection[int], *, max_records: int, wait: float
    ) -> Sequence[Any]:
        """Return records of aiokafka.

        :raises OutOfRange: if the offset of one of the partitions is not in the log.
        :raises NoOffset: if the group has no offset in one of them.
        """
        tps = [TopicPartition(self._topic, number) for number in partitions]
        with translated("reading the log"):
            self._consumer.check()
            try:
                # aiokafka waits without limit while the partitions are rebalanced.
                async with asyncio.timeout(wait + 1.0):
                    batches = await self._consumer.getmany(
                        *tps, timeout_ms=int(wait * 1000), max_records=max_records
                    )
            except TimeoutError:
                return ()
            except kafka_errors.OffsetOutOfRangeError as error:
                ((tp, offset),) = error.args[0].items()
                raise OutOfRange(tp.partition, offset) from None
            except kafka_errors.NoOffsetForPartitionError as error:
                raise NoOffset(error.args[0].partition) from None
            return [record for records in batches.values() for record in records]

    def positions(self) -> dict[int, int]:
        """Return partition → the offset after all that :meth:`poll` has returned or left out."""
        return {tp.partition: offset for tp, offset in self._consumer.positions().items()}

    def seek(self, partition: int, offset: int) -> None:
        """Continue at an offset, if the member still has the partition."""
        with contextlib.suppress(kafka_errors.IllegalStateError):
            self._consumer.seek(TopicPartition(self._topic, partition), offset)

    def pause(self, partition: int) -> None:
        """Fetch nothing more of a partition, if the member has it."""
        with contextlib.suppress(kafka_errors.IllegalStateError):
            self._consumer.pause(TopicPartition(self._topic, partition))

    async def committed(self, partition: int, seconds: float) -> int | None:
        """Return the committed offset of the group in a partition."""
        with translated("the offsets of the group cannot be read"):
            async with asyncio.timeout(seconds):
                tp = TopicPartition(self._topic, partition)
                offset: int | None = await self._consumer.committed(tp)
                return offset

    async def with_offset(self, partitions: Iterable[int], seconds: float) -> set[int]:
        """Return those of the partitions in which the group has a committed offset."""
        tps = [TopicPartition(self._topic, number) for number in partitions]
        with translated("the offsets of the group cannot be read"):
            async with asyncio.timeout(seconds):
                places = await self._consumer.all_committed(tps)
                return {tp.partition for tp, value in places.items() if value.offset >= 0}

    async def commit(self, offsets: Mapping[int, int], seconds: float) -> bool:
        """Commit offsets.

        :return: false if the partitions were rebalanced: the offsets are not committed.
        """
        with translated("the offsets cannot be committed"):
            tps = {TopicPartition(self._topic, n): offset for n, offset in offsets.items()}
            # aiokafka goes on with a commit that takes too long. The caller commits again, so
            # nothing waits for the error of the first commit: asyncio would log its traceback.
            commit = asyncio.ensure_future(self._consumer.commit(tps))
            commit.add_done_callback(lambda done: done.cancelled() or done.exception())
            try:
                async with asyncio.timeout(seconds):
                    await asyncio.shield(commit)
            except (kafka_errors.CommitFailedError, kafka_errors.IllegalStateError):
                _log.warning(
                    "the group was rebalanced during a commit; the records since the last commit"
                    " are read again"
                )
                return False
            return True
