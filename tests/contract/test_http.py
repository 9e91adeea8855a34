# SPDX-License-Identifier: Apache-2.0
"""HTTP apart from events: paths, methods, health, limits, shutdown.

``test_corpus.py`` has CORS, request ids, log lines and counts.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from engage.api import Kind, StorageUnavailable, Subject
from engage.handlers.operations import FORM, OPERATIONS, allowed_at
from engage.subscriptions.links import subscription_hash
from support.server_inprocess import Valve, serving
from support.server_process import KEY, SECRET
from support.waiting import eventually

TRACK = "/api/public/apps/track"
SUBSCRIPTIONS = "/api/public/subscription-management/user-subscriptions"
BODY = {"userId": "u", "event": "E", "messageId": "m"}
GROUP = """[[workspaces.subscription_groups]]
id = "news"
name = "News"
channel = "email"
type = "opt_in"
"""
ORIGIN = {"Origin": "https://shop.example.com"}
#: Every path with its operation.
ROUTES = [(path, operation) for operation in OPERATIONS for path in operation.paths]


def concrete(path: str) -> str:
    """Return a path of the table with a value in place of its braces."""
    return re.sub(r"\{.*?\}", "stripe", path)


# ----------------------------------------------------------------------------- paths and methods
UNKNOWN_PATHS = (
    *("/", "/v1", "/v1/", "/v1/track/", "/v1/Track", "//v1//track", "/v1/../v1/track"),
    *("/v1/%74rack", "/v1/track%00", "/api/public/apps/", "/api/public/apps/delete"),
    *("/api/public/webhooks", "/api/public/webhooks/", "/api/public/webhooks/a/b"),
    *("/favicon.ico", "/metrics", "/x" * 1000),
)


async def test_an_unknown_path_is_404(tmp_path: Path) -> None:
    """With any method, with a body or without."""
    methods = ("GET", "POST", "PUT", "DELETE", "PATCH", "BREW", "PROPFIND", "OPTIONS")
    async with serving(tmp_path) as server, await server.connect() as client:
        for path in UNKNOWN_PATHS:
            for method in methods:
                body = BODY if method in ("POST", "PUT") else None
                answer = await server.send(path, body, method=method, client=client)
                assert (path, answer.status, answer.json["code"]) == (path, 404, "not_found")
            answer = await server.send(path, method="HEAD", client=client)
            assert (answer.status, answer.body) == (404, b"")


async def test_a_wrong_method_is_405(tmp_path: Path) -> None:
    """With ``Allow``, on every route, for methods of HTTP and others."""
    async with serving(tmp_path) as server, await server.connect() as client:
        for pattern, operation in ROUTES:
            for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "TRACE", "BREW", "M-SEARCH"):
                if method in allowed_at(pattern):
                    continue
                path = concrete(pattern)
                answer = await server.send(path, b"{}", method=method, client=client)
                assert (path, answer.status) == (path, 405)
                if not operation.error_pages:
                    assert answer.json["code"] == "method_not_allowed"
                assert answer.headers["allow"] == ", ".join(allowed_at(pattern))


async def test_options_is_answered_everywhere(tmp_path: Path) -> None:
    """On every route, and for the server as a whole."""
    async with serving(tmp_path) as server, await server.connect() as client:
        for pattern, _ in ROUTES:
            path = concrete(pattern)
            answer = await server.send(path, method="OPTIONS", key=None, client=client)
            assert (path, answer.status) == (path, 204)
            assert answer.headers["allow"] == ", ".join(allowed_at(pattern))
            assert "content-type" not in answer.headers
        answer = await server.send("*", method="OPTIONS", key=None, client=client)
        assert answer.status == 204
        assert "POST" in answer.headers["allow"]


# -------------------------------------------------------------------------------------- failures
async def test_a_storage_that_is_down_is_503(tmp_path: Path) -> None:
    """With a random ``Retry-After``; nothing is acknowledged, and later the server works again."""
    valve = Valve("write")
    async with serving(tmp_path, meddle=valve) as server:
        valve.error = StorageUnavailable("gone: /secret/path")
        answers = [await server.track(messageId=f"m{number}") for number in range(12)]
        waits = {int(answer.headers["retry-after"]) for answer in answers}
        assert {answer.status for answer in answers} == {503}
        assert {answer.json["code"] for answer in answers} == {"storage_unavailable"}
        assert min(waits) >= 5
        assert max(waits) <= 30
        assert len(waits) > 1
        assert "secret" not in answers[0].body.decode()
        valve.error = None
        assert (await server.track(messageId="m0")).status == 200
        assert [event.message_id for event in await server.events()] == ["m0"]


async def test_an_exception_is_500(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer has the usual shape; the log has the exception and the request id."""

    async def crash(*_: object, **__: object) -> None:
        raise ZeroDivisionError("secret inside")

    async with serving(tmp_path) as server, await server.connect() as client:
        monkeypatch.setattr("engage.pipeline.pipeline.Pipeline.event", crash)
        path = f"{TRACK}?writeKey={KEY}"
        answer = await server.send(path, BODY, headers=ORIGIN, client=client)
        assert (answer.status, answer.json["code"]) == (500, "internal_error")
        assert "secret" not in answer.body.decode()
        assert answer.headers["access-control-allow-origin"] == ORIGIN["Origin"]
        assert (await server.send("/healthz", method="GET", client=client)).status == 200
    record = next(record for record in caplog.records if record.exc_info)
    assert "ZeroDivisionError" in caplog.text
    assert record.requestId == answer.json["requestId"]  # type: ignore[attr-defined]
    assert KEY not in caplog.text


