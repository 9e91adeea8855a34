# SPDX-License-Identifier: Apache-2.0
"""What the server does with a verified delivery: users, writes, dead letters, answers."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Never

import pytest

from engage.api import (
    ConfigError,
    DeadLetter,
    Event,
    Outcome,
    PayloadInvalid,
    StorageUnavailable,
    TranslatedEvent,
    Translation,
    WebhookRequest,
)
from engage.app import build
from engage.config import Config, load
from engage.deliveries.delivery import PATH_HEADER, REDACTED, redacted
from engage.deliveries.receive import translate
from engage.monitoring.metrics import Metrics
from engage.people.requests import erasure_requests
from engage.pipeline.ingest import Ingest
from engage.registry import shared_credentials
from support.exports import registry
from support.provider_http import PUBLIC_URL, deliver, public, toml, workspace
from support.providers import (
    make,
    mandrill_delivery,
    request,
    segment_delivery,
    twilio_delivery,
)
from support.server_inprocess import Serving, serving

KEY = "mandrill-key"
SECRET = "segment-secret"


def hooks(**webhooks: Mapping[str, Any]) -> str:
    return "".join(
        f"[workspaces.webhooks.{name}]\n"
        + "".join(f"{option} = {toml(value)}\n" for option, value in options.items())
        for name, options in webhooks.items()
    )


MANDRILL: dict[str, Any] = {"workspace": hooks(mailchimp={"webhook_key": KEY}), "server": public()}
SEGMENT: dict[str, Any] = {"workspace": hooks(segment={"secret": SECRET, "allow_batch": True})}


def mandrill(*items: Any) -> WebhookRequest:
    """Return a delivery of Mandrill events."""
    return mandrill_delivery(f"{PUBLIC_URL}/api/public/webhooks/mailchimp", KEY, items)


def item(n: int, kind: str = "open", email: str = "a@example.com", **fields: Any) -> dict[str, Any]:
    message = {"email": email, "metadata": fields.pop("metadata", {})}
    return {"event": kind, "_id": f"m{n}", "ts": 1461095246 + n, "msg": message, **fields}


segment = functools.partial(segment_delivery, secret=SECRET)


def batch(*items: Any) -> WebhookRequest:
    raw = [json.dumps(item).encode() for item in items]
    return segment(b"[" + b",".join(raw) + b"]", signed=raw[0])


async def identify(server: Serving, user: str, at: str | None = None, **traits: Any) -> None:
    body = {"userId": user, "traits": traits, "timestamp": at}
    answer = await server.send("/v1/identify", body)
    assert answer.status == 200


async def documents(server: Serving) -> list[dict[str, Any]]:
    """Return the stored events of deliveries."""
    return [event.document() for event in await server.events() if event.origin != "api"]


def provider_of(server: Any, name: str) -> Any:
    """Return the provider of the workspace ``acme``."""
    return server.app.deliveries.destination(name, "/?workspaceId=acme", []).provider


# ---- users
async def test_an_unknown_recipient_becomes_an_anonymous_id(tmp_path: Path) -> None:
    async with serving(tmp_path, **MANDRILL) as server:
        assert (await deliver(server, mandrill(item(1, email=" A@Example.COM ")))).status == 200
        [document] = await documents(server)
        assert document["anonymousId"] == "email:a@example.com"
        assert "userId" not in document


async def test_an_event_belongs_to_the_first_user_with_the_address(tmp_path: Path) -> None:
    """Anyone with a public write key can make a user with the address of another person, and choose
    its timestamp. That must not take the person's deliveries away."""
    async with serving(tmp_path, **MANDRILL) as server:
        await identify(server, "u1", email="A@example.com")
        await identify(server, "u2", email="two@example.com")
        await identify(server, "forged", email="two@example.com", at="1970-01-01T00:00:00Z")
        delivery = mandrill(
            item(1), item(2, email="two@example.com"), item(3, metadata={"userId": "u9"})
        )
        assert (await deliver(server, delivery)).json == {
            "success": True,
            "accepted": 3,
            "ignored": 0,
        }
        first, second, third = await documents(server)
        assert first["userId"] == "u1"
        assert "anonymousId" not in first
        assert second["userId"] == "u2"
        assert third["userId"] == "u9"


