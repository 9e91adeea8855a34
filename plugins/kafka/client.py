# SPDX-License-Identifier: Apache-2.0
"""The only module that imports aiokafka: connections, errors, time limits.

Three kinds of clients: :class:`Cluster` looks up and administers, :class:`Sender` appends,
:class:`Member` reads as a member of a group.

Length: one file shows all that engage needs of aiokafka, and what has to change when it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import random
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import aiokafka.admin.client
import aiokafka.client
import aiokafka.codec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRebalanceListener, TopicPartition
from aiokafka import errors as kafka_errors
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.admin.new_topic import NewTopic as _NewTopic
from aiokafka.protocol.metadata import MetadataRequest

from engage.api import StorageError, StorageUnavailable

from .options import Address
from .topics import NewTopic

_log = logging.getLogger("engage.log.kafka")
_Answer = TypeVar("_Answer")

#: Milliseconds: after that, the brokers give the partitions of a silent member to others.
_SESSION: Final = 6000
_HEARTBEAT: Final = 1500
#: Seconds of a request of a member: the answer to that which joins the group waits until all other
#: members have joined again or have lost their place, and in a new group three seconds more.
_JOIN: Final = 10.0
#: A node that fails like this may still be in the list of nodes: it stays there for some seconds.
_UNREACHABLE: Final = (
    kafka_errors.NodeNotReadyError,
    kafka_errors.KafkaConnectionError,
    kafka_errors.RequestTimedOutError,
)
#: As milliseconds, a member keeps its partitions however long the storage takes.
_UNLIMITED: Final = 2**31 - 1
#: Bytes that a member fetches of a partition at once, unless a record is larger.
_FETCH: Final = 1024 * 1024
#: Seconds until a question is asked again that no broker could answer.
_AGAIN: Final = 0.1
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


class OutOfRange(Exception):
    """The place of a partition is not in the log: it is before its first record, or after its end.

    Its arguments are the partition and the place.
    """


class NoPlace(Exception):
    """The group has no committed place in a partition, which is the argument."""


class TooFewBrokers(Exception):
    """There are fewer brokers, the argument, than a new topic is to have replicas."""


class SendFailed(Exception):
    """A batch may not be in the log, and this sender must not send to its partition any more.

    ``permanent`` is true if another attempt would fail as well, and ``too_large`` if the reason is
    the size of the batch.
    """

    def __init__(self, message: str, *, permanent: bool, too_large: bool = False) -> None:
        super().__init__(message)
        self.permanent = permanent
        self.too_large = too_large


class _MetadataRequest(MetadataRequest):  # type: ignore[misc] # aiokafka has no types
    """Asks about topics without creating them.

    Otherwise brokers with ``auto.create.topics.enable``, which is Kafka's default, would create a
    missing or deleted topic with one partition and one replica, and acknowledge events in it.
    """

    def __init__(self, topics: list[str] | None = None) -> None:
        super().__init__(topics, allow_auto_topic_creation=False)


# aiokafka has no option for it.
aiokafka.admin.client.MetadataRequest = _MetadataRequest
aiokafka.client.MetadataRequest = _MetadataRequest

_connect: Final = aiokafka.client.create_conn
#: Host and port → why it could not be connected to, in the call that this task makes.
_refused: Final[contextvars.ContextVar[dict[str, str]]] = contextvars.ContextVar("refused")


async def _connect_noting(host: str, port: int, **options: Any) -> Any:
    """Connect to a broker, and note why that fails: aiokafka only logs it."""
    try:
        return await _connect(host, port, **options)
    except Exception as error:
        if (refused := _refused.get(None)) is not None:
            refused[f"{host}:{port}"] = _reason_of_refusal(error)
        raise


aiokafka.client.create_conn = _connect_noting


def _reason_of_refusal(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message.rstrip('.')}"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, socket.gaierror):
        return str(error.strerror)
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        # The text of asyncio is a Python tuple.
        return os.strerror(error.errno)
    return _reason(error)


class _Rarely(logging.Filter):
    """Passes an equal warning once a minute, and no news."""

    def __init__(self) -> None:
        super().__init__()
        self._passed: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return record.levelno < logging.INFO
        now = time.monotonic()
        key = f"{record.name} {record.msg}"
        if now - self._passed.get(key, -_QUIET) < _QUIET:
            return False
        self._passed[key] = now
        return True


class _NotAwaited(logging.Filter):
    """Drops the report of an error that this module has dealt with.

    When a commit takes too long, its task in aiokafka goes on, and asyncio reports its error
    because nothing waits for it any more. The caller commits again.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return "GroupCoordinator._do_commit_offsets()" not in str(record.msg)


