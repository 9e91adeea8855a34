# SPDX-License-Identifier: Apache-2.0
"""What every test may use."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from tornado.ioloop import IOLoop

from support import mongo
from support.server_process import SQLITE, Server, start_server


def pytest_addoption(parser: pytest.Parser) -> None:
    """Say how long the long tests may be."""
    parser.addoption(
        "--rounds",
        type=int,
        default=5,
        help="how often tests/server/test_durability.py kills the server",
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what the servers of the MongoDB tests could not show."""
    mongo.summary(terminalreporter)


# A CI that says yes must say yes again: there the examples are always the same ones.
hypothesis.settings.register_profile("ci", derandomize=True, print_blob=True)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")


@pytest.fixture(autouse=True)
def io_loop() -> Iterator[IOLoop]:
    """Replace pytest-tornasync's, which calls the deprecated ``make_current()``."""
    asyncio.set_event_loop(asyncio.new_event_loop())
    loop = IOLoop.current()
    yield loop
    asyncio.set_event_loop(None)
    loop.close(all_fds=True)


@pytest.fixture
def engage(tmp_path: Path) -> Iterator[Server]:
    """A server of its own for the test; a write that takes over three seconds is given up."""
    storage = SQLITE.replace("[storage]", "[storage]\nwrite_timeout = 3")
    with start_server(tmp_path, storage=storage) as server:
        yield server


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name tests after short values only: bytes may hold the time of day (gzip does), and every
    process of a parallel run must find the same tests."""
    return argname if isinstance(val, bytes) and len(val) > 16 else None
