# SPDX-License-Identifier: Apache-2.0
"""Genuine and recorded deliveries of every provider, sent over HTTP to a server with a store."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from engage.api import WebhookRequest
from engage.deliveries.delivery import Delivery
from engage.testing import ProviderConformance
from support.provider_cases import CASES, SES_CERTIFICATE, TwilioJson
from support.provider_http import PUBLIC_URL, deliver, public, workspace
from support.providers import MAPPINGS, NOW, VECTORS, assert_matches, delivery_of, request_of
from support.server_inprocess import Serving, serving

#: Provider → its first case.
PROVIDERS = {
    case.plugin.rpartition(".")[2].replace("_", "-"): case
    for case in reversed(CASES.values())  # The first of a provider is the last that is set.
}


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Return the clock that the server compares timestamps with."""
    now = {"is": NOW}

    def delivery(**fields: Any) -> Delivery:
        return Delivery(**{**fields, "arrived_at": now["is"]})

    monkeypatch.setattr("engage.handlers.webhook.Delivery", delivery)
    return now


class Case:
    """A conformance case, with the URL and the options of a server."""

    def __init__(self, case: type[ProviderConformance]) -> None:
        # A new class, because it gets another URL and perhaps other headers.
        self.suite: Any = type(case.__name__, (case,), {})()
        self.name = case.plugin.rpartition(".")[2].replace("_", "-")
        self.options, self.others = dict(case.options), dict(case.other_options)
        if self.name == "amazon-ses":  # so that nothing is fetched
            self.options["signing_cert_pem"] = self.others["signing_cert_pem"] = (
                SES_CERTIFICATE.decode()
            )
        query = urlsplit(case.url).query
        self.suite.url = (
            f"{PUBLIC_URL}/api/public/webhooks/{self.name}"
            f"?workspaceId=mine{'&' if query else ''}{query}"
        )

    def serving(self, folder: Path) -> contextlib.AbstractAsyncContextManager[Serving]:
        return serving(
            folder,
            server=public(),
            config_extra=workspace("mine", {self.name: self.options})
            + workspace("theirs", {self.name: self.others}),
        )

    def delivery(
        self,
        body: bytes | None = None,
        options: Mapping[str, Any] | None = None,
        timestamp: str | None = None,
    ) -> WebhookRequest:
        made: WebhookRequest = self.suite.delivery(
            self.suite.body if body is None else body,
            self.suite.options if options is None else options,
            str(int(NOW)) if timestamp is None else timestamp,
        )
        return made

    def here(self, request: WebhookRequest) -> WebhookRequest:
        """Return the delivery with the URL of this case."""
        return changed(request, url=self.suite.url)


def changed(request: WebhookRequest, **changes: Any) -> WebhookRequest:
    fields = {name: getattr(request, name) for name in ("method", "headers", "body", "url", "now")}
    return WebhookRequest(**{**fields, **changes})


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(CASES[request.param])


def test_all_recordings_are_there() -> None:
    assert len(VECTORS) == 146
    assert len(MAPPINGS) == 52


async def test_a_genuine_delivery_is_stored_once(case: Case, tmp_path: Path) -> None:
    async with case.serving(tmp_path) as server:
        answer = await deliver(server, case.here(case.delivery()))
        assert answer.status == 200, answer.body
        events = await server.events()
        if isinstance(case.suite, TwilioJson):
            assert not events
            return
        assert events
        for event in events:
            document = event.document()
            assert event.workspace_id == document["workspaceId"] == "mine"
            assert event.origin == case.name
            assert document["source"] == f"webhook:{case.name}"
            assert "writeKeyId" not in document
        again = await deliver(server, case.here(case.delivery()))
        assert again.status == 200
        assert len(await server.events()) == len(events)
        assert not await server.dead_letters()


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["id"])
async def test_a_recorded_delivery_is_answered_as_recorded(
    vector: dict[str, Any], tmp_path: Path, clock: dict[str, float]
) -> None:
    clock["is"] = vector["now"]
    parts = urlsplit(vector["url"])
    options = dict(vector["config"])
    path = f"/api/public/webhooks/{vector['provider']}"
    if parts.path != path:  # an example from the provider's documentation
        options["public_url"] = vector["url"]
    request = request_of(vector)
    async with serving(
        tmp_path,
        server=public(f"{parts.scheme}://{parts.netloc}"),
        config_extra=workspace("ws-1", {vector["provider"]: options}),
    ) as server:
        url = f"{PUBLIC_URL}{path}" + (f"?{parts.query}" if parts.query else "")
        answer = await deliver(server, changed(request, url=url))
        expected = {"valid": 200, "invalid": 401, "unreadable": 200}[vector["expected"]]
        assert answer.status == vector.get("expected_status", expected), answer.body
        if vector["expected"] != "valid":
            assert not await server.events()
        letters = await server.dead_letters()
        if vector["expected"] == "unreadable":
            [letter] = letters
            assert letter.item == vector["raw"]
        elif vector["expected"] == "invalid":
            assert not letters


@pytest.mark.parametrize(
    "mapping", MAPPINGS, ids=lambda mapping: f"{mapping['provider']}: {mapping['description']}"
)
async def test_a_recorded_payload_becomes_the_recorded_events(
    mapping: dict[str, Any], tmp_path: Path
) -> None:
    case = Case(PROVIDERS[mapping["provider"]])
    if mapping["provider"] == "segment":
        case = Case(CASES["segment-SegmentBatch"])
    unsigned = delivery_of(mapping["provider"], mapping["input"])
    body = unsigned.body
    if mapping["provider"] == "amazon-ses":  # the case wraps the message
        body = json.loads(body)["Message"].encode()
    if unsigned.query:
        case.suite.url = f"{case.suite.url.partition('?')[0]}?{unsigned.query}".replace(
            mapping["workspaceId"], "mine"
        )
    case.suite.headers = dict(unsigned.headers) if mapping["provider"] == "shopify" else {}
    delivery = case.here(case.delivery(body))
    async with case.serving(tmp_path) as server:
        for _ in range(2):  # The second has the same ids.
            answer = await deliver(server, delivery)
            assert answer.status == 200, answer.body
            assert not await server.dead_letters()
        events = await server.events()
        for event, expected in zip(events, mapping["expected_events"], strict=True):
            document = event.document()
            users = {"userId": document.get("userId"), "anonymousId": document.get("anonymousId")}
            times = {"timestamp": document["receivedAt"]}
            assert_matches({**users, **document}, {**dict.fromkeys(users), **times, **expected})
