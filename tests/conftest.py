# SPDX-License-Identifier: Apache-2.0
"""What every test may use."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from tornado.ioloop import IOLoop


@pytest.fixture(autouse=True)
def io_loop() -> Iterator[IOLoop]:
    """Replace pytest-tornasync's, which calls the deprecated ``make_current()``."""
    asyncio.set_event_loop(asyncio.new_event_loop())
    loop = IOLoop.current()
    yield loop
    asyncio.set_event_loop(None)
    loop.close(all_fds=True)
