# SPDX-License-Identifier: Apache-2.0
"""A step of the system's clock is noticed and logged, and an event does not get a wrong time."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engage.pipeline.clock import EARLIEST_MS, Clock
from support.times import DAY, MINUTE, Times

#: 2026-11-21T09:30:00.000Z
NOW = 1795253400000
YEARS = 2 * 365 * DAY


@pytest.fixture
def times() -> Times:
    return Times(NOW)


def test_the_clock_shows_the_systems_time() -> None:
    assert abs(Clock()() - time.time() * 1000) < 1000
    assert Clock().stepped is False
    assert Clock().disputed is None


@pytest.mark.parametrize("step", [2 * MINUTE, 1, -2 * MINUTE, -1])
def test_a_small_step_is_followed_and_the_time_never_decreases(times: Times, step: int) -> None:
    clock = times.clock()
    before = clock()
    times.step(step)
    assert clock() == max(before, times.wall)
    times.pass_(2 * MINUTE)
    assert clock() == times.wall
    assert not clock.stepped


def test_a_step_ahead_is_not_followed_before_it_has_held(
    times: Times, caplog: pytest.LogCaptureFixture
) -> None:
    clock = times.clock()
    times.step(YEARS)
    for _ in range(10):
        assert clock() == times.wall - YEARS
        assert clock.disputed == times.wall
        times.pass_(MINUTE - 1)
    assert len(caplog.messages) == 1
    assert "was set ahead by 63072000 seconds, to 2028-11-20T09:30:00.000Z" in caplog.text
    times.pass_(10)
    assert clock() == times.wall
    assert len(caplog.messages) == 2
    assert "engage follows it" in caplog.messages[1]
    assert (clock.stepped, clock.disputed, clock.steady_seconds) == (True, None, 0)


def test_a_clock_that_is_right_again_leaves_no_trace(
    times: Times, caplog: pytest.LogCaptureFixture
) -> None:
    """Finding 7: it stayed ahead until the process was restarted."""
    clock = times.clock()
    times.step(YEARS)
    seen = [clock()]
    times.pass_(5 * MINUTE)
    seen.append(clock())
    times.step(-YEARS)
    times.pass_(1000)
    seen.append(clock())
    assert seen == [NOW, NOW + 5 * MINUTE, NOW + 5 * MINUTE + 1000]
    assert caplog.messages[1] == "the system's clock is right again"
    times.pass_(5000)
    assert (clock.stepped, clock.steady_seconds) == (True, 5)


def test_a_clock_that_jumps_about_ahead_is_not_followed(times: Times) -> None:
    clock = times.clock()
    start = times.elapsed
    times.step(YEARS)
    for _ in range(20):
        assert clock() == NOW + times.elapsed - start
        times.pass_(8 * MINUTE)
        times.step(3 * MINUTE)
    clock()
    times.pass_(10 * MINUTE)
    assert clock() == times.wall


def test_a_step_back_is_followed_at_once(times: Times, caplog: pytest.LogCaptureFixture) -> None:
    """As for a process that was started while the clock was ahead."""
    clock = times.clock()
    clock()
    times.step(-YEARS)
    assert clock() == NOW - YEARS
    times.pass_(1)
    assert clock() == NOW - YEARS + 1
    assert caplog.messages == [
        "the system's clock was set back by 63072000 seconds, to 2024-11-21T09:30:00.000Z; "
        "engage follows it"
    ]
    assert clock.stepped


def test_a_clock_that_was_never_set_is_followed_when_it_is() -> None:
    times = Times(3 * DAY)
    clock = times.clock()
    assert clock() == 3 * DAY
    times.wall = NOW
    assert clock() == NOW
    times = Times(EARLIEST_MS)
    clock = times.clock()
    times.wall = NOW
    assert clock() == EARLIEST_MS


@given(st.lists(st.tuples(st.integers(0, 20 * MINUTE), st.integers(-YEARS, YEARS)), max_size=20))
def test_the_clock_agrees_with_the_systems_again(moves: list[tuple[int, int]]) -> None:
    times = Times(NOW + 50 * YEARS)
    clock = times.clock()
    for passed, step in moves:
        times.pass_(passed)
        times.step(step)
        clock()
    clock()
    times.pass_(10 * MINUTE)
    clock()
    times.pass_(10 * MINUTE)
    assert clock() == times.wall
