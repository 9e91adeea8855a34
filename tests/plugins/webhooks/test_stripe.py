# SPDX-License-Identifier: Apache-2.0
"""Stripe: the translation of events, and the signature header."""

from __future__ import annotations

import hmac
import json
from typing import Any

import pytest

from engage.api import PayloadInvalid, SignatureMismatch, Translation
from support.providers import NOW, make, recipient_of, request

SECRET = {"secret": "whsec_x"}


def translate(kind: str | None, thing: dict[str, Any], **fields: Any) -> Translation:
    payload = {
        "id": "evt_1",
        "object": "event",
        "created": 1492774577,
        "type": kind,
        "data": {"object": thing, **fields.pop("data", {})},
        **fields,
    }
    return make("stripe", SECRET).translate(request(json.dumps(payload)))


@pytest.mark.parametrize(
    ("thing", "user"),
    [
        ({"metadata": {"userId": "u"}, "client_reference_id": "r", "customer": "c"}, "u"),
        ({"metadata": {"user_id": 7}, "customer": "c"}, "7"),
        ({"metadata": {}, "client_reference_id": "r", "customer": "c"}, "r"),
        ({"customer": "c"}, "c"),
        ({"customer": {"id": "c", "object": "customer"}}, "c"),
        ({"object": "customer", "id": "c"}, "c"),
    ],
)
def test_an_event_belongs_to_a_user(thing: dict[str, Any], user: str | None) -> None:
    [event] = translate("x.y", thing).events
    assert event.document["userId"] == user


@pytest.mark.parametrize(
    "thing",
    [
        {"customer_email": "a@b.c"},
        {"receipt_email": "a@b.c"},
        {"customer_details": {"email": "a@b.c"}},
        {"billing_details": {"email": "a@b.c"}},
    ],
)
def test_an_event_without_a_customer_belongs_to_the_address(thing: dict[str, Any]) -> None:
    [event] = translate("charge.succeeded", thing).events
    assert "userId" not in event.document
    assert event.recipient is not None
    assert recipient_of(event) == ("email", "a@b.c")


def test_an_event_without_a_user_is_ignored() -> None:
    assert translate("payout.paid", {"id": "po_1", "object": "payout"}).ignored == 1
    thin = {"id": "evt", "object": "v2.core.event", "type": "v1.billing.meter.no_meter_found"}
    assert make("stripe", SECRET).translate(request(json.dumps(thin))).ignored == 1


def test_a_removed_field_of_a_customer_is_null() -> None:
    thing = {
        "id": "cus_1",
        "object": "customer",
        "email": "a@b.c",
        "phone": None,
        "metadata": {"userId": "u", "plan": "pro"},
    }
    [event] = translate("customer.updated", thing, livemode=True).events
    assert event.document == {
        "type": "identify",
        "messageId": "evt_1",
        "userId": "u",
        "timestamp": "2017-04-21T11:36:17.000Z",
        "traits": {"email": "a@b.c", "phone": None, "stripeCustomerId": "cus_1", "plan": "pro"},
        "properties": {"stripeEvent": {"livemode": True}},
    }
    [deleted] = translate("customer.deleted", thing).events
    assert deleted.document["type"] == "track"


def test_fields_of_the_event_and_of_its_object_are_separate() -> None:
    [event] = translate(
        "invoice.paid",
        {"id": "in_1", "customer": "c", "livemode": True},
        data={"previous_attributes": {"paid": False}},
        pending_webhooks=3,
        api_version="2024-06-20",
    ).events
    assert event.document["properties"] == {
        "id": "in_1",
        "customer": "c",
        "livemode": True,
        "stripeEvent": {"api_version": "2024-06-20", "previous_attributes": {"paid": False}},
    }


def test_a_payload_without_a_type_is_invalid() -> None:
    with pytest.raises(PayloadInvalid):
        translate(None, {})


def test_an_odd_signature_beside_a_good_one_is_ignored() -> None:
    now = str(int(NOW))
    good = hmac.new(b"whsec_x", f"{now}.{{}}".encode(), "sha256").hexdigest()
    header = {"Stripe-Signature": f"t={now}, v1=xyz ,v1={good},v0=1"}
    make("stripe", SECRET).verify(request("{}", header), None)


@pytest.mark.parametrize("header", ["t={t}, v1={good}", " t={t},v1={good}", "t={t},v1 ={good}"])
def test_the_header_has_one_spelling(header: str) -> None:
    """As in Stripe's library for Python."""
    now = str(int(NOW))
    good = hmac.new(b"whsec_x", f"{now}.{{}}".encode(), "sha256").hexdigest()
    sent = {"Stripe-Signature": header.format(t=now, good=good)}
    with pytest.raises(SignatureMismatch):
        make("stripe", SECRET).verify(request("{}", sent), None)
