# SPDX-License-Identifier: Apache-2.0
"""Whether a key may send something now: its rules, its rates, and quotas; refusals of addresses."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from engage.api import DAY_MS, Count, StorageError, StorageUnavailable
from engage.config import Config, Limits, Quota, Rate, Workspace, WriteKey
from engage.errors import ApiError, key_refused
from engage.keys import limits as module
from engage.keys.auth import Principal
from engage.keys.effective import Key, effective_keys
from engage.keys.limits import (
    Bucket,
    Buckets,
    Guard,
    Guards,
    Quotas,
    Rules,
    make_buckets_file,
    open_buckets,
    used_up,
)
from engage.monitoring.history import History
from engage.monitoring.metrics import Metrics
from support.each import each
from support.memory_store import MemoryStore

SHOP = "https://shop.example.com"
#: A public address.
ADDRESS = "93.184.216.34"

#: Takes one out of a bucket whenever it can, and prints how often.
TAKER = """
import sys, time
from engage.keys.limits import Bucket, open_buckets
bucket = Bucket(open_buckets(int(sys.argv[1]))[0], "key", (float(sys.argv[2]), 1))
ends, taken = time.monotonic() + float(sys.argv[3]), 0
while time.monotonic() < ends:
    if bucket.take(1):
        taken += 1
    else:
        time.sleep(0.0002)