async def test_a_user_who_is_identified_later_gets_later_events(tmp_path: Path) -> None:
    async with serving(tmp_path, **MANDRILL) as server:
        await deliver(server, mandrill(item(1)))
        await identify(server, "u1", email="a@example.com")
        await deliver(server, mandrill(item(2)))
        # The first one again: it is a duplicate although the user is known now.
        again = await deliver(server, mandrill(item(1)))
        assert again.json == {"success": True, "accepted": 0, "ignored": 0}
        before, after = await documents(server)
        assert before["anonymousId"] == "email:a@example.com"
        assert after["userId"] == "u1"
        assert not await server.dead_letters()


@pytest.mark.parametrize("path", ["/api/public/webhooks", "/api/webhooks"])
async def test_a_phone_number_finds_its_user(tmp_path: Path, path: str) -> None:
    """The signature covers the URL, so it depends on the path that the provider knows."""
    token = {"auth_token": "token"}
    async with serving(tmp_path, server=public(), workspace=hooks(twilio=token)) as server:
        await identify(server, "u1", phone="+1 (555) 867-5310")
        fields = {"MessageSid": "SM1", "MessageStatus": "failed", "To": "+15558675310"}
        delivery = twilio_delivery(f"{PUBLIC_URL}{path}/twilio", "token", fields)
        assert (await deliver(server, delivery)).status == 200
        [document] = await documents(server)
        assert (document["event"], document["userId"]) == ("SMS Failed", "u1")


async def test_a_payload_cannot_have_the_mark_that_only_engage_sets(tmp_path: Path) -> None:
    async with serving(tmp_path, **SEGMENT) as server:
        event = {
            "type": "track",
            "event": "E",
            "context": {"ip": "::1", "engage": {"foundBy": "x"}},
        }
        for n, who in enumerate(("userId", "anonymousId")):
            await deliver(server, segment({**event, who: "u", "messageId": f"m{n}"}))
        contexts = [document["context"] for document in await documents(server)]
        assert contexts == [{"ip": "::1"}] * 2


async def test_all_recipients_of_a_delivery_are_looked_up_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, **MANDRILL) as server:
        calls: list[tuple[str, str, list[str]]] = []
        find_users = server.app.store.find_users

        async def counted(workspace_id: str, trait: str, values: Sequence[str]) -> Any:
            calls.append((workspace_id, trait, list(values)))
            return await find_users(workspace_id, trait, values)

        monkeypatch.setattr(server.app.store, "find_users", counted)
        items = [item(n, email=f"{n % 2}@example.com") for n in range(600)]
        assert (await deliver(server, mandrill(*items))).json["accepted"] == 600
        assert calls == [("acme", "email", ["0@example.com", "1@example.com"])]


async def test_a_storage_that_cannot_look_up_users_is_503(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, **MANDRILL) as server:

        async def broken(*_: object) -> Never:
            raise StorageUnavailable("no")

        monkeypatch.setattr(server.app.store, "find_users", broken)
        answer = await deliver(server, mandrill(item(1)))
        assert (answer.status, answer.json["code"]) == (503, "storage_unavailable")
        assert int(answer.headers["retry-after"]) >= 5
        assert not await documents(server)


# ---- dead letters
async def test_a_delivery_that_cannot_be_translated_is_a_dead_letter(tmp_path: Path) -> None:
    async with serving(tmp_path, **SEGMENT) as server:
        delivery = segment(
            b'{"type": \xff}', headers=[("Authorization", "Bearer abc"), ("X-Trace", "t1")]
        )
        for _ in range(2):  # the second one is the same letter
            answer = await deliver(server, delivery)
            assert answer.json == {"success": True, "accepted": 0, "ignored": 0}
        [letter] = await server.dead_letters()
        assert letter.item == delivery.body
        assert letter.origin == "segment"
        assert letter.reason == "untranslated"
        assert not letter.truncated
        headers = {name.lower(): value for name, value in letter.headers}
        assert headers["x-trace"] == "t1"
        assert headers["x-signature"] == headers["authorization"] == REDACTED
        assert headers[PATH_HEADER] == "/api/public/webhooks/segment"
        assert not await server.events()


