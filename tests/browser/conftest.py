# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests in a browser: one Chromium per test process, a new server and a new page
origin for each test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support import console_data
from support.browser import Browser, Pages
from support.operator import Operator, operator
from support.server_process import Server


@pytest.fixture(scope="session")
def _chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def browser(_chromium: Browser) -> Iterator[Browser]:
    """Return a Chromium that shows an empty page and whose logs were read.

    The page of each test has a different origin (another port), so that tests do not share storage.
    Cookies are deleted, because they ignore ports."""
    _chromium.cdp("Network.clearBrowserCookies")
    _chromium.errors()
    yield _chromium
    _chromium.leave()


@pytest.fixture
def pages() -> Iterator[Pages]:
    pages = Pages()
    yield pages
    pages.close()


def events(engage: Server) -> list[dict[str, Any]]:
    exported: list[dict[str, Any]] = engage.export("events")
    return exported


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server with two workers and a console, which has something on every page.

    All tests of a module share it, so they look only for what they sent themselves."""
    with console_data.start(tmp_path_factory.mktemp("console")) as server:
        console_data.fill(server)
        yield server


@pytest.fixture(scope="module", params=console_data.STORAGES)
def starred(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Return a server with two workers and a console on each storage, with an empty store."""
    folder = tmp_path_factory.mktemp("console")
    with console_data.start(folder, storage=console_data.tables(request.param)) as server:
        yield server


@pytest.fixture(name="operator")
def signed_in_operator(browser: Browser, console: Server) -> Iterator[Operator]:
    """Return a browser that is signed in to the console; in the end, no page may have had an
    error, a violation of the policy, or a request to another origin."""
    with operator(browser, console) as watcher:
        yield watcher
