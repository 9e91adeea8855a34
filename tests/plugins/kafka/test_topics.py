# SPDX-License-Identifier: Apache-2.0
"""The topics: how they are created, and which settings are refused, at the start and later."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from engage.api import Status, StorageIncompatible, StorageMissing, StorageUnavailable
from engage_plugins.kafka.client import Cluster, TooFewBrokers
from engage_plugins.kafka.topics import NewTopic, retention, topics_of, weaknesses
from support import kafka
from support.each import each
from support.kafka_log import make_log, opened, record, topic_name, until

#: A setting that allows acknowledged events to be lost, and what the message names.
WEAK = [
    ({"min.insync.replicas": "1"}, "min.insync.replicas=1"),
    ({"unclean.leader.election.enable": "true"}, "unclean.leader.election.enable=true"),
    ({"cleanup.policy": "compact"}, "cleanup.policy=compact"),
    ({"cleanup.policy": "compact,delete"}, "cleanup.policy=compact,delete"),
    ({"retention.bytes": "1000000000"}, "retention.bytes=1000000000"),
    ({"retention.ms": "86399999"}, "retention.ms=86399999"),
    ({"message.timestamp.type": "CreateTime"}, "message.timestamp.type=CreateTime"),
]
nodes = pytest.mark.kafka
long = pytest.mark.timeout(600, func_only=True)


def safe() -> dict[str, str]:
    """Return the settings of the topic that engage creates."""
    return dict(topics_of("t", max_value=1)[0].settings)


@each("changed, named", WEAK)
def test_a_weak_setting_is_named(changed: dict[str, str], named: str) -> None:
    (found,) = weaknesses("t", {**safe(), **changed}, replicas=3)
    assert found.startswith(f"t has {named}: ")


def test_a_topic_with_few_replicas_is_weak() -> None:
    for replicas, named in ((2, "2 replicas"), (1, "1 replica")):
        (found,) = weaknesses("t", safe(), replicas=replicas)
        assert found.startswith(f"t has {named};")


def test_what_engage_creates_is_not_weak() -> None:
    topics = topics_of("t", max_value=1)
    assert [topic.name for topic in topics] == ["t", "t.dead", "t.ready"]
    for topic in topics[:2]:
        assert weaknesses(topic.name, topic.settings, replicas=topic.replicas) == []
    assert (
        weaknesses("t", {**safe(), "retention.ms": "-1", "min.insync.replicas": "3"}, replicas=5)
        == []
    )


def test_a_topic_has_room_for_the_largest_record() -> None:
    for value in (1, 4 << 20, 64 << 20):
        (found,) = {
            topic.settings["max.message.bytes"] for topic in topics_of("t", max_value=value)
        }
        assert int(found) >= value + 65536


def test_a_retention_may_be_without_limit() -> None:
    assert retention({"retention.ms": "-1"}) is None
    assert retention({"retention.ms": "5"}) == 5


@nodes
@long
async def test_missing_topics_are_created(kafka_nodes: kafka.Cluster) -> None:
    topic = topic_name()
    with pytest.raises(StorageMissing, match=topic):
        await make_log(kafka_nodes.servers(), topic).open(create=False)
    async with opened(kafka_nodes.servers(), topic) as log:
        assert len(await log.ends()) == 12
        assert (await log.backlog("g")).retention == 7 * 24 * 3600 * 1000
    found = kafka_nodes.admin.list_topics(timeout=60).topics
    counts = {topic: 12, f"{topic}.dead": 1, f"{topic}.ready": 1}
    for name, count in counts.items():
        assert len(found[name].partitions) == count
        assert all(len(partition.replicas) == 3 for partition in found[name].partitions.values())
    settings = kafka_nodes.settings(topic)
    assert {name: settings[name] for name in safe()} == {
        **safe(),
        "max.message.bytes": str(4 << 20),
    }


@nodes
@long
async def test_a_single_broker_is_enough_where_weak_settings_are_allowed(
    kafka_nodes: kafka.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = Cluster.create

    async def only_one(self: Cluster, new: NewTopic) -> None:
        if new.replicas > 1:
            raise TooFewBrokers(1)
        await create(self, new)

    monkeypatch.setattr(Cluster, "create", only_one)
    topic = topic_name()
    # More brokers may come.
    log = make_log(kafka_nodes.servers(), topic)
    await log.open(create=True)
    with pytest.raises(StorageUnavailable, match="3 replicas: there are 1 brokers"):
        await log.append([record("a")])
    await log.close()
    async with opened(kafka_nodes.servers(), topic, allow_weak_acknowledgement=True) as log:
        await log.check()
        await log.append([record("a")])
    assert kafka_nodes.settings(topic)["min.insync.replicas"] == "1"


@nodes
@long
async def test_a_weak_topic_is_refused(kafka_nodes: kafka.Cluster) -> None:
    for config, named in WEAK:
        topic = kafka_nodes.make_topic(topic_name(), partitions=1, config=config)
        for create in (True, False):
            with pytest.raises(StorageIncompatible) as raised:
                await make_log(kafka_nodes.servers(), topic).open(create=create)
            assert named in str(raised.value)
            assert "allow_weak_acknowledgement" in str(raised.value)
    topic = kafka_nodes.make_topic(topic_name(), partitions=1, replicas=2)
    with pytest.raises(StorageIncompatible, match="2 replicas"):
        await make_log(kafka_nodes.servers(), topic).open(create=True)
    # It is the operator's choice.
    async with opened(kafka_nodes.servers(), topic, allow_weak_acknowledgement=True) as log:
        await log.append([record("a")])


@nodes
@long
async def test_weak_dead_letters_are_refused(kafka_nodes: kafka.Cluster) -> None:
    """They are acknowledged events."""
    topic = topic_name()
    kafka_nodes.make_topic(
        f"{topic}.dead", partitions=1, replicas=1, config={"min.insync.replicas": "1"}
    )
    with pytest.raises(StorageIncompatible, match=rf"{topic}\.dead has 1 replica"):
        await make_log(kafka_nodes.servers(), topic).open(create=True)


@nodes
@long
async def test_a_topic_that_becomes_weak_is_refused(
    kafka_nodes: kafka.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a minute. It is accepted again when the setting is."""
    monkeypatch.setattr("engage_plugins.kafka.log._LOOK", 0.1)
    monkeypatch.setattr("engage_plugins.kafka.log._RETRY", 0.1)
    topic = topic_name()

    async def change(name: str, value: str) -> None:
        await asyncio.to_thread(kafka_nodes.set, topic, name, value)
        await asyncio.sleep(1.5)

    async with opened(kafka_nodes.servers(), topic) as log:
        await log.append([record("a")])
        await change("min.insync.replicas", "1")
        for call in (log.append([record("b")]), log.append_dead([record("b")]), log.check()):
            with pytest.raises(StorageUnavailable, match=r"min\.insync\.replicas=1"):
                await call
        await change("min.insync.replicas", "2")
        await log.append([record("c")])
    assert [one.value() for one in kafka_nodes.records(topic)] == [b"a", b"c"]