async def test_a_bad_element_does_not_affect_others(tmp_path: Path) -> None:
    async with serving(tmp_path, **SEGMENT) as server:
        good = {"type": "track", "event": "E", "userId": "u", "messageId": "m1"}
        long = {"type": "track", "event": "E", "userId": "u" * 513, "messageId": "m2"}
        delivery = batch(good, 7, long, {**good, "messageId": "m3"})
        for accepted in (2, 0):
            answer = await deliver(server, delivery)
            assert answer.json == {"success": True, "accepted": accepted, "ignored": 0}
        assert [document["messageId"] for document in await documents(server)] == ["m1", "m3"]
        [letter] = await server.dead_letters()
        assert letter.item == delivery.body
        assert {error["pointer"] for error in letter.errors} == {"/1", "/2/userId"}


async def test_an_event_beyond_a_limit_is_a_dead_letter(tmp_path: Path) -> None:
    """Its size when stored, and its depth: the event is level 1, its properties are level 2."""
    limits = "[limits]\nwebhook_event_bytes = 2000\njson_depth = 10\n"
    async with serving(tmp_path, **SEGMENT, config_extra=limits) as server:

        async def send(message_id: str, value: Any) -> None:
            event = {"type": "track", "event": "E", "userId": "u", "messageId": message_id}
            answer = await deliver(server, segment({**event, "properties": {"x": value}}))
            assert answer.status == 200

        await send("0", "")
        room = 2000 - len((await server.events())[0].body)
        await send("1", "y" * room)
        await send("2", "y" * (room + 1))
        await send("3", json.loads("[" * 8 + "]" * 8))
        await send("4", json.loads("[" * 9 + "]" * 9))
        assert [document["messageId"] for document in await documents(server)] == ["0", "1", "3"]
        large, deep = await server.dead_letters()
        assert "limits.webhook_event_bytes" in large.message
        assert "nested too deeply" in deep.message


def test_a_delivery_that_is_nested_too_deeply_is_no_failure_of_the_provider(
    caplog: pytest.LogCaptureFixture,
) -> None:
    provider = make("shopify", {"client_secret": "one"})
    body = b'{"id":1,"email":"a@b.c","line_items":%b%b}' % (b"[" * 900, b"]" * 900)
    translation, problems = translate(
        provider, request(body, {"X-Shopify-Topic": "orders/create"}), 9
    )
    assert not translation.events
    assert ["is nested too deeply" in problem.message for problem in problems] == [True]
    assert not caplog.records


async def test_a_letter_can_be_translated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, **MANDRILL) as server:
        provider = provider_of(server, "mailchimp")
        monkeypatch.setattr(
            provider, "translate", lambda request: (_ for _ in ()).throw(PayloadInvalid("new"))
        )
        await deliver(server, mandrill(item(1), item(2, kind="inbound")))
        monkeypatch.undo()
        [letter] = await server.dead_letters()
        result = await server.app.deliveries.retry(letter)
        assert (result.accepted, result.ignored, result.rejected) == (1, 1, 0)
        [document] = await documents(server)
        assert document["event"] == "Email Opened"
        assert await server.app.store.remove("acme", [letter.id]) == 1


async def test_the_dead_letter_of_a_compressed_delivery_can_be_translated(tmp_path: Path) -> None:
    async with serving(tmp_path, **SEGMENT) as server:
        raw = b'{"type":"track","event":1,"userId":"u"}'
        plain = segment(raw)
        answer = await deliver(
            server,
            request(
                gzip.compress(raw),
                [*plain.headers, ("Content-Encoding", "gzip")],
                url=plain.url,
            ),
        )
        assert answer.status == 200
        [letter] = await server.dead_letters()
        assert gzip.decompress(letter.item) == raw
        assert (await server.app.deliveries.retry(letter)).rejected == 1


