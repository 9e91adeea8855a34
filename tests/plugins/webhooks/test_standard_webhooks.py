# SPDX-License-Identifier: Apache-2.0
"""Standard Webhooks: signatures, secrets, and the paths of the translation."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import pytest

from engage.api import ConfigError, SignatureMismatch, Translation
from engage.webhooks import standard_webhook_key
from support.providers import make, recipient_of, request, request_of, signature_vectors

SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef").decode()
VECTORS = signature_vectors("standard-webhooks")


def translate(payload: Any, options: Mapping[str, Any] | None = None) -> Translation:
    provider = make("standard-webhooks", {"secret": SECRET, **(options or {})})
    return provider.translate(request(json.dumps(payload), {"webhook-id": "msg_1"}))


def test_a_payload_becomes_a_track_event_named_by_its_type() -> None:
    translation = translate(
        {
            "type": "user.created",
            "timestamp": "2024-01-01T01:00:00+01:00",
            "data": {"id": 7, "email": "a@b.c"},
            "version": 2,
        }
    )
    assert translation.events[0].document == {
        "type": "track",
        "event": "user.created",
        "userId": "7",
        "messageId": "msg_1",
        "timestamp": "2024-01-01T00:00:00.000Z",
        "properties": {"id": 7, "email": "a@b.c", "version": 2},
    }


def test_a_payload_without_a_user_id_belongs_to_the_address() -> None:
    [event] = translate({"type": "x", "data": {"email": "a@b.c"}}).events
    assert "userId" not in event.document
    assert recipient_of(event) == ("email", "a@b.c")


def test_a_payload_without_a_user_is_ignored() -> None:
    assert translate({"type": "x", "data": {"n": 1}}).ignored == 1


def test_a_sender_that_uses_svix_may_name_the_headers_so() -> None:
    provider = make("standard-webhooks", {"secret": SECRET})
    for vector in VECTORS:
        own = request_of(vector)
        sent = dataclasses.replace(
            own,
            headers=[(name.lower().replace("webhook-", "svix-"), v) for name, v in own.headers],
        )
        try:
            make("standard-webhooks", vector["config"]).verify(own, None)
        except SignatureMismatch:
            with pytest.raises(SignatureMismatch):
                make("standard-webhooks", vector["config"]).verify(sent, None)
        else:
            make("standard-webhooks", vector["config"]).verify(sent, None)
    body = json.dumps({"type": "x", "data": {"id": "u1"}})
    [event] = provider.translate(request(body, {"Svix-Id": "msg_2"})).events
    assert event.document["messageId"] == "msg_2"


def test_the_paths_are_configurable() -> None:
    [event] = translate({"type": "x", "who": {"key": "u1"}}, {"user_id": ["who.key"]}).events
    assert event.document["userId"] == "u1"


def test_a_time_may_be_in_seconds() -> None:
    [event] = translate({"type": "x", "timestamp": 1700000000, "data": {"id": "u"}}).events
    assert event.document["timestamp"] == "2023-11-14T22:13:20.000Z"
    assert "timestamp" not in event.document["properties"]


def test_a_value_that_is_not_a_time_stays_in_the_properties() -> None:
    [event] = translate({"type": "x", "timestamp": "soon", "data": {"id": "u"}}).events
    assert "timestamp" not in event.document
    assert event.document["properties"]["timestamp"] == "soon"


@pytest.mark.parametrize("secret", ["whsec_", "whsec_c2hvcnQ=", "not base64!"])
def test_a_secret_must_be_base64_of_16_bytes(secret: str) -> None:
    with pytest.raises(ConfigError, match="secret"):
        standard_webhook_key(secret)


@pytest.mark.parametrize(
    ("signatures", "right"),
    [
        ("v1,{other} v1,{good}", True),
        ("v2,? v1a,%% v1,{good}", True),
        ("v1,{good} v1,%%", False),
        ("v1,{good} ", False),
        (" v1,{good}", False),
        ("v1,{other} v1,{other}", False),
        ("V1,{good}", False),
    ],
)
def test_one_of_several_signatures_must_match(signatures: str, right: bool) -> None:
    vector = VECTORS[0]
    good = dict(vector["headers"])["webhook-signature"].partition(",")[2]
    other = "A" * 43 + "="
    sent = signatures.format(good=good, other=other)
    headers = [
        (name, sent if name == "webhook-signature" else value) for name, value in vector["headers"]
    ]
    provider = make("standard-webhooks", vector["config"])
    delivery = dataclasses.replace(request_of(vector), headers=headers)
    if right:
        provider.verify(delivery, None)
    else:
        with pytest.raises(SignatureMismatch):
            provider.verify(delivery, None)
