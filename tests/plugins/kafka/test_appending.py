# SPDX-License-Identifier: Apache-2.0
"""Batches, time limits, forks, and what another client finds in the log."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import orjson
import pytest
from aiokafka.conn import AIOKafkaConnection

from engage.api import Event, EventLog, LogReader, Outcome, Status, StorageUnavailable
from engage.api.log_records import record_of, unpack
from support import kafka
from support.kafka_log import make_log, opened, read_records, record, topic_name

WEAK = {"allow_weak_acknowledgement": True}
OK = Outcome(Status.STORED)


@contextlib.asynccontextmanager
async def _reading(servers: str) -> AsyncIterator[tuple[EventLog, LogReader, Any]]:
    """Open a log and a reader, and yield both, and aiokafka's part of the reader."""
    async with opened(servers, "events", **WEAK) as log:
        reader: Any = log.reader("g")
        await reader.open()
        yield log, reader, reader._member._consumer
        await reader.close()


@pytest.fixture
def servers() -> Iterator[str]:
    """Run brokers without Java."""
    with kafka.mock() as found:
        yield found


async def test_calls_of_one_moment_share_their_batches(servers: str) -> None:
    async with opened(servers, "events", **WEAK) as log:
        await log.check()
        before = log.gauges()
        calls = [log.append([record(f"{n}", f"{n}")]) for n in range(500)]
        assert await asyncio.gather(*calls) == [[OK]] * 500
        # The first call of a partition is sent at once, and the others that came meanwhile.
        sent = log.gauges()["sent_batches"] - before["sent_batches"]
        assert 4 <= sent <= 12


async def test_a_process_that_was_forked_must_open_the_log_itself(
    servers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The brokers would take its records for repeated ones, and acknowledge them."""
    async with opened(servers, "events", **WEAK) as log:
        assert await log.append([record("a")]) == [OK]
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: -1)
            for call in (log.append([record("b")]), log.append_dead([record("b")]), log.check()):
                with pytest.raises(StorageUnavailable, match="fork"):
                    await call
        assert await log.append([record("c")]) == [OK]
    found = [one.value() for one in kafka.read_all(servers, "events")]
    assert found == [b"a", b"c"]


async def test_a_call_that_is_not_acknowledged_in_time_fails() -> None:
    """Its records are not sent later, so a broker that is away for long costs no memory."""
    with kafka.mock(1) as servers:
        log = make_log(servers, "events", timeout=1, **WEAK)
        await log.open(create=True)
        assert await log.append([record("a")]) == [OK]
    # The brokers are gone now.
    for turn in range(3):
        calls = [log.append([record(f"{turn}-{n}")]) for n in range(100)]
        done = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(one, StorageUnavailable) for one in done)
    # Only what the last calls left, which the next call removes.
    assert log.gauges()["waiting_calls"] <= 100
    await log.close()


@pytest.mark.kafka
@pytest.mark.timeout(600, func_only=True)
async def test_another_client_finds_what_is_documented(kafka_nodes: kafka.Cluster) -> None:
    """Key, value, headers, partition, time and topic; see docs/log-kafka.md."""
    topic = topic_name()
    body = orjson.dumps({"type": "track", "event": "Signed Up", "userId": "ü1"})
    event = Event(
        workspace_id="main",
        origin="api",
        message_id="m1",
        type="track",
        user_id="ü1",
        anonymous_id=None,
        name="Signed Up",
        received_at=1_795_000_000_000,
        timestamp=1_794_999_999_000,
        body=body,
    )
    started = time.time() * 1000
    async with opened(kafka_nodes.servers(), topic) as log:
        await log.append([record_of(event)])
        await log.append_dead([record_of(event)])
    (found,) = kafka_nodes.records(topic)
    assert found.key() == "main:ü1".encode()
    assert found.value() == body
    assert found.partition() == zlib.crc32(found.key()) % 12
    kind, at = found.timestamp()
    assert kind == 2  # the time of the broker, not of the event
    assert abs(at - started) < 60_000
    headers = dict(found.headers())
    assert headers["engage"] == b"event/1"
    assert orjson.loads(headers["meta"]) == {
        "origin": "api",
        "receivedAt": 1_795_000_000_000,
        "timestamp": 1_794_999_999_000,
        "type": "track",
        "messageId": "m1",
        "workspaceId": "main",
        "userId": "ü1",
        "anonymousId": None,
        "name": "Signed Up",
    }
    (dead,) = kafka_nodes.records(f"{topic}.dead")
    assert (dead.key(), dead.value(), dead.headers()) == (found.key(), body, found.headers())


@pytest.mark.kafka
@pytest.mark.timeout(600, func_only=True)
async def test_what_another_client_writes_is_read(kafka_nodes: kafka.Cluster) -> None:
    """Records without a key, a value or headers, and two headers of one name, break nothing."""
    from confluent_kafka import Producer

    topic = kafka_nodes.make_topic(topic_name(), partitions=1)
    producer = Producer({"bootstrap.servers": kafka_nodes.servers(), "log_level": 0})
    producer.produce(topic, key=None, value=None)
    producer.produce(topic, key=b"k", value=b"v", headers=[("a", b"1"), ("a", b"2"), ("b", None)])
    assert producer.flush(20) == 0
    async with opened(kafka_nodes.servers(), topic) as log:
        reader = log.reader("g")
        await reader.open()
        found = await read_records(reader, 2)
        await reader.close()
    assert (found[0].key, found[0].value, dict(found[0].headers)) == (b"", b"", {})
    assert (found[1].key, found[1].value) == (b"k", b"v")
    assert dict(found[1].headers) == {"a": b"1", "b": b""}
    with pytest.raises(ValueError, match="kind"):
        unpack(found[0])


async def test_a_reader_is_closed_while_a_request_of_it_waits(
    servers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """aiokafka cancels the request, waits for it, and lets its ``CancelledError`` escape."""
    async with _reading(servers) as (_, reader, consumer):

        async def close() -> None:
            monkeypatch.undo()
            request = asyncio.create_task(asyncio.sleep(60))
            await asyncio.sleep(0)
            request.cancel()
            await request

        monkeypatch.setattr(consumer._fetcher, "close", close)
        await reader.close()
        assert not any(connection.connected() for connection in consumer._client._conns.values())


async def test_a_reader_goes_on_if_the_task_that_fetches_has_ended(servers: str) -> None:
    """aiokafka itself would wait for it without limit."""
    async with _reading(servers) as (log, reader, consumer):
        await log.append([record("a")])
        assert len(await read_records(reader, 1)) == 1
        consumer._fetcher.error_future.cancel()
        await log.append([record("b")])
        assert {one.value for one in await read_records(reader, 2)} == {
            b"a",
            b"b",
        }  # Nothing was committed.


async def test_a_connection_that_was_just_closed_ends_no_task(
    servers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvloop raises a plain ``RuntimeError`` then."""
    async with _reading(servers) as (log, reader, consumer):
        await log.append([record("a")])
        assert len(await read_records(reader, 1)) == 1
        task = consumer._fetcher.error_future
        broken: list[type] = []
        send = AIOKafkaConnection.send

        def closed(connection: Any, request: Any, **options: Any) -> Any:
            if connection in consumer._client._conns.values() and len(broken) < 3:
                broken.append(type(request))
                raise RuntimeError("the handler is closed")
            return send(connection, request, **options)

        monkeypatch.setattr(AIOKafkaConnection, "send", closed)
        await log.append([record("b")])
        assert len(await read_records(reader, 1)) == 1
        assert len(broken) == 3
        assert not task.done()
