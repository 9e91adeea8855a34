# SPDX-License-Identifier: Apache-2.0
"""Shopify: customers become users, orders and checkouts their events.

Shopify signs the body and not the headers, the topic among them: what a body is, is checked against
the topic before it is believed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from engage.api import (
    PayloadInvalid,
    ProviderFactory,
    Register,
    Signing,
    TranslatedEvent,
    Translation,
    WebhookRequest,
    hookimpl,
)
from engage.webhooks import (
    SecretProvider,
    check_hmac,
    decode_base64,
    email_recipient,
    event_id,
    iso_time,
    merged,
    message_id,
    one_header,
    optional_header,
    options_schema,
    parse_object,
    phone_recipient,
    track,
    user_id,
)

#: Topics whose names differ from "thing, what was done to it".
EVENTS: Final = {
    "carts/update": "Cart Updated",
    "checkouts/create": "Checkout Started Webhook",
    "customers/data_request": "Customer Data Requested",
    "customers/redact": "Customer Redaction Requested",
}
#: Kinds whose e-mail address is the shop owner's, no customer's.
OWNERS: Final = frozenset({"app", "shop"})
ACTIONS: Final = {
    "create": "Created",
    "update": "Updated",
    "delete": "Deleted",
    "enable": "Enabled",
    "disable": "Disabled",
}
#: Lists of ids whose names do not say so.
ID_LISTS: Final = frozenset({"orders_requested", "orders_to_redact"})
#: Where a topic's own time stands; every other is dated by ``updated_at``.
TIMES: Final = {"create": "created_at", "cancelled": "cancelled_at", "paid": "processed_at"}
TRAITS: Final = {
    "first_name": "firstName",
    "last_name": "lastName",
    "created_at": "createdAt",
}


class Shopify(SecretProvider):
    """Deliveries of the webhooks of one app."""

    setup = (
        "Shopify > Settings > Notifications > Webhooks, or the app's webhook "
        "subscriptions: paste the URL,\n"
        "format JSON, for customers/*, orders/* and checkouts/*.\n"
        "The app's client secret (or what that page shows as signing secret) is the "
        "option client_secret."
    )

    secret_option = "client_secret"
    signing = Signing(signature="x-shopify-hmac-sha256", encoding="base64", body=True)

    def verify(self, request: WebhookRequest, fetched: bytes | None) -> None:
        """HMAC-SHA256 over the body."""
        signature = decode_base64(one_header(request, "x-shopify-hmac-sha256"))
        check_hmac(self.keys, request.body, [signature])

    def translate(self, request: WebhookRequest) -> Translation:
        """An identify of ``customers/create`` and ``customers/update``; track events of the rest.

        What concerns no customer (products, stock) is of no interest.
        """
        payload = parse_object(request.body)
        topic = (optional_header(request, "x-shopify-topic") or "").lower()
        kind, _, action = topic.partition("/")
        if not kind or not action:
            raise PayloadInvalid("X-Shopify-Topic: missing")
        if kind in OWNERS:
            return Translation(ignored=1)
        customer = payload.get("customer")
        is_profile = kind == "customers" and action not in ("data_request", "redact")
        if is_profile and ("line_items" in payload or isinstance(customer, dict)):
            raise PayloadInvalid("the topic says a customer, the body is something else")
        person = payload if is_profile else customer if isinstance(customer, dict) else {}
        user = user_id(person.get("id"))
        recipient = email_recipient(
            payload.get("email"), payload.get("contact_email"), person.get("email")
        ) or phone_recipient(payload.get("phone"), person.get("phone"))
        if user is None and recipient is None:
            return Translation(ignored=1)
        identity = message_id(optional_header(request, "x-shopify-webhook-id")) or event_id(
            topic, request.body.decode()
        )
        timestamp = (
            iso_time(payload.get(TIMES.get(action, "updated_at")))
            or iso_time(optional_header(request, "x-shopify-triggered-at"))
            or iso_time(payload.get("updated_at"))
            or iso_time(payload.get("created_at"))
        )
        if user is not None and is_profile and action in ("create", "update"):
            document: dict[str, Any] = {
                "type": "identify",
                "messageId": identity,
                "userId": user,
                "traits": {
                    TRAITS.get(key, key): _exact(key, value)
                    for key, value in payload.items()
                    if key != "id"
                },
            }
            if timestamp is not None:
                document["timestamp"] = timestamp
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
        return Translation(events=[TranslatedEvent(document, recipient)])


def _properties(kind: str, payload: Mapping[str, Any]) -> dict[str, Any]:
    first, *others = kind.removesuffix("s").split("_")
    own_id = first + "".join(map(str.capitalize, others)) + "Id"
    properties: dict[str, Any] = {}
    for key, value in payload.items():
        if value is None:
            continue
        name = own_id if key == "id" else key
        properties["total" if key == "total_price" else name] = _exact(key, value)
    return properties


def _exact(key: str, value: Any) -> Any:
    """Ids have more digits than a double holds: they become strings, wherever they stand."""
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
    kind, _, action = topic.partition("/")
    thing = kind.replace("_", " ").title().removesuffix("s")
    return f"{thing} {ACTIONS.get(action) or action.replace('_', ' ').title()}"


@hookimpl
def engage_register_webhook(register: Register[ProviderFactory]) -> None:
    """Bring ``shopify``."""
    register("shopify", Shopify, options_schema("engage_schemas", "plugins/webhooks/shopify.json"))
