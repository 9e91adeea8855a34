# SPDX-License-Identifier: Apache-2.0
"""What brokers and other programs do with the topics that engage does not do itself."""

from __future__ import annotations

import asyncio
import uuid
from unittest import mock

import pytest
from aiokafka.errors import UnknownTopicOrPartitionError
from confluent_kafka import Producer

from engage.api import StorageIncompatible
from engage_plugins.kafka import aio, client
from engage_plugins.kafka.reading import KafkaReader
from support import kafka
from support.kafka_log import make_log, opened, read_records, record, topic_name, until

nodes = pytest.mark.kafka
long = pytest.mark.timeout(600, func_only=True)


def test_no_client_creates_a_topic_by_asking_for_it() -> None:
    """Otherwise a broker with Kafka's default settings creates it with one replica."""
    topic = topic_name()

    async def run(servers: str) -> None:
        options = {"bootstrap_servers": servers, "request_timeout_ms": 1000}
        producer, consumer, admin = (
            aio.Producer(**options),
            aio.Consumer(**options),
            aio.Admin(**options),
        )
        await asyncio.gather(producer.start(), consumer.start(), admin.start())
        try:
            with pytest.raises(UnknownTopicOrPartitionError):
                await producer.partitions_for(topic)
            consumer.subscribe([topic])
            await consumer.getmany(timeout_ms=500)
            (found,) = await admin.describe_topics([topic])
            assert found["error_code"] == UnknownTopicOrPartitionError.errno
        finally:
            await asyncio.gather(producer.stop(), consumer.stop(), admin.close())

    with kafka.mock() as servers:
        asyncio.run(run(servers))


@nodes
@long
async def test_markers_of_transactions_are_not_a_backlog(kafka_nodes: kafka.Cluster) -> None:
    """They have offsets, and no reader is given them."""
    topic = kafka_nodes.make_topic(topic_name(), partitions=2)
    other = Producer(
        {
            "bootstrap.servers": kafka_nodes.servers(),
            "transactional.id": uuid.uuid4().hex,
            "log_level": 0,
        }
    )
    other.init_transactions(30)

    def transact(value: bytes, *, abort: bool = False) -> None:
        other.begin_transaction()
        other.produce(topic, value, partition=0)
        other.flush()
        (other.abort_transaction if abort else other.commit_transaction)(30)

    async with opened(kafka_nodes.servers(), topic) as log:
        await log.append([record(f"{number}", f"{number}") for number in range(9)])
        transact(b"a")
        transact(b"aborted", abort=True)
        reader = log.reader("g")
        await reader.open()
        found: list[bytes] = []
        offsets: dict[int, int] = {}
        while offsets != await log.ends():
            batch = await reader.read(max_records=100, max_bytes=1 << 20, wait=0.5)
            found += [one.record.value for one in batch.records]
            offsets |= {one.partition: one.offset + 1 for one in batch.records}
            offsets |= batch.passed
            assert not batch.gaps
        await reader.commit(offsets)
        assert await log.committed("g") == offsets
        assert sorted(found) == [*(b"%d" % number for number in range(9)), b"a"]
        # A new member, which finds only a marker.
        await reader.close()
        await asyncio.to_thread(transact, b"aborted", abort=True)
        backlog = await log.backlog("g")
        assert (backlog.records, backlog.oldest_at) == (0, None)
        reader = log.reader("g")
        await reader.open()
        while (await log.committed("g"))[0] < offsets[0] + 2:
            batch = await reader.read(max_records=100, max_bytes=1 << 20, wait=0.5)
            assert not batch.records
            await reader.commit(batch.passed)
        await reader.close()


@nodes
@long
async def test_a_topic_that_is_made_again_under_a_reader_is_read_from_its_beginning(
    kafka_nodes: kafka.Cluster,
) -> None:
    """Its new records have offsets that the reader has passed, so none is out of range."""
    topic = kafka_nodes.make_topic(topic_name(), partitions=1)
    async with opened(kafka_nodes.servers(), topic) as log:
        await log.append([record(f"old{number}") for number in range(30)])
        reader = log.reader("g")
        await reader.open()
        await read_records(reader, 10)
        await reader.commit({0: 10})
        await read_records(reader, 20)
        deleted = kafka_nodes.admin.delete_topics([topic], operation_timeout=60)[topic]
        await asyncio.to_thread(deleted.result)
        await asyncio.to_thread(kafka_nodes.make_topic, topic, partitions=1)
        await until(log.check)
        new = [f"new{number}" for number in range(50)]
        await log.append([record(name) for name in new])
        # The storage has been slow, and now has the last batch.
        await reader.commit({0: 30})
        found: list[str] = []
        gaps: dict[int, tuple[int, int]] = {}
        while len(found) < 50:
            batch = await reader.read(max_records=100, max_bytes=1 << 20, wait=0.5)
            found += [one.record.value.decode() for one in batch.records]
            gaps |= batch.gaps
        await reader.commit({0: 50})
        assert (found, gaps) == (new, {0: (30, 0)})
        assert await log.committed("g") == {0: 50}
        await reader.close()


@nodes
@long
async def test_what_brokers_compress_is_read(
    kafka_nodes: kafka.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A topic that could not be read is refused before anything is acknowledged."""
    topic = kafka_nodes.make_topic(topic_name(), partitions=1, config={"compression.type": "zstd"})
    async with opened(kafka_nodes.servers(), topic) as log:
        await log.append([record("a" * 1000)])
        for codec in ("gzip", "snappy", "lz4"):
            other = Producer(
                {
                    "bootstrap.servers": kafka_nodes.servers(),
                    "compression.type": codec,
                    "log_level": 0,
                }
            )
            other.produce(topic, codec.encode() * 100)
            other.flush()
        reader = log.reader("g")
        await reader.open()
        assert len({one.value for one in await read_records(reader, 4)}) == 4
        await reader.close()
    monkeypatch.setattr(client.aiokafka.codec, "has_zstd", lambda: False)
    with pytest.raises(StorageIncompatible, match=r"compression\.type=zstd"):
        await make_log(kafka_nodes.servers(), topic).open(create=True)


async def test_an_offset_that_is_gone_is_a_gap() -> None:
    """Kafka deletes the offsets of a topic with the topic, and the client begins without one."""
    member, cluster = mock.MagicMock(), mock.AsyncMock()
    member.assigned, member.positions.return_value = {0}, {}
    for name in ("start", "stop", "poll", "commit", "with_offset"):
        setattr(member, name, mock.AsyncMock())
    cluster.firsts.return_value = {0: 0}
    cluster.is_open = True
    one = mock.Mock(partition=0, offset=6, timestamp=1, key=b"k", value=b"v", headers=())
    member.poll.side_effect = [client.NoOffset(0), [one], client.NoOffset(0), ()]
    reader = KafkaReader(cluster, lambda *_: member, topic="t", since=None, timeout=1)
    await reader.open()
    batches = []
    for _ in range(2):
        batches.append(await reader.read(max_records=9, max_bytes=999, wait=0.1))
        await reader.commit({0: 7})
    assert [len(batch.records) for batch in batches] == [1, 0]
    assert [dict(batch.gaps) for batch in batches] == [{}, {0: (7, 0)}]
