# SPDX-License-Identifier: Apache-2.0
"""``engage webhook-url``, ``webhook-test`` and ``webhook-retry``."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from engage.api import Provider, WebhookRequest
from engage.app import build
from engage.config import Limits, load
from engage.deliveries.delivery import Delivery
from engage.pipeline.normalise import Arrival, normalise
from support.commands import run
from support.exports import registry as plugins
from support.provider_http import public, workspace
from support.providers import segment_delivery, signature_vectors

VECTOR = next(v for v in signature_vectors("stripe") if v["id"] == "stripe-02")
OTHER = {"secret": "whsec_other"}


def config(folder: Path, *workspaces: str, server: str | None = None) -> Path:
    path = folder / "engage.toml"
    storage = '[storage]\nbackend = "sqlite"\n[storage.sqlite]\npath = "engage.db"\n'
    path.write_text(f"[server]\n{server or public()}\n{storage}" + "".join(workspaces))
    return path


@pytest.fixture
def stripe(tmp_path: Path) -> Path:
    return config(tmp_path, workspace("acme", {"stripe": VECTOR["config"]}))


# ---- webhook-url
def test_webhook_url_prints_the_url_of_each_workspace(tmp_path: Path) -> None:
    path = config(
        tmp_path,
        workspace("acme", {"stripe": VECTOR["config"]}),
        workspace("other", {"stripe": OTHER}),
    )
    result = run("webhook-url", "stripe", "--config", path)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    url = "https://events.example.com/api/public/webhooks/stripe?workspaceId="
    assert lines[:2] == [f"acme\t{url}acme", f"other\t{url}other"]
    assert "signing secret" in result.stdout.lower()
    only = run("webhook-url", "stripe", "--config", path, "--workspace", "other")
    assert only.stdout.startswith(f"other\t{url}other\n")


def test_webhook_url_warns_without_a_public_url(tmp_path: Path) -> None:
    path = config(tmp_path, workspace("acme", {"stripe": OTHER}), server="port = 81")
    result = run("webhook-url", "stripe", "--config", path)
    assert result.exit_code == 0
    assert "server.public_url" in result.stderr
    assert "http://127.0.0.1:81/api/public/webhooks/stripe" in result.stdout


def test_webhook_url_prints_the_url_that_an_option_gives(tmp_path: Path) -> None:
    options = {"auth_token": "x", "public_url": "https://hook.example.com/sms"}
    path = config(tmp_path, workspace("acme", {"twilio": options}))
    result = run("webhook-url", "twilio", "--config", path)
    assert result.stdout.startswith("acme\thttps://hook.example.com/sms\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nobody",), "the webhook provider 'nobody' is not installed; installed are: "),
        (("stripe", "--workspace", "x"), "does not contain a workspace 'x'"),
    ],
)
def test_webhook_url_reports_what_is_missing(
    stripe: Path, arguments: tuple[str, ...], said: str
) -> None:
    result = run("webhook-url", *arguments, "--config", stripe)
    assert result.exit_code == 1
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_webhook_url_needs_no_table_and_no_secret(tmp_path: Path) -> None:
    """Some services show their secret only after the URL is entered there."""
    path = config(tmp_path, workspace("acme", {}), workspace("other", {}))
    url = "https://events.example.com/api/public/webhooks/sendgrid?workspaceId="
    result = run("webhook-url", "sendgrid", "--config", path)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(f"acme\t{url}acme\nother\t{url}other\n")
    assert "1. SendGrid > " in result.stdout
    assert "[workspaces.webhooks.sendgrid]" in result.stdout
    assert "Missing in: acme, other\n" in result.stdout
    only = run("webhook-url", "sendgrid", "--config", path, "--workspace", "other")
    assert only.stdout.startswith(f"other\t{url}other\n")
    assert "acme" not in only.stdout
    # A key that is not filled in yet is not an error here, and `check` reports it.
    path = config(
        tmp_path,
        workspace("acme", {"sendgrid": {"verification_key": "to do"}}),
        workspace("other", {}),
    )
    result = run("webhook-url", "sendgrid", "--config", path)
    assert result.stdout.startswith(f"acme\t{url}acme\n\n")
    assert "Missing in" not in result.stdout
    assert "verification_key" in run("check", "--config", path).stderr
    result = run("webhook-url", "sendgrid", "--config", path, "--workspace", "other")
    assert "Missing in: other\n" in result.stdout


def test_every_provider_describes_its_setup(tmp_path: Path) -> None:
    for name, registered in plugins().webhooks.items():
        made: Any = registered.factory
        assert len(made.setup) > 60, name
        assert all(len(line) <= 100 for line in made.setup.splitlines()), name


# ---- webhook-test
def recorded(folder: Path, vector: Mapping[str, Any] = VECTOR, **changes: Any) -> Path:
    path = folder / "delivery.json"
    fields = {"url", "headers", "body", "now"}
    path.write_text(json.dumps({key: vector[key] for key in fields if key in vector} | changes))
    return path


def test_a_recording_may_be_json(stripe: Path, tmp_path: Path) -> None:
    result = run("webhook-test", "stripe", recorded(tmp_path), "--config", stripe)
    assert result.exit_code == 0, result.stderr
    [line] = result.stdout.splitlines()
    document = json.loads(line)
    assert document["workspaceId"] == "acme"
    assert document["source"] == "webhook:stripe"
    assert "verified for workspace acme" in result.stderr
    assert "1 event, 0 ignored, 0 not translated" in result.stderr
    assert not (tmp_path / "engage.db").exists()


#: docs/webhooks.md records a delivery with netcat: the bytes of a connection are a recording.
NETCAT = f"""POST /api/public/webhooks/stripe?workspaceId=acme HTTP/1.1\r
Host: events.example.com\r
Content-Length: {len(VECTOR["raw"])}\r
"""


@pytest.mark.parametrize("line", ["POST /api/public/webhooks/stripe HTTP/1.1\r\n", "", NETCAT])
@pytest.mark.parametrize("end", ["\r\n", "\n"])
def test_a_recording_may_be_raw_http(stripe: Path, tmp_path: Path, line: str, end: str) -> None:
    head = line + "".join(f"{name}: {value}\r\n" for name, value in VECTOR["headers"])
    path = tmp_path / "delivery.http"
    path.write_bytes((head + "\r\n").replace("\r\n", end).encode() + VECTOR["raw"])
    result = run("webhook-test", "stripe", path, "--config", stripe, "--now", VECTOR["now"])
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["workspaceId"] == "acme"
    old = run("webhook-test", "stripe", path, "--config", stripe, "--now", "2030-01-01T00:00:00Z")
    assert old.exit_code == 1
    assert "the webhook signature could not be verified: signed" in old.stderr
    assert not old.stdout


def test_a_recording_with_a_wrong_signature_is_reported(stripe: Path, tmp_path: Path) -> None:
    path = recorded(tmp_path, body=VECTOR["body"] + " ")
    result = run("webhook-test", "stripe", path, "--config", stripe)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        "engage: the webhook signature could not be verified: the signature does not match\n"
    )


def test_a_recording_that_cannot_be_translated_is_reported(tmp_path: Path) -> None:
    path = config(tmp_path, workspace("acme", {"segment": {"secret": "segment-secret"}}))
    body = b'{"type": "track", "userId": "u", "messageId": "m"}'
    file = recorded(
        tmp_path,
        {"headers": segment_delivery(body, "segment-secret").headers, "body_base64": ""},
        body_base64=base64.b64encode(body).decode(),
    )
    result = run("webhook-test", "segment", file, "--config", path)
    assert result.exit_code == 1
    assert "the server would keep the delivery as a dead letter" in result.stderr


def test_the_workspace_may_be_named_by_the_recording(tmp_path: Path) -> None:
    path = config(
        tmp_path,
        workspace("acme", {"stripe": VECTOR["config"]}),
        workspace("other", {"stripe": OTHER}),
    )
    unnamed = run("webhook-test", "stripe", recorded(tmp_path), "--config", path)
    assert unnamed.exit_code == 1
    assert "choose one with --workspace: acme, other" in unnamed.stderr
    url = VECTOR["url"] + "?workspaceId=acme"
    named = run("webhook-test", "stripe", recorded(tmp_path, url=url), "--config", path)
    assert named.exit_code == 0, named.stderr


def test_a_recording_that_names_two_workspaces_is_refused(tmp_path: Path) -> None:
    path = config(tmp_path, workspace("acme", {"stripe": VECTOR["config"]}))
    url, headers = VECTOR["url"] + "?workspaceId=acme", [["df-workspace-id", "other"]]
    file = recorded(tmp_path, url=url, headers=[*VECTOR["headers"], *headers])
    result = run("webhook-test", "stripe", file, "--config", path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "names several workspaces" in result.stderr


def test_a_recipient_becomes_the_anonymous_id_that_the_server_stores(tmp_path: Path) -> None:
    path = config(tmp_path, workspace("acme", {"postmark": {"value": "a long random value"}}))
    body = {"RecordType": "Delivery", "MessageID": "m", "Recipient": "Ann@Example.COM"}
    headers = [["Authorization", "a long random value"]]
    file = recorded(tmp_path, {"headers": headers, "body": json.dumps(body)})
    result = run("webhook-test", "postmark", file, "--config", path)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["anonymousId"] == "email:ann@example.com"


def identify_ann(path: Path) -> None:
    """Store the user ``u1`` with the address ann@example.com."""

    async def fill() -> None:
        app = build(load(path), plugins())
        await app.open()
        try:
            event = {"type": "identify", "userId": "u1", "traits": {"email": "ann@example.com"}}
            await app.store.write([normalise(event, "identify", arrival)])
        finally:
            await app.close()

    arrival = Arrival.of_delivery("acme", "api", received_at=1, limits=Limits())
    asyncio.run(fill())


def test_users_are_looked_up_in_the_storage_on_demand(tmp_path: Path) -> None:
    """Without ``--store`` the answer differs from the server's, and the command says so."""
    path = config(tmp_path, workspace("acme", {"postmark": {"value": "a long random value"}}))
    identify_ann(path)
    body = {"RecordType": "Delivery", "MessageID": "m", "Recipient": "Ann@Example.COM"}
    headers = [["Authorization", "a long random value"]]
    file = recorded(tmp_path, {"headers": headers, "body": json.dumps(body)})
    without = run("webhook-test", "postmark", file, "--config", path)
    assert json.loads(without.stdout)["anonymousId"] == "email:ann@example.com"
    assert "1 event without a user id" in without.stderr
    assert "use --store" in without.stderr
    looked_up = run("webhook-test", "postmark", file, "--config", path, "--store")
    assert looked_up.exit_code == 0, looked_up.stderr
    assert json.loads(looked_up.stdout)["userId"] == "u1"
    assert "--store" not in looked_up.stderr
    # A delivery that names its user needs no look-up.
    named = {**body, "Metadata": {"userId": "u2"}}
    file = recorded(tmp_path, {"headers": headers, "body": json.dumps(named)})
    result = run("webhook-test", "postmark", file, "--config", path)
    assert json.loads(result.stdout)["userId"] == "u2"
    assert "--store" not in result.stderr