_rarely: Final = _Rarely()
_not_awaited: Final = _NotAwaited()


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
    refused: dict[str, str] = {}
    _refused.set(refused)
    try:
        yield
    except (StorageError, OutOfRange, NoPlace, TooFewBrokers):
        raise
    except Exception as error:
        raise StorageUnavailable(f"{what}: {_cause(error, refused)}") from error


def _cause(error: Exception, refused: Mapping[str, str]) -> str:
    """Say why a call failed: the error, and why brokers could not be connected to."""
    if isinstance(error, TimeoutError):
        text = "Kafka did not answer in time"
    elif "Unable to bootstrap" in str(error):
        # The error lists the servers, each time in another order, as Python writes them.
        text = "no server of log.kafka.servers answers, or none accepts how engage signs in"
    else:
        text = _reason(error)
    brokers: dict[str, list[str]] = {}
    for broker, reason in sorted(refused.items()):
        # Some reasons of aiokafka name the broker.
        brokers.setdefault(reason.replace(broker, "it"), []).append(broker)
    reasons = "; ".join(f"{', '.join(those)}: {reason}" for reason, those in brokers.items())
    return f"{text} ({reasons})" if reasons else text


def _reason(error: Exception) -> str:
    """Return the name and the text of an error in one line."""
    # The text of an error of aiokafka begins with its name.
    name = f"{type(error).__name__}: "
    return " ".join(f"{name}{str(error).removeprefix(name)}".split())


def _common(address: Address, timeout: float) -> dict[str, Any]:
    """Return the arguments that all clients have."""
    for name in _LOGGERS:
        # Adding it again has no effect.
        logging.getLogger(name).addFilter(_rarely)
    logging.getLogger("asyncio").addFilter(_not_awaited)
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