print(taken)
"""


# -------------------------------------------------------------------------------------------- rules
def rules(**options: object) -> Rules | None:
    key = WriteKey(id="k", key="key-1", **options)  # type: ignore[arg-type]
    return Rules.of(Workspace(id="acme", name="Acme", write_keys=(key,)), key)


def test_most_keys_have_no_rules() -> None:
    """So that their requests cost nothing."""
    assert rules() is None
    key = WriteKey(id="website", key="key-1")
    assert Principal(Workspace(id="acme", name="Acme", write_keys=(key,)), key).rules is None


@each(
    "origin, allowed",
    [
        *((SHOP, True), ("HTTPS://SHOP.example.com", True)),
        *(("https://admin.example.com:8443", True), ("https://admin.example.com", False)),
        *((f"{SHOP}:443", False), ("http://shop.example.com", False)),
        *(("https://evil.shop.example.com", False), ("https://shop.example.com.evil.com", False)),
        *((f"{SHOP}/", False), (f"{SHOP},{SHOP}", False), ("*", False), ("null", False)),
        *(("", False), (None, False)),
    ],
)
def test_only_the_exact_origins_may_use_a_key(origin: str | None, allowed: bool) -> None:
    own = rules(origins=(SHOP, "https://Admin.example.com:8443"))
    assert own is not None
    if allowed:
        own.check_request(origin)
        return
    with pytest.raises(ApiError) as caught:
        own.check_request(origin)
    assert (caught.value.status, caught.value.code) == (403, "origin_not_allowed")
    # RudderStack's 1.x SDKs stop only if they find these words.
    assert "invalid write key" in caught.value.message
    assert (origin or "no Origin") in caught.value.message


# ------------------------------------------------------------------------------------ rates of keys
@pytest.fixture
def _hardly_any_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    microseconds = itertools.count(10**9)
    monkeypatch.setattr(module, "monotonic", lambda: next(microseconds) / 10**6)


#: For tests of what flows in slowly, on a machine that may be slow too.
at_once = pytest.mark.usefixtures("_hardly_any_time_passes")


def guard_of(own: dict[str, float] | None = None, **rate: Any) -> Guard | None:
    limits = Limits(rate=Rate(**rate))
    return Guards(limits).of("acme", WriteKey(id="ios", key="k", rate=own or {}))


def events_until_refused(guard: Guard, size: int = 1) -> tuple[int, ApiError]:
    for count in range(10_000):
        try:
            guard.take(1, size)
        except ApiError as error:
            return count, error
    raise AssertionError("it was never refused")


def test_keys_have_no_limit_by_default() -> None:
    assert guard_of() is None
    assert guard_of({"events_per_second": 0}, events_per_second=5) is None
    assert guard_of({"burst": 5}) is None


@at_once
@each(
    "own, rate, passes, words",
    [
        ({}, {"events_per_second": 0.5, "burst": 7}, 7, "0.5 events a second (limits.rate.events"),
        ({}, {"events_per_second": 0.01}, 0, "0.01 events a second"),
        ({}, {"events_per_second": 30}, 30, "30 events a second"),
        ({"events_per_second": 20}, {"events_per_second": 1, "burst": 500}, 20, "(rate.events_per"),
        ({"burst": 9}, {"events_per_second": 0.1}, 9, "(limits.rate.events_per_second)"),
        ({"bytes_per_second": 5}, {}, 5, "5 bytes a second (rate.bytes_per_second of the key)"),
        ({}, {"bytes_per_second": 5}, 5, "5 bytes a second (limits.rate.bytes_per_second)"),
        ({"bytes_per_second": 3}, {"events_per_second": 0.1, "burst": 2}, 2, "0.1 events"),
    ],
)
def test_a_key_sends_its_burst_and_then_waits(
    own: dict[str, float], rate: dict[str, float], passes: int, words: str
) -> None:
    guard = guard_of(own, **rate)
    assert guard is not None
    count, error = events_until_refused(guard)
    # One more than the burst: a request passes while the bucket is not empty.
    assert count == passes + 1
    assert (error.status, error.code) == (429, "rate_limited")
    assert words in error.message
    assert error.headers["Retry-After"].isdecimal()
    with pytest.raises(ApiError):
        guard.check()


@at_once
def test_a_batch_that_is_larger_than_the_burst_passes_and_is_paid_for() -> None:
    guard = guard_of(events_per_second=10, burst=10)
    assert guard is not None
    guard.take(1000, 1)
    with pytest.raises(ApiError) as caught:
        guard.check()
    assert caught.value.retry_after in (98, 99)
    assert f"again in {caught.value.retry_after} s" in caught.value.message


@at_once
def test_the_time_to_wait_is_in_whole_seconds_and_never_0() -> None:
    guard = guard_of(events_per_second=1000, burst=1)
    assert guard is not None
    guard.take(900, 1)
    with pytest.raises(ApiError) as caught:
        guard.check()
    assert caught.value.headers["Retry-After"] == "1"


@at_once
def test_keys_of_two_workspaces_with_one_id_are_apart() -> None:
    guards = Guards(Limits(rate=Rate(events_per_second=0.001)))
    key = WriteKey(id="ios", key="k")
    one, other, again = (guards.of(name, key) for name in ("acme", "other", "acme"))
    assert one is not None
    assert other is not None
    assert again is not None
    one.take(5, 0)
    other.check()
    with pytest.raises(ApiError):
        again.check()


# ---------------------------------------------------------------------------- refusals of addresses
def answers(guards: Guards, address: str, count: int) -> list[int]:
    error = key_refused("it is unknown")
    return [guards.answer(error, address).status for _ in range(count)]


@at_once
def test_an_address_gets_as_many_refusals_as_the_config_says_then_429() -> None:
    guards = Guards(Limits(rate=Rate(unauthenticated_per_second=0.5)))
    assert answers(guards, ADDRESS, 3) == [401, 401, 429]
    assert guards.is_over(ADDRESS)
    error = guards.answer(key_refused("x"), ADDRESS)
    assert error.code == "rate_limited"
    assert error.retry_after in (2, 3)
    assert "WWW-Authenticate" not in error.headers
    assert answers(guards, "93.184.216.35", 1) == [401]


@at_once
def test_the_default_is_20_a_second() -> None:
    found = answers(Guards(Limits()), ADDRESS, 200)
    assert found == [401] * 21 + [429] * 179, "the bucket is not empty after a microsecond"


@at_once
@each(
    "one, other, same",
    [
        ("93.184.216.34", "::ffff:93.184.216.34", True),
        ("2606:4700::1", "2606:4700::ffff:1:2:3", True),
        ("2606:4700::1", "2606:4700:0:1::1", False),
        ("93.184.216.34", "93.184.216.35", False),
    ],
)
def test_which_addresses_are_one(one: str, other: str, same: bool) -> None:
    guards = Guards(Limits(rate=Rate(unauthenticated_per_second=0.001)))
    assert answers(guards, one, 3) == [401, 401, 429]
    assert answers(guards, other, 1) == [429 if same else 401]


ADDRESSES = """
    127.0.0.1 ::1 10.1.2.3 192.168.0.1 fd00::1 fe80::1%eth0 169.254.1.1 ::ffff:10.0.0.1 nonsense
