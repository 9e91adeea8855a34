# SPDX-License-Identifier: Apache-2.0
"""Time that passes only while a test waits, and then at once.

A test with the mark ``virtual_time`` has it. Such a test shows the same on any machine in no time,
for example what happens after thirty seconds. All that it waits for must happen in its event loop:
while a thread, a process or a socket works, the time of everything else would be over.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable
from typing import Any

import pytest

_MONOTONIC, _TIME = time.monotonic(), time.time()
#: Seconds of a turn of the event loop, so that a task that only passes on its turn ends, too.
_TURN = 1e-5


class _Impatient(selectors.DefaultSelector):
    """Waits only for what has no time limit."""

    #: The seconds that have passed, in all loops of this process.
    passed = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(None if timeout is None else 0)
        _Impatient.passed += _TURN if ready or timeout is None else max(timeout, _TURN)
        return ready


def install(patch: pytest.MonkeyPatch) -> None:
    """Let the clocks of :mod:`time`, and the event loops that are made, have such a time."""
    patch.setattr(asyncio.events, "new_event_loop", VirtualTimeLoop)
    patch.setattr(time, "monotonic", lambda: _MONOTONIC + _Impatient.passed)
    patch.setattr(time, "time", lambda: _TIME + _Impatient.passed)
    patch.setattr(time, "time_ns", lambda: int(1e9 * time.time()))


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """The event loop. It runs at once what is handed to a thread."""

    def __init__(self) -> None:
        super().__init__(_Impatient())

    def time(self) -> float:
        return _MONOTONIC + _Impatient.passed

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *arguments: Any
    ) -> asyncio.Future[Any]:
        done = self.create_future()
        try:
            done.set_result(func(*arguments))
        except Exception as error:
            done.set_exception(error)
        return done
