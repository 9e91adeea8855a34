# SPDX-License-Identifier: Apache-2.0
"""A server with a console, which all tests of a module share: they look only for what they sent."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import httpx
import pytest

from support.console import CONSOLE, console_url, signed_in
from support.server_process import Server, start_server

if sys.platform == "win32":  # There is no console beside a server.
    collect_ignore = [
        *("test_bad_input.py", "test_event_pages.py", "test_every_page.py", "test_pages.py"),
        *("test_process.py", "test_security.py", "pages/test_rejected.py", "pages/test_sign_in.py"),
    ]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server with the workspace ``acme``, whose console has no password."""
    with start_server(tmp_path_factory.mktemp("console"), config_extra=CONSOLE) as started:
        yield started


@pytest.fixture
def url(server: Server) -> str:
    """Return the URL of the console."""
    return console_url(server)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    """Return a client that is signed in."""
    with signed_in(server) as one:
        yield one
