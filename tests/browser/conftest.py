# SPDX-License-Identifier: Apache-2.0
"""One Chromium for a test process, a fresh page origin and server for each test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.browser import Browser, Pages


@pytest.fixture(scope="session")
def _chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def browser(_chromium: Browser) -> Iterator[Browser]:
    """A Chromium whose current page is empty and whose logs are read. Each test's page has an
    origin of its own (another port), so that storage is not shared; cookies are deleted, because
    they do not know ports."""
    _chromium.cdp("Network.clearBrowserCookies")
    _chromium.errors()
    yield _chromium
    _chromium.leave()


@pytest.fixture
def pages() -> Iterator[Pages]:
    pages = Pages()
    yield pages
    pages.close()


def events(engage: Any) -> list[dict[str, Any]]:
    exported: list[dict[str, Any]] = engage.export("events")
    return exported
