# SPDX-License-Identifier: Apache-2.0
"""Translation of Shopify's topics."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engage.api import PayloadInvalid, Translation
from support.each import each
from support.providers import make, recipient_of, request

SECRET = {"client_secret": "x"}
ORDER = {"id": 1, "created_at": "2024-01-01T00:00:00Z", "customer": {"id": 2}}


def translate(topic: str, body: Any, **headers: str) -> Translation:
    sent = {"X-Shopify-Topic": topic, "X-Shopify-Webhook-Id": "w1", **headers}
    return make("shopify", SECRET).translate(request(json.dumps(body), sent))


@pytest.mark.parametrize(
    ("topic", "name"),
    [
        ("orders/updated", "Order Updated"),
        ("orders/cancelled", "Order Cancelled"),
        ("orders/paid", "Order Paid"),
        ("orders/partially_fulfilled", "Order Partially Fulfilled"),
        ("checkouts/create", "Checkout Started Webhook"),
        ("checkouts/update", "Checkout Updated"),
        ("draft_orders/create", "Draft Order Created"),
        ("customers/data_request", "Customer Data Requested"),
        ("customers/redact", "Customer Redaction Requested"),
    ],
)
def test_an_event_gets_its_name(topic: str, name: str) -> None:
    [event] = translate(topic, ORDER).events
    assert event.document["event"] == name
    assert event.document["userId"] == "2"
    assert event.document["messageId"] == "w1"


def test_a_customer_is_identified() -> None:
    body = {
        "id": 706405506930370084,
        "email": "bob@biller.com",
        "first_name": "Bob",
        "note": None,
        "default_address": {"id": 706405506930370084, "city": "Ottawa"},
        "updated_at": "2024-01-02T00:00:00-05:00",
    }
    headers = {"X-Shopify-Shop-Domain": "demo.myshopify.com"}
    [event] = translate("customers/update", body, **headers).events
    assert event.document == {
        "type": "identify",
        "messageId": "w1",
        "userId": "706405506930370084",
        "timestamp": "2024-01-02T05:00:00.000Z",
        "traits": {
            "email": "bob@biller.com",
            "firstName": "Bob",
            "note": None,
            "default_address": {"id": "706405506930370084", "city": "Ottawa"},
            "updated_at": "2024-01-02T00:00:00-05:00",
        },
        "context": {"shop": "demo.myshopify.com", "topic": "customers/update"},
    }


@pytest.mark.parametrize("body", [ORDER, {"id": 1, "line_items": []}])
def test_a_body_that_does_not_fit_its_topic_is_invalid(body: dict[str, Any]) -> None:
    # The topic is not signed, so an order must not become a user.
    with pytest.raises(PayloadInvalid):
        translate("customers/create", body)


@pytest.mark.parametrize("action", ["enable", "disable", "delete"])
def test_other_changes_of_a_customer_are_events(action: str) -> None:
    [event] = translate(f"customers/{action}", {"id": 2, "email": "a@b.c"}).events
    assert event.document["event"] == f"Customer {action.title()}d"
    assert event.document["userId"] == event.document["properties"]["customerId"] == "2"


def test_ids_become_strings_everywhere() -> None:
    body = {**ORDER, "line_items": [{"id": 3, "product_id": 4, "quantity": 5}], "tag_ids": [6]}
    [event] = translate("orders/create", body).events
    properties = event.document["properties"]
    assert properties["orderId"] == "1"
    assert properties["line_items"] == [{"id": "3", "product_id": "4", "quantity": 5}]
    assert properties["tag_ids"] == ["6"]
    [draft] = translate("draft_orders/create", ORDER).events
    assert draft.document["properties"]["draftOrderId"] == "1"
    asked = {"customer": {"id": 2}, "orders_to_redact": [299938], "orders_requested": [299938]}
    [redact] = translate("customers/redact", asked).events
    assert redact.document["properties"]["orders_to_redact"] == ["299938"]
    assert redact.document["properties"]["orders_requested"] == ["299938"]


@pytest.mark.parametrize(
    ("body", "trait", "value"),
    [
        ({"id": 1, "email": "a@b.c", "phone": "+1"}, "email", "a@b.c"),
        ({"id": 1, "contact_email": "a@b.c"}, "email", "a@b.c"),
        ({"id": 1, "phone": "+15551234567"}, "phone", "+15551234567"),
    ],
)
def test_a_guest_has_the_address_or_number_of_the_order(
    body: dict[str, Any], trait: str, value: str
) -> None:
    [event] = translate("orders/create", body).events
    assert recipient_of(event) == (trait, value)


CUSTOMER = 6706405506930
GID = f"gid://shopify/Customer/{CUSTOMER}"
AT = "2026-11-28T04:00:00-05:00"
CONSENT = {"state": "unsubscribed", "consent_updated_at": AT}


# The fields are those of Shopify's list of topics, version 2026-04.
@each(
    "topic, body, name, time",
    [
        (
            "customers_email_marketing_consent/update",
            {
                "customer_id": CUSTOMER,
                "email_address": "ann@example.com",
                "email_marketing_consent": CONSENT,
            },
            "Customer Email Marketing Consent Updated",
            AT,
        ),
        (
            "customers_marketing_consent/update",
            {"id": CUSTOMER, "phone": None, "sms_marketing_consent": CONSENT},
            "Customer Marketing Consent Updated",
            AT,
        ),
        (
            "subscription_contracts/create",
            {"id": 1, "customer_id": CUSTOMER, "created_at": AT},
            "Subscription Contract Created",
            AT,
        ),
        (
            "subscription_contracts/pause",
            {"id": 1, "admin_graphql_api_customer_id": GID},
            "Subscription Contract Pause",
            None,
        ),
        (
            "customer_payment_methods/create",
            {"token": "x", "customer_id": CUSTOMER},
            "Customer Payment Method Created",
            None,
        ),
        (
            "customers/purchasing_summary",
            {"customerId": GID, "numberOfOrders": 2, "occurredAt": AT},
            "Customer Purchasing Summary",
            AT,
        ),
        (
            "customers/merge",
            {
                "admin_graphql_api_customer_kept_id": GID,
                "admin_graphql_api_customer_deleted_id": "gid://shopify/Customer/2",
                "status": "completed",
            },
            "Customer Merged",
            None,
        ),
        (
            "customer.tags_added",
            {"customerId": GID, "tags": ["vip"], "occurredAt": AT},
            "Customer Tags Added",
            AT,
        ),
        (
            "customer.joined_segment",
            {"customer_id": GID, "segment_id": "gid://shopify/Segment/2", "date": AT},
            "Customer Joined Segment",
            AT,
        ),
        (
            "company_contacts/create",
            {"customer_admin_graphql_api_id": GID, "title": "Buyer"},
            "Company Contact Created",
            None,
        ),
        ("orders/paid", {"id": 1, "customer": {"id": GID}}, "Order Paid", None),
    ],
)
def test_a_topic_about_a_customer_is_the_customers(
    topic: str, body: dict[str, Any], name: str, time: str | None
) -> None:
    [event] = translate(topic, body).events
    assert event.document["type"] == "track"
    assert event.document["event"] == name
    assert event.document["userId"] == str(CUSTOMER)
    assert event.document.get("timestamp") == (time and "2026-11-28T09:00:00.000Z")
    if "id" in body and topic.startswith("customers"):
        assert event.document["properties"]["customerId"] == str(CUSTOMER)


def test_a_customer_without_an_id_has_the_address() -> None:
    body = {"customer_id": None, "email_address": "ann@example.com"}
    [event] = translate("customers_email_marketing_consent/update", body).events
    assert recipient_of(event) == ("email", "ann@example.com")


@pytest.mark.parametrize("kind", ["marketing_consent", "email_marketing_consent"])
def test_an_order_is_no_consent(kind: str) -> None:
    """The topic is not signed, so an order must not become a user."""
    with pytest.raises(PayloadInvalid):
        translate(f"customers_{kind}/update", ORDER)


def test_a_topic_without_a_customer_is_ignored() -> None:
    assert translate("products/update", {"id": 1, "title": "T"}).ignored == 1
    assert translate("shop/redact", {"shop_id": 1}).ignored == 1


def test_an_event_gets_its_time() -> None:
    times = {"cancelled_at": "2024-03-01T00:00:00Z", "updated_at": "2024-02-01T00:00:00Z"}

    def time(topic: str, body: Any, **headers: str) -> Any:
        return translate(topic, body, **headers).events[0].document["timestamp"]

    assert time("orders/cancelled", ORDER | times) == "2024-03-01T00:00:00.000Z"
    assert time("orders/updated", ORDER | times) == "2024-02-01T00:00:00.000Z"
    triggered = {"X-Shopify-Triggered-At": "2024-04-01T00:00:00.5Z"}
    assert time("orders/edited", ORDER, **triggered) == "2024-04-01T00:00:00.500Z"
    assert time("orders/edited", ORDER) == "2024-01-01T00:00:00.000Z"


@pytest.mark.parametrize("topic", ["", "orders", "ORDERS_CREATE", "/create", "customer."])
def test_a_delivery_without_a_topic_is_invalid(topic: str) -> None:
    with pytest.raises(PayloadInvalid):
        translate(topic, ORDER)


@pytest.mark.parametrize("topic", ["app/uninstalled", "shop/update"])
def test_the_owner_of_the_shop_is_not_a_customer(topic: str) -> None:
    assert translate(topic, {"id": 1, "email": "owner@example.com"}).ignored == 1
