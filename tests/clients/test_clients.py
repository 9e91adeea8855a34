# SPDX-License-Identifier: Apache-2.0
"""The HTTP API with several client libraries: requests, httpx, aiohttp, curl, Go's net/http."""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Callable
from typing import Any

import pytest
from clients.libraries import LIBRARIES, Answer, Request, Send

pytestmark = [pytest.mark.timeout(300)]

EVENT = {"userId": "u", "event": "E", "properties": {"text": "ünï ✓"}}

Post = Callable[..., Request]


@pytest.fixture(params=LIBRARIES, ids=str)
def send(request: pytest.FixtureRequest) -> Send:
    return LIBRARIES[request.param]


@pytest.fixture
def post(engage: Any) -> Post:
    def make(
        number: int = 0, path: str = "/v1/track", body: bytes | None = None, **more: Any
    ) -> Request:
        event = {**EVENT, "messageId": f"m-{number}"}
        headers = {"Authorization": engage.authorization, **more.pop("headers", {})}
        return Request(
            method=more.pop("method", "POST"),
            url=engage.url + path,
            body=json.dumps(event).encode() if body is None else body,
            headers=headers,
            **more,
        )

    return make


def stored(engage: Any) -> list[str]:
    return [event["messageId"] for event in engage.export("events")]


def test_many_requests_on_one_connection_are_answered(engage: Any, send: Send, post: Post) -> None:
    """Each answer belongs to its request, and none is lost."""
    answers = send([post(number) for number in range(20)])
    assert [answer.json() for answer in answers] == [
        {"success": True, "messageId": f"m-{number}"} for number in range(20)
    ]
    assert stored(engage) == [f"m-{number}" for number in range(20)]


def test_a_chunked_body_is_stored(engage: Any, send: Send, post: Post) -> None:
    answers = send([post(1, chunked=True), post(2, chunked=True), post(3)])
    assert [answer.status for answer in answers] == [200, 200, 200]
    assert stored(engage) == ["m-1", "m-2", "m-3"]


def test_a_gzip_body_is_stored(engage: Any, send: Send, post: Post) -> None:
    body = gzip.compress(json.dumps({**EVENT, "messageId": "zipped"}).encode())
    [answer] = send([post(body=body, headers={"Content-Encoding": "gzip"})])
    assert answer.status == 200
    assert stored(engage) == ["zipped"]


def test_a_request_can_close_the_connection(engage: Any, send: Send, post: Post) -> None:
    """The server announces that it closes, and closes; the client opens another connection."""
    answers = send([post(1, close=True), post(2)])
    assert [answer.status for answer in answers] == [200, 200]
    assert answers[0].headers.get("connection", "close").lower() == "close"


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_client_can_wait_for_100_continue(engage: Any, send: Send, post: Post, size: int) -> None:
    body = json.dumps({"batch": [{**EVENT, "type": "track"}], "padding": "x" * size}).encode()
    answers = send([post(path="/v1/batch", body=body, headers={"Expect": "100-continue"}), post(2)])
    assert [answer.status for answer in answers] == [200, 200]


def test_a_client_that_waits_with_a_large_body_is_refused(
    engage: Any, send: Send, post: Post
) -> None:
    """The client gets the answer, whether it waits for permission or sends the body anyway."""
    body = b" " * (5 * 1024 * 1024 + 1)
    [answer] = send([post(path="/v1/batch", body=body, headers={"Expect": "100-continue"})])
    assert answer.status == 413
    assert answer.json()["code"] == "body_too_large"


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_head_has_no_body(engage: Any, send: Send, path: str) -> None:
    """The headers are those of GET, and the connection can be used again."""
    get, head, again = send(
        [Request(method=method, url=engage.url + path) for method in ("GET", "HEAD", "GET")]
    )
    assert get.status == head.status == again.status == 200
    assert head.body == b""
    assert head.headers["content-type"] == get.headers["content-type"]
    assert again.body == get.body


def error_of(answer: Answer) -> tuple[int, object]:
    body = answer.json()
    assert body["success"] is False
    assert body["status"] == answer.status
    assert body["message"]
    assert body["requestId"] == answer.headers["x-request-id"]
    assert answer.headers["content-type"].startswith("application/json")
    assert answer.headers["x-content-type-options"] == "nosniff"
    return answer.status, body["code"]


def test_errors_have_one_shape(engage: Any, send: Send, post: Post) -> None:
    answers = send(
        [
            post(path="/nowhere"),
            post(method="GET", body=b""),
            post(body=b"{"),
            post(body=b'{"event": "E"}'),
            post(headers={"Authorization": "Basic bm86"}),
            post(headers={"Content-Encoding": "br"}),
            post(7),
        ]
    )
    assert [error_of(answer) for answer in answers[:-1]] == [
        (404, "not_found"),
        (405, "method_not_allowed"),
        (400, "invalid_json"),
        (400, "invalid_payload"),
        (401, "invalid_write_key"),
        (415, "unsupported_encoding"),
    ]
    assert "POST" in answers[1].headers["allow"]
    assert answers[4].headers["www-authenticate"].startswith("Basic")
    assert answers[-1].status == 200
    assert stored(engage) == ["m-7"]


def test_a_503_has_retry_after_in_seconds(engage: Any, send: Send, post: Post) -> None:
    connection = sqlite3.connect(engage.database, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    try:
        [answer] = send([post(1)])
    finally:
        connection.execute("ROLLBACK")
        connection.close()
    assert error_of(answer) == (503, "storage_unavailable")
    assert 5 <= int(answer.headers["retry-after"]) <= 30
    [answer] = send([post(1)])
    assert answer.status == 200
    assert stored(engage) == ["m-1"]


def test_options_is_answered(engage: Any, send: Send, post: Post) -> None:
    headers = {
        "Origin": "https://shop.test",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-retry-count",
    }
    [answer] = send([Request(method="OPTIONS", url=engage.url + "/v1/batch", headers=headers)])
    assert answer.status in (200, 204)
    assert answer.headers["access-control-allow-origin"] == "https://shop.test"
    assert answer.headers["access-control-allow-credentials"] == "true"
    allowed = answer.headers["access-control-allow-headers"].lower()
    assert {"authorization", "content-type", "x-retry-count"} <= {
        name.strip() for name in allowed.split(",")
    }
    assert int(answer.headers["access-control-max-age"]) > 0
