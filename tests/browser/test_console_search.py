# SPDX-License-Identifier: Apache-2.0
"""Finding things in the console with the keyboard, with suggestions, and by time."""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

import pytest
from selenium.webdriver.common.keys import Keys

from support.operator import Operator
from support.server_process import Server

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

#: The name of the element that has the focus.
FOCUSED = "return document.activeElement.name ?? ''"
#: What a field offers.
OFFERED = "return [...document.querySelector(arguments[0]).list.options].map((one) => one.value)"


def value_of(operator: Operator, selector: str) -> str:
    return str(operator.one(selector).get_property("value"))


def test_the_keyboard_leads_to_the_search(operator: Operator, console: Server) -> None:
    for keys in ("/", Keys.CONTROL + "k"):
        operator.open("system")
        assert operator.browser.run(FOCUSED) != "q"
        operator.keys(keys)
        assert operator.browser.run(FOCUSED) == "q"
        operator.keys("A/B", keys if keys == "/" else "")
        assert value_of(operator, ".search [name=q]").startswith("A/B")
        # In a field, they are only what one types.
        operator.open("events", type="track")
        operator.one("#f-name").click()
        operator.keys(keys)
        assert operator.browser.run(FOCUSED) == "name"
    operator.open("search", q="old text")
    operator.keys("/", "new text")
    assert value_of(operator, ".search [name=q]") == "new text"


@pytest.mark.parametrize("width", [320, 390, 640])
def test_a_narrow_search_is_called_search(operator: Operator, width: int) -> None:
    operator.size(width)
    operator.open("system")
    spacing, shown = operator.browser.run(
        "const field = document.querySelector('.search [name=q]');"
        " return [getComputedStyle(field, '::placeholder').wordSpacing, field.clientWidth];"
    )
    assert float(spacing.removesuffix("px")) > shown > 0, "the second word is visible"


def test_the_fields_offer_what_was_seen(operator: Operator, console: Server) -> None:
    sent = {"userId": "offered-user", "event": "Offered Name"}
    assert console.post("/v1/track", sent).status_code == 200

    def offered(selector: str) -> list[str]:
        found: list[str] = operator.browser.run(OFFERED, selector)
        return found

    def is_offered() -> bool:
        """The console reads the newest events once a second."""
        operator.open("events", type="track")
        return "Offered Name" in offered("#f-name")

    operator.until(is_offered)
    assert "offered-user" in offered("#f-user")
    assert {"Offered Name", "offered-user"} <= set(offered(".search [name=q]"))
    operator.fill("#f-name", "oFFered")
    operator.keys(Keys.ENTER)
    operator.see("Offered Name", "tbody")


def test_the_times_of_a_filter_follow_the_zone_of_the_page(
    operator: Operator, console: Server
) -> None:
    def fields() -> tuple[str, str]:
        """Return what the field for the beginning shows, and what its label says."""
        return value_of(operator, "#f-since"), operator.text("label[for=f-since]")

    def asked() -> tuple[list[str], list[str]]:
        """Return what the address asks for."""
        query = parse_qs(urlsplit(operator.path).query, keep_blank_values=True)
        return query["since"], query["until"]

    operator.browser.cdp("Emulation.setTimezoneOverride", timezoneId="Asia/Kathmandu")
    operator.open("events", since="2026-01-01T22:30", until="rubbish")
    assert fields() == ("2026-01-02T04:15", "Since (local time)")
    operator.click("UTC", ".top")
    assert fields() == ("2026-01-01T22:30", "Since (UTC)")
    operator.click("UTC", ".top")
    assert fields() == ("2026-01-02T04:15", "Since (local time)")
    for shown, sent in (("2026-01-02T04:15", "2026-01-01T22:30"), ("", "")):
        operator.browser.run(
            "const one = document.getElementById('f-since'); one.value = arguments[0];"
            " one.dispatchEvent(new Event('change', {bubbles: true}))",
            shown,
        )
        operator.click("Filter", "main")
        operator.until(lambda sent=sent: asked() == ([sent], [""]))  # type: ignore[misc]
        assert fields()[0] == shown