def test_a_recording_shows_what_its_reports_change(tmp_path: Path) -> None:
    rules = (
        '[workspaces.unsubscribes.postmark]\naction = "groups"\n'
        'groups = { "broadcast" = "news" }\n'
        '[[workspaces.subscription_groups]]\nid = "news"\nchannel = "email"\ntype = "opt_out"\n'
    )
    options = {"header": "X-Secret", "value": "a long word"}
    path = config(tmp_path, workspace("acme", {"postmark": options}) + rules)
    record = {
        "RecordType": "SpamComplaint",
        "Email": "Ann@example.com",
        "MessageStream": "broadcast",
        "Metadata": {"userId": "u1"},
    }
    recording = tmp_path / "delivery.json"
    recording.write_text(
        json.dumps({"headers": {"X-Secret": "a long word"}, "body": json.dumps(record)})
    )
    result = run("webhook-test", "postmark", recording, "--config", path)
    assert result.exit_code == 0
    assert result.stderr.splitlines()[1:-1] == [
        "unsubscribes u1 from news",
        "suppresses the email address ann@example.com for news (complaint)",
    ]
    assert not (tmp_path / "engage.db").exists()
    # With the store, it shows whether the address is the user's.
    identify_ann(path)
    for address, expected in (
        ("ann@example.com", ["unsubscribes u1 from news"]),
        ("bob@example.com", []),
    ):
        body = json.dumps({**record, "Email": address})
        recording.write_text(json.dumps({"headers": {"X-Secret": "a long word"}, "body": body}))
        result = run("webhook-test", "postmark", recording, "--config", path, "--store")
        assert result.stderr.splitlines()[1:-1] == [
            *expected,
            f"suppresses the email address {address} for news (complaint)",
        ]


