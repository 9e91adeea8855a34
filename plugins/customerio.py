# SPDX-License-Identifier: Apache-2.0
"""Customer.io's reporting webhooks: what happened to messages, and changes of subscriptions.

After a failed delivery Customer.io holds back every later one, for up to seven days.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from engage.api import (
    OptOut,
    PayloadInvalid,
    ProviderContext,
    Signing,
    TranslatedEvent,
    Translation,
    WebhookRequest,
)
from engage.webhooks import (
    SecretProvider,
    check_hmac,
    check_timestamp,
    decode_hex,
    email_event,
    email_opt_outs,
    email_recipient,
    event_id,
    merged,
    message_id,
    one_header,
    parse_object,
    phone_recipient,
    registration,
    text,
    track,
    unix_time,
    user_id,
)

CHANNELS: Final = {
    "customer": "Customer",
    "email": "Email",
    "push": "Push",
    "sms": "SMS",
    "in_app": "In-App Message",
    "slack": "Slack Message",
    "webhook": "Webhook Message",
    "whatsapp": "WhatsApp",
}
METRICS: Final = {
    "clicked": "Link Clicked",
    "spammed": "Marked as Spam",
    "deferred": "Delayed",
}
#: Fields that have another name in the events of other providers; the rest become camelCase.
NAMES: Final = {"subject": "emailSubject", "failure_message": "reason", "event_type": "type"}


class CustomerIo(SecretProvider):
    """Deliveries of one reporting webhook."""

    setup = (
        "1. Customer.io > Data & Integrations > Integrations > Reporting Webhooks > Add\n"
        "   Reporting Webhook: enter the URL as the webhook endpoint, choose the events, and\n"
        "   save.\n"
        "2. Copy the signing key of the webhook into the option signing_key, and restart\n"
        "   engage."
    )

    secret_option = "signing_key"
    opt_out_channels = ("email", "sms", "push", "whatsapp")
    signing = Signing(
        signature="x-cio-signature",
        body=True,
        timestamp="x-cio-timestamp",
        past=300,
        future=300,
    )

    def __init__(self, options: Mapping[str, Any], context: ProviderContext) -> None:
        super().__init__(options, context)
        self._tolerance: int | None = options.get("tolerance", 300) or None

    def verify(self, request: WebhookRequest, fetched: bytes | None) -> None:
        """Check HMAC-SHA256 over ``v0:timestamp:body``."""
        timestamp = one_header(request, "x-cio-timestamp")
        signature = decode_hex(one_header(request, "x-cio-signature"))
        check_timestamp(timestamp, request.now, past=self._tolerance, future=self._tolerance)
        check_hmac(self.keys, b"v0:%b:%b" % (timestamp.encode(), request.body), [signature])

    def translate(self, request: WebhookRequest) -> Translation:
        """Return one track event, such as ``Email Link Clicked``."""
        payload = parse_object(request.body)
        kind, metric = text(payload.get("object_type")), text(payload.get("metric"))
        data = payload.get("data")
        if kind is None or metric is None or not isinstance(data, dict):
            raise PayloadInvalid("object_type, metric and data are required")
        kind = kind.lower()
        types = [f"{kind}.{metric}"]
        given = data.get("identifiers")
        identifiers = given if isinstance(given, dict) else {}
        user = user_id(identifiers.get("id"), data.get("customer_id"))
        is_message = kind in ("email", "sms", "whatsapp")
        named = _named(data, identifiers, is_message=is_message)
        number = phone_recipient(named) if is_message and kind != "email" else None
        recipient = number or email_recipient(named)
        profile = user_id(identifiers.get("cio_id"))
        if user is None and recipient is None and profile is None:
            return Translation(ignored=1, unknown={0: data}, types=types)
        timestamp = unix_time(payload.get("timestamp"))
        properties = _properties(payload, data, timestamp)
        if kind == "email" and metric == "bounced":
            properties["bounceType"] = "hard"
        traits = merged(
            {
                "email": recipient.value if recipient and recipient.trait == "email" else None,
                "cioId": identifiers.get("cio_id"),
            }
        )
        document = track(
            _name(kind, metric),
            message_id=message_id(payload.get("event_id"))
            or event_id(kind, metric, str(data.get("delivery_id")), str(timestamp)),
            timestamp=timestamp,
            user=user,
            properties=properties,
            context={"traits": traits} if traits else {},
        )
        if user is None and recipient is None:
            # All that Customer.io knows of this profile is the id that it assigned itself.
            document["anonymousId"] = f"customerio:{profile}"
        opt_outs = tuple(_opt_outs(kind, metric, data))
        event = TranslatedEvent(document, recipient, opt_outs=opt_outs)
        if is_message and number is None:
            # Customer.io does not say which of several recipients an event is about.
            event = email_event(document, named, opt_outs, one_of=True)
        if kind == "customer" and user is not None:
            # What the customer wants, with whichever address.
            event = dataclasses.replace(event, named=())
        return Translation(events=[event], types=types)


def _opt_outs(kind: str, metric: str, data: Mapping[str, Any]) -> Iterator[OptOut]:
    """Yield what an event says about subscriptions."""
    channels = CustomerIo.opt_out_channels
    if metric == "cio_subscription_preferences_changed":
        # All preferences of the person, as JSON in a text: those that did not change are in it too.
        try:
            content = parse_object(str(data.get("content")))
        except PayloadInvalid:
            return
        topics = tuple(topic for topic in _refused(content.get("topics")) if text(topic))
        if topics:
            yield OptOut("unsubscribe", "email", topics)
        for channel in _refused(content.get("channels")):
            if channel in channels:
                yield OptOut("unsubscribe", channel)
    elif metric == "unsubscribed":
        # A customer who has unsubscribed gets nothing more, in any channel.
        for channel in channels if kind == "customer" else {kind}.intersection(channels):
            yield OptOut("unsubscribe", channel)
    elif kind == "email":
        yield from email_opt_outs(_name(kind, metric), "hard")


def _refused(preferences: object) -> list[str]:
    items = preferences.items() if isinstance(preferences, dict) else ()
    return [name for name, choice in items if choice is False]


def _properties(
    payload: Mapping[str, Any], data: Mapping[str, Any], timestamp: str | None
) -> dict[str, Any]:
    """Return everything without a field of its own, with names in camelCase."""
    properties: dict[str, Any] = {"eventId": payload.get("event_id")}
    if "href" in data or "link_id" in data:
        properties["link"] = merged({"url": data.get("href"), "id": data.get("link_id")})
    for key, value in data.items():
        if key not in ("customer_id", "identifiers", "href", "link_id"):
            properties.setdefault(NAMES.get(key, _camel(key)), value)
    fields = {"object_type", "metric", "event_id", "data"}
    if timestamp is not None:
        fields.add("timestamp")
    for key, value in payload.items():
        if key not in fields:
            properties.setdefault(_camel(key), value)
    return merged(properties)


def _named(
    data: Mapping[str, Any], identifiers: Mapping[str, Any], *, is_message: bool
) -> str | None:
    """Return the recipient of a message, or else the address of its profile."""
    places = [data.get("recipient"), data.get("email_address"), identifiers.get("email")]
    return next(filter(None, map(text, places if is_message else reversed(places))), None)


def _name(kind: str, metric: str) -> str:
    channel = CHANNELS.get(kind) or kind.replace("_", " ").title()
    words = metric.removeprefix("cio_").replace("_", " ")
    return f"{channel} {METRICS.get(metric) or words.title()}"


def _camel(name: str) -> str:
    return re.sub(r"_([a-z0-9])", lambda match: match[1].upper(), name)


engage_register_webhook = registration("customerio", CustomerIo)
