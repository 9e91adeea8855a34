# SPDX-License-Identifier: Apache-2.0
"""Nodes that are killed or stopped, connections that are cut: no acknowledged record is lost."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import zlib
from pathlib import Path
from typing import Any, cast

import pytest

from engage.api import StorageUnavailable
from support import kafka
from support.exactly_once import check_exactly_once
from support.kafka_log import opened, record, start_reader, topic_name, until, writing

pytestmark = [pytest.mark.kafka, pytest.mark.long, pytest.mark.timeout(600, func_only=True)]


async def test_the_leader_is_killed(kafka_nodes: kafka.Cluster) -> None:
    """No call fails, because the nodes notice it within three seconds."""
    topic = topic_name()
    async with opened(kafka_nodes.servers(), topic) as log, writing(log) as noted:
        await noted.more(500)
        await asyncio.to_thread(kafka_nodes.kill, kafka_nodes.leaders(topic)[0])
        await noted.more(2000)
        await until(log.check)
    assert noted.failures == 0
    print(f"pause after the leader was killed: {noted.slowest:.1f} s")
    noted.judge(kafka_nodes, topic)


async def test_two_nodes_are_killed_and_started_again(kafka_nodes: kafka.Cluster) -> None:
    """Meanwhile every call fails; afterwards the same log goes on."""
    topic = topic_name()
    async with opened(kafka_nodes.servers(), topic, seconds=3) as log, writing(log) as noted:
        await noted.more(500)
        await asyncio.to_thread(kafka_nodes.kill, 1, 2)
        await asyncio.sleep(1)
        with pytest.raises(StorageUnavailable):
            await log.append([record(name, name) for name in map(str, range(50))])
        noted.sent.update(map(str, range(50)))
        before = len(noted.acknowledged)
        with pytest.raises(StorageUnavailable):
            await log.check()
        assert len(noted.acknowledged) == before
        for node in (1, 2):
            kafka_nodes.start(node)
        await until(log.check)
        await noted.more(500)
    assert noted.failures
    noted.judge(kafka_nodes, topic)


async def test_a_node_is_stopped(kafka_nodes: kafka.Cluster) -> None:
    """It keeps its connections and does not answer. Other partitions do not wait for it."""
    topic = topic_name()
    async with opened(kafka_nodes.servers(), topic) as log:
        async with writing(log) as noted:
            await noted.more(500)
            leaders = kafka_nodes.leaders(topic)
            stopped = leaders[0]
            keys = {zlib.crc32(f"main:{key}".encode()) % 12: key for key in map(str, range(99))}
            kafka_nodes.pause(stopped)
            await asyncio.sleep(0.2)
            # Replicas on the stopped node are in sync until the others notice: wait for that.
            other = next(number for number in leaders if leaders[number] != stopped)
            noted.sent.add("other")
            await log.append([record("other", keys[other])])
            await noted.more(1000)
            kafka_nodes.resume(stopped)
            await noted.more(500)
        assert noted.failures == 0
        print(f"pause after a node was stopped: {noted.slowest:.1f} s")
        await until(log.check)
    noted.judge(kafka_nodes, topic)


async def test_a_partition_without_a_leader_costs_only_its_own_requests(
    kafka_nodes: kafka.Cluster,
) -> None:
    """The only replica of one partition is away for the time of two calls."""
    topic = kafka_nodes.make_topic(
        topic_name(), partitions=3, replicas=1, config={"min.insync.replicas": "1"}
    )
    keys = {zlib.crc32(f"main:{key}".encode()) % 3: key for key in map(str, range(50))}
    servers = kafka_nodes.servers()
    async with opened(servers, topic, seconds=8, allow_weak_acknowledgement=True) as log:
        for key in keys.values():
            await log.append([record(f"before {key}", key)])
        leaders = kafka_nodes.leaders(topic)
        lost = [number for number, leader in leaders.items() if leader == leaders[0]]
        assert len(lost) < 3
        await asyncio.to_thread(kafka_nodes.kill, leaders[0])
        for good in range(2):
            calls = [log.append([record(f"{number} {good}", key)]) for number, key in keys.items()]
            done = await asyncio.gather(*calls, return_exceptions=True)
            for number, one in zip(keys, done, strict=True):
                assert isinstance(one, StorageUnavailable) == (number in lost), (number, one)
        # By now the other nodes have noticed it.
        with pytest.raises(StorageUnavailable, match="partition"):
            await log.check()
        kafka_nodes.start(leaders[0])
        await until(log.check)
        for key in keys.values():
            await log.append([record(f"after {key}", key)])


async def test_connections_are_cut(kafka_nodes: kafka.Cluster) -> None:
    """Answers are lost, too: what is sent again is in the log once."""
    topic = topic_name()
    servers = kafka_nodes.servers("advertised")
    with kafka_nodes.proxies() as proxies:
        async with opened(servers, topic) as log, writing(log) as noted:
            chance = random.Random(14)
            for _ in range(15):
                await noted.more(100)
                proxies[chance.choice(kafka.NODES)].cut()
            proxies[1].hold()
            await asyncio.sleep(1)
            proxies[1].flow()
            proxies[2].down()
            await asyncio.sleep(1)
            proxies[2].up()
            await noted.more(500)
        assert noted.failures == 0
        noted.judge(kafka_nodes, topic)


async def test_readers_are_killed(kafka_nodes: kafka.Cluster, tmp_path: Path) -> None:
    """So is the node that coordinates their group. Every record is read, none is invented."""
    topic = topic_name()
    file = tmp_path / "read"
    job = {"servers": kafka_nodes.servers(), "topic": topic, "group": "g", "file": str(file)}
    async with opened(kafka_nodes.servers(), topic) as log:
        readers = [await start_reader(job) for _ in range(3)]
        try:
            async with writing(log, writers=4) as noted:
                for turn in range(4):
                    await noted.more(800)
                    await asyncio.sleep(1)
                    readers[turn % 3].kill()
                    await readers[turn % 3].wait()
                    readers[turn % 3] = await start_reader(job)
                    if turn == 1:
                        await asyncio.to_thread(kafka_nodes.kill, 2)
                        kafka_nodes.start(2)

            async def nothing_is_left() -> None:
                if (await log.backlog("g")).records:
                    raise StorageUnavailable("not yet")

            await until(nothing_is_left, seconds=60)
        finally:
            for reader in readers:
                with contextlib.suppress(ProcessLookupError):
                    reader.kill()
                await reader.wait()
        # What was read and not committed is read again.
        found = file.read_text().split()
        check_exactly_once(found, noted.acknowledged, noted.sent, once=False)


async def test_the_coordinator_of_a_group_is_killed(kafka_nodes: kafka.Cluster) -> None:
    """A reader that reads meanwhile goes on with another one."""
    topic = topic_name()
    async with opened(kafka_nodes.servers(), topic) as log:
        reader = log.reader("g")
        await reader.open()
        found: set[str] = set()

        async def read() -> None:
            with contextlib.suppress(StorageUnavailable):
                batch = await reader.read(max_records=1000, max_bytes=1 << 20, wait=0.5)
                found.update(one.record.value.decode() for one in batch.records)
                await reader.commit({one.partition: one.offset + 1 for one in batch.records})

        end = time.monotonic() + 240
        async with writing(log, writers=2) as noted:
            while len(found) < 500:
                await read()
            groups = kafka_nodes.admin.describe_consumer_groups(["g"])
            coordinator = groups["g"].result().coordinator.id
            await asyncio.to_thread(kafka_nodes.kill, coordinator)
            await noted.more(1000)
            while len(found) < 2000:
                await read()
                assert time.monotonic() < end
        while not noted.acknowledged <= found:
            await read()
            assert time.monotonic() < end
        await reader.close()
        assert noted.failures == 0
        assert found <= noted.sent
        assert (await log.backlog("g")).records == 0


def test_a_commit_after_the_group_was_rebalanced_is_one_line(
    kafka_nodes: kafka.Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """The nodes do not answer for longer than the session of the reader."""
    topic = topic_name()

    async def run() -> None:
        servers = kafka_nodes.servers("advertised")
        with kafka_nodes.proxies() as proxies:
            async with opened(servers, topic, seconds=60) as log:
                reader = log.reader("g")
                await reader.open()
                await log.append([record(name, name) for name in map(str, range(50))])
                offsets: dict[int, int] = {}
                while sum(offsets.values()) < 50:
                    batch = await reader.read(max_records=100, max_bytes=1 << 20, wait=1)
                    offsets |= {one.partition: one.offset + 1 for one in batch.records}
                for proxy in proxies.values():
                    proxy.hold()
                commit = asyncio.create_task(reader.commit(offsets))
                await asyncio.sleep(8)
                for proxy in proxies.values():
                    proxy.flow()
                await commit
                found: set[str] = set()
                async with asyncio.timeout(120):
                    while len(found) < 50:
                        batch = await reader.read(max_records=100, max_bytes=1 << 20, wait=1)
                        found |= {one.record.value.decode() for one in batch.records}
                await reader.close()

    asyncio.run(run())
    assert not any(line.exc_info for line in caplog.records)
    (line,) = [one for one in caplog.records if "commit" in one.getMessage().lower()]
    assert "rebalanced during a commit" in line.getMessage()


@pytest.mark.parametrize("fault", ["kill", "pause"])
def test_what_every_node_knows_is_asked_of_another_one(
    kafka_nodes: kafka.Cluster, fault: str
) -> None:
    """The client goes on asking a node that was killed, too, until it has noticed that."""
    topic = topic_name()

    async def run() -> None:
        async with opened(kafka_nodes.servers(), topic) as log:
            cluster = cast(Any, log)._cluster
            client = cluster._admin._client
            asked = []
            send = client.send

            async def noting(node: int, request: Any) -> Any:
                asked.append(node)
                return await send(node, request)

            client.send = noting
            await asyncio.to_thread(getattr(kafka_nodes, fault), 1)
            for _ in range(50):
                await cluster.await_partitions(topic)
            # A request to the stopped node takes 2.4 s.
            assert asked.count(1) < 4
            assert len(asked) >= 50

    try:
        asyncio.run(run())
    finally:
        if fault == "pause":
            kafka_nodes.resume(1)


async def test_a_topic_that_was_made_again_is_read_from_its_beginning(
    kafka_nodes: kafka.Cluster,
) -> None:
    """The offset of the group is after the end then: that is reported, and nothing is skipped."""
    topic = topic_name()
    async with opened(kafka_nodes.servers(), topic) as log:
        await log.append([record(f"old{number}") for number in range(30)])
        reader = log.reader("g")
        await reader.open()
        offsets: dict[int, int] = {}
        while sum(offsets.values()) < 30:
            batch = await reader.read(max_records=100, max_bytes=1 << 20, wait=1)
            offsets |= {one.partition: one.offset + 1 for one in batch.records}
        await reader.commit(offsets)
        await reader.close()
    kafka_nodes.admin.delete_topics([topic], operation_timeout=60)[topic].result()
    await asyncio.sleep(1)
    async with opened(kafka_nodes.servers(), topic) as log:
        await until(log.check)
        await log.append([record(f"new{number}") for number in range(5)])
        reader = log.reader("g")
        await reader.open()
        found: list[str] = []
        gaps: dict[int, tuple[int, int]] = {}
        end = time.monotonic() + 60
        while len(found) < 5 and time.monotonic() < end:
            batch = await reader.read(max_records=100, max_bytes=1 << 20, wait=1)
            found += [one.record.value.decode() for one in batch.records]
            gaps |= batch.gaps
        await reader.close()
    assert found == [f"new{number}" for number in range(5)]
    # Kafka forgets the offsets of a deleted topic, but not at once.
    assert gaps in ({}, dict.fromkeys(offsets, (30, 0)))