async def test_events_without_a_time_get_that_of_their_dead_letter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, **SEGMENT) as server:
        await deliver(server, segment(b"not json"))
        [letter] = await server.dead_letters()
        provider = provider_of(server, "segment")
        document = {"type": "track", "event": "E", "userId": "u", "messageId": "m"}
        translation = Translation(events=[TranslatedEvent(document)])
        monkeypatch.setattr(provider, "translate", lambda request: translation)
        await server.app.deliveries.retry(letter)
        [event] = await server.events()
        assert event.timestamp == letter.received_at < event.received_at
        # Another program wrote it.
        for at in (-1, 9 * 10**15):
            again = dataclasses.replace(letter, received_at=at)
            assert (await server.app.deliveries.retry(again)).rejected == 0


async def test_a_retry_neither_changes_times_nor_conflicts(tmp_path: Path) -> None:
    async with serving(tmp_path, **SEGMENT) as server:
        undated = {"type": "track", "event": "E", "userId": "u", "messageId": "m1"}
        dated = {**undated, "messageId": "m2", "originalTimestamp": "2020-01-01T00:00:00.000Z"}
        await deliver(server, batch(undated, dated, 7))
        [letter] = await server.dead_letters()
        before = await documents(server)
        result = await server.app.deliveries.retry(letter)
        assert (result.accepted, result.duplicates, result.rejected) == (0, 2, 1)
        assert await server.dead_letters() == [letter]
        assert await documents(server) == before
        assert before[1]["timestamp"] == "2020-01-01T00:00:00.000Z"


def test_headers_that_may_be_secret_are_redacted() -> None:
    provider = make("shopify", {"client_secret": "s3cr3t-of-mine"})
    headers = [
        ("X-Shopify-Hmac-SHA256", "abc"),
        ("Authorization", "Basic eDp5"),
        ("Cookie", "a=b"),
        ("X-Webhook-Key", "abc"),
        ("X-Api-Key", "k"),
        ("X-My-Token", "t"),
        ("X-Odd", "prefix s3cr3t-of-mine"),
        ("X-Shopify-Topic", "orders/create"),
    ]
    kept = redacted(headers, provider)
    assert [name for name, value in kept if value != REDACTED] == ["X-Shopify-Topic"]
    assert "s3cr3t-of-mine" not in str(kept)


# ---- batches


async def test_a_delivery_is_503_when_a_later_write_fails_and_complete_when_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, **SEGMENT) as server:
        items = [
            {"type": "track", "event": "E", "userId": "u", "messageId": f"m{n}"}
            for n in range(1200)
        ]
        submit = Ingest.submit
        calls = iter(range(10))

        async def failing(
            self: Ingest, events: Sequence[Event], key: str, **options: Any
        ) -> Sequence[Outcome]:
            if next(calls) == 1:
                raise StorageUnavailable("no")
            return await submit(self, events, key, **options)

        monkeypatch.setattr(Ingest, "submit", failing)
        assert (await deliver(server, batch(*items))).status == 503
        monkeypatch.undo()
        assert (await deliver(server, batch(*items))).status == 200
        assert len(await documents(server)) == 1200


async def test_the_clock_of_a_provider_is_not_corrected(tmp_path: Path) -> None:
    async with serving(tmp_path, **SEGMENT) as server:
        event = {
            "type": "track",
            "event": "E",
            "userId": "u",
            "messageId": "m",
            "originalTimestamp": "2024-01-01T00:00:00.000Z",
            "timestamp": "2024-01-01T00:00:00.400Z",
            "sentAt": "2020-01-01T00:00:00.000Z",
        }
        await deliver(server, segment(event))
        [document] = await documents(server)
        assert document["timestamp"] == "2024-01-01T00:00:00.400Z"
        assert document["originalTimestamp"] == "2024-01-01T00:00:00.000Z"


