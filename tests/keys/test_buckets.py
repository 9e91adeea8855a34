# SPDX-License-Identifier: Apache-2.0
"""Token buckets that several processes share."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from engage.keys import buckets
from engage.keys.buckets import Buckets, make_buckets_file, open_buckets

#: Takes one out of a bucket whenever it can, and prints how often.
TAKER = """
import sys, time
from engage.keys.buckets import open_buckets
bucket = open_buckets(int(sys.argv[1]))[0].bucket("key", (float(sys.argv[2]), 1))
ends, taken = time.monotonic() + float(sys.argv[3]), 0
while time.monotonic() < ends:
    if bucket.take(1):
        taken += 1
    else:
        time.sleep(0.0002)
print(taken)
"""


class Time:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr(buckets, "monotonic", made)
    return made


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = make_buckets_file()
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> tuple[Buckets, Buckets]:
    """Small tables of keys and of addresses."""
    monkeypatch.setattr(buckets, "SLOTS", 1024)
    monkeypatch.setattr(buckets, "TABLE_BYTES", 24 * 1024)
    return open_buckets()


@pytest.fixture
def table(tables: tuple[Buckets, Buckets]) -> Buckets:
    return tables[0]


def test_a_bucket_is_empty_after_what_it_holds_and_fills_with_time(
    clock: Time, table: Buckets
) -> None:
    bucket = table.bucket("key", (2, 3))
    for _ in range(3):
        assert bucket.waits()[0] < 0
        bucket.take(1)
    assert bucket.waits()[0] == 0
    clock.now += 0.25
    assert bucket.waits()[0] == -0.25
    bucket.take(1)
    assert bucket.waits()[0] == 0.25
    clock.now += 1000
    for _ in range(3):
        bucket.take(1)
    assert bucket.waits()[0] == 0


def test_a_bucket_can_be_overdrawn_and_then_waits_longer(clock: Time, table: Buckets) -> None:
    bucket = table.bucket("key", (10, 1))
    bucket.take(1000)
    assert bucket.waits()[0] == pytest.approx(99.9)


def test_nothing_is_taken_of_one_kind_while_the_other_is_empty(clock: Time, table: Buckets) -> None:
    bucket = table.bucket("key", (1, 10), (1, 10))
    assert bucket.take(1, 30)
    for _ in range(5):
        assert not bucket.take(5, 0)
    assert bucket.waits() == (-9, 20)
    clock.now += 21
    assert bucket.take(1, 0)
    unlimited = table.bucket("other", (1, 1))
    assert unlimited.take(0, 10**12)
    assert unlimited.take(0, 10**12)


def test_steps_of_the_system_clock_change_nothing(
    monkeypatch: pytest.MonkeyPatch, table: Buckets
) -> None:
    bucket = table.bucket("key", (1, 1))
    bucket.take(1)
    for step in (-86400, 86400):
        now = time.time() + step
        monkeypatch.setattr(time, "time", lambda now=now: now)
        assert 0 < bucket.waits()[0] + 0.9 <= 0.9


def test_processes_share_the_buckets_and_keys_are_apart_from_addresses(
    clock: Time, memory: int
) -> None:
    ours, addresses = open_buckets(memory)
    theirs, _ = open_buckets(memory)
    ours.bucket("key", (1, 1)).take(5)
    assert theirs.bucket("key", (1, 1)).waits()[0] == 4
    assert theirs.bucket("other", (1, 1)).waits()[0] < 0
    assert addresses.bucket("key", (1, 1)).waits()[0] < 0


def test_a_flood_of_names_takes_no_more_than_the_table(
    clock: Time, tables: tuple[Buckets, Buckets]
) -> None:
    keys, addresses = tables
    key = keys.bucket("key", (1, 1))
    key.take(100)
    for number in range(5_000):
        clock.now += 0.06
        addresses.bucket(f"2001:db8:{number:x}::/64", (20, 20)).take(1)
    assert key.waits()[0] == pytest.approx(99 - 300)
    # The latest are known, and the oldest were forgotten.
    assert -1 < addresses.bucket("2001:db8:1387::/64", (20, 20)).waits()[0] + 1 < 0.1
    assert addresses.bucket("2001:db8:0::/64", (20, 20)).waits()[0] < -1


def test_a_bucket_that_lost_its_place_is_full_again(clock: Time, table: Buckets) -> None:
    bucket = table.bucket("victim", (1, 1))
    bucket.take(10)
    for number in range(20 * buckets.SLOTS):
        if bucket.waits()[0] < 0:
            break
        table.bucket(f"other-{number}", (1, 1)).take(1_000_000)
    assert bucket.waits()[0] == -clock.now - 1
    bucket.take(2)
    assert bucket.waits()[0] == 1


def test_a_bucket_of_the_second_kind_alone_keeps_its_place_as_long(
    clock: Time, table: Buckets
) -> None:
    """A key can have a limit of bytes only."""
    bucket = table.bucket("key", (0, 0), (1, 1))
    bucket.take(1, 1_000_000)
    for number in range(5_000):
        clock.now += 0.04
        table.bucket(f"other-{number}", (1, 1)).take(1)
    assert bucket.waits()[1] == pytest.approx(1_000_000 - 1 - 200)


@pytest.mark.timing
def test_four_processes_take_together_what_flows_in(memory: int) -> None:
    """Without a lock, they lose next to nothing of what the others take."""
    rate, seconds = 500, 4
    takers = [
        subprocess.Popen(
            [sys.executable, "-c", TAKER, *map(str, (memory, rate, seconds))],
            pass_fds=(memory,),
            stdout=subprocess.PIPE,
        )
        for _ in range(4)
    ]
    taken = [int(taker.communicate()[0]) for taker in takers]
    # They do not begin and end at the same moment; the bucket knows for how long it was open.
    assert 0.9 * rate * seconds <= sum(taken) <= 1.1 * rate * (seconds + 3)
    bucket = open_buckets(memory)[0].bucket("key", (rate, 1))
    assert bucket.waits()[0] < 0
