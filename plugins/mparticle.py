# SPDX-License-Identifier: Apache-2.0
"""mParticle's webhook.

mParticle signs nothing: an ``Authorization`` header of your choice carries the secret, and only TLS
protects the body.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, Literal

from engage.api import (
    PayloadInvalid,
    ProviderContext,
    Recipient,
    TranslatedEvent,
    Translation,
    WebhookRequest,
)
from engage.webhooks import (
    StaticCredentialProvider,
    at,
    content_id,
    email_recipient,
    event_id,
    merged,
    message_id,
    parse_object,
    registration,
    text,
    translated,
    unix_time,
    user_id,
)

#: mParticle's reserved attribute or identity → the trait, if that has another name.
_TRAITS: Final[Mapping[str, str]] = {"$Mobile": "phone", "mobile_number": "phone"}
#: Product action → the event's name in Segment's e-commerce spec.
_ACTIONS: Final[Mapping[str, str]] = {
    "add_to_cart": "Product Added",
    "remove_from_cart": "Product Removed",
    "checkout": "Checkout Started",
    "checkout_option": "Checkout Step Completed",
    "click": "Product Clicked",
    "view_detail": "Product Viewed",
    "view": "Product Viewed",
    "purchase": "Order Completed",
    "refund": "Order Refunded",
    "add_to_wishlist": "Product Added to Wishlist",
    "remove_from_wish_list": "Product Removed from Wishlist",
    "remove_from_wishlist": "Product Removed from Wishlist",
}
#: The same for promotion actions.
_PROMOTIONS: Final[Mapping[str, str]] = {
    "view": "Promotion Viewed",
    "click": "Promotion Clicked",
}
#: Fields of a batch that become fields of its events.
_BATCH_FIELDS: Final = frozenset(
    {"events", "user_identities", "user_attributes", "message_id", "ip", "timestamp_unixtime_ms"}
)


class MParticle(StaticCredentialProvider):
    """Deliveries of one batch each: a user's identities and attributes, and their events."""

    setup = (
        "1. Choose a long random value, enter it in the option value, and restart engage.\n"
        "2. mParticle > Setup > Outputs > Webhook: enter the URL as POST URL, and that value\n"
        "   as authorization header."
    )

    def __init__(self, options: Mapping[str, Any], context: ProviderContext) -> None:
        super().__init__(options, context)
        self._development = bool(options.get("development", False))

    def translate(self, request: WebhookRequest) -> Translation:
        """Return an identify, then one event for each of the batch that has an equivalent."""
        batch = parse_object(request.body, elements="events")
        items = batch.get("events")
        if items is None:
            items = []
        if not isinstance(items, list) or not ({"events", "user_identities", "mpid"} & set(batch)):
            raise PayloadInvalid("not a batch of events")
        if batch.get("environment") == "development" and not self._development:
            return Translation(ignored=max(1, len(items)))
        return _Batch(batch, items).translation()


