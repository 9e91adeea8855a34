# SPDX-License-Identifier: Apache-2.0
"""Customer.io: the translation of reporting webhooks, and the time window of signatures."""

from __future__ import annotations

import hmac
import json
from typing import Any

import pytest

from engage.api import PayloadInvalid, SignatureMismatch, Translation
from support.providers import NOW, make, recipient_of, request

KEY = {"signing_key": "key"}


def translate(kind: str, metric: str, **data: Any) -> Translation:
    payload = {
        "object_type": kind,
        "metric": metric,
        "event_id": "01E",
        "timestamp": 1585250305,
        "data": {"customer_id": "7", **data},
    }
    return make("customerio", KEY).translate(request(json.dumps(payload)))


@pytest.mark.parametrize(
    ("kind", "metric", "name"),
    [
        ("email", "sent", "Email Sent"),
        ("email", "delivered", "Email Delivered"),
        ("email", "opened", "Email Opened"),
        ("email", "clicked", "Email Link Clicked"),
        ("email", "bounced", "Email Bounced"),
        ("email", "deferred", "Email Delayed"),
        ("email", "spammed", "Email Marked as Spam"),
        ("email", "unsubscribed", "Email Unsubscribed"),
        ("sms", "failed", "SMS Failed"),
        ("sms", "clicked", "SMS Link Clicked"),
        ("push", "opened", "Push Opened"),
        ("slack", "sent", "Slack Message Sent"),
        ("SMS", "sent", "SMS Sent"),
        ("webhook", "attempted", "Webhook Message Attempted"),
        ("customer", "subscribed", "Customer Subscribed"),
        (
            "customer",
            "cio_subscription_preferences_changed",
            "Customer Subscription Preferences Changed",
        ),
        ("email", "human_opened", "Email Human Opened"),
        ("carrier_pigeon", "got_lost", "Carrier Pigeon Got Lost"),
    ],
)
def test_an_event_gets_its_name(kind: str, metric: str, name: str) -> None:
    [event] = translate(kind, metric).events
    assert event.document["event"] == name


def test_an_event_gets_its_fields() -> None:
    [event] = translate(
        "email",
        "clicked",
        identifiers={"id": "9", "email": "a@b.c", "cio_id": "c1"},
        delivery_id="d",
        subject="Hi",
        href="https://example.com",
        link_id=3,
        failure_message="no",
        trigger_event_id=None,
    ).events
    assert event.document == {
        "type": "track",
        "event": "Email Link Clicked",
        "messageId": "01E",
        "userId": "9",
        "timestamp": "2020-03-26T19:18:25.000Z",
        "properties": {
            "eventId": "01E",
            "link": {"url": "https://example.com", "id": 3},
            "deliveryId": "d",
            "emailSubject": "Hi",
            "reason": "no",
        },
        "context": {"traits": {"email": "a@b.c", "cioId": "c1"}},
    }


def test_an_event_without_an_id_belongs_to_the_recipient() -> None:
    [mail] = translate("email", "sent", customer_id=None, recipient="A@b.c").events
    assert recipient_of(mail) == ("email", "A@b.c")
    [sms] = translate("sms", "sent", customer_id="", recipient="+15551234567").events
    assert recipient_of(sms)[0] == "phone"
    assert translate("push", "sent", customer_id=None, recipient="token").ignored == 1


def test_a_profile_without_id_and_address_has_customer_ios_id() -> None:
    nobody = {"id": None, "email": None, "cio_id": "a3000001"}
    [event] = translate("email", "bounced", customer_id="", identifiers=nobody).events
    assert event.document["anonymousId"] == "customerio:a3000001"
    [event] = translate("email", "bounced", identifiers=nobody).events
    assert event.document["userId"] == "7"
    assert "anonymousId" not in event.document


@pytest.mark.parametrize("changes", [{"data": []}, {"metric": None}, {"object_type": {}}])
def test_a_payload_without_a_required_field_is_invalid(changes: dict[str, Any]) -> None:
    payload = {"object_type": "email", "metric": "sent", "data": {}, **changes}
    with pytest.raises(PayloadInvalid):
        make("customerio", KEY).translate(request(json.dumps(payload)))


def test_the_window_can_be_switched_off() -> None:
    signature = hmac.new(b"key", b"v0:1:{}", "sha256").hexdigest()
    old = request("{}", {"X-CIO-Timestamp": "1", "X-CIO-Signature": signature}, now=NOW)
    make("customerio", {**KEY, "tolerance": 0}).verify(old, None)
    with pytest.raises(SignatureMismatch):
        make("customerio", KEY).verify(old, None)


def test_a_value_that_is_not_a_time_stays_in_the_properties() -> None:
    payload = {
        "object_type": "email",
        "metric": "sent",
        "timestamp": "abc",
        "data": {"customer_id": "7"},
    }
    [event] = make("customerio", KEY).translate(request(json.dumps(payload))).events
    assert "timestamp" not in event.document
    assert event.document["properties"] == {"timestamp": "abc"}
