# SPDX-License-Identifier: Apache-2.0
"""RudderStack's webhook destinations: its events already have Segment's form.

RudderStack signs nothing: a header of your choice carries the secret, and only TLS protects the
body.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final, Literal

from engage.api import (
    EVENT_TYPES,
    PayloadInvalid,
    Recipient,
    TranslatedEvent,
    Translation,
    WebhookRequest,
)
from engage.webhooks import (
    ElementIds,
    StaticCredentialProvider,
    at,
    content_id,
    email_recipient,
    iso_time,
    merged,
    message_id,
    parse_json,
    registration,
    text,
    translated,
)

#: RudderStack's own fields: they describe how an event was sent, not what happened.
_CONTEXT: Final = ("channel", "rudderId", "request_ip")


class RudderStack(StaticCredentialProvider):
    """Deliveries of one event, or of a list of events (HTTP Webhook with batching)."""

    setup = (
        "1. Choose a long random value, enter it in the option value, and restart engage.\n"
        "   (RudderStack does not repeat an event after a 401.)\n"
        "2. RudderStack > Destinations > Webhook: enter the URL, choose the method POST, and\n"
        "   add the header Authorization with that value."
    )

    def translate(self, request: WebhookRequest) -> Translation:
        """Return the events as they are."""
        payload = parse_json(request.body, elements="batch")
        if isinstance(payload, dict) and isinstance(payload.get("batch"), list):
            payload = payload["batch"]
        items = payload if isinstance(payload, list) else [payload]
        translate = functools.partial(_translate, ElementIds(items))
        result = translated(items, translate, (text(at(item, "type")) for item in items))
        if result.rejected and not result.events and not result.ignored:
            raise PayloadInvalid(result.rejected[0].message)
        return result


def _translate(ids: ElementIds, item: Any, index: int) -> TranslatedEvent | Literal["unknown"]:
    kind = text(at(item, "type"))
    if kind is None:
        raise PayloadInvalid("not an event: it has no type")
    kind = kind.lower()
    if kind not in EVENT_TYPES:
        return "unknown"
    context = merged(
        item.get("context"),
        {name: item.get(name) for name in _CONTEXT},
        {"ip": item.get("request_ip")},
    )
    document = merged(item, without=["context", "timestamp", *_CONTEXT])
    document["type"] = kind
    document["context"] = context
    # In "timestamp" RudderStack has corrected the client's clock.
    timestamp = iso_time(item.get("timestamp")) or iso_time(item.get("originalTimestamp"))
    if timestamp is not None:
        document["timestamp"] = timestamp
    document["messageId"] = message_id(item.get("messageId")) or (
        ids(index) if timestamp is None else content_id(item)
    )
    return TranslatedEvent(document, _recipient(item), index)


def _recipient(item: Mapping[str, Any]) -> Recipient | None:
    traits = item.get("traits")
    return email_recipient(traits.get("email") if isinstance(traits, dict) else None)


engage_register_webhook = registration("rudderstack", RudderStack)
