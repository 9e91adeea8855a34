# SPDX-License-Identifier: Apache-2.0
"""Every page of the console: no errors, accessible, readable at every size and without scripts."""

from __future__ import annotations

from typing import Any

import pytest

from engage.console.application import ROUTES
from support import console_data
from support.axe import accessible
from support.console_data import USER, letters, pages
from support.operator import Operator
from support.server_process import Server

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

PAGES = list(console_data.pages(""))
WIDE, NARROW = 1280, 320


@pytest.fixture(scope="module")
def paths(console: Server) -> dict[str, str]:
    return pages(letters(console)[0])


def test_each_page_of_the_route_table_is_visited() -> None:
    shown = {path.partition("?")[0] for path in pages("x").values()}
    others = {
        *("event.json", "live.json", "overview.json", "events.ndjson", "user.ndjson", "healthz"),
        *("letter/check", "letter/replay", "link", "login", "logout"),
    }
    assert {route.lstrip("/") for route in ROUTES} == shown | others


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_accessible_in_both_themes_and_at_both_widths(
    operator: Operator, paths: dict[str, str], name: str
) -> None:
    found = {}
    for theme in ("light", "dark"):
        operator.media(prefers_color_scheme=theme, prefers_reduced_motion="reduce")
        for width in (WIDE, NARROW):
            operator.size(width)
            operator.open(paths[name])
            # What is folded is looked at, too.
            operator.browser.run(
                "for (const one of document.querySelectorAll('details')) one.open = true"
            )
            found[theme, width] = accessible(operator.browser)
            if width == NARROW:
                overflow = operator.browser.run(
                    "return document.documentElement.scrollWidth - innerWidth"
                )
                assert overflow <= 0, f"{name} is {overflow} pixels too wide"
    assert {where: lines for where, lines in found.items() if lines} == {}


@pytest.mark.parametrize("path", ["login", "link?t=x"])
def test_the_pages_for_signing_in_are_accessible(operator: Operator, path: str) -> None:
    operator.browser.cdp("Network.clearBrowserCookies")
    for theme in ("light", "dark"):
        operator.media(prefers_color_scheme=theme)
        operator.size(NARROW)
        operator.open(path)
        assert "Sign in" in operator.text()
        assert accessible(operator.browser) == []


def test_an_open_row_is_accessible(operator: Operator) -> None:
    for path in ("live", "user?id=" + USER):
        operator.open(path)
        operator.one("tr.row a").click()
        operator.until(lambda: operator.text("tr.detail"))
        assert accessible(operator.browser) == []


@pytest.mark.parametrize("name", PAGES)
def test_a_page_works_in_forced_colours_and_without_motion(
    operator: Operator, paths: dict[str, str], name: str
) -> None:
    operator.media(forced_colors="active", prefers_reduced_motion="reduce")
    operator.open(paths[name])
    state: dict[str, Any] = operator.browser.run("""
      const visible = [...document.querySelectorAll("main button, main a.button, main .status")]
        .filter((one) => one.checkVisibility());
      const same = visible.filter((one) => {
        const style = getComputedStyle(one);
        return style.color === getComputedStyle(document.body).backgroundColor;
      });
      return {same: same.map((one) => one.outerHTML), moving: document.getAnimations().length};
    """)
    assert state == {"same": [], "moving": 0}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_readable_without_scripts(
    operator: Operator, paths: dict[str, str], name: str
) -> None:
    operator.open(paths[name])
    heading = operator.text("h1")
    operator.browser.cdp("Emulation.setScriptExecutionDisabled", value=True)
    operator.open(paths[name])
    html = operator.browser.driver.page_source
    assert heading
    assert f"<h1>{heading}</h1>" in html
    # Buttons that only scripts understand are not shown.
    for button in operator.browser.driver.find_elements("css selector", "main button[type=button]"):
        assert not button.is_displayed(), button.text