@nodes
@long
async def test_a_record_that_a_topic_does_not_take_any_more_is_refused(
    kafka_nodes: kafka.Cluster,
) -> None:
    """The first time, the broker refuses it: 503. Then its size is known. Others are not harmed."""
    topic = topic_name()
    large = record("x" * 200_000)
    async with opened(kafka_nodes.servers(), topic) as log:
        assert (await log.append([large]))[0].status is Status.STORED
        await asyncio.to_thread(kafka_nodes.set, topic, "max.message.bytes", "100000")
        with pytest.raises(StorageUnavailable):
            await log.append([large])

        async def refused() -> None:
            (outcome,) = await log.append([large])
            assert outcome.status is Status.REFUSED
            assert "bytes" in (outcome.reason or "")

        await until(refused)
        # A batch is not larger than a record may be.
        outcomes = await log.append([record("y" * 50_000) for _ in range(5)])
        assert {outcome.status for outcome in outcomes} == {Status.STORED}


@nodes
@long
async def test_a_dead_letter_that_its_topic_does_not_take_is_refused(
    kafka_nodes: kafka.Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """The limit is that of the topic of dead letters, which may be lower. It is named."""
    topic = topic_name()
    dead = kafka_nodes.make_topic(
        f"{topic}.dead", partitions=1, config={"max.message.bytes": "100000", "retention.ms": "-1"}
    )
    large = record("x" * 200_000)
    async with opened(kafka_nodes.servers(), topic) as log:
        assert (await log.append([large]))[0].status is Status.STORED
        outcomes = await log.append_dead([record("a"), large, *[record("b" * 50_000)] * 4])
        assert [outcome.status for outcome in outcomes] == [
            *(Status.STORED, Status.REFUSED),
            *[Status.STORED] * 4,
        ]
        assert f"max.message.bytes of topic {dead}" in (outcomes[1].reason or "")
    assert f"{dead} has max.message.bytes=100000: larger dead letters are cut off" in caplog.text
    assert len(kafka_nodes.records(dead)) == 5


@nodes
@long
async def test_partitions_may_be_added(
    kafka_nodes: kafka.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    from confluent_kafka.admin import NewPartitions

    monkeypatch.setattr("engage_plugins.kafka.log._LOOK", 0.1)
    monkeypatch.setattr("engage_plugins.kafka.log._RETRY", 0.1)
    topic = kafka_nodes.make_topic(topic_name(), partitions=1)
    async with opened(kafka_nodes.servers(), topic) as log:
        reader = log.reader("g")
        await reader.open()
        await log.append([record(f"a{n}", f"{n}") for n in range(20)])
        kafka_nodes.admin.create_partitions([NewPartitions(topic, 4)])[topic].result()
        found: dict[str, int] = {}
        turn = 0
        end = time.monotonic() + 120
        while len(set(found.values())) < 4 and time.monotonic() < end:
            turn += 1
            await asyncio.sleep(0.2)
            await log.append([record(f"{turn}-{n}", f"{n}") for n in range(20)])
            batch = await reader.read(max_records=1000, max_bytes=1 << 20, wait=0.5)
            found |= {one.record.value.decode(): one.partition for one in batch.records}
        assert set(found.values()) == {0, 1, 2, 3}
        await reader.close()


@pytest.mark.parametrize("values", [{}, {"retention.ms": "-1"}])
def test_missing_settings_count_as_the_defaults_of_kafka(values: dict[str, Any]) -> None:
    named = [line.split(" has ")[1].split("=")[0] for line in weaknesses("t", values, replicas=3)]
    assert named == ["min.insync.replicas", "message.timestamp.type"]
