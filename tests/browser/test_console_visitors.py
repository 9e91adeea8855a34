# SPDX-License-Identifier: Apache-2.0
"""A visitor is found in the console, and its link to a user is undone and restored."""

from __future__ import annotations

import pytest
from selenium.webdriver.common.keys import Keys

from support.operator import Operator
from support.server_process import Server

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

VISITOR, USER, EMAIL = "v-1", "שלום עולם", "shalom@example.com"


@pytest.mark.parametrize("width", [1280, 320])
def test_a_visitor_is_found_unlinked_and_linked_again(
    operator: Operator, console: Server, width: int
) -> None:
    visitor, email = f"{VISITOR}-{width}", f"{width}.{EMAIL}"
    user = f"{USER} {width}"
    visit = {"anonymousId": visitor, "traits": {"email": email, "source": "newsletter"}}
    assert console.post("/v1/identify", visit).status_code == 200
    operator.size(width)
    operator.open("search", q=email)
    operator.see("This visitor belongs to no user.")
    assert console.post("/v1/identify", {"userId": user}).status_code == 200
    linked = {"userId": user, "anonymousId": visitor, "event": "Signed Up"}
    assert console.post("/v1/track", linked).status_code == 200
    operator.open("search", q=email)
    operator.see("newsletter")
    assert operator.text("h1") == user
    operator.click(visitor, "#ids")
    operator.see("This visitor belongs to the user")
    operator.click("Unlink", "main")
    assert operator.see("from this user?").count("newsletter") == 1
    # By the keyboard alone.
    operator.tab_to("Unlink")
    operator.keys(Keys.ENTER)
    assert "newsletter" not in operator.see("is not linked to this user any more", "main")
    operator.click("Link it again", "main")
    operator.see("is linked to this user", ".notice")
    assert "newsletter" in operator.text("main")
    operator.click("Unlink", "#ids")
    operator.click("Cancel", "main")
    operator.until(lambda: "unlink" not in operator.path)
    assert operator.texts("#ids .badge") == ["visitor"]
