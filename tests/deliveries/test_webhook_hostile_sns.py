# SPDX-License-Identifier: Apache-2.0
"""A message of SNS makes the server call only SNS, and only for an allowed topic."""

from __future__ import annotations

import contextlib
import functools
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tornado.httpclient import HTTPRequest, HTTPResponse
from tornado.httputil import HTTPHeaders

import engage.app
from engage.deliveries.fetcher import Fetcher
from support import provider_sns as sns
from support.http_client import Answer
from support.provider_sns import CERTIFICATE_URL, ELSEWHERE, HOST, TOPIC
from support.server_inprocess import Serving, serving

OPEN = {"eventType": "Open", "mail": {"destination": ["a@b.c"], "messageId": "m"}, "open": {}}
URL = "/api/public/webhooks/amazon-ses"


#: Messages that name another host or a topic that is not allowed.
MISLEADING = [
    *(sns.notification(OPEN, SigningCertURL=url) for url in ELSEWHERE),
    *(sns.confirmation(SigningCertURL=url) for url in ELSEWHERE),
    *(sns.confirmation(SubscribeURL=url) for url in ELSEWHERE),
    sns.notification(OPEN, TopicArn=TOPIC + "-mine"),
    sns.confirmation(TopicArn=TOPIC + "-mine"),
]


class Internet:
    """An HTTP client that records the calls and answers what a test wants."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.status = 200
        self.headers: dict[str, str] = {}
        self.body = sns.certificate()

    async def fetch(self, request: HTTPRequest, raise_error: bool = True) -> HTTPResponse:
        self.calls.append(request.url)
        assert request.follow_redirects is False
        for limit in (request.request_timeout, request.connect_timeout):
            assert limit is not None
            assert limit <= 3
        assert request.proxy_host is None
        headers = HTTPHeaders(self.headers)
        return HTTPResponse(request, self.status, headers, io.BytesIO(self.body))

    def close(self) -> None:
        pass


@pytest.fixture
def internet(monkeypatch: pytest.MonkeyPatch) -> Internet:
    outside = Internet()
    monkeypatch.setattr(engage.app, "Fetcher", functools.partial(Fetcher, outside))
    return outside


@contextlib.asynccontextmanager
async def ses(folder: Path, **options: Any) -> AsyncIterator[Serving]:
    """Serve a workspace with amazon-ses and without a pinned certificate."""
    given = {"allowed_topic_arns": [TOPIC], **options}
    lines = [f"{name} = {json.dumps(value)}" for name, value in given.items()]
    extra = "\n".join(["[workspaces.webhooks.amazon-ses]", *lines, ""])
    async with serving(folder, config_extra=extra) as server:
        yield server


async def deliver(server: Serving, envelope: Any, key: str | None = None) -> Answer:
    return await server.send(URL, envelope, key=key, headers={"Content-Type": "text/plain"})


async def refused(server: Serving, envelope: Any) -> None:
    answer = await deliver(server, envelope)
    assert (answer.status, answer.json["code"]) == (401, "invalid_signature"), envelope


async def nothing_stored(server: Serving) -> None:
    assert await server.events() == []
    assert await server.dead_letters() == []


async def test_the_certificate_is_fetched_once_from_sns(tmp_path: Path, internet: Internet) -> None:
    async with ses(tmp_path) as server:
        for number in range(3):
            envelope = sns.signed(sns.notification(OPEN, MessageId=f"m-{number}"))
            assert (await deliver(server, envelope)).status == 200
        assert internet.calls == [CERTIFICATE_URL]
        assert len(await server.events()) == 3


async def test_a_message_that_leads_elsewhere_makes_no_call(
    tmp_path: Path, internet: Internet
) -> None:
    async with ses(tmp_path) as server:
        for envelope in MISLEADING:
            await refused(server, sns.signed(envelope))
        assert internet.calls == []
        await nothing_stored(server)


async def test_a_subscription_is_confirmed_after_its_signature(
    tmp_path: Path, internet: Internet
) -> None:
    async with ses(tmp_path) as server:
        forged = sns.signed(sns.confirmation(Token="forged"), sns.OTHER_KEY)
        await refused(server, forged)
        assert internet.calls == [CERTIFICATE_URL]
        answer = await deliver(server, sns.signed(sns.confirmation()))
        assert (answer.status, answer.json["ignored"]) == (200, 1)
        assert internet.calls == [
            CERTIFICATE_URL,
            f"{HOST}/?Action=ConfirmSubscription&TopicArn={TOPIC}&Token=2336412f37f",
        ]
        answer = await deliver(server, sns.signed(sns.confirmation("UnsubscribeConfirmation")))
        assert (answer.status, answer.json["ignored"]) == (200, 1)
        assert len(internet.calls) == 2
        await nothing_stored(server)


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ({"auto_confirm": False}, [CERTIFICATE_URL]),
        ({"signing_cert_pem": sns.certificate().decode()}, []),
    ],
    ids=["without auto_confirm", "with a pinned certificate"],
)
async def test_nothing_is_confirmed_where_the_config_says_so(
    tmp_path: Path, internet: Internet, options: dict[str, Any], calls: list[str]
) -> None:
    async with ses(tmp_path, **options) as server:
        for envelope in (sns.notification(OPEN), sns.confirmation()):
            assert (await deliver(server, sns.signed(envelope))).status == 200
        assert internet.calls == calls
        [letter] = await server.dead_letters()
        assert "SubscribeURL" in letter.message


async def test_a_redirect_is_not_followed(tmp_path: Path, internet: Internet) -> None:
    """It is a failure, which is remembered; the provider sends the delivery again."""
    internet.status = 302
    internet.headers = {"Location": "https://169.254.169.254/latest/meta-data/"}
    async with ses(tmp_path) as server:
        for _ in range(3):
            answer = await deliver(server, sns.signed(sns.notification(OPEN)))
            assert answer.status == 503
            assert int(answer.headers["retry-after"]) > 0
        assert internet.calls == [CERTIFICATE_URL]
        await nothing_stored(server)
