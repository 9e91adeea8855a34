# SPDX-License-Identifier: Apache-2.0
"""Shopify: customers become users, and orders and checkouts become their events.

Shopify signs the body but not the headers, and the topic is a header. The body is therefore checked
against the topic.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from engage.api import PayloadInvalid, Signing, TranslatedEvent, Translation, WebhookRequest
from engage.webhooks import (
    SecretProvider,
    at,
    check_hmac,
    decode_base64,
    email_recipient,
    event_id,
    iso_time,
    merged,
    message_id,
    names_person,
    one_header,
    optional_header,
    parse_object,
    phone_recipient,
    registration,
    track,
    user_id,
)

#: Topic → the event's name, if that is not made of the thing and the action.
EVENTS: Final = {
    "carts/update": "Cart Updated",
    "checkouts/create": "Checkout Started Webhook",
    "customers/data_request": "Customer Data Requested",
    "customers/redact": "Customer Redaction Requested",
}
#: Kinds that are about the shop: their e-mail address or phone number is not a customer's.
OWNERS: Final = frozenset(
    {"app", "shop", "locations", "customer_groups", "customer_account_settings"}
)
#: Kinds whose body is a customer, or is about the customer whose id it has.
PROFILES: Final = frozenset(
    {"customers", "customers_marketing_consent", "customers_email_marketing_consent"}
)
#: Members of other bodies with the id of the customer.
CUSTOMER_IDS: Final = (
    *("customer_id", "customerId", "admin_graphql_api_customer_id"),
    *("customer_admin_graphql_api_id", "company_contact.customer_admin_graphql_api_id"),
    "admin_graphql_api_customer_kept_id",
)
GID: Final = re.compile(r"gid://shopify/Customer/([^/?]+)")
#: Names of members that have a customer; ``user_id`` is one of the staff.
PERSON: Final = frozenset({"customer", "customerid", "email", "emailaddress"})
#: The ids in the bodies of *Send test notification*, of customers and of orders and checkouts:
#: https://shopify.dev/docs/api/webhooks. The newest topics have short ones, as global ids.
SAMPLES: Final = frozenset(
    {"706405506930370084", "115310627314723954", "603851970716743426", "191167"}
    | {"820982911946154508", "981820079255243537", "890612572568261625"}
    | {"gid://shopify/Customer/1", "gid://shopify/Customer/2", "82850125", "12123842227812391"}
)
ACTIONS: Final = {
    "create": "Created",
    "update": "Updated",
    "delete": "Deleted",
    "enable": "Enabled",
    "disable": "Disabled",
    "merge": "Merged",
}
#: Lists of ids whose names do not end in ``_ids``.
ID_LISTS: Final = frozenset({"orders_requested", "orders_to_redact"})
#: Action → the field with its time; for any other action it is ``updated_at``.
TIMES: Final = {"create": "created_at", "cancelled": "cancelled_at", "paid": "processed_at"}
#: Fields with the time of topics that have no ``updated_at``.
OCCURRED: Final = ("occurredAt", "occurred_at", "date")
TRAITS: Final = {
    "first_name": "firstName",
    "last_name": "lastName",
    "created_at": "createdAt",
}


class Shopify(SecretProvider):
    """Deliveries of the webhooks of one app."""

    setup = (
        "1. Copy the client secret of the app into the option client_secret, and restart\n"
        "   engage. Without an app, it is the secret that Settings > Notifications > Webhooks\n"
        "   shows.\n"
        "2. In the webhook subscriptions of the app, or on that page, enter the URL, with the\n"
        "   format JSON, for customers/*, customers_email_marketing_consent/update, orders/* and\n"
        "   checkouts/*."
    )

    trusted = True
    erasure_requests = ("Customer Redaction Requested",)
    secret_option = "client_secret"
    signing = Signing(signature="x-shopify-hmac-sha256", encoding="base64", body=True)

    def verify(self, request: WebhookRequest, fetched: bytes | None) -> None:
        """Check HMAC-SHA256 over the body."""
        signature = decode_base64(one_header(request, "x-shopify-hmac-sha256"))
        check_hmac(self.keys, request.body, [signature])

    def translate(self, request: WebhookRequest) -> Translation:
        """Return an identify for a created or updated customer, and a track event for the rest.

        Deliveries that concern no customer, such as products and stock, are ignored.
        """
        payload = parse_object(request.body)
        topic = (optional_header(request, "x-shopify-topic") or "").lower()
        # Newer topics have a dot: customer.tags_added.
        kind, _, action = topic.replace(".", "/").partition("/")
        if not kind or not action:
            raise PayloadInvalid("X-Shopify-Topic: missing, or not <thing>/<action>", kind=topic)
        if kind in OWNERS:
            return Translation(ignored=1, types=[topic])
        is_profile = kind in PROFILES and action not in ("data_request", "redact")
        person = _person(payload, topic, is_profile=is_profile)
        user = _customer(payload, person)
        written = (at(payload, path) for path in ("id", "order_id", *CUSTOMER_IDS))
        ids = {str(value) for value in (user, *written)}
        # The header is not signed: it counts only together with the content of a test.
        if (optional_header(request, "x-shopify-test") or "").lower() == "true" and ids & SAMPLES:
            return Translation(ignored=1, tests=1, types=[topic])
        recipient = email_recipient(
            *(payload.get(name) for name in ("email", "contact_email", "email_address")),
            person.get("email"),
        ) or phone_recipient(payload.get("phone"), person.get("phone"))
        if user is None and recipient is None:
            if kind.startswith("customer") or names_person(payload, PERSON):
                raise PayloadInvalid("names a customer, but engage cannot read whom", kind=topic)
            return Translation(ignored=1, types=[topic])
        identity = message_id(optional_header(request, "x-shopify-webhook-id")) or event_id(
            topic, request.body.decode()
        )
        timestamp = _timestamp(request, payload, action)
        if user is not None and kind == "customers" and action in ("create", "update"):
            document = _identify(payload, user, identity, timestamp)
        else:
            document = track(
                _name(topic),
                message_id=identity,
                timestamp=timestamp,
                user=user,
                properties=_properties(kind, payload),
            )
        document["context"] = merged(
            {
                "shop": optional_header(request, "x-shopify-shop-domain"),
                "topic": topic,
                "eventId": optional_header(request, "x-shopify-event-id"),
            }
        )
        return Translation(events=[TranslatedEvent(document, recipient)], types=[topic])


def _customer(payload: Mapping[str, Any], person: Mapping[str, Any]) -> str | None:
    """Return the id of the customer, without the rest of a global id."""
    written = user_id(*(at(payload, path) for path in CUSTOMER_IDS), person.get("id"))
    gid = GID.fullmatch(written or "")
    return written if gid is None else gid[1]


def _person(payload: Mapping[str, Any], topic: str, *, is_profile: bool) -> Mapping[str, Any]:
    """Return the customer that a payload is, or that it has.

    :raises PayloadInvalid: if the topic is about a profile and the payload is something else.
    """
    value = payload.get("customer")
    customer: Mapping[str, Any] | None = value if isinstance(value, dict) else None
    if is_profile and ("line_items" in payload or customer is not None):
        raise PayloadInvalid(
            "X-Shopify-Topic names a customer, but the body is something else", kind=topic
        )
    return payload if is_profile else customer or {}


def _timestamp(request: WebhookRequest, payload: Mapping[str, Any], action: str) -> str | None:
    own = ("email_marketing_consent.consent_updated_at", "sms_marketing_consent.consent_updated_at")
    return (
        iso_time(payload.get(TIMES.get(action, "updated_at")))
        or next(filter(None, (iso_time(at(payload, path)) for path in (*own, *OCCURRED))), None)
        or iso_time(optional_header(request, "x-shopify-triggered-at"))
        or iso_time(payload.get("updated_at"))
        or iso_time(payload.get("created_at"))
    )


def _identify(
    customer: Mapping[str, Any], user: str, identity: str, timestamp: str | None
) -> dict[str, Any]:
    document: dict[str, Any] = {
        "type": "identify",
        "messageId": identity,
        "userId": user,
        "traits": {
            TRAITS.get(key, key): _exact(key, value)
            for key, value in customer.items()
            if key != "id"
        },
    }
    if timestamp is not None:
        document["timestamp"] = timestamp
    return document


def _properties(kind: str, payload: Mapping[str, Any]) -> dict[str, Any]:
    thing = "customer" if kind in PROFILES else kind.removesuffix("s")
    first, *others = thing.split("_")
    own_id = first + "".join(map(str.capitalize, others)) + "Id"
    properties: dict[str, Any] = {}
    for key, value in payload.items():
        if value is None:
            continue
        name = own_id if key == "id" else key
        properties["total" if key == "total_price" else name] = _exact(key, value)
    return properties


def _exact(key: str, value: Any) -> Any:
    """Return a value with every id as a string: ids have more digits than a double can hold."""
    if isinstance(value, dict):
        return {name: _exact(name, member) for name, member in value.items()}
    if isinstance(value, list):
        return [_exact(key, member) for member in value]
    if isinstance(value, int) and not isinstance(value, bool):
        is_id = key == "id" or key.endswith(("_id", "_ids")) or key in ID_LISTS
        return str(value) if is_id else value
    return value


def _name(topic: str) -> str:
    if topic in EVENTS:
        return EVENTS[topic]
    kind, _, action = topic.replace(".", "/").partition("/")
    thing = kind.replace("customers_", "customer_").replace("_", " ").title().removesuffix("s")
    return f"{thing} {ACTIONS.get(action) or action.replace('_', ' ').title()}"


engage_register_webhook = registration("shopify", Shopify)
