# SPDX-License-Identifier: Apache-2.0
"""Postmark's webhooks for messages.

Postmark signs nothing: HTTP Basic or a header of your choice carries the secret, and only TLS
protects the body.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from engage.api import (
    PayloadInvalid,
    Recipient,
    TranslatedEvent,
    Translation,
    WebhookRequest,
    identifier_value,
)
from engage.webhooks import (
    StaticCredentialProvider,
    at,
    email_event,
    email_opt_outs,
    email_recipient,
    event_id,
    iso_time,
    merged,
    own_user_id,
    parse_object,
    registration,
    spread,
    text,
    track,
)

#: Record type → the event's name, and the field with its time.
_RECORDS: Final[Mapping[str, tuple[str, str]]] = {
    "Delivery": ("Email Delivered", "DeliveredAt"),
    "Open": ("Email Opened", "ReceivedAt"),
    "Click": ("Email Link Clicked", "ReceivedAt"),
    "Bounce": ("Email Bounced", "BouncedAt"),
    "SpamComplaint": ("Email Marked as Spam", "BouncedAt"),
    "SubscriptionChange": ("Email Unsubscribed", "ChangedAt"),
}
#: Types of Postmark's bounce records that are not bounces → the event's name.
_NOT_BOUNCES: Final[Mapping[str, str]] = {
    "SpamNotification": "Email Marked as Spam",
    "SpamComplaint": "Email Marked as Spam",
    "Unsubscribe": "Email Unsubscribed",
    "Subscribe": "Email Resubscribed",
}
#: Why an address was suppressed → the event's name, if it did not unsubscribe. The webhooks for
#: bounces and spam complaints report the same event.
_SUPPRESSIONS: Final[Mapping[str, str]] = {
    "HardBounce": "Email Bounced",
    "SpamComplaint": "Email Marked as Spam",
}
#: Postmark's id of a message that it does not know, and of the messages of its test deliveries.
_NO_MESSAGE: Final = "00000000-0000-0000-0000-000000000000"
#: What else the records of test deliveries have: https://postmarkapp.com/developer/webhooks
_TEST_METADATA: Final = {"example": "value", "example_2": "value"}
_TEST_ADDRESS: Final = "john@example.com"
_HARD: Final = frozenset({"HardBounce", "BadEmailAddress"})
_SOFT: Final = frozenset(
    {"Transient", "SoftBounce", "DnsError", "Blocked", "DMARCPolicy", "VirusNotification"}
)


class Postmark(StaticCredentialProvider):
    """Deliveries of one record each."""

    setup = (
        "1. Choose a user name and a long random password, enter them in the options\n"
        "   basic_user and basic_password (or a header in the options header and value), and\n"
        "   restart engage.\n"
        "2. Postmark > Server > Message stream > Webhooks > Add webhook: enter the URL and\n"
        "   the same credentials, and choose the events.\n"
        "3. Send e-mails with the metadata userId, and their events belong to that user."
    )

    opt_out_channels = ("email",)

    def translate(self, request: WebhookRequest) -> Translation:
        """Return one track event."""
        record = parse_object(request.body)
        kind = text(record.get("RecordType"))
        if kind is None:
            raise PayloadInvalid("RecordType is missing")
        if _is_test(record):
            return Translation(ignored=1, tests=1, types=[kind])
        if kind not in _RECORDS:
            unknown = {} if kind == "Inbound" else {0: record}
            return Translation(ignored=1, unknown=unknown, types=[kind])
        return Translation(events=[_translate(kind, record)], types=[kind])


def _is_test(record: Mapping[str, Any]) -> bool:
    """Return whether a record is of Postmark's *Send test*. The message id alone does not say so:
    the messages that Postmark does not know have it too."""
    return record.get("MessageID") == _NO_MESSAGE and (
        record.get("Metadata") == _TEST_METADATA
        or _TEST_ADDRESS in (record.get("Recipient"), record.get("Email"))
    )


def _translate(kind: str, record: Mapping[str, Any]) -> TranslatedEvent:
    name, time_field = _RECORDS[kind]
    bounce = text(record.get("Type")) if kind == "Bounce" else None
    if bounce is not None:
        name = _NOT_BOUNCES.get(bounce, name)
    if kind == "SubscriptionChange":
        reason = text(record.get("SuppressionReason")) or ""
        name = _SUPPRESSIONS.get(reason, name)
        bounce = "HardBounce" if name == "Email Bounced" else None
        if record.get("SuppressSending") is False:
            name = "Email Resubscribed"
    metadata = record.get("Metadata")
    named = record.get("Recipient") or record.get("Email") or at(metadata, "recipient")
    recipient = email_recipient(named)
    user, taken = own_user_id(metadata)
    once = _once(name, bounce, record, recipient)
    bounce_type = _bounce_type(bounce) if name == "Email Bounced" else None
    document = track(
        name,
        message_id=event_id(*(once or _distinct(kind, record, time_field))),
        timestamp=iso_time(record.get(time_field)),
        user=user,
        properties=spread(
            merged(
                {
                    "email": recipient.value if recipient else None,
                    "bounceType": bounce_type,
                },
                record,
                without=["RecordType", "Metadata"],
            ),
            metadata,
            "Metadata",
            without=taken,
        ),
    )
    # A filter made a SpamNotification, not the person. Postmark suppresses per message stream.
    opt_outs = email_opt_outs(name, bounce_type, record.get("MessageStream"))
    return email_event(
        document,
        named,
        () if bounce == "SpamNotification" else opt_outs,
        taken=taken,
        restated=once is not None,
    )


def _once(
    name: str, bounce: str | None, record: Mapping[str, Any], recipient: Recipient | None
) -> list[str] | None:
    """Return what identifies an event that happens once to a message and its recipient.

    A message bounces hard once and is marked as spam once, but two of Postmark's webhooks report
    it. ``None`` for any other event, and for a message without an id.
    """
    message = text(record.get("MessageID"))
    if message is None or message == _NO_MESSAGE or recipient is None:
        return None
    if name != "Email Marked as Spam" and (name != "Email Bounced" or bounce not in _HARD):
        return None
    return [name, message, identifier_value("email", recipient.value) or ""]


def _distinct(kind: str, record: Mapping[str, Any], time_field: str) -> list[str]:
    """Return what distinguishes an event from all others of its kind.

    Two opens of a message differ in the time; two clicks at the same time, in the link.
    """
    fields = ("MessageID", "ID", "Recipient", time_field, "OriginalLink")
    return [kind, *(text(record.get(field)) or "" for field in fields)]


def _bounce_type(bounce: str | None) -> str | None:
    """Return the ``bounceType``.

    ``other``, such as for an automatic answer, says nothing about the address.
    """
    if bounce is None:
        return None
    return "hard" if bounce in _HARD else "soft" if bounce in _SOFT else "other"


engage_register_webhook = registration("postmark", Postmark)