async def _closed(close: Callable[[], Awaitable[Any]], seconds: float) -> bool:
    """Close a part of aiokafka, and return whether that succeeded.

    aiokafka waits for tasks that it has cancelled, and lets their ``CancelledError`` escape.
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


async def _stopped(consumer: AIOKafkaConsumer, seconds: float) -> None:
    """Stop a consumer, also one whose coordinator cannot be reached, or whose task was waiting."""
    if await _closed(consumer.stop, seconds):
        return
    # Without this, its connections would stay open. It has no fetcher before it has connected.
    for part in filter(None, (consumer._fetcher, consumer._client)):
        for _ in range(_CLOSE_ATTEMPTS):
            if await _closed(part.close, 1.0):
                break


class _Admin(AIOKafkaAdminClient):  # type: ignore[misc] # aiokafka has no types
    """Asks all nodes one after the other for what every node knows, until one answers.

    aiokafka asks one at random, also one that has just died.
    """

    def __init__(self, **common: Any) -> None:
        super().__init__(**common)
        self._failed: set[int] = set()

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


class Cluster:
    """Answers about topics, offsets and groups.

    :param request_timeout: seconds after which a request is sent again, perhaps to another broker.
    :param timeout: seconds of a call.
    """

    def __init__(self, address: Address, *, request_timeout: float, timeout: float) -> None:
        self.timeout = timeout
        self._common = _common(address, request_timeout)
        self._admin: _Admin | None = None
        self._offsets: AIOKafkaConsumer | None = None
        self._lock = asyncio.Lock()

    async def start(self) -> None:
        """Connect. Idempotent.

        :raises StorageUnavailable: if no broker can be reached.
        """
        async with self._lock:
            if self._admin is not None:
                return
            admin = _Admin(**self._common)
            offsets = AIOKafkaConsumer(
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

    async def _close(self, admin: _Admin, offsets: AIOKafkaConsumer) -> None:
        await _stopped(offsets, self.timeout)
        await _closed(admin.close, self.timeout)

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
                await asyncio.sleep(_AGAIN)

    @property
    def _opened(self) -> _Admin:
        if self._admin is None:
            raise StorageUnavailable("the log is not open")
        return self._admin

    # ------------------------------------------------------------------------------ topics
    async def partitions(self, topic: str) -> dict[int, tuple[int, int, int]]:
        """Return partition → (leader or -1, number of replicas, number of those in sync).

        :return: empty if the topic does not exist, or if a broker does not know it yet.
        """
        async with self._calling(f"topic {topic}"):
            (found,) = await self._opened.describe_topics([topic])
            code = found["error_code"]
            if code == kafka_errors.UnknownTopicOrPartitionError.errno:
                return {}
            if code not in (0, kafka_errors.LeaderNotAvailableError.errno):
                raise kafka_errors.for_code(code)(topic)
            return {
                one["partition"]: (one["leader"], len(one["replicas"]), len(one["isr"]))
                for one in found["partitions"]
            }

    async def known(self, topic: str) -> dict[int, tuple[int, int, int]]:
        """Return the same as :meth:`partitions`, and wait until a topic that was created appears.

        :raises StorageUnavailable: if it does not.
        """
        for _ in range(10):
            if found := await self.partitions(topic):
                return found
            await asyncio.sleep(_AGAIN)
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
            await self._opened._send_request(
                MetadataRequest([topic], allow_auto_topic_creation=True)
            )

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
            places = [TopicPartition(topic, number) for number in partitions]
            found = await self._reader.beginning_offsets(places)
            return {place.partition: offset for place, offset in found.items()}

    async def ends(self, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        """Return partition → the offset that the next record will have."""
        async with self._calling("offsets"):
            places = [TopicPartition(topic, number) for number in partitions]
            found = await self._reader.end_offsets(places)
            return {place.partition: offset for place, offset in found.items()}

    async def since(self, topic: str, partition: int, at: int) -> int | None:
        """Return the first offset at or after a time in milliseconds; ``None``: there is none."""
        async with self._calling("offsets"):
            place = TopicPartition(topic, partition)
            found = (await self._reader.offsets_for_times({place: at}))[place]
            return None if found is None else int(found.offset)

    async def committed(self, topic: str, group: str, partitions: Iterable[int]) -> dict[int, int]:
        """Return partition → the committed place of a group, without those that have none."""
        places = [TopicPartition(topic, number) for number in partitions]

        async def ask() -> dict[int, int]:
            found = await self._opened.list_consumer_group_offsets(group, partitions=places)
            return {
                place.partition: value.offset for place, value in found.items() if value.offset >= 0
            }

        return await self._answered(f"the places of group {group} cannot be read", ask)

    async def appended_at(
        self, topic: str, places: Mapping[int, int], ends: Mapping[int, int]
    ) -> dict[int, int]:
        """Return partition → when its first record at or after an offset was appended.

        The offsets must be there; a partition whose broker does not answer is missing. -1: there
        is no record before the end, only markers of transactions.
        """
        found: dict[int, int] = {}
        async with self._lock:
            reader = self._reader
            reader.assign([TopicPartition(topic, number) for number in places])
            try:
                with contextlib.suppress(StorageUnavailable):
                    async with self._calling("records"):
                        for number, offset in places.items():
                            reader.seek(TopicPartition(topic, number), offset)
                        while len(found) < len(places):
                            left = [TopicPartition(topic, n) for n in places if n not in found]
                            batch = await reader.getmany(*left, timeout_ms=200, max_records=1)
                            for place, records in batch.items():
                                found[place.partition] = records[0].timestamp
                                reader.pause(place)
                            for place in left:
                                number = place.partition
                                if number not in found and (
                                    await reader.position(place) >= ends[number]
                                ):
                                    found[number] = -1
                                    reader.pause(place)
            finally:
                reader.unsubscribe()
        return found

    @property
    def _reader(self) -> AIOKafkaConsumer:
        if self._offsets is None:
            raise StorageUnavailable("the log is not open")
        return self._offsets


class Sender:
    """An idempotent producer: the brokers ignore what it sends a second time.

    It sends one batch of a partition at a time; the caller waits for it. aiokafka drops a second
    one far too early (``MessageAccumulator.add_batch`` subtracts the same time again and again).
    A batch that failed leaves a hole in the numbers of its partition, so a new sender is needed.
    """

    def __init__(self, address: Address, *, request_timeout: float) -> None:
        self._producer = AIOKafkaProducer(
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
        """Disconnect. What was not answered until then fails.

        It goes on if the caller is cancelled, and another call waits for it.
        """
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(seconds))
        await asyncio.shield(self._stopping)

    async def _stop(self, seconds: float) -> None:
        if self.in_flight:
            # Otherwise aiokafka would wait for the answers without limit.
            self._producer._message_accumulator.fail_all(kafka_errors.ProducerClosed())
        await _closed(self._producer.stop, seconds)


_TOO_LARGE: Final = (
    kafka_errors.MessageSizeTooLargeError,
    kafka_errors.RecordListTooLargeError,
)
_FORBIDDEN: Final = (
    kafka_errors.TopicAuthorizationFailedError,
    kafka_errors.ClusterAuthorizationFailedError,
)


def _numbers(places: Collection[TopicPartition]) -> str:
    """Return the numbers of partitions as text, such as ``partitions 0 to 3, 7``."""
    spans: list[list[int]] = []
    for number in sorted(place.partition for place in places):
        if spans and spans[-1][-1] == number - 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    texts = [" to ".join(map(str, span)) for span in spans]
    return f"partitions {', '.join(texts)}" if texts else "no partitions"


class Member(ConsumerRebalanceListener):  # type: ignore[misc] # aiokafka has no types
    """A member of a group of readers. It commits nothing by itself.

    :param revoked: called when the member loses its partitions: they are divided again.
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
        self._consumer = AIOKafkaConsumer(
            **_common(address, _JOIN),
            group_id=group,
            enable_auto_commit=False,
            # It must not jump: neither to the end nor, if records were deleted, over these.
            auto_offset_reset="none",
            isolation_level="read_committed",
            session_timeout_ms=_SESSION,
            heartbeat_interval_ms=_HEARTBEAT,
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
        await _stopped(self._consumer, seconds)

    def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        """Called by aiokafka when the partitions are divided again."""
        self._revoked()

    def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        """Called by aiokafka when the member has partitions."""
        _log.info("reading %s of topic %s", _numbers(assigned), self._topic)
        self._assigned()

    @property
    def assigned(self) -> set[int]:
        """The partitions that this member has."""
        return {place.partition for place in self._consumer.assignment()}

    async def poll(
        self, partitions: Collection[int], *, max_records: int, wait: float
    ) -> Sequence[Any]:
        """Return records of aiokafka.

        :raises OutOfRange: if the place of one of the partitions is not in the log.
        :raises NoPlace: if the group has no place in one of them.
        """
        places = [TopicPartition(self._topic, number) for number in partitions]
        with translated("reading the log"):
            try:
                # aiokafka waits without limit while the partitions are divided again.
                async with asyncio.timeout(wait + 1.0):
                    found = await self._consumer.getmany(
                        *places, timeout_ms=int(wait * 1000), max_records=max_records
                    )
            except TimeoutError:
                return ()
            except kafka_errors.OffsetOutOfRangeError as error:
                ((place, offset),) = error.args[0].items()
                raise OutOfRange(place.partition, offset) from None
            except kafka_errors.NoOffsetForPartitionError as error:
                raise NoPlace(error.args[0].partition) from None
            return [record for records in found.values() for record in records]

    def positions(self) -> dict[int, int]:
        """Return partition → the offset after all that :meth:`poll` has returned or left out."""
        subscription = self._consumer._subscription.subscription
        assignment = None if subscription is None else subscription.assignment
        if assignment is None or not assignment.active:
            return {}
        states = {place.partition: assignment.state_value(place) for place in assignment.tps}
        return {
            number: state.position for number, state in states.items() if state.has_valid_position
        }

    def seek(self, partition: int, offset: int) -> None:
        """Continue at an offset, if the member still has the partition."""
        with contextlib.suppress(kafka_errors.IllegalStateError):
            self._consumer.seek(TopicPartition(self._topic, partition), offset)

    def pause(self, partition: int) -> None:
        """Fetch nothing more of a partition, if the member has it."""
        with contextlib.suppress(kafka_errors.IllegalStateError):
            self._consumer.pause(TopicPartition(self._topic, partition))

    async def committed(self, partition: int, seconds: float) -> int | None:
        """Return the committed place of the group in a partition."""
        with translated("the places of the group cannot be read"):
            async with asyncio.timeout(seconds):
                place = TopicPartition(self._topic, partition)
                found: int | None = await self._consumer.committed(place)
                return found

    async def placed(self, partitions: Iterable[int], seconds: float) -> set[int]:
        """Return those of the partitions in which the group has a committed place."""
        places = [TopicPartition(self._topic, number) for number in partitions]
        with translated("the places of the group cannot be read"):
            async with asyncio.timeout(seconds):
                found = await self._consumer._coordinator.fetch_committed_offsets(places)
                return {place.partition for place, value in found.items() if value.offset >= 0}

    async def commit(self, places: Mapping[int, int], seconds: float) -> bool:
        """Commit places.

        :return: false if the partitions have been divided again: the places are not committed.
        """
        with translated("the places cannot be committed"):
            try:
                async with asyncio.timeout(seconds):
                    await self._consumer.commit(
                        {TopicPartition(self._topic, n): place for n, place in places.items()}
                    )
            except (kafka_errors.CommitFailedError, kafka_errors.IllegalStateError) as error:
                _log.info("places not committed: %s", error)
                return False
            return True