class _Batch:
    """One batch, and the fields that all of its events share."""

    def __init__(self, batch: Mapping[str, Any], items: list[Any]) -> None:
        self._batch = batch
        self._items = items
        self._id = text(batch.get("message_id")) or content_id(batch)
        self._identities = _identities(batch.get("user_identities"))
        mpid = user_id(batch.get("mpid"))
        self._user = user_id(
            self._identities.get("customer_id"),
            self._identities.get("customerid"),
            mpid if mpid != "0" else None,
        )
        self._recipient: Recipient | None = email_recipient(self._identities.get("email"))
        rest = merged(batch, without=_BATCH_FIELDS)
        self._context = merged(
            {"ip": text(batch.get("ip")), "mparticle": rest if rest else None},
        )

    def translation(self) -> Translation:
        kinds = (text(at(item, "event_type")) for item in self._items)
        result = translated(self._items, self._translate, kinds)
        identify = self._identify()
        if identify is None:
            return result
        events = [TranslatedEvent(identify, self._recipient), *result.events]
        return dataclasses.replace(result, events=events)

    def _translate(self, item: Any, index: int) -> TranslatedEvent | Literal["ignored"]:
        kind, data = text(at(item, "event_type")), at(item, "data")
        if kind is None or not isinstance(data, dict):
            raise PayloadInvalid("not an event")
        document = self._event(kind, data, item)
        if document is None:
            return "ignored"
        return TranslatedEvent(document, self._recipient, index)

    def _identify(self) -> dict[str, Any] | None:
        """Return the identify, unless the batch has nothing but an mpid."""
        traits: dict[str, Any] = {}
        for name, value in self._identities.items():
            if name not in ("customer_id", "customerid") and value is not None:
                traits.setdefault(_trait(name), value)
        attributes = self._batch.get("user_attributes")
        for name, value in attributes.items() if isinstance(attributes, dict) else ():
            # An attribute that is null has been removed: it stays null.
            traits.setdefault(_trait(name), value)
        if not traits and at(self._identities, "customer_id") is None:
            return None
        times = [_milliseconds(at(item, "data.timestamp_unixtime_ms")) for item in self._items]
        timestamp = next(
            filter(None, times), _milliseconds(self._batch.get("timestamp_unixtime_ms"))
        )
        document = self._document("identify", timestamp, f"{self._id}:identify")
        document["traits"] = traits
        return document

    def _event(self, kind: str, data: Mapping[str, Any], item: object) -> dict[str, Any] | None:
        document: dict[str, Any] = {}
        own: object = data.get("custom_attributes")
        fields = {"custom_attributes", "timestamp_unixtime_ms", "event_id"}
        if kind == "custom_event":
            name = text(data.get("event_name"))
            document["event"] = name or "Custom Event"
            fields.add("event_name")
            becomes = "track"
        elif kind == "screen_view":
            document["name"] = text(data.get("screen_name")) or text(data.get("activity_type"))
            fields.add("screen_name")
            becomes = "screen"
        elif kind == "commerce_event":
            document["event"] = _commerce(data)
            own = merged(own, data, without=fields)
            fields = set(data)
            becomes = "track"
        else:
            # Sessions, application states, crashes …: not something that a person did.
            return None
        timestamp = _milliseconds(data.get("timestamp_unixtime_ms"))
        identity = text(data.get("event_id")) or content_id(item)
        result = self._document(becomes, timestamp, f"{self._id}:{identity}")
        result.update({key: value for key, value in document.items() if value is not None})
        rest = merged(data, without=fields)
        # Under one name, because the sender may give custom attributes any other.
        result["properties"] = merged(own, {"mparticle": rest} if rest else None)
        return result

    def _document(self, kind: str, timestamp: str | None, name: str) -> dict[str, Any]:
        document: dict[str, Any] = {
            "type": kind,
            "messageId": message_id(name) or event_id(name),
            "context": dict(self._context),
        }
        if self._user is not None:
            document["userId"] = self._user
        if timestamp is not None:
            document["timestamp"] = timestamp
        return document


def _identities(value: object) -> Mapping[str, Any]:
    """Return type → identity; they are sent as an object or as a list of pairs."""
    if isinstance(value, list):
        return {
            item["identity_type"]: item.get("identity")
            for item in value
            if isinstance(item, dict) and isinstance(item.get("identity_type"), str)
        }
    return value if isinstance(value, dict) else {}


def _trait(name: str) -> str:
    """Return the trait for an attribute, such as ``firstName`` for ``$FirstName``."""
    trait = _TRAITS.get(name)
    if trait is not None:
        return trait
    if name.startswith("$") and len(name) > 1:
        return name[1].lower() + name[2:]
    return name


def _commerce(data: Mapping[str, Any]) -> str:
    action = text(at(data, "product_action.action"))
    if action is not None:
        return _ACTIONS.get(action, action)
    promotion = text(at(data, "promotion_action.action"))
    if promotion is not None:
        return _PROMOTIONS.get(promotion, promotion)
    return "Product List Viewed" if data.get("product_impressions") else "Commerce Event"


def _milliseconds(value: object) -> str | None:
    """Read milliseconds since 1970, as a number or digits."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 15:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return unix_time(value / 1000)


engage_register_webhook = registration("mparticle", MParticle)
