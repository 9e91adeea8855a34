# SPDX-License-Identifier: Apache-2.0
"""The progress bar, which is shown only on a terminal and only when a command takes long."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from engage.cli.output import Progress


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that advances the clock of the progress bar."""
    now = [100.0]

    def advance(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr("engage.cli.output.time.monotonic", lambda: now[0])
    return advance


def shown(
    monkeypatch: pytest.MonkeyPatch, clock: Any, *, stream: io.StringIO, wanted: bool = True
) -> list[str]:
    """Return what was drawn while 5000 records took three seconds."""
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress("events", shown=wanted) as bar:
        for count in range(0, 5001, 500):
            bar.show(count, count / 5000)
            clock(0.3)
    return [part.removesuffix("\x1b[K") for part in stream.getvalue().split("\r") if part]


def test_a_bar_is_drawn_on_a_terminal(monkeypatch: pytest.MonkeyPatch, clock: Any) -> None:
    drawn = shown(monkeypatch, clock, stream=Terminal())
    assert drawn[0] == "[############..................]  40 %  2,000 events, 1,667/s"
    assert drawn[-2] == "[##############################] 100 %  5,000 events, 1,667/s"
    assert drawn[-1] == "", "nothing is left behind"
    assert all(len(line) < 80 for line in drawn)


def test_no_bar_is_drawn_elsewhere(monkeypatch: pytest.MonkeyPatch, clock: Any) -> None:
    assert shown(monkeypatch, clock, stream=io.StringIO()) == []
    assert shown(monkeypatch, clock, stream=Terminal(), wanted=False) == []


def test_no_bar_is_drawn_for_a_quick_command(monkeypatch: pytest.MonkeyPatch, clock: Any) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress("events") as bar:
        clock(0.9)
        bar.show(5000, 1.0)
    assert stream.getvalue() == ""


def test_a_count_is_drawn_when_the_total_is_unknown(
    monkeypatch: pytest.MonkeyPatch, clock: Any
) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress("users") as bar:
        clock(2)
        bar.show(1000)
    assert stream.getvalue() == "\r1,000 users, 500/s\x1b[K\r\x1b[K"
