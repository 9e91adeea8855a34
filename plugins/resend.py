# SPDX-License-Identifier: Apache-2.0
"""Resend: what happened to e-mails. Svix signs the deliveries, as Standard Webhooks specifies."""

from __future__ import annotations

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
    check_standard_webhook,
    email_opt_outs,
    email_recipient,
    event_id,
    iso_time,
    merged,
    message_id,
    optional_header,
    options_schema,
    parse_object,
    spread,
    standard_webhook_key,
    text,
    track,
    user_id,
)

EVENTS: Final = {
    "email.sent": "Email Sent",
    "email.delivered": "Email Delivered",
    "email.delivery_delayed": "Email Delayed",
    "email.complained": "Email Marked as Spam",
    "email.bounced": "Email Bounced",
    "email.opened": "Email Opened",
    "email.clicked": "Email Link Clicked",
    "email.failed": "Email Dropped",
    "email.suppressed": "Email Dropped",
    "contact.updated": "Email Unsubscribed",
}
BOUNCES: Final = {"permanent": "hard", "transient": "soft"}


class Resend(SecretProvider):
    """Deliveries of one Resend webhook."""

    setup = (
        "1. Resend > Webhooks > Add Webhook: enter the URL and choose the events email.*, and\n"
        "   contact.updated, which reports who has unsubscribed.\n"
        "2. Copy the signing secret of the webhook (whsec_...) into the option secret, and\n"
        "   restart engage.\n"
        "3. Send e-mails with the tag userId, and their events belong to that user."
    )

    opt_out_channels = ("email",)
    signing = Signing(
        signature="svix-signature",
        signature_pattern=r"v1,(?P<signature>[^ ]*)",
        encoding="base64",
        body=True,
        headers=("svix-id",),
        timestamp="svix-timestamp",
        past=300,
        future=300,
    )

    def key_of(self, secret: str) -> bytes:
        """Return the bytes that follow ``whsec_`` in base64."""
        return standard_webhook_key(secret)

    def verify(self, request: WebhookRequest, fetched: bytes | None) -> None:
        """Check the signature; as Svix does, accept both names of each header, even mixed."""
        check_standard_webhook(request, self.keys, prefixes=("svix", "webhook"))

    def translate(self, request: WebhookRequest) -> Translation:
        """Return one track event for a sent e-mail, or a contact who has unsubscribed; ignore
        domains, other changes of contacts, and received mail."""
        payload = parse_object(request.body)
        kind = payload.get("type")
        name = EVENTS.get(kind) if isinstance(kind, str) else None
        if name is None:
            return Translation(ignored=1)
        data = payload.get("data")
        if not isinstance(data, dict):
            raise PayloadInvalid("data: must be an object")
        if kind == "contact.updated" and data.get("unsubscribed") is not True:
            return Translation(ignored=1)
        to = data.get("email") if kind == "contact.updated" else data.get("to")
        recipient = email_recipient(*to) if isinstance(to, list) else email_recipient(to)
        tags = _tags(data.get("tags"))
        properties: dict[str, Any] = {}
        if recipient is not None:
            properties["email"] = recipient.value
        if name == "Email Bounced":
            bounce = data.get("bounce")
            sort = text(bounce.get("type")) if isinstance(bounce, dict) else None
            if sort is not None:
                properties["bounceType"] = BOUNCES.get(sort.lower(), sort.lower())
        properties = merged(properties, data, without=("tags",))
        # ``data.created_at`` is the time of the e-mail; that of the event is beside ``type``.
        when = payload.get("created_at")
        document = track(
            name,
            message_id=message_id(
                optional_header(request, "svix-id"), optional_header(request, "webhook-id")
            )
            or event_id(name, str(data.get("email_id")), str(when)),
            timestamp=iso_time(when),
            user=user_id(tags.get("userId"), tags.get("user_id")),
            properties=spread(properties, tags, "tags", without=("userId", "user_id")),
        )
        # A contact was once one of an audience; now it is one of the team, in segments.
        audience = data.get("audience_id") if "segment_ids" not in data else None
        opt_outs = email_opt_outs(name, properties.get("bounceType"), audience)
        return Translation(events=[TranslatedEvent(document, recipient, opt_outs=opt_outs)])


def _tags(value: object) -> dict[str, Any]:
    """Return name → value; tags are an object, or the list of pairs that the sender gave."""
    if isinstance(value, list):
        return {
            tag["name"]: tag.get("value")
            for tag in value
            if isinstance(tag, dict) and isinstance(tag.get("name"), str)
        }
    return value if isinstance(value, dict) else {}


@hookimpl
def engage_register_webhook(register: Register[ProviderFactory]) -> None:
    """Register ``resend``."""
    register("resend", Resend, options_schema("engage_schemas", "plugins/webhooks/resend.json"))
