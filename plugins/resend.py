# SPDX-License-Identifier: Apache-2.0
"""Resend: what happened to e-mails. Svix signs the deliveries, as Standard Webhooks specifies."""

from __future__ import annotations

import itertools
from typing import Any, Final

from engage.api import PayloadInvalid, Signing, Translation, WebhookRequest
from engage.webhooks import (
    SecretProvider,
    check_standard_webhook,
    email_event,
    email_opt_outs,
    email_recipient,
    event_id,
    iso_time,
    merged,
    message_id,
    optional_header,
    own_user_id,
    parse_object,
    registration,
    spread,
    standard_webhook_key,
    text,
    track,
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
#: Events that say nothing about a sent e-mail or a subscription.
IGNORED: Final = frozenset(
    {"email.scheduled", "email.received", "contact.created", "contact.deleted"}
    | {f"domain.{change}" for change in ("created", "updated", "deleted")}
)
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
        kind = text(payload.get("type")) or ""
        name = EVENTS.get(kind)
        if name is None:
            unknown = {} if kind in IGNORED else {0: payload}
            return Translation(ignored=1, unknown=unknown, types=[kind])
        data = payload.get("data")
        if not isinstance(data, dict):
            raise PayloadInvalid("data: must be an object", kind=kind)
        if kind == "contact.updated" and data.get("unsubscribed") is not True:
            return Translation(ignored=1, types=[kind])
        # Resend does not say which of the recipients of an e-mail an event is about.
        fields = ("email",) if kind == "contact.updated" else ("to", "cc", "bcc")
        lists = [to if isinstance(to, list) else [to] for to in map(data.get, fields)]
        named = [*itertools.chain(*lists)]
        recipient = email_recipient(named)
        tags = _tags(data.get("tags"))
        user, taken = own_user_id(tags)
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
            user=user,
            properties=spread(properties, tags, "tags", without=taken),
        )
        # A contact was once one of an audience; now it is one of the team, in segments.
        audience = data.get("audience_id") if "segment_ids" not in data else None
        opt_outs = email_opt_outs(name, properties.get("bounceType"), audience)
        event = email_event(document, named, opt_outs, one_of=True, taken=taken)
        return Translation(events=[event], types=[kind])


def _tags(value: object) -> dict[str, Any]:
    """Return name → value; tags are an object, or the list of pairs that the sender gave."""
    if isinstance(value, list):
        return {
            tag["name"]: tag.get("value")
            for tag in value
            if isinstance(tag, dict) and isinstance(tag.get("name"), str)
        }
    return value if isinstance(value, dict) else {}


engage_register_webhook = registration("resend", Resend)