# ---- answers
async def test_head_and_probe_answer_200(tmp_path: Path) -> None:
    async with serving(tmp_path, **MANDRILL) as server:
        path = "/api/public/webhooks/mailchimp"
        answer = await server.send(path, method="HEAD", key=None)
        assert (answer.status, answer.body) == (200, b"")
        probe = request("mandrill_events=%5B%5D", url=f"{PUBLIC_URL}{path}")
        assert (await deliver(server, probe)).status == 200
        assert (await deliver(server, mandrill())).status == 200
        assert not await server.dead_letters()


async def test_unknown_providers_and_methods_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path, **SEGMENT) as server:
        for path, method, status, code in (
            ("/api/public/webhooks/nobody", "POST", 404, "unknown_provider"),
            ("/api/public/webhooks/nobody", "GET", 404, "unknown_provider"),
            ("/api/public/webhooks/nobody", "HEAD", 404, None),
            ("/api/public/webhooks/segment/x", "POST", 404, "not_found"),
            ("/api/public/webhooks/segment", "GET", 405, "method_not_allowed"),
            ("/api/public/webhooks/resend", "POST", 400, "workspace_required"),
            ("/api/public/webhooks/resend?workspaceId=acme", "POST", 401, "invalid_signature"),
        ):
            answer = await server.send(path, {}, method=method, key=None)
            assert answer.status == status, path
            if code is not None:
                assert answer.json["code"] == code
        encoded = await server.send(
            "/api/public/webhooks/segment", {}, headers={"Content-Encoding": "br"}
        )
        assert encoded.status == 415
    assert "webhook resend refused: it names no workspace, and 0 have this provider" in caplog.text


async def test_an_exception_of_a_provider_never_causes_a_500(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, **SEGMENT) as server:
        provider = provider_of(server, "segment")

        def stumble(*_: object) -> Never:
            raise KeyError("oops")

        delivery = segment({"type": "track", "event": "E", "userId": "u", "messageId": "m"})
        for method, status in (
            ("probe", 200),
            ("needs", 401),
            ("verify", 401),
            ("translate", 200),
            ("reply", 200),
        ):
            monkeypatch.setattr(provider, method, stumble)
            assert (await deliver(server, delivery)).status == status, method
            monkeypatch.undo()
        assert len(await server.dead_letters()) == 1  # of ``translate``


async def test_an_event_with_values_that_json_lacks_is_a_dead_letter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, **SEGMENT) as server:
        provider = provider_of(server, "segment")
        for odd in ({1, 2}, 2**64, "\ud800"):
            document = {"type": "track", "event": "E", "userId": "u", "properties": {"x": odd}}
            events = [TranslatedEvent(document)]
            monkeypatch.setattr(
                provider, "translate", lambda request, e=events: Translation(events=e)
            )
            answer = await deliver(server, segment({"odd": repr(odd)}))
            assert answer.status == 200
        assert len(await server.dead_letters()) == 3
        assert not await server.events()


async def test_a_delete_of_segment_is_noted_for_the_operator(tmp_path: Path) -> None:
    async with serving(tmp_path, **SEGMENT) as server:
        for user_id in ("u", "u", "x" * 512, "x" * 513, ""):
            answer = await deliver(server, segment({"type": "delete", "userId": user_id}))
            assert answer.status == 200
        assert not await server.events()
        assert not await server.dead_letters()
        requests = [one async for one in erasure_requests(server.app.store, "acme", [])]
    noted = {(one.origin, one.user_id) for one in requests}
    assert (len(requests), noted) == (2, {("segment", "u"), ("segment", "x" * 512)})


async def test_deliveries_are_counted(tmp_path: Path) -> None:
    class Counting(Metrics):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[tuple[str, ...]] = []

        def count(self, name: str, *labels: str, by: int = 1) -> None:
            if name == "webhook_deliveries":
                self.seen.append(labels)

    metrics = Counting()
    async with serving(tmp_path, **SEGMENT, metrics=metrics) as server:
        event = {"type": "track", "event": "E", "userId": "u", "messageId": "m"}
        await deliver(server, segment(event))
        await deliver(server, segment({"type": "delete", "userId": "u"}))
        await deliver(server, segment({"type": "other"}))
        await deliver(server, segment({"type": "other", "userId": "u"}))
        await deliver(server, segment(b"x"))
        await deliver(server, segment(event, secret="wrong"))
        await server.send("/api/public/webhooks/nobody", {})
    assert metrics.seen == [
        ("segment", "accepted"),
        ("segment", "ignored"),
        ("segment", "not_understood"),
        ("segment", "untranslated"),
        ("segment", "untranslated"),
        ("segment", "invalid_signature"),
        ("unknown", "unknown_provider"),
    ]


