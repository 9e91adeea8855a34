# SPDX-License-Identifier: Apache-2.0
"""Passwords: their hashes, and how many guesses there may be."""

from __future__ import annotations

import asyncio
import ipaddress
from typing import Any

import pytest

from engage.console.sign_in import passwords as passwords_module
from engage.console.sign_in.passwords import (
    ADDRESS_FAILURES,
    ALL_FAILURES,
    Passwords,
    Throttle,
    hash_password,
    is_password,
)


def test_a_hash_is_that_of_one_password() -> None:
    setting = hash_password("pässword")
    assert setting.startswith("scrypt$15$8$3$")
    assert is_password(setting, "pässword")
    assert not is_password(setting, "password")
    assert setting != hash_password("pässword")


async def test_passwords_are_checked_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    running, most = 0, 0
    release = asyncio.Event()

    async def to_thread(*_: Any) -> bool:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await release.wait()
        running -= 1
        return False

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    checker = Passwords("x")
    tasks = [asyncio.create_task(checker.check("p")) for _ in range(8)]
    await asyncio.sleep(0.01)
    release.set()
    assert await asyncio.gather(*tasks) == [False] * 8
    assert most == 1
    assert not await checker.check("p" * 2000)


class Seconds:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_address_has_five_guesses_in_fifteen_minutes() -> None:
    clock = Seconds()
    throttle = Throttle(clock)
    for _ in range(ADDRESS_FAILURES):
        assert throttle.wait("192.0.2.1") == 0
        throttle.failed("192.0.2.1")
        clock.now += 60
    assert throttle.wait("192.0.2.1") == 600
    assert throttle.wait("::ffff:192.0.2.1") == 600
    assert throttle.wait("192.0.2.2") == 0
    clock.now += 600
    assert throttle.wait("192.0.2.1") == 0
    throttle.failed("192.0.2.1")
    assert throttle.wait("192.0.2.1") == 60
    throttle.succeeded("192.0.2.1")
    assert throttle.wait("192.0.2.1") == 0


def test_all_addresses_together_have_twenty_guesses_a_minute() -> None:
    clock = Seconds()
    throttle = Throttle(clock)
    for number in range(ALL_FAILURES):
        assert throttle.wait(f"192.0.2.{number}") == 0
        throttle.failed(f"192.0.2.{number}")
    assert throttle.wait("198.51.100.1") == 60
    clock.now += 60
    assert throttle.wait("198.51.100.1") == 0


def test_the_addresses_of_one_network_count_as_one() -> None:
    throttle = Throttle(Seconds())
    for number in range(ADDRESS_FAILURES):
        throttle.failed(f"2001:db8::{number:x}")
    assert throttle.wait("2001:db8::ffff:1") > 0
    assert throttle.wait("2001:db8:0:1::1") == 0


def test_the_throttle_does_not_grow() -> None:
    clock = Seconds()
    throttle = Throttle(clock)
    for _ in range(ADDRESS_FAILURES):
        throttle.failed("192.0.2.1")
    for number in range(passwords_module.MAX_ADDRESSES):
        throttle.failed(str(ipaddress.ip_address(number)))
    clock.now += passwords_module.ALL_SECONDS
    assert throttle.wait("192.0.2.1") == 0, "the oldest address is forgotten"
