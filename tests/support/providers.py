# SPDX-License-Identifier: Apache-2.0
"""Webhook providers without a server: make one, make requests to it, and what was recorded.

``tests/data`` has recorded signatures (:data:`VECTORS`) and recorded translations
(:data:`MAPPINGS`) of every provider.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hmac
import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import jsonschema

from engage.api import (
    Provider,
    ProviderContext,
    ProviderFactory,
    TranslatedEvent,
    WebhookRequest,
)

DATA = Path(__file__).parent.parent / "data"

#: The clock of vectors that have none.
NOW = 1_700_000_000.0


@dataclasses.dataclass(frozen=True)
class Registered:
    """What a provider registers."""

    factory: ProviderFactory
    schema: Mapping[str, Any]


@functools.cache
def registered(provider: str) -> Registered:
    """Return what the module of a built-in provider registers under this name.

    Its schema is valid."""
    module = importlib.import_module(f"engage_plugins.{provider.replace('-', '_')}")
    found: dict[str, Registered] = {}
    module.engage_register_webhook(
        lambda name, factory, schema: found.update({name: Registered(factory, schema)})
    )
    jsonschema.Draft202012Validator.check_schema(found[provider].schema)
    return found[provider]


def make(
    provider: str, options: Mapping[str, Any], *, url: str = "https://ingest.example.com/x"
) -> Provider:
    """Make a provider from options that its schema allows."""
    found = registered(provider)
    jsonschema.Draft202012Validator(found.schema).validate(options)
    parts = urlsplit(url)
    context = ProviderContext(workspace_id="acme", public_url=f"{parts.scheme}://{parts.netloc}")
    return found.factory(options, context)


@functools.cache
def signature_vectors(provider: str) -> list[dict[str, Any]]:
    """Return the vectors of the provider, with ``raw`` (bytes) and ``now`` filled in."""
    vectors = json.loads((DATA / "webhook_signatures.json").read_bytes())
    found = [vector for vector in vectors if vector["provider"] == provider]
    for vector in found:
        body = vector["body"]
        vector["raw"] = (
            body.encode() if body is not None else base64.b64decode(vector["body_base64"])
        )
        vector.setdefault("now", NOW)
    return found


@functools.cache
def mappings(provider: str) -> list[dict[str, Any]]:
    """Return the recorded translations of the provider."""
    document = json.loads((DATA / "webhook_mappings.json").read_bytes())
    return [mapping for mapping in document if mapping["provider"] == provider]


#: All recorded signatures, and all recorded translations.
VECTORS = [
    vector
    for provider in sorted(
        {v["provider"] for v in json.loads((DATA / "webhook_signatures.json").read_bytes())}
    )
    for vector in signature_vectors(provider)
]
MAPPINGS = [
    mapping
    for provider in sorted(
        {m["provider"] for m in json.loads((DATA / "webhook_mappings.json").read_bytes())}
    )
    for mapping in mappings(provider)
]


def request(
    body: bytes | str,
    headers: Mapping[str, str] | Sequence[tuple[str, str]] | None = None,
    *,
    url: str = "https://ingest.example.com/api/public/webhooks/x",
    method: str = "POST",
    now: float = NOW,
) -> WebhookRequest:
    """Make a request like the core."""
    pairs = list(headers.items()) if isinstance(headers, Mapping) else list(headers or ())
    raw = body.encode() if isinstance(body, str) else body
    return WebhookRequest(method=method, headers=pairs, body=raw, url=url, now=now)


def request_of(vector: Mapping[str, Any]) -> WebhookRequest:
    """Make the request of a signature vector."""
    # Headers are sent as bytes; the core decodes them as Latin-1.
    headers = [(name, value.encode("utf-8").decode("latin-1")) for name, value in vector["headers"]]
    return request(
        vector["raw"],
        headers,
        url=vector["url"],
        method=vector["method"],
        now=vector["now"],
    )


def delivery_of(provider: str, payload: Any) -> WebhookRequest:
    """Wrap a payload as the provider does."""
    if provider == "mailchimp":
        return request(urlencode({"mandrill_events": json.dumps(payload)}))
    if provider == "twilio":
        query = urlencode(payload["query"])
        return request(urlencode(payload["form"]), url=f"https://ingest.example.com/x?{query}")
    if provider == "shopify":
        return request(json.dumps(payload["body"]), payload["headers"])
    if provider == "amazon-ses":
        envelope = {
            "Type": "Notification",
            "MessageId": "22b80b92-fdea-4c2c-8f9d-bdfb0c7bf324",
            "TopicArn": "arn:aws:sns:us-east-1:123456789012:ses-events",
            "Message": json.dumps(payload),
            "Timestamp": "2024-01-01T00:00:00.000Z",
        }
        return request(json.dumps(envelope))
    return request(json.dumps(payload), {"svix-id": "msg_1"})


def mandrill_delivery(url: str, key: str, items: Sequence[Any]) -> WebhookRequest:
    """Make a delivery of Mandrill events to a URL."""
    value = json.dumps(items)
    signed = hmac.new(key.encode(), f"{url}mandrill_events{value}".encode(), "sha1").digest()
    headers = {"X-Mandrill-Signature": base64.b64encode(signed).decode(), "X-Trace": "t1"}
    return request(urlencode({"mandrill_events": value}), headers, url=url)


def twilio_delivery(url: str, token: str, fields: Mapping[str, str]) -> WebhookRequest:
    """Make a delivery of Twilio to a URL."""
    signed = url + "".join(name + fields[name] for name in sorted(fields))
    signature = base64.b64encode(hmac.new(token.encode(), signed.encode(), "sha1").digest())
    return request(urlencode(fields), {"X-Twilio-Signature": signature.decode()}, url=url)


def segment_delivery(
    body: Any,
    secret: str,
    *,
    signed: bytes | None = None,
    headers: Sequence[tuple[str, str]] = (),
    url: str = "https://events.example.com/api/public/webhooks/segment",
) -> WebhookRequest:
    """Make a delivery of Segment.

    :param body: bytes as they are, anything else as JSON.
    :param signed: what is signed, if it is not the body.
    """
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    signature = hmac.new(secret.encode(), signed or raw, "sha1").hexdigest()
    return request(raw, [("X-Signature", signature), *headers], url=url)


def recipient_of(event: TranslatedEvent) -> tuple[str, str]:
    """Return the trait and the value that the event's user is looked up by."""
    assert event.recipient is not None
    return event.recipient.trait, event.recipient.value


def assert_matches(got: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Compare an event with a recorded one.

    ``properties``, ``context`` and ``traits`` must have at least the recorded members; every other
    recorded field must be equal."""
    for key, value in expected.items():
        if key in ("properties", "context", "traits"):
            for name, member in value.items():
                assert got[key].get(name) == member, f"{key}.{name}"
        else:
            assert got.get(key) == value, key
