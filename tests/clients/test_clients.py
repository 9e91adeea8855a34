# SPDX-License-Identifier: Apache-2.0
"""The HTTP API with several client libraries: requests, httpx, aiohttp, curl, Go's net/http."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from clients.libraries import LIBRARIES, Request, Send

from support.server_process import Server, start_server

pytestmark = [pytest.mark.timeout(300)]

EVENT = {"userId": "u", "event": "E", "properties": {"text": "ünï ✓"}}


@pytest.fixture(params=LIBRARIES, ids=str)
def send(request: pytest.FixtureRequest) -> Send:
    return LIBRARIES[request.param]


@pytest.fixture(scope="module")
def engage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start one server for all tests; each test has its own message ids, see :class:`Sent`."""
    with start_server(tmp_path_factory.mktemp("clients")) as server:
        yield server


class Sent:
    """Makes the requests of one test, and finds its events among those of other tests."""

    _numbers = itertools.count()

    def __init__(self, engage: Server) -> None:
        self.engage = engage
        self.prefix = f"test-{next(self._numbers)}-"

    def post(
        self,
        message_id: str = "m",
        path: str = "/v1/track",
        body: bytes | None = None,
        **more: Any,
    ) -> Request:
        """Make a request with the write key; without a body, it is an event with this id."""
        headers = {"Authorization": self.engage.authorization, **more.pop("headers", {})}
        return Request(
            method=more.pop("method", "POST"),
            url=self.engage.url + path,
            body=self.event(message_id) if body is None else body,
            headers=headers,
            **more,
        )

    def event(self, message_id: str) -> bytes:
        """Return an event whose stored id begins with :attr:`prefix`."""
        return json.dumps({**EVENT, "messageId": self.prefix + message_id}).encode()

    def stored(self) -> list[str]:
        """Return the ids of the stored events of this test, in order, without the prefix."""
        ids = [event["messageId"] for event in self.engage.export("events")]
        return [one.removeprefix(self.prefix) for one in ids if one.startswith(self.prefix)]


@pytest.fixture
def sent(engage: Server) -> Sent:
    return Sent(engage)


def test_many_requests_on_one_connection_are_answered(send: Send, sent: Sent) -> None:
    """Each answer belongs to its request, and none is lost."""
    answers = send([sent.post(str(number)) for number in range(20)])
    assert [answer.json() for answer in answers] == [
        {"success": True, "messageId": f"{sent.prefix}{number}"} for number in range(20)
    ]
    assert sent.stored() == [str(number) for number in range(20)]


def test_a_chunked_body_is_stored(send: Send, sent: Sent) -> None:
    answers = send([sent.post("1", chunked=True), sent.post("2", chunked=True), sent.post("3")])
    assert [answer.status for answer in answers] == [200, 200, 200]
    assert sent.stored() == ["1", "2", "3"]


def test_a_gzip_body_is_stored(send: Send, sent: Sent) -> None:
    body = gzip.compress(sent.event("zipped"))
    [answer] = send([sent.post(body=body, headers={"Content-Encoding": "gzip"})])
    assert answer.status == 200
    assert sent.stored() == ["zipped"]


def test_a_request_can_close_the_connection(send: Send, sent: Sent) -> None:
    """The server announces that it closes, and closes; the client opens another connection."""
    answers = send([sent.post("1", close=True), sent.post("2")])
    assert [answer.status for answer in answers] == [200, 200]
    assert answers[0].headers.get("connection", "close").lower() == "close"


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_client_can_wait_for_100_continue(send: Send, sent: Sent, size: int) -> None:
    body = json.dumps({"batch": [{**EVENT, "type": "track"}], "padding": "x" * size}).encode()
    answers = send(
        [sent.post(path="/v1/batch", body=body, headers={"Expect": "100-continue"}), sent.post("2")]
    )
    assert [answer.status for answer in answers] == [200, 200]


def test_a_client_that_waits_with_a_large_body_is_refused(send: Send, sent: Sent) -> None:
    """The client gets the answer, whether it waits for permission or sends the body anyway."""
    body = b" " * (5 * 1024 * 1024 + 1)
    [answer] = send([sent.post(path="/v1/batch", body=body, headers={"Expect": "100-continue"})])
    assert answer.status == 413
    assert answer.json()["code"] == "body_too_large"


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_head_has_no_body(engage: Server, send: Send, path: str) -> None:
    """The headers are those of GET, and the connection can be used again."""
    get, head, again = send(
        [Request(method=method, url=engage.url + path) for method in ("GET", "HEAD", "GET")]
    )
    assert get.status == head.status == again.status == 200
    assert head.body == b""
    assert head.headers["content-type"] == get.headers["content-type"]
    assert again.body == get.body
