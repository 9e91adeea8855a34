# SPDX-License-Identifier: Apache-2.0
"""Every provider through HTTP, its store and its errors included: genuine, hostile, odd."""

from __future__ import annotations

import json
from urllib.parse import urlsplit

import pytest
import test_webhook_amazon_ses
import test_webhook_conformance
import test_webhook_sendgrid
import test_webhook_static
from support.hooks import PUBLIC_URL, deliver, public, workspace
from support.inprocess import serving
from support.webhooks import NOW, assert_matches, request_of
from test_webhook_vectors import MAPPINGS, VECTORS, delivery_of

from engage.api import WebhookRequest
from engage.testing.providers import JUNK

MODULES = (
    test_webhook_amazon_ses,
    test_webhook_conformance,
    test_webhook_sendgrid,
    test_webhook_static,
)
CASES = {
    f"{case.plugin.rpartition('.')[2]}-{name.removeprefix('Test')}": case
    for module in MODULES
    for name, case in vars(module).items()
    if name.startswith("Test") and hasattr(case, "plugin") and case.__module__ == module.__name__
}
PEM = test_webhook_amazon_ses.PEM.decode()
#: One case for each provider.
PROVIDERS = {
    case.plugin.rpartition(".")[2].replace("_", "-"): case
    for case in reversed(CASES.values())  # the first of them
}


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Deliveries are as old as the test says."""
    now = {"is": NOW}
    monkeypatch.setattr("engage.deliveries.time.time", lambda: now["is"])
    return now


class Case:
    """A conformance class, with the URL and the options that a server wants."""

    def __init__(self, case):
        self.suite = case()
        self.name = case.plugin.rpartition(".")[2].replace("_", "-")
        self.options, self.others = dict(case.options), dict(case.other_options)
        if self.name == "amazon-ses":  # nothing is to be fetched here
            self.options["signing_cert_pem"] = self.others["signing_cert_pem"] = PEM
        query = urlsplit(case.url).query
        self.suite.url = (
            f"{PUBLIC_URL}/api/public/webhooks/{self.name}"
            f"?workspaceId=mine{'&' if query else ''}{query}"
        )

    def serving(self, folder):
        return serving(
            folder,
            server=public(),
            config_extra=workspace("mine", {self.name: self.options})
            + workspace("theirs", {self.name: self.others}),
        )

    def delivery(self, body=None, options=None, timestamp=None):
        return self.suite.delivery(
            self.suite.body if body is None else body,
            self.suite.options if options is None else options,
            str(int(NOW)) if timestamp is None else timestamp,
        )

    def here(self, request):
        """The delivery, sent to this case's URL."""
        return changed(request, url=self.suite.url)


def changed(request, **changes):
    fields = {name: getattr(request, name) for name in ("method", "headers", "body", "url", "now")}
    return WebhookRequest(**{**fields, **changes})


@pytest.fixture(params=CASES, ids=str)
def case(request):
    return Case(CASES[request.param])


async def refused(server, request):
    """Send what must not be let in."""
    answer = await deliver(server, request)
    assert answer.status == 401, answer.body
    assert answer.json["code"] == "invalid_signature"
    assert answer.json["message"] == "the delivery does not verify"
    assert "www-authenticate" not in answer.headers


async def test_a_genuine_delivery_is_stored_once(case, tmp_path):
    async with case.serving(tmp_path) as server:
        answer = await deliver(server, case.here(case.delivery()))
        assert answer.status == 200, answer.body
        events = await server.events()
        if isinstance(case.suite, test_webhook_conformance.TestTwilioJson):
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


