# SPDX-License-Identifier: Apache-2.0
"""Mailchimp Transactional (Mandrill): what happened to e-mails, up to 1000 events in a delivery."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from engage.api import (
    PayloadInvalid,
    ProviderContext,
    Reply,
    Signing,
    TranslatedEvent,
    Translation,
    WebhookRequest,
)
from engage.webhooks import (
    SecretProvider,
    at,
    check_hmac,
    decode_base64,
    email_event,
    email_opt_outs,
    event_id,
    form_bytes,
    form_fields,
    form_values,
    merged,
    one_header,
    own_user_id,
    parse_json,
    public_url,
    registration,
    signed_url,
    spread,
    text,
    track,
    translated,
    unix_time,
)

EVENTS: Final = {
    "send": "Email Sent",
    "delivered": "Email Delivered",
    "deferral": "Email Delayed",
    "open": "Email Opened",
    "click": "Email Link Clicked",
    "hard_bounce": "Email Bounced",
    "soft_bounce": "Email Bounced",
    "reject": "Email Dropped",
    "spam": "Email Marked as Spam",
    "unsub": "Email Unsubscribed",
}
#: Changes of the deny and allow lists have no ``event``.
IGNORED: Final = frozenset({None, "inbound"})
#: To whom the events of *Send Test* are: https://mailchimp.com/developer/transactional/docs/webhooks
TEST: Final = "example.webhook@mandrillapp.com"
EMPTY: Final = (b"mandrill_events", b"[]")
BOUNCES: Final = {"hard_bounce": "hard", "soft_bounce": "soft"}


class Mailchimp(SecretProvider):
    """Deliveries of one Mandrill webhook."""

    setup = (
        "1. Mandrill > Settings > Webhooks > Add a Webhook: choose the events and enter the\n"
        "   URL exactly as printed, because it is signed. engage must be running, because\n"
        "   Mandrill tries the URL.\n"
        "2. Copy the key of the webhook into the option webhook_key, and restart engage.\n"
        "3. Send e-mails with the metadata userId, and their events belong to that user."
    )

    secret_option = "webhook_key"
    opt_out_channels = ("email",)
    signing = Signing(
        signature="x-mandrill-signature", encoding="base64", body=True, url=True, form=True
    )

    def __init__(self, options: Mapping[str, Any], context: ProviderContext) -> None:
        super().__init__(options, context)
        self._url = public_url(options, context)

    def probe(self, request: WebhookRequest) -> Reply | None:
        """Answer the empty list with which Mandrill tries a new webhook.

        It is signed with a key that anyone can know.
        """
        # The length is checked first, because anyone can send this.
        if len(request.body) <= 64 and form_bytes(request.body.strip()) == [EMPTY]:
            return Reply(body=b'{"success":true,"accepted":0,"ignored":0}')
        return None

    def verify(self, request: WebhookRequest, fetched: bytes | None) -> None:
        """Check HMAC-SHA1 over the URL and the decoded form fields, sorted by name."""
        signature = decode_base64(one_header(request, "x-mandrill-signature"))
        fields = sorted(form_bytes(request.body))
        signed = signed_url(self._url, request).encode() + b"".join(
            name + value for name, value in fields
        )
        check_hmac(self.keys, signed, [signature], algorithm="sha1")

    def translate(self, request: WebhookRequest) -> Translation:
        """Return one track event for each element about a sent e-mail; ignore the others."""
        encoded = form_values(form_fields(request.body)).get("mandrill_events")
        items = parse_json(encoded) if isinstance(encoded, str) else None
        if not isinstance(items, list):
            raise PayloadInvalid("mandrill_events: must be a list")
        return translated(items, _event, (text(at(item, "event")) for item in items))


def _event(item: Any, index: int) -> TranslatedEvent | Literal["ignored", "test", "unknown"]:
    if not isinstance(item, dict):
        raise PayloadInvalid("is not an object")
    kind, message = text(item.get("event")), item.get("msg")
    if str(at(message, "email")).strip().lower() == TEST:
        return "test"
    if kind is None or kind not in EVENTS:
        return "ignored" if kind in IGNORED else "unknown"
    if not isinstance(message, dict):
        raise PayloadInvalid("msg: must be an object")
    metadata = message.get("metadata")
    user, taken = own_user_id(metadata)
    properties = merged(
        {
            "email": message.get("email"),
            "bounceType": BOUNCES.get(kind),
            "sentTs": message.get("ts"),
        },
        item,
        message,
        without=("event", "msg", "ts", "metadata"),
    )
    document = track(
        EVENTS[kind],
        # ``_id`` is the id of the message: its opens and clicks have the same one.
        message_id=event_id(
            kind, *(str(item.get(key)) for key in ("_id", "ts", "url", "ip", "user_agent"))
        ),
        timestamp=unix_time(item.get("ts")),
        user=user,
        properties=spread(properties, metadata, "metadata", without=taken),
    )
    # Mandrill rejects further messages of the same subaccount only.
    opt_outs = email_opt_outs(EVENTS[kind], BOUNCES.get(kind), message.get("subaccount"))
    return email_event(document, message.get("email"), opt_outs, taken=taken, index=index)


engage_register_webhook = registration("mailchimp", Mailchimp)
