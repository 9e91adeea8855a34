# SPDX-License-Identifier: Apache-2.0
"""A user is erased in the console: the id is typed, the progress is seen, the receipt stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import console_data
from support.browser import Browser
from support.operator import operator
from support.people import KEY
from support.server_process import SQLITE

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

USER = "שלום <b>עולם</b>"


@pytest.mark.parametrize("width", [1280, 320])
def test_a_user_is_erased(browser: Browser, tmp_path: Path, width: int) -> None:
    storage = SQLITE.replace("[storage]", "[storage]\nwrite_timeout = 2", 1)
    extra = f'{console_data.EXTRA}\n[erasures]\nkey = "{KEY}"\n'
    with (
        console_data.start(tmp_path, storage=storage, extra=extra) as server,
        operator(browser, server) as one,
    ):
        body = {"userId": USER, "traits": {"email": "shalom@example.com"}}
        assert server.post("/v1/identify", body).status_code == 200
        one.size(width)
        one.open("user", id=USER)
        one.see("shalom@example.com")
        one.see("Download everything")
        one.click("Erase", ".actions")
        one.see("This cannot be undone.")
        one.see("shalom@example.com")
        one.fill("#confirm", USER)
        one.click("Erase", "form.card")
        one.see("It goes on when you close this page")
        receipt = one.see("The user is erased.")
        assert "Addresses that are left" in receipt
        assert "shalom@example.com" in receipt
        one.open("audit")
        one.see("user-erased")
        assert server.export("users") == []
        one.open("erase")
        one.see("No request is left")