async def test_nothing_hostile_gets_in(case, tmp_path, clock):
    async with case.serving(tmp_path) as server:
        genuine = case.here(case.delivery())
        await refused(server, case.here(case.delivery(options=case.suite.other_options)))
        for name in case.suite._authentication():
            others = [pair for pair in genuine.headers if pair[0].lower() != name.lower()]
            [value] = genuine.values(name)
            for values in ([], [""], [value, value], [f"{value}, {value}"], ["\xff"], ["="]):
                headers = [*others, *((name, text) for text in values)]
                await refused(server, changed(genuine, headers=headers))
        if case.suite.make().signing.credential is None:
            text = case.suite.signature(genuine)
            for wrong in ("", text[:-1], text[1:], text + text, "é" + text[1:], "\xff", "=", "!"):
                await refused(server, case.here(case.suite.with_signature(genuine, wrong)))
        for content, change in case.suite.signed_parts(genuine):
            flipped = bytes([content[0] ^ 1]) + content[1:]
            broken = change(flipped)
            if signs_url(case) and broken.url != genuine.url:
                continue  # another path is another route
            await refused(server, case.here(broken))
        signing = case.suite.make().signing
        for limit, sign in ((signing.past, 1), (signing.future, -1)):
            if limit is not None:
                clock["is"] = NOW + sign * (limit + 1)
                await refused(server, genuine)
        clock["is"] = NOW
        if signing.timestamp is not None:
            for odd in ("1e9", "1_000", "+1", "1" * 20, "1.0", ""):
                await refused(server, case.here(case.delivery(timestamp=odd)))
        for other in PROVIDERS.values():
            own = {"header", "basic_user"} & set(case.options)  # the tests' own credential
            if other.plugin != case.suite.plugin and not own & set(other.options):
                foreign = Case(other).delivery()
                await refused(server, case.here(foreign))
        assert not await server.events()
        assert not await server.dead_letters()


def signs_url(case):
    return case.suite.make().signing.url


async def test_another_workspace_is_no_hint(case, tmp_path):
    async with case.serving(tmp_path) as server:
        for workspace_id in ("acme", "theirs", "nobody", "", "mine&workspaceId=theirs"):
            url = case.suite.url.replace("Id=mine", f"Id={workspace_id}")
            await refused(server, changed(case.delivery(), url=url))
        genuine = case.here(case.delivery())
        await refused(
            server, changed(genuine, headers=[*genuine.headers, ("df-workspace-id", "theirs")])
        )
        unnamed = changed(genuine, url=case.suite.url.replace("workspaceId=mine", "x=y"))
        answer = await deliver(server, unnamed)
        assert (answer.status, answer.json["code"]) == (400, "workspace_required")
        assert not await server.events()


@pytest.mark.parametrize("kind", JUNK)
async def test_a_signed_body_may_be_anything(case, kind, tmp_path):
    async with case.serving(tmp_path) as server:
        answer = await deliver(server, case.here(case.delivery(JUNK[kind])))
        assert answer.status in (200, 400, 401), answer.body
        assert not await server.events()
        letters = await server.dead_letters()
        assert len(letters) <= 1
        for letter in letters:
            assert letter.origin == case.name
            assert not letter.truncated


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["id"])
async def test_recorded_deliveries(vector, tmp_path, clock):
    clock["is"] = vector["now"]
    parts = urlsplit(vector["url"])
    options = dict(vector["config"])
    path = f"/api/public/webhooks/{vector['provider']}"
    if parts.path != path:  # the example of the provider's own page
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
async def test_recorded_translations(mapping, tmp_path):
    case = Case(PROVIDERS[mapping["provider"]])
    if mapping["provider"] == "segment":
        case = Case(CASES["segment-SegmentBatch"])
    unsigned = delivery_of(mapping["provider"], mapping["input"])
    body = unsigned.body
    if mapping["provider"] == "amazon-ses":  # the case wraps it
        body = json.loads(body)["Message"].encode()
    if unsigned.query:
        case.suite.url = f"{case.suite.url.partition('?')[0]}?{unsigned.query}".replace(
            mapping["workspaceId"], "mine"
        )
    case.suite.headers = dict(unsigned.headers) if mapping["provider"] == "shopify" else {}
    async with case.serving(tmp_path) as server:
        answer = await deliver(server, case.here(case.delivery(body)))
        assert answer.status == 200, answer.body
        assert not await server.dead_letters()
        events = await server.events()
        assert len(events) == len(mapping["expected_events"])
        for event, expected in zip(events, mapping["expected_events"], strict=True):
            assert_matches(event.document(), expected)
