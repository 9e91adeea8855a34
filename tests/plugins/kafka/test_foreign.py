# SPDX-License-Identifier: Apache-2.0
"""What brokers and other programs do with the topics that engage does not do itself."""

from __future__ import annotations

import asyncio
import uuid

import aiokafka.admin.client
import aiokafka.client
import pytest
from aiokafka.protocol.metadata import MetadataRequest_v4, MetadataRequest_v5
from confluent_kafka import Producer

from engage.api import StorageIncompatible
from engage_plugins.kafka import client
from support import kafka
from support.kafka_log import make_log, opened, record, topic_name

nodes = pytest.mark.kafka
long = pytest.mark.timeout(300, func_only=True)


def test_no_client_creates_a_topic_by_asking_for_it() -> None:
    """Otherwise a broker with Kafka's default settings creates it with one replica."""
    for module in (aiokafka.client, aiokafka.admin.client):
        for version in (MetadataRequest_v4, MetadataRequest_v5):
            request = module.MetadataRequest(["t"]).build(version)
            assert request.to_object()["allow_auto_topic_creation"] is False
        assert module.MetadataRequest is client._MetadataRequest


@nodes
@long
def test_markers_of_transactions_are_not_a_backlog(kafka_nodes: kafka.Cluster) -> None:
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

    async def run() -> None:
        async with opened(kafka_nodes.servers(), topic) as log:
            await log.append([record(f"{number}", f"{number}") for number in range(9)])
            transact(b"a")
            transact(b"aborted", abort=True)
            reader = log.reader("g")
            await reader.open()
            found: list[bytes] = []
            places: dict[int, int] = {}
            while places != await log.ends():
                portion = await reader.read(max_records=100, max_bytes=1 << 20, wait=0.5)
                found += [one.record.value for one in portion.records]
                places |= {one.partition: one.offset + 1 for one in portion.records}
                places |= portion.passed
                assert not portion.gaps
            await reader.commit(places)
            assert await log.committed("g") == places
            assert sorted(found) == [*(b"%d" % number for number in range(9)), b"a"]
            # A new member, which finds only a marker.
            await reader.close()
            await asyncio.to_thread(transact, b"aborted", abort=True)
            backlog = await log.backlog("g")
            assert (backlog.records, backlog.oldest_at) == (0, None)
            reader = log.reader("g")
            await reader.open()
            while (await log.committed("g"))[0] < places[0] + 2:
                portion = await reader.read(max_records=100, max_bytes=1 << 20, wait=0.5)
                assert not portion.records
                await reader.commit(portion.passed)
            await reader.close()

    asyncio.run(run())


@nodes
@long
def test_what_brokers_compress_is_read(
    kafka_nodes: kafka.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A topic that could not be read is refused before anything is acknowledged."""
    topic = kafka_nodes.make_topic(topic_name(), partitions=1, config={"compression.type": "zstd"})

    async def run() -> None:
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
            values: set[bytes] = set()
            while len(values) < 4:
                portion = await reader.read(max_records=100, max_bytes=1 << 20, wait=0.5)
                values |= {one.record.value for one in portion.records}
            await reader.close()
        monkeypatch.setattr(client.aiokafka.codec, "has_zstd", lambda: False)
        with pytest.raises(StorageIncompatible, match=r"compression\.type=zstd"):
            await make_log(kafka_nodes.servers(), topic).open(create=True)

    asyncio.run(run())
