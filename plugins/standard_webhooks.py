# SPDX-License-Identifier: Apache-2.0
"""Deliveries of any sender that signs as the Standard Webhooks specification says.

The signature is HMAC-SHA256 over ``id.timestamp.body``. The key is the base64 after ``whsec_``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from engage.api import ProviderContext, Signing, TranslatedEvent, Translation, WebhookRequest
from engage.webhooks import (
    SecretProvider,
    at,
    check_standard_webhook,
    email_recipient,
    event_id,
    iso_time,
    merged,
    message_id,
    parse_object,
    registration,
    standard_webhook_key,
    text,
    track,
    unix_time,
    user_id,
)

#: Of the names of the headers. Senders that use Svix have the second one.
PREFIXES: Final = ("webhook", "svix")


class StandardWebhooks(SecretProvider):
    """Deliveries of one sender."""

    setup = (
        "1. At the sender: add a webhook endpoint with this URL and choose its events.\n"
        "2. Copy the signing secret of the endpoint (whsec_ and base64) into the option\n"
        "   secret, and restart engage.\n"
        "3. If the payloads have the id of the user elsewhere than in data.userId,\n"
        "   data.user_id or data.id, name the place in the option user_id."
    )

    signing = Signing(
        signature="webhook-signature",
        signature_pattern=r"v1,(?P<signature>[^ ]*)",
        encoding="base64",
        body=True,
        headers=("webhook-id",),
        timestamp="webhook-timestamp",
        past=300,
        future=300,
    )

    def __init__(self, options: Mapping[str, Any], context: ProviderContext) -> None:
        super().__init__(options, context)
        self._user_paths = options.get("user_id", ["data.userId", "data.user_id", "data.id"])
        self._email_paths = options.get("email", ["data.email"])

    def key_of(self, secret: str) -> bytes:
        """Return the bytes that follow ``whsec_`` in base64."""
        return standard_webhook_key(secret)

    def verify(self, request: WebhookRequest, fetched: bytes | None) -> None:
        check_standard_webhook(request, self.keys, prefixes=PREFIXES)

    def translate(self, request: WebhookRequest) -> Translation:
        """Return one track event, named by the payload's ``type``; ignore it if it has no user."""
        payload = parse_object(request.body)
        kind = text(payload.get("type")) or "Webhook Received"
        user = next(filter(None, (user_id(at(payload, path)) for path in self._user_paths)), None)
        recipient = None
        if user is None:
            recipient = email_recipient(*(at(payload, path) for path in self._email_paths))
        if user is None and recipient is None:
            return Translation(ignored=1, unknown={0: payload}, types=[kind])
        data = payload.get("data")
        when = payload.get("timestamp")
        timestamp = iso_time(when) or unix_time(when)
        ids = (request.values(f"{name}-id") for name in PREFIXES)
        sent = next((values[0] for values in ids if values), "")
        # A value that became a field is left out of the properties.
        fields = ["type", "timestamp"] if timestamp else ["type"]
        rest = merged(payload, without=[*fields, "data"] if isinstance(data, dict) else fields)
        document = track(
            kind,
            message_id=message_id(sent) or event_id(sent),
            timestamp=timestamp,
            user=user,
            properties=merged(data, rest),
        )
        return Translation(events=[TranslatedEvent(document, recipient)], types=[kind])


engage_register_webhook = registration("standard-webhooks", StandardWebhooks)
