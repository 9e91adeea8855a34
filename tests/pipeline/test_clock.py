# SPDX-License-Identifier: Apache-2.0
"""A step of the system's clock is noticed, logged and followed."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engage.pipeline.clock import Clock
from support.times import DAY, MINUTE, Times

#: 2026-11-21T09:30:00.000Z
NOW = 1795253400000
YEARS = 2 * 365 * DAY


@pytest.fixture
def times() -> Times:
    return Times(NOW)


def test_the_clock_shows_the_systems_time() -> None:
    assert abs(Clock()() - time.time() * 1000) < 1000


@pytest.mark.parametrize("step", [2 * MINUTE, 1, -2 * MINUTE, -1])
def test_a_small_step_is_followed_and_the_time_never_decreases(
    times: Times, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    clock = times.clock()
    before = clock()
    times.step(step)
    assert clock() == max(before, times.wall)
    times.pass_(2 * MINUTE)
    assert clock() == times.wall
    assert caplog.messages == []


@pytest.mark.parametrize(("step", "words"), [(YEARS, "ahead"), (-YEARS, "back")])
def test_a_large_step_is_logged_and_followed_at_once(
    times: Times, caplog: pytest.LogCaptureFixture, step: int, words: str
) -> None:
    clock = times.clock()
    clock()
    times.step(step)
    assert clock() == NOW + step
    times.pass_(1)
    assert clock() == NOW + step + 1
    (message,) = caplog.messages
    assert message.startswith(f"the system's clock was set {words} by 63072000 seconds, to 202")


def test_a_step_between_two_requests_is_noticed_however_soon_they_follow(
    times: Times, caplog: pytest.LogCaptureFixture
) -> None:
    clock = times.clock()
    for step in (YEARS, -YEARS, 3 * MINUTE):
        clock()
        times.step(step)
    clock()
    assert len(caplog.messages) == 3


def test_the_second_reading_ignores_steps_ahead(times: Times) -> None:
    clock = times.clock()
    times.step(YEARS)
    times.pass_(5 * MINUTE)
    assert clock.without_steps_ahead() == NOW + 5 * MINUTE
    times.step(-YEARS)
    assert clock.without_steps_ahead() == NOW + 5 * MINUTE
    # As of a process that was started while the clock was ahead.
    times.step(-DAY)
    assert clock.without_steps_ahead() == NOW + 5 * MINUTE - DAY


moves = st.lists(st.tuples(st.integers(0, 20 * MINUTE), st.integers(-YEARS, YEARS)), max_size=20)


@given(moves)
def test_the_clock_agrees_with_the_systems_and_the_second_reading_is_never_ahead(
    moves: list[tuple[int, int]],
) -> None:
    times = Times(NOW + 50 * YEARS)
    clock = times.clock()
    for passed, step in moves:
        times.pass_(passed)
        times.step(step)
        assert clock() >= times.wall
        assert clock.without_steps_ahead() <= times.wall
    # Small steps back add up.
    times.pass_(len(moves) * 2 * MINUTE)
    assert clock() == times.wall
