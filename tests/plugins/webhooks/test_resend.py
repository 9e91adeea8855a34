# SPDX-License-Identifier: Apache-2.0
"""Translation of Resend's events."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import pytest

from engage.api import PayloadInvalid, SignatureMismatch, TranslatedEvent, Translation
from support.providers import make, recipient_of, request, request_of, signature_vectors

SECRET = {"secret": "whsec_MDEyMzQ1Njc4OWFiY2RlZg=="}


def translate(kind: Any, headers: Mapping[str, str] | None = None, **data: Any) -> Translation:
    payload = {
        "type": kind,
        "created_at": "2023-09-28T17:21:35.257Z",
        "data": {"email_id": "e1", "to": ["To <to@example.org>"], **data},
    }
    sent = {"svix-id": "msg_1"} if headers is None else headers
    return make("resend", SECRET).translate(request(json.dumps(payload), sent))


def event(kind: Any, headers: Mapping[str, str] | None = None, **data: Any) -> TranslatedEvent:
    [translated] = translate(kind, headers, **data).events
    return translated


@pytest.mark.parametrize(
    ("bounce", "expected"),
    [
        ({"type": "Permanent", "subType": "General"}, "hard"),
        ({"type": "Transient"}, "soft"),
        ({"type": "Undetermined"}, "undetermined"),
        ({}, None),
        ("text", None),
    ],
)
def test_bounces_are_told_apart(bounce: Any, expected: str | None) -> None:
    document = event("email.bounced", bounce=bounce).document
    assert document["event"] == "Email Bounced"
    assert document["properties"].get("bounceType") == expected
    assert document["properties"]["bounce"] == bounce


@pytest.mark.parametrize(
    "tags",
    [
        {"userId": "u1", "plan": "pro"},
        [{"name": "userId", "value": "u1"}, {"name": "plan", "value": "pro"}],
    ],
)
def test_tags_are_an_object_or_a_list(tags: Any) -> None:
    document = event("email.opened", tags=tags).document
    assert document["userId"] == "u1"
    assert document["properties"]["plan"] == "pro"
    assert "userId" not in document["properties"]


def test_a_tag_does_not_replace_a_field_of_resend() -> None:
    document = event("email.opened", subject="Hi", tags={"subject": "other"}).document
    assert document["properties"]["subject"] == "Hi"
    assert document["properties"]["tags"] == {"subject": "other"}


def test_the_recipient_is_the_address_alone() -> None:
    translated = event("email.delivered")
    assert translated.document["properties"]["email"] == "to@example.org"
    assert recipient_of(translated) == ("email", "to@example.org")


def test_the_time_is_that_of_the_event() -> None:
    document = event("email.delivered", created_at="2020-01-01T00:00:00Z").document
    assert document["timestamp"] == "2023-09-28T17:21:35.257Z"
    assert document["properties"]["created_at"] == "2020-01-01T00:00:00Z"


def test_the_message_id_is_that_of_the_delivery() -> None:
    assert event("email.opened").document["messageId"] == "msg_1"
    assert event("email.opened", {"webhook-id": "msg_2"}).document["messageId"] == "msg_2"
    made = event("email.opened", {}).document["messageId"]
    assert made == event("email.opened", {}).document["messageId"]
    assert made != event("email.clicked", {}).document["messageId"]


@pytest.mark.parametrize("kind", ["contact.created", "domain.updated", "email.scheduled", 7, None])
def test_other_types_are_ignored(kind: Any) -> None:
    assert translate(kind).ignored == 1


def test_a_payload_without_data_is_invalid() -> None:
    with pytest.raises(PayloadInvalid):
        make("resend", SECRET).translate(request('{"type": "email.sent", "data": []}'))


def test_the_svix_headers_take_precedence() -> None:
    vector = signature_vectors("resend")[0]
    provider = make("resend", vector["config"])
    delivery = request_of(vector)
    decoys = [("webhook-id", "x"), ("webhook-timestamp", "1"), ("webhook-signature", "v1,AAAA")]
    provider.verify(dataclasses.replace(delivery, headers=[*decoys, *delivery.headers]), None)
    renamed = [(name.replace("svix", "webhook"), value) for name, value in delivery.headers]
    decoys = [(name.replace("webhook", "svix"), value) for name, value in decoys]
    with pytest.raises(SignatureMismatch):
        provider.verify(dataclasses.replace(delivery, headers=[*decoys, *renamed]), None)