async def test_a_request_too_many_is_refused(tmp_path: Path) -> None:
    """When all requests are busy, a new one gets 503; idle connections stay."""
    valve = Valve("write")
    limit = "max_connections = 2\n"
    async with serving(tmp_path, server=limit, meddle=valve) as server:
        clients = [await server.connect() for _ in range(3)]
        assert (await server.track(clients[2])).status == 200
        valve.gate.clear()
        answers = [asyncio.create_task(server.track(client)) for client in clients[:2]]
        listener = server.app.listener
        assert listener is not None
        await eventually(lambda: sum(one.serving for one in listener.connections) == 2)
        answer = await server.send(TRACK, BODY, headers=ORIGIN)
        assert (answer.status, answer.json["code"]) == (503, "overloaded")
        assert 1 <= int(answer.headers["retry-after"]) <= 5
        assert answer.headers["access-control-allow-origin"] == ORIGIN["Origin"]
        valve.gate.set()
        for waiting in answers:
            assert (await waiting).status == 200
        assert (await server.track()).status == 200
        for client in clients:
            await client.__aexit__()


# ---------------------------------------------------------------------------- health and the end
async def test_the_server_is_ready_while_the_storage_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not ready after ten seconds without an answer; it is always alive."""
    valve = Valve("check")
    async with serving(tmp_path, meddle=valve) as server:
        now = 1000.0
        monkeypatch.setattr(server.app.readiness, "_clock", lambda: now)
        server.app.readiness.alive()

        async def ready() -> int:
            assert (await server.send("/healthz", method="GET", key=None)).status == 200
            answer = await server.send("/readyz", method="GET", key=None)
            if answer.status != 200:
                assert answer.json["code"] == "storage_unavailable"
                assert 5 <= int(answer.headers["retry-after"]) <= 30
            return answer.status

        valve.error = StorageUnavailable("gone")
        assert await ready() == 200
        now += 9.0
        assert await ready() == 200
        # A stored event proves that the storage works.
        assert (await server.track()).status == 200
        now += 9.0
        assert await ready() == 200
        now += 2.0
        assert await ready() == 503
        valve.error = None
        assert await ready() == 200


# --------------------------------------------------------------------------------- subscriptions
async def test_a_subscription_change_is_applied(tmp_path: Path) -> None:
    """With the hash of a test vector and no write key; every wrong credential gets the same 401."""
    async with serving(tmp_path, config_extra=GROUP) as server:
        await server.send("/v1/identify", {"userId": "u", "traits": {"email": "ann@example.com"}})
        change: dict[str, Any] = {
            "workspaceId": "acme",
            "identifier": "ann@example.com",
            "identifierKey": "email",
            "hash": subscription_hash(
                SECRET,
                subject=Subject(Kind.USER, "u"),
                workspace_id="acme",
                identifier="ann@example.com",
                identifier_key="email",
            ),
            "changes": {"news": True},
        }

        async def put(**changed: Any) -> Any:
            return await server.send(SUBSCRIPTIONS, {**change, **changed}, method="PUT", key=None)

        answer = await put()
        assert (answer.status, answer.json) == (
            200,
            {"success": True, "subscriptions": {"news": True}},
        )
        wrong = [
            await put(hash="0" * 64),
            await put(workspaceId="other"),
            await put(identifier="nobody@example.com"),
            await put(identifierKey="phone"),
        ]
        assert {(one.status, one.json["code"]) for one in wrong} == {(401, "invalid_user_hash")}
        assert len({one.json["message"] for one in wrong}) == 1
        assert all("www-authenticate" not in one.headers for one in wrong)
        for media_type in (FORM, f"{FORM.title()} ; charset=UTF-8"):
            for news in (False, True):
                fields = {**change, "changes[news]": str(news).lower()}
                del fields["changes"]
                answer = await server.send(
                    SUBSCRIPTIONS,
                    urlencode(fields).encode(),
                    method="PUT",
                    headers={"Content-Type": media_type},
                    key=None,
                )
                assert (answer.status, answer.json["subscriptions"]) == (200, {"news": news})
        answer = await server.send(SUBSCRIPTIONS, b"changes[news]=1", method="PUT", key=None)
        assert (answer.status, answer.json["code"]) == (400, "invalid_json")
        answer = await put(changes={"news": True, "nothing": False})
        assert (answer.status, answer.json["code"]) == (400, "unknown_subscription_group")
        assert "nothing" in answer.json["message"]
        answer = await put(changes={})
        assert answer.status in (200, 400)


@pytest.mark.parametrize(
    ("settings", "forwarded", "address"),
    [
        ("", "203.0.113.9, 192.0.2.7", ""),
        ("keep", "203.0.113.9, 192.0.2.7", "127.0.0.1"),
        ("keep proxied", "203.0.113.9, 192.0.2.7", "192.0.2.7"),
        ("keep proxied", "203.0.113.9, ::ffff:192.0.2.7", "192.0.2.7"),
        ("keep proxied", "203.0.113.9, unknown", ""),
    ],
)
async def test_the_history_says_from_where_a_change_came(
    tmp_path: Path, settings: str, forwarded: str, address: str
) -> None:
    workspace = "keep_addresses = true" if "keep" in settings else ""
    proxies = 'trusted_proxies = ["127.0.0.0/8"]' if "proxied" in settings else ""
    async with serving(tmp_path, server=proxies, workspace=workspace, config_extra=GROUP) as server:
        signed: dict[str, Any] = {
            "subject": Subject(Kind.USER, "u"),
            "workspace_id": "acme",
            "identifier": "u",
        }
        change = {
            "workspaceId": "acme",
            "identifier": "u",
            "identifierKey": "id",
            "hash": subscription_hash(SECRET, **signed, identifier_key="id"),
            "changes": {"news": True},
        }
        headers = {"User-Agent": "Mozilla/5.0", "X-Forwarded-For": forwarded}
        await server.send(SUBSCRIPTIONS, change, method="PUT", key=None, headers=headers)
        store: Any = server.app.store
        (record,) = (
            await store.history("acme", Subject(Kind.USER, "u"), after=None, limit=9)
        ).items
    assert (record.how, record.user_agent, record.address) == ("api", "Mozilla/5.0", address)
    assert record.secret == hashlib.sha256(SECRET.encode()).hexdigest()[:8]


async def test_a_proxy_that_does_not_name_its_clients_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def lines() -> list[str]:
        found = [line.getMessage() for line in caplog.records]
        return [line for line in found if "X-Forwarded-For" in line]

    async with serving(tmp_path, server='trusted_proxies = ["127.0.0.1"]') as server:
        await server.send("/v1/track", {}, key="Bearer no", headers={"X-Forwarded-For": "1.2.3.4"})
        assert lines() == []
        for _ in range(2):
            answer = await server.send("/v1/track", {}, key="Bearer no")
            assert answer.status == 401
    assert len(lines()) == 1
    caplog.clear()
    async with serving(tmp_path) as server:
        await server.send("/v1/track", {}, key="Bearer no")
    assert lines() == []