async def test_the_log_has_whether_a_dead_letter_was_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, **SEGMENT) as server:
        bad = segment({"type": "track", "event": "E", "userId": "u" * 513})
        await deliver(server, bad)
        [letter] = await server.dead_letters()
        assert f"webhook segment: kept as dead letter {letter.id}: " in caplog.text
        caplog.clear()

        async def full(letters: Sequence[DeadLetter]) -> list[bool]:
            return [False] * len(letters)

        monkeypatch.setattr(server.app.store, "keep", full)
        answer = await deliver(server, bad)
        assert (answer.status, answer.json["code"]) == (503, "overloaded")
    assert "webhook segment: not acknowledged, it cannot be kept: " in caplog.text
    assert "kept as dead letter" not in caplog.text


async def test_a_refused_delivery_is_logged_without_its_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path, **SEGMENT) as server:
        secret = hashlib.sha256(b"").hexdigest()
        delivery = segment({"type": "track", "mark": "in-the-body"}, secret=secret)
        assert (await deliver(server, delivery)).status == 401
    assert "webhook segment refused" in caplog.text
    assert "in-the-body" not in caplog.text
    assert delivery.values("X-Signature")[0] not in caplog.text


# ---- config
def config(folder: Path, text: str) -> Config:
    path = folder / "engage.toml"
    path.write_text('[storage]\nbackend = "sqlite"\n[storage.sqlite]\npath = "e.db"\n' + text)
    return load(path)


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ({"segment": {"secret": "same"}}, {"segment": {"secret": ["other", "same"]}}),
        ({"segment": {"secret": "same"}}, {"stripe": {"secret": "same"}}),
        (
            {"resend": {"secret": "whsec_MDEyMzQ1Njc4OWFiY2RlZg=="}},
            {"standard-webhooks": {"secret": "MDEyMzQ1Njc4OWFiY2RlZg"}},
        ),
    ],
)
def test_a_secret_of_two_workspaces_is_an_error_at_the_start(
    tmp_path: Path, mine: Mapping[str, Any], theirs: Mapping[str, Any]
) -> None:
    text = workspace("one", mine) + workspace("two", theirs)
    table = rf"\[workspaces\.webhooks\.{next(iter(theirs))}\] of the workspace 'two'"
    with pytest.raises(ConfigError, match=f"{table} has the same secret"):
        build(config(tmp_path, text), registry())


def test_a_workspace_may_use_a_secret_twice() -> None:
    provider = make("segment", {"secret": "x"})
    assert shared_credentials({"a": {"one": provider}, "b": {"one": provider}}) == []
    [problem] = shared_credentials({"a": {"one": provider, "two": provider}})
    assert "'one'" in problem
    assert "'two'" in problem


@pytest.mark.parametrize("provider", ["mailchimp", "twilio"])
def test_a_provider_that_signs_the_url_needs_a_public_url(tmp_path: Path, provider: str) -> None:
    option = {"mailchimp": "webhook_key", "twilio": "auth_token"}[provider]
    with pytest.raises(ConfigError, match=r"server\.public_url"):
        build(config(tmp_path, workspace("one", {provider: {option: "x"}})), registry())
    own = {option: "x", "public_url": "https://other.example.com/hook"}
    build(config(tmp_path, workspace("one", {provider: own})), registry())


@pytest.mark.parametrize("secret", ["", [], [""], "whsec_c2hvcnQ="])
def test_an_empty_or_short_secret_is_an_error_at_the_start(tmp_path: Path, secret: Any) -> None:
    with pytest.raises(ConfigError, match="secret"):
        build(config(tmp_path, workspace("one", {"resend": {"secret": secret}})), registry())