@pytest.mark.parametrize("now", ["nan", "inf", "-1", "1e300", "yesterday"])
def test_a_value_that_is_not_a_time_is_wrong_usage(stripe: Path, tmp_path: Path, now: str) -> None:
    result = run("webhook-test", "stripe", recorded(tmp_path), "--config", stripe, "--now", now)
    assert result.exit_code == 2
    assert "is not a time; use for example" in result.stderr


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"no header\n\nbody", b"a: b"])
def test_a_file_that_is_not_a_recording_is_reported(
    stripe: Path, tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "delivery"
    path.write_bytes(content)
    result = run("webhook-test", "stripe", path, "--config", stripe)
    assert result.exit_code == 1
    assert "the recording" in result.stderr
    assert result.exception is None or isinstance(result.exception, SystemExit)


# ---- webhook-retry
def test_webhook_retry_translates_dead_letters_again(tmp_path: Path) -> None:
    path = config(tmp_path, workspace("acme", {"segment": {"secret": "segment-secret"}}))
    assert run("webhook-retry", "--config", path).exit_code == 1  # The store does not exist yet.

    async def fill() -> None:
        app = build(load(path), plugins())
        await app.open()
        try:
            for body in (b"not json", b'{"type": "track", "event": 1, "userId": "u"}'):
                delivery = Delivery(
                    target="/api/public/webhooks/segment",
                    headers=segment_delivery(body, "segment-secret").headers,
                    body=body,
                    arrived_at=time.time(),
                )
                destination = app.deliveries.destination(
                    "segment", delivery.target, delivery.headers
                )
                await app.deliveries.receive(destination, delivery)
        finally:
            await app.close()

    asyncio.run(fill())
    result = run("webhook-retry", "--config", path)
    assert result.exit_code == 1
    assert "0 deliveries translated, 0 events stored" in result.stdout
    assert "2 of 2 deliveries still cannot be translated" in result.stderr

    # A newer version of the provider that understands one of them.
    segment_class: Any = plugins().webhooks["segment"].factory
    original = segment_class.translate

    def patient(self: Provider, request: WebhookRequest) -> Any:
        if request.body.startswith(b"{"):
            fields = json.loads(request.body) | {"event": "one"}
            request = type(request)(
                method="POST",
                headers=[],
                body=json.dumps(fields).encode(),
                url=request.url,
                now=request.now,
            )
        return original(self, request)

    segment_class.translate = patient
    try:
        result = run("webhook-retry", "--config", path, "--provider", "segment")
    finally:
        segment_class.translate = original
    assert "1 delivery translated, 1 event stored" in result.stdout
    assert "1 of 2 deliveries still" in result.stderr
    exported = run("export", "dead-letters", "--config", path)
    assert len(exported.stdout.splitlines()) == 1
    assert run("webhook-retry", "--config", path, "--provider", "stripe").exit_code == 0
