# SPDX-License-Identifier: Apache-2.0
"""Amplitude's webhook destination for events.

Amplitude signs nothing: a header of your choice carries the secret, and only TLS protects the
body.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from engage.api import PayloadInvalid, TranslatedEvent, Translation, WebhookRequest
from engage.webhooks import (
    StaticCredentialProvider,
    at,
    content_id,
    email_recipient,
    iso_time,
    merged,
    message_id,
    parse_object,
    registration,
    text,
    unix_time,
    user_id,
)

_PAGE_VIEWED: Final = "[Amplitude] Page Viewed"
#: Property of a page → Amplitude's property.
_PAGE: Final = {
    "url": "[Amplitude] Page URL",
    "path": "[Amplitude] Page Path",
    "title": "[Amplitude] Page Title",
    "referrer": "referrer",
}
#: Fields that become fields of the event.
_FIELDS: Final = frozenset(
    {"event_type", "event_time", "event_properties", "user_id", "device_id", "uuid", "ip_address"}
)


class Amplitude(StaticCredentialProvider):
    """Deliveries of one event each, in the form of Amplitude's export."""

    setup = (
        "1. Choose a long random value, enter it in the option value, and restart engage.\n"
        "2. Amplitude > Data > Destinations > Webhook: enter the URL, add the header\n"
        "   Authorization with that value, and leave the payload as it is."
    )

    def translate(self, request: WebhookRequest) -> Translation:
        """Return an identify for ``$identify``, a page for a page view, and track for the rest."""
        event = parse_object(request.body)
        kind = text(event.get("event_type"))
        if kind is None:
            raise PayloadInvalid("event_type is missing")
        return Translation(events=[_translate(kind, event)])


def _translate(kind: str, event: Mapping[str, Any]) -> TranslatedEvent:
    document: dict[str, Any] = {
        "messageId": message_id(event.get("uuid"), event.get("$insert_id")) or content_id(event),
        "context": merged({"ip": text(event.get("ip_address"))}),
    }
    fields = set(_FIELDS)
    # Times such as "2022-10-24 20:07:32.123000" are UTC, although they have no zone.
    timestamp = iso_time(event.get("event_time")) or unix_time(event.get("event_time"))
    if timestamp is not None:
        document["timestamp"] = timestamp
    else:
        fields.discard("event_time")
    user, device = user_id(event.get("user_id")), user_id(event.get("device_id"))
    if user is not None:
        document["userId"] = user
    if device is not None:
        document["anonymousId"] = device
    recipient = email_recipient(at(event, "user_properties.email"))
    if user is None and device is None and recipient is None:
        amplitude_id = text(event.get("amplitude_id"))
        if amplitude_id is not None:
            document["anonymousId"] = f"amplitude:{amplitude_id}"

    properties = event.get("event_properties")
    if kind == "$identify":
        fields.add("user_properties")
        document["type"] = "identify"
        traits = event.get("user_properties")
        # A trait that is null has been removed: it stays null.
        document["traits"] = dict(traits) if isinstance(traits, dict) else {}
        layers = [properties]
    elif kind == _PAGE_VIEWED:
        document["type"] = "page"
        page = {key: at(properties, source) for key, source in _PAGE.items()}
        name = text(page["title"])
        if name is not None:
            document["name"] = name
        layers = [page, properties]
    else:
        document["type"] = "track"
        document["event"] = kind
        layers = [properties]
    rest = merged(event, without=fields)
    # Under one name, because the sender may give event properties any other.
    document["properties"] = merged(*layers, {"amplitude": rest} if rest else None)
    return TranslatedEvent(document, recipient)


engage_register_webhook = registration("amplitude", Amplitude)
