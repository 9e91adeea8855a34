# SPDX-License-Identifier: Apache-2.0
"""SendGrid's Event Webhook.

The signature is ECDSA (P-256, SHA-256) over the timestamp's digits and the raw body, with nothing
between them. The body ends with a line break, which is signed too.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from engage.api import (
    ConfigError,
    PayloadInvalid,
    Provider,
    ProviderContext,
    SignatureMismatch,
    Signing,
    TranslatedEvent,
    Translation,
    WebhookRequest,
)
from engage.webhooks import (
    at,
    check_timestamp,
    content_id,
    decode_base64,
    email_event,
    email_opt_outs,
    email_recipient,
    event_id,
    merged,
    message_id,
    one_header,
    own_user_id,
    parse_json,
    registration,
    secrets,
    text,
    track,
    translated,
    unix_time,
)

SIGNATURE: Final = "X-Twilio-Email-Event-Webhook-Signature"
TIMESTAMP: Final = "X-Twilio-Email-Event-Webhook-Timestamp"
#: Seconds. SendGrid retries for 24 hours, and does not document whether it signs each retry again.
PAST: Final = 25 * 3600
FUTURE: Final = 300

_NAMES: Final[Mapping[str, str]] = {
    "processed": "Email Sent",
    "delivered": "Email Delivered",
    "open": "Email Opened",
    "click": "Email Link Clicked",
    "bounce": "Email Bounced",
    "deferred": "Email Delayed",
    "dropped": "Email Dropped",
    "spamreport": "Email Marked as Spam",
    "unsubscribe": "Email Unsubscribed",
    "group_unsubscribe": "Email Unsubscribed",
    "group_resubscribe": "Email Resubscribed",
}
#: Address and beginning of the message id of *Test Your Integration*:
#: https://www.twilio.com/docs/sendgrid/for-developers/tracking-events/getting-started-event-webhook
_TEST: Final = ("example@test.com", "14c5d75ce93.dfd.64b469.")
#: What SendGrid may report late, without the custom arguments and the ``sg_message_id``.
_LATE: Final = frozenset({"bounce", "spamreport"})


class SendGrid(Provider):
    """Signed batches of delivery and engagement events."""

    setup = (
        "1. SendGrid > Settings > Mail Settings > Event Webhooks > Create new webhook: enter\n"
        "   the URL, choose the events, enable Signed Event Webhook, and save.\n"
        "2. Open the webhook again, copy its verification key into the option\n"
        "   verification_key, and restart engage.\n"
        "3. Send e-mails with the custom argument userId, and their events belong to that\n"
        "   user. Choose the event Processed, so that this is true of late bounces too."
    )

    opt_out_channels = ("email",)
    signing = Signing(
        signature=SIGNATURE,
        encoding="base64",
        body=True,
        headers=(TIMESTAMP,),
        timestamp=TIMESTAMP,
        past=PAST,
        future=FUTURE,
    )

    def __init__(self, options: Mapping[str, Any], context: ProviderContext) -> None:
        """:raises ConfigError: if a key does not have the form of SendGrid's."""
        self._keys = [_public_key(key) for key in secrets(options, "verification_key")]

    def credentials(self) -> Sequence[bytes]:
        form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        return [key.public_bytes(*form) for key in self._keys]

    def verify(self, request: WebhookRequest, fetched: bytes | None) -> None:
        timestamp = one_header(request, TIMESTAMP)
        signature = decode_base64(one_header(request, SIGNATURE))
        check_timestamp(timestamp, request.now, past=PAST, future=FUTURE)
        # OpenSSL accepts only canonical DER, so a signature has one spelling.
        signed = timestamp.encode("ascii") + request.body
        for key in self._keys:
            try:
                key.verify(signature, signed, ec.ECDSA(hashes.SHA256()))
            except InvalidSignature:
                continue
            return
        raise SignatureMismatch("the signature does not match")

    def translate(self, request: WebhookRequest) -> Translation:
        """Return one track event for each element."""
        payload = parse_json(request.body)
        if not isinstance(payload, list):
            raise PayloadInvalid("the body is not a list of events")
        return translated(payload, _translate, (text(at(item, "event")) for item in payload))


def _public_key(encoded: str) -> ec.EllipticCurvePublicKey:
    """Read a key in the form that SendGrid shows (base64), or in PEM."""
    try:
        if encoded.lstrip().startswith("-----BEGIN"):
            key = serialization.load_pem_public_key(encoded.encode())
        else:
            key = serialization.load_der_public_key(base64.b64decode(encoded, validate=True))
    except ValueError as error:
        raise ConfigError("verification_key: not a public key in base64") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ConfigError("verification_key: not an elliptic-curve key on P-256")
    return key


def _translate(item: Any, index: int) -> TranslatedEvent | Literal["test", "unknown"]:
    kind = at(item, "event")
    if not isinstance(kind, str):
        raise PayloadInvalid("not an event")
    if kind not in _NAMES:
        return "unknown"
    if item.get("email") == _TEST[0] and str(item.get("sg_message_id")).startswith(_TEST[1]):
        return "test"
    recipient = email_recipient(item.get("email"))
    user, taken = own_user_id(item)
    timestamp = unix_time(item.get("timestamp"))
    # Recipients of one message share its smtp-id.
    smtp_id = text(item.get("smtp-id"))
    sent = (
        event_id("processed", smtp_id, recipient.value.lower()) if smtp_id and recipient else None
    )
    earlier = sent if kind in _LATE else None
    bounce = _bounce(item) if kind == "bounce" else None
    # SendGrid gives the group of the message with other events too, but then stops everything.
    group = item.get("asm_group_id") if kind == "group_unsubscribe" else None
    # A value that became a field is left out of the properties.
    fields = {"event", *taken, *(["timestamp"] if timestamp else ())}
    document = track(
        _NAMES[kind],
        message_id=(sent if kind == "processed" else None)
        or message_id(item.get("sg_event_id"))
        or content_id(item),
        timestamp=timestamp,
        user=user,
        # SendGrid puts custom arguments beside its own fields, so all of them become properties.
        properties=merged(
            {
                "email": recipient.value if recipient else None,
                "bounceType": bounce,
            },
            item,
            without=fields,
        ),
    )
    return email_event(
        document,
        item.get("email"),
        email_opt_outs(_NAMES[kind], bounce, group),
        taken=taken,
        index=index,
        restated=earlier is not None,
        earlier=earlier,
    )


def _bounce(item: Mapping[str, Any]) -> str:
    """Return ``soft`` if the message was refused, ``hard`` if the address was."""
    if item.get("type") == "blocked" or (text(item.get("status")) or "").startswith("4"):
        return "soft"
    return "hard"


engage_register_webhook = registration("sendgrid", SendGrid)