"""


@each("address", ["", *ADDRESSES.split()])
def test_addresses_that_are_not_public_have_no_limit(address: str) -> None:
    guards = Guards(Limits(rate=Rate(unauthenticated_per_second=0.001)))
    assert set(answers(guards, address, 50)) == {401}
    assert not guards.is_over(address)


def test_the_limit_can_be_off() -> None:
    guards = Guards(Limits(rate=Rate(unauthenticated_per_second=0)))
    assert set(answers(guards, ADDRESS, 100)) == {401}


# ------------------------------------------------------------------------------------------ buckets
class Time:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr(module, "monotonic", made)
    return made


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = make_buckets_file()
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> tuple[Buckets, Buckets]:
    """Small tables of keys and of addresses."""
    monkeypatch.setattr(module, "SLOTS", 1024)
    monkeypatch.setattr(module, "TABLE_BYTES", 24 * 1024)
    return open_buckets()


@pytest.fixture
def table(tables: tuple[Buckets, Buckets]) -> Buckets:
    return tables[0]


def test_a_bucket_is_empty_after_what_it_holds_and_fills_with_time(
    clock: Time, table: Buckets
) -> None:
    bucket = Bucket(table, "key", (2, 3))
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
    bucket = Bucket(table, "key", (10, 1))
    bucket.take(1000)
    assert bucket.waits()[0] == pytest.approx(99.9)


def test_nothing_is_taken_of_one_kind_while_the_other_is_empty(clock: Time, table: Buckets) -> None:
    bucket = Bucket(table, "key", (1, 10), (1, 10))
    assert bucket.take(1, 30)
    for _ in range(5):
        assert not bucket.take(5, 0)
    assert bucket.waits() == (-9, 20)
    clock.now += 21
    assert bucket.take(1, 0)
    unlimited = Bucket(table, "other", (1, 1))
    assert unlimited.take(0, 10**12)
    assert unlimited.take(0, 10**12)


def test_steps_of_the_system_clock_change_nothing(
    monkeypatch: pytest.MonkeyPatch, table: Buckets
) -> None:
    bucket = Bucket(table, "key", (1, 1))
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
    Bucket(ours, "key", (1, 1)).take(5)
    assert Bucket(theirs, "key", (1, 1)).waits()[0] == 4
    assert Bucket(theirs, "other", (1, 1)).waits()[0] < 0
    assert Bucket(addresses, "key", (1, 1)).waits()[0] < 0


def test_a_flood_of_names_takes_no_more_than_the_table(
    clock: Time, tables: tuple[Buckets, Buckets]
) -> None:
    keys, addresses = tables
    key = Bucket(keys, "key", (1, 1))
    key.take(100)
    for number in range(5_000):
        clock.now += 0.06
        Bucket(addresses, f"2001:db8:{number:x}::/64", (20, 20)).take(1)
    assert key.waits()[0] == pytest.approx(99 - 300)
    # The latest are known, and the oldest were forgotten.
    assert -1 < Bucket(addresses, "2001:db8:1387::/64", (20, 20)).waits()[0] + 1 < 0.1
    assert Bucket(addresses, "2001:db8:0::/64", (20, 20)).waits()[0] < -1


def test_a_bucket_that_lost_its_place_is_full_again(clock: Time, table: Buckets) -> None:
    bucket = Bucket(table, "victim", (1, 1))
    bucket.take(10)
    for number in range(20 * module.SLOTS):
        if bucket.waits()[0] < 0:
            break
        Bucket(table, f"other-{number}", (1, 1)).take(1_000_000)
    assert bucket.waits()[0] == -clock.now - 1
    bucket.take(2)
    assert bucket.waits()[0] == 1


def test_a_bucket_of_the_second_kind_alone_keeps_its_place_as_long(
    clock: Time, table: Buckets
) -> None:
    """A key can have a limit of bytes only."""
    bucket = Bucket(table, "key", (0, 0), (1, 1))
    bucket.take(1, 1_000_000)
    for number in range(5_000):
        clock.now += 0.04
        Bucket(table, f"other-{number}", (1, 1)).take(1)
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
    bucket = Bucket(open_buckets(memory)[0], "key", (rate, 1))
    assert bucket.waits()[0] < 0


# ------------------------------------------------------------------------------------------- quotas
#: 00:00 UTC.
MIDNIGHT = 20_000 * DAY_MS
KEYS = (
    WriteKey(id="web", key="w"),
    WriteKey(id="ios", key="i"),
    WriteKey(id="backend", sha256="0" * 64, kind="server"),
)


class Process:
    """A process of a server, with the clock of the test."""

    def __init__(self, config: Config, store: MemoryStore, now: int = MIDNIGHT) -> None:
        self.now = now
        self.metrics = Metrics()
        self.history = History(self.metrics)
        self.store = store
        keys: list[Key] = list(effective_keys(config.workspaces, ()).keys)
        self.quotas = Quotas(config, store, lambda: keys, lambda: self.now)

    def stores(self, key: str, events: int, size: int = 100, workspace: str = "acme") -> None:
        self.metrics.stored(events, events * size, workspace, key)

    async def passes(self, seconds: int, *, write: bool = True) -> None:
        """Do what a process does every second."""
        for _ in range(seconds):
            self.now += 1000
            self.history.turn(self.now)
            if write and self.now % 5000 == 0:
                with contextlib.suppress(StorageError):
                    await self.history.write_to(self.store)
            await self.quotas.look(self.history, logs=True)

    def refused(self) -> dict[str, str]:
        found = {}
        for key in ("web", "ios", "backend"):
            try:
                self.quotas.check(("acme", key))
            except ApiError as error:
                found[key] = error.headers["Retry-After"]
        return found


def config(limits: dict[str, int] | None = None, workspace: dict[str, int] | None = None) -> Config:
    acme = Workspace(id="acme", name="Acme", write_keys=KEYS, quota=Quota(**(workspace or {})))
    other = dataclasses.replace(acme, id="other", quota=Quota())
    return Config(
        path=Path("engage.toml"),
        base_dir=Path(),
        limits=Limits(quota=Quota(**(limits or {}))),
        workspaces=(acme, other),
    )


@pytest.mark.parametrize("kind", ["events", "bytes"])
async def test_a_key_is_refused_from_its_quota_to_midnight(kind: str) -> None:
    quota = {"events_per_day": 50} if kind == "events" else {"bytes_per_day": 5000}
    process = Process(config(quota), MemoryStore(), now=MIDNIGHT + 3_600_000)
    process.stores("web", 49)
    process.stores("web", 50, workspace="other")
    await process.passes(3)
    assert process.refused() == {}
    process.stores("web", 1)
    await process.passes(3)
    left = (MIDNIGHT + DAY_MS - process.now) // 1000
    assert process.refused() == {"web": str(left)}
    process.now = MIDNIGHT + DAY_MS - 1
    assert process.refused() == {"web": "1"}
    with pytest.raises(ApiError) as caught:
        process.quotas.check(("acme", "web"))
    assert (caught.value.status, caught.value.code) == (429, "quota_exceeded")
    # At once, before the counters are read again.
    process.now += 1
    assert process.refused() == {}
    await process.passes(20)
    assert process.refused() == {}
    process.stores("web", 50)
    await process.passes(3)
    assert list(process.refused()) == ["web"]


async def test_a_workspace_counts_its_public_keys_and_refuses_only_them() -> None:
    process = Process(config(workspace={"events_per_day": 100}), MemoryStore())
    process.stores("backend", 1000)
    process.stores("web", 60)
    process.stores("ios", 39)
    await process.passes(3)
    assert process.refused() == {}
    assert process.metrics.numbers["quota_used_ratio"] == {(): 0.99}
    process.stores("ios", 1)
    await process.passes(3)
    assert list(process.refused()) == ["web", "ios"]


class Watched(MemoryStore):
    """Counts how often the sums are read, and calls a function during every read and write."""

    reads = 0
    applied = True

    def __init__(self) -> None:
        super().__init__()
        self.during: Callable[[], None] = lambda: None

    async def counts(self, *args: Any, **options: Any) -> Any:
        self.reads += 1
        self.during()
        page = await super().counts(*args, **options)
        self.during()
        return page

    async def put_counts(self, counts: Sequence[Count]) -> None:
        self.during()
        await super().put_counts(counts)
        self.during()
        if not self.applied:
            raise StorageUnavailable("no answer within 8 seconds")


async def test_all_processes_count_together_also_those_that_ended() -> None:
    store = MemoryStore()
    one, other = (Process(config({"events_per_day": 100}), store) for _ in range(2))
    one.stores("web", 50)
    await one.passes(5)
    # It ends, and another takes its place.
    one = Process(config({"events_per_day": 100}), store, now=one.now)
    one.stores("web", 30)
    other.stores("web", 20)
    for _ in range(60):
        await one.passes(1)
        await other.passes(1)
    assert list(one.refused()) == list(other.refused()) == ["web"]
    # One that starts knows it at once.
    third = Process(config({"events_per_day": 100}), store, now=one.now)
    await third.passes(1)
    assert list(third.refused()) == ["web"]


@each("second", [1, 20, 40, 56, 60, 110])
async def test_a_quota_is_exact_to_a_minute_and_a_second_for_one_process(second: int) -> None:
    store = Watched()
    one, other = (Process(config({"events_per_day": 100}), store) for _ in range(2))
    for _ in range(second):
        await one.passes(1)
        await other.passes(1)
    one.stores("web", 100)
    await one.passes(1)
    assert list(one.refused()) == ["web"]
    await other.passes(1)
    for _ in range(59):
        await one.passes(1)
        await other.passes(1)
    assert list(other.refused()) == ["web"]
    assert store.reads <= 2 * (1 + (second + 60) / 50), "they read more than once a minute"


async def test_nothing_is_counted_twice_or_lost_while_counters_are_written() -> None:
    store = Watched()
    process = Process(config({"events_per_day": 10_000}), store)
    stored = 0

    def store_more() -> None:
        nonlocal stored
        process.stores("web", 7)
        stored += 7

    store.during = store_more
    while stored < 11_000:
        process.stores("web", 29)
        stored += 29
        await process.passes(1)
        assert (process.refused() != {}) == (stored >= 10_000)
    assert store.reads > 3


async def test_a_write_that_failed_and_was_applied_counts_once() -> None:
    store = Watched()
    process = Process(config({"events_per_day": 100}), store)
    await process.passes(50)
    store.applied = False
    process.stores("web", 60)
    await process.passes(70)
    assert process.refused() == {}
    store.applied = True
    process.stores("web", 39)
    await process.passes(70)
    assert process.refused() == {}
    process.stores("web", 1)
    await process.passes(1)
    assert list(process.refused()) == ["web"]


async def test_the_last_sum_holds_while_the_counters_cannot_be_read() -> None:
    class Away(MemoryStore):
        away = False

        async def counts(self, *args: Any, **options: Any) -> Any:
            if self.away:
                raise StorageUnavailable("away")
            return await super().counts(*args, **options)

    store = Away()
    one, other = (Process(config({"events_per_day": 100}), store) for _ in range(2))
    one.stores("web", 90)
    await one.passes(6)
    await other.passes(6)
    store.away = True
    other.stores("web", 9)
    await other.passes(120)
    assert other.refused() == {}
    other.stores("web", 101)
    await other.passes(1)
    assert list(other.refused()) == ["web"]
    # Of the next day nothing is known but what this process has counted.
    other.now = MIDNIGHT + DAY_MS
    await other.passes(3, write=False)
    assert other.refused() == {}
    other.stores("web", 100)
    await other.passes(1, write=False)
    assert list(other.refused()) == ["web"]


async def test_a_quota_that_is_used_up_is_logged_once_a_day(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    quotas = config({"events_per_day": 10}, {"bytes_per_day": 1500})
    process = Process(quotas, MemoryStore())
    process.stores("web", 10)
    await process.passes(10)
    assert caplog.messages == [
        "the write key 'web' of the workspace 'acme' has used up 10 events a day"
        " (limits.quota.events_per_day); it is refused until 2024-10-05T00:00:00+00:00"
    ]
    caplog.clear()
    process.stores("ios", 5)
    await process.passes(10)
    assert caplog.messages == [
        "the workspace 'acme' with its public write keys has used up 1500 bytes a day"
        " (workspaces.quota.bytes_per_day); it is refused until 2024-10-05T00:00:00+00:00"
    ]


async def test_a_clock_that_is_set_back_counts_for_the_day_that_it_shows() -> None:
    process = Process(config({"events_per_day": 10}), MemoryStore(), now=MIDNIGHT + 5000)
    process.stores("web", 10)
    await process.passes(3)
    assert list(process.refused()) == ["web"]
    process.now = MIDNIGHT - 3_600_000
    await process.passes(1)
    process.stores("web", 9)
    await process.passes(20)
    assert "web" not in process.refused()


async def test_a_clock_that_is_set_back_within_the_day_forgets_nothing() -> None:
    process = Process(config({"events_per_day": 100}), MemoryStore(), now=MIDNIGHT + 3_600_000)
    process.stores("web", 60)
    await process.passes(5)
    process.stores("web", 30)
    await process.passes(1)
    process.now -= 120_000
    process.stores("web", 9)
    await process.passes(1)
    assert process.refused() == {}
    process.stores("web", 1)
    for _ in range(100):
        await process.passes(1)
        assert list(process.refused()) == ["web"]


@each("step", [DAY_MS, 3 * 3_600_000, 300_000])
async def test_a_clock_that_was_wrong_for_a_while_loses_nothing(step: int) -> None:
    process = Process(config({"events_per_day": 100}), MemoryStore(), now=MIDNIGHT + 5000)
    process.stores("web", 60)
    await process.passes(10)
    process.now += step
    await process.passes(10)
    process.now -= step
    await process.passes(1)
    process.stores("web", 39)
    await process.passes(10)
    assert process.refused() == {}
    process.stores("web", 1)
    await process.passes(10)
    assert list(process.refused()) == ["web"]


class Keys(list[Key]):
    """Counts how often it is gone through."""

    times = 0

    def __iter__(self) -> Iterator[Key]:
        self.times += 1
        return super().__iter__()


def test_many_workspaces_do_not_hold_the_event_loop() -> None:
    acme = config({"events_per_day": 1})
    keys = Keys(effective_keys(acme.workspaces, ()).keys)
    assert used_up(acme, keys, {("other", "stored", ("ios",)): 1})[0].keys() == {("other", "ios")}
    assert keys.times == 1
