# SPDX-License-Identifier: Apache-2.0
"""How fast a key may send, and how many refusals an address gets."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from engage.config import Limits, Rate, WriteKey
from engage.errors import ApiError, key_refused
from engage.keys import buckets
from engage.keys.guards import Guard, Guards
from support.each import each

PUBLIC = "93.184.216.34"


@pytest.fixture(autouse=True)
def _hardly_any_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    microseconds = itertools.count(10**9)
    monkeypatch.setattr(buckets, "monotonic", lambda: next(microseconds) / 10**6)


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


def test_a_batch_that_is_larger_than_the_burst_passes_and_is_paid_for() -> None:
    guard = guard_of(events_per_second=10, burst=10)
    assert guard is not None
    guard.take(1000, 1)
    with pytest.raises(ApiError) as caught:
        guard.check()
    assert caught.value.retry_after in (98, 99)
    assert f"again in {caught.value.retry_after} s" in caught.value.message


def test_the_time_to_wait_is_in_whole_seconds_and_never_0() -> None:
    guard = guard_of(events_per_second=1000, burst=1)
    assert guard is not None
    guard.take(900, 1)
    with pytest.raises(ApiError) as caught:
        guard.check()
    assert caught.value.headers["Retry-After"] == "1"


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


# --------------------------------------------------------------------------------------- strangers
def answers(guards: Guards, address: str, count: int) -> list[int]:
    error = key_refused("it is unknown")
    return [guards.answer(error, address).status for _ in range(count)]


def test_an_address_gets_as_many_refusals_as_the_config_says_then_429() -> None:
    guards = Guards(Limits(rate=Rate(unauthenticated_per_second=0.5)))
    assert answers(guards, PUBLIC, 3) == [401, 401, 429]
    assert guards.is_over(PUBLIC)
    error = guards.answer(key_refused("x"), PUBLIC)
    assert error.code == "rate_limited"
    assert error.retry_after in (2, 3)
    assert "WWW-Authenticate" not in error.headers
    assert answers(guards, "93.184.216.35", 1) == [401]


def test_the_default_is_20_a_second() -> None:
    found = answers(Guards(Limits()), PUBLIC, 200)
    assert found == [401] * 21 + [429] * 179, "the bucket is not empty after a microsecond"


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
    assert set(answers(guards, PUBLIC, 100)) == {401}
