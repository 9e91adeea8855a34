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
        operator(browser, server) as watcher,
    ):
        body = {"userId": USER, "traits": {"email": "shalom@example.com"}}
        assert server.post("/v1/identify", body).status_code == 200
        watcher.size(width)
        watcher.open("user", id=USER)
        watcher.see("shalom@example.com")
        watcher.see("Download everything")
        watcher.click("Erase", ".actions")
        watcher.see("This cannot be undone.")
        watcher.see("shalom@example.com")
        watcher.fill("#confirm", USER)
        watcher.click("Erase", "form.card")
        watcher.see("It goes on when you close this page")
        receipt = watcher.see("The user is erased.")
        assert "Addresses that are left" in receipt
        assert "shalom@example.com" in receipt
        watcher.open("audit")
        watcher.see("user-erased")
        assert server.export("users") == []
        watcher.open("erase")
        watcher.see("No request is left")
