# SPDX-License-Identifier: Apache-2.0
"""No request with a write key holds the event loop for more than 150 ms, whatever its body.

The test measures the processor time that the loop's thread uses between two turns of a task that
does nothing else: unlike the wall clock, it does not depend on what else the machine does.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import gzip
import zlib
from collections.abc import Callable, Iterator

import pytest

from engage.config import DEFAULT_LIMITS
from engage.errors import ApiError
from engage.pipeline.admission import LARGE_BODY
from engage.pipeline.decode import Encoding
from engage.server.worker import GC_THRESHOLD
from support.loop_time import check_time, longest_hold
from support.pipeline import make_core

#: Seconds of processor time that one turn of the loop may take.
TURN = 0.150

MIB = 2**20
SIZE = DEFAULT_LIMITS.decompressed_bytes - 200
VALUES = DEFAULT_LIMITS.json_values - 3000


def batch(item: bytes, count: int) -> bytes:
    """Return a batch of equal items, within the largest size."""
    count = min(count, SIZE // (len(item) + 1))
    return b'{"batch":[' + b",".join([item] * count) + b"]}"


def track(properties: bytes) -> bytes:
    return b'{"type":"track","userId":"u","event":"e","properties":' + properties + b"}"


def one(value: bytes) -> bytes:
    """Return a batch with one track event that has this value."""
    return b'{"batch":[' + track(b'{"a":' + value + b"}") + b"]}"


def keys(count: int, size: int) -> bytes:
    """Return an object of many different keys."""
    return b"{" + b",".join(b'"%0*d":1' % (size, number) for number in range(count)) + b"}"


BODIES: dict[str, Callable[[], bytes]] = {
    "the most events": lambda: batch(track(b'{"a":"' + b"x" * 300 + b'"}'), 2500),
    "large events": lambda: batch(track(b'{"a":"' + b"x" * 60_000 + b'"}'), 340),
    "identifies of many traits": lambda: batch(
        b'{"type":"identify","userId":"u","traits":' + keys(500, 10) + b"}", 450
    ),
    "one long string": lambda: one(b'"' + b"x" * (SIZE - 200) + b'"'),
    "escapes": lambda: one(b'"' + b"\\u00e9" * ((SIZE - 200) // 6) + b'"'),
    "numbers": lambda: one(b"[" + b"1," * (VALUES - 10) + b"1]"),
    "long numbers": lambda: one(b"[" + b",".join([b"0." + b"1" * 70] * (VALUES - 10)) + b"]"),
    "long keys": lambda: one(keys(VALUES - 10, 65)),
    "digits": lambda: one(b"[" + b",".join([b'"' + b"1" * 70 + b'"'] * (VALUES - 10)) + b"]"),
    "integers beside a long one": lambda: one(b"[1234567890123456789" + b",7" * VALUES + b"]"),
    "blanks beside a long integer": lambda: one(
        b"[1234567890123456789" + b" " * (SIZE - 200) + b"]"
    ),
    "escapes beside a long integer": lambda: one(
        b'["' + b'\\"' * ((SIZE - 200) // 2) + b'",1234567890123456789]'
    ),
    "strings beside a long integer": lambda: one(b"[1234567890123456789" + b',"a"' * VALUES + b"]"),
    "lists in lists": lambda: one(b"[" + b"[[]]," * (VALUES // 3 - 10) + b"1]"),
    "blanks": lambda: b" " * (SIZE - 2) + b"{}",
    "not JSON": lambda: b"x" * SIZE,
    "not UTF-8": lambda: b'"' + b"x" * (SIZE - 10) + b'\xff"',
    "items that are no events": lambda: batch(b"5", VALUES),
    "invalid items": lambda: batch(b'{"type":"track","userId":1.5,"event":[],"context":5}', 2500),
    "items of misspelt members": lambda: batch(
        b'{"type":"track",' + b",".join(b'"evntdIus%02d":1' % n for n in range(95)) + b"}", 2500
    ),
    "long invalid values": lambda: batch(
        b'{"type":"track","userId":"' + b" " * 7000 + b'","event":"e"}', 2500
    ),
    "invalid times": lambda: batch(
        b'{"type":"track","userId":"u","event":"e","timestamp":"' + b"2" * 7000 + b'"}', 2500
    ),
    "numbers that cannot be stored": lambda: one(b"[" + b"1e400," * (VALUES - 10) + b"1]"),
    "integers that are doubles": lambda: one(
        b"[" + b"18446744073709552000," * (VALUES - 10) + b"1]"
    ),
    "half an emoji in every text": lambda: one(b"[" + b'"\\ud83d",' * (VALUES - 10) + b"1]"),
    "half an emoji in one": lambda: one(b'["\\ud83d","' + b"x" * (SIZE - 300) + b'"]'),
    "faulty items": lambda: batch(track(b'{"a":1e400,"b":"' + b"x" * 8000 + b'"}'), 2500),
    "many unknown fields": lambda: batch(
        b'{"type":"track","userId":"u","event":"e",' + keys(95, 10)[1:], 2500
    ),
}


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Set the garbage collector as a worker does."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


#: Four blocks of a deflate stream without any output, each with codes of its own.
EMPTY_BLOCKS = bytes.fromhex(
    "04c081000000000090ff6b100007020000000040feaf41001c080000000000f9bf060170200000000000e4ff1a"
)


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.timing
async def test_a_batch_lets_the_loop_turn(kind: str, encoding: Encoding) -> None:
    body = BODIES[kind]()
    assert len(body) <= DEFAULT_LIMITS.decompressed_bytes
    if encoding == "gzip":
        body = gzip.compress(body, 1, mtime=0)
    await check_turns(body, encoding, TURN)


@pytest.mark.timing
async def test_a_compressed_body_without_output_lets_the_loop_turn() -> None:
    """Decompressing is bounded by what is read, too, not only by what comes out."""
    most = DEFAULT_LIMITS.body_bytes - 10
    body = EMPTY_BLOCKS * (most // len(EMPTY_BLOCKS)) + b"\x03\x00"
    assert zlib.decompress(body, -zlib.MAX_WBITS) == b""
    await check_turns(body, "deflate", TURN / 3)


@pytest.mark.timing
async def test_a_large_event_that_is_refused_lets_the_loop_turn() -> None:
    """Its dead letter is made in another turn than the event."""
    event = track(b'{"a":"' + b'\\"' * ((SIZE - 200) // 2) + b'","b":1234567890123456789}')
    await check_turns(event, "identity", TURN, "track")


async def check_turns(
    body: bytes, encoding: Encoding, limit: float, operation: str = "batch"
) -> None:
    """Check that no turn of the loop takes ``limit`` seconds while a body is handled."""
    core = make_core()
    # A store in memory would make all writes of a body in one turn.
    core.store.before = lambda _events: asyncio.sleep(0)

    async def handle() -> None:
        with contextlib.suppress(ApiError):
            if operation == "batch":
                await core.pipeline.batch(body, encoding, core.principal)
            else:
                await core.pipeline.event(operation, body, encoding, core.principal)

    await check_time(lambda: longest_hold(handle()), limit)


@pytest.mark.timing
async def test_many_small_batches_that_take_long_let_the_loop_turn() -> None:
    """100 batches that arrive at once, each with more invalid items than a turn has time for."""
    item = b'{"type":"track","userId":1.5,"event":5,"context":5,"properties":5}'
    body = batch(item, 900)
    assert len(body) < LARGE_BODY

    async def hold() -> float:
        core = make_core()
        requests = [
            asyncio.create_task(core.pipeline.batch(body, "identity", core.principal))
            for _ in range(100)
        ]
        longest = await longest_hold(asyncio.sleep(0.3))
        # Another client's batch does not wait for them.
        valid = batch(track(b'{"a":"' + b"x" * 300 + b'"}'), 100)
        principal = dataclasses.replace(
            core.principal,
            write_key=dataclasses.replace(core.principal.write_key, id="another", key="another"),
        )
        await core.pipeline.batch(valid, "identity", principal)
        assert not all(task.done() for task in requests)
        longest = max(longest, await longest_hold(asyncio.wait(requests, timeout=1.7)))
        for task in requests:
            task.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        return longest

    await check_time(hold, TURN)
