# SPDX-License-Identifier: Apache-2.0
"""The brokers do not take any more what the log's producer sends: the log takes a new one."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.producer.transaction_manager import PidAndEpoch

from engage.api import EventLog
from support import kafka
from support.kafka_log import Noted, opened, record, topic_name, until, writing

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(600, func_only=True)]

#: What another client writes.
OTHER = "of another client"


def producer_of(log: EventLog) -> PidAndEpoch:
    """Return the number and the epoch of the log's producer."""
    manager = cast(Any, log)._appender._sender._producer._txn_manager
    return PidAndEpoch(manager.producer_id, manager.producer_epoch)


async def write_as(producer: PidAndEpoch, nodes: kafka.Cluster, topic: str) -> None:
    """Append one record with another client, which has the number and the epoch of a producer."""
    other = AIOKafkaProducer(bootstrap_servers=nodes.servers(), enable_idempotence=True, acks="all")
    await other.start()
    try:
        other._txn_manager._pid_and_epoch = producer
        await other.send_and_wait(topic, OTHER.encode(), partition=0)
    finally:
        await other.stop()


async def make_again(nodes: kafka.Cluster, topic: str) -> None:
    deleted = nodes.admin.delete_topics([topic], operation_timeout=60)[topic]
    await asyncio.to_thread(deleted.result)
    await asyncio.to_thread(nodes.make_topic, topic, partitions=1)


def judge(noted: Noted, nodes: kafka.Cluster, topic: str, *, other: bool = True) -> None:
    """Check that nothing is lost and, because no call failed, that nothing is there twice."""
    assert noted.failures == 0
    noted.sent |= {OTHER} if other else set()
    noted.acknowledged |= {OTHER} if other else set()
    noted.judge(nodes, topic)


async def test_a_producer_that_is_fenced_is_replaced(kafka_nodes: kafka.Cluster) -> None:
    """The partition has a record of a later epoch, so the brokers refuse the log's epoch."""
    topic = kafka_nodes.make_topic(topic_name(), partitions=1)
    async with opened(kafka_nodes.servers(), topic, seconds=30) as log, writing(log) as noted:
        await noted.more(200)
        producer = producer_of(log)
        await write_as(producer._replace(epoch=producer.epoch + 1), kafka_nodes, topic)
        await noted.more(200)
        assert log.gauges()["replaced_senders"] == 1
    judge(noted, kafka_nodes, topic)


@pytest.mark.parametrize("behind", [False, True], ids=["forgotten", "behind"])
async def test_brokers_that_forget_a_producer_take_its_records(
    kafka_nodes: kafka.Cluster, behind: bool
) -> None:
    """A topic that is made again knows nothing of it, or fewer records than it has sent."""
    topic = kafka_nodes.make_topic(topic_name(), partitions=1)
    async with opened(kafka_nodes.servers(), topic, seconds=30) as log:
        await log.append([record(f"{number}") for number in range(30)])
        producer = producer_of(log)
        await make_again(kafka_nodes, topic)
        if behind:
            await write_as(producer, kafka_nodes, topic)
        await until(log.check)
        async with writing(log) as noted:
            await noted.more(200)
        assert log.gauges()["replaced_senders"] == behind
    judge(noted, kafka_nodes, topic, other=behind)
