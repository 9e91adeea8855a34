# SPDX-License-Identifier: Apache-2.0
"""What a web page of another origin can send to the server and read of its answers."""

from __future__ import annotations

from typing import Any

import pytest

from support.browser import Browser, Pages
from support.server_process import Server
from support.sqlite import locked

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

FETCH = """
const [url, options, done] = arguments;
fetch(url, options).then(async (answer) => done({
  status: answer.status,
  retryAfter: answer.headers.get("Retry-After"),
  requestId: answer.headers.get("X-Request-Id"),
  body: await answer.json(),
}), (error) => done({error: String(error)}));
"""


@pytest.fixture
def page(browser: Browser, pages: Pages) -> Browser:
    pages.pages["/"] = "<!doctype html><title>empty</title>"
    browser.open(pages.url + "/")
    return browser


def post(page: Browser, url: str, body: str, **headers: str) -> Any:
    return page.driver.execute_async_script(
        FETCH, url, {"method": "POST", "headers": headers, "body": body}
    )


EVENT = '{"userId": "u", "event": "E", "messageId": "m-1"}'


def test_a_request_with_a_preflight_can_be_sent_and_read(engage: Server, page: Browser) -> None:
    """Authorization and custom headers are allowed, the answer can be read."""
    answer = post(
        page,
        engage.url + "/v1/track",
        EVENT,
        **{"Authorization": engage.authorization, "X-Retry-Count": "1", "rsa-retry-reason": "x"},
    )
    assert answer["status"] == 200, answer
    assert answer["body"] == {"success": True, "messageId": "m-1"}
    assert answer["requestId"]
    assert page.errors() == []


def test_a_wrong_key_opens_no_login_dialog(engage: Server, page: Browser) -> None:
    answer = post(page, engage.url + "/v1/track", EVENT, Authorization="Basic bm86")
    assert answer["status"] == 401
    assert answer["body"]["code"] == "invalid_write_key"


def test_retry_after_can_be_read(short_timeout: Server, page: Browser) -> None:
    with locked(short_timeout.database):
        answer = post(
            page, short_timeout.url + "/v1/track", EVENT, Authorization=short_timeout.authorization
        )
    assert answer["status"] == 503
    assert 1 <= int(answer["retryAfter"]) <= 30
