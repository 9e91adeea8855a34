# SPDX-License-Identifier: Apache-2.0
"""Twilio: what happened to text messages.

Twilio sends a status once and does not retry after an error. The query of the callback's URL, which
is signed, names the user.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import parse_qsl

from engage.api import (
    PayloadInvalid,
    ProviderContext,
    ProviderFactory,
    Register,
    SignatureMismatch,
    Signing,
    TranslatedEvent,
    Translation,
    WebhookRequest,
    hookimpl,
)
from engage.webhooks import (
    SecretProvider,
    check_hmac,
    decode_base64,
    email_recipient,
    event_id,
    form_bytes,
    form_fields,
    one_header,
    options_schema,
    phone_recipient,
    public_url,
    signed_url,
    spread,
    text,
    track,
    user_id,
)

EVENTS: Final = {
    "sent": "SMS Sent",
    "delivered": "SMS Delivered",
    "undelivered": "SMS Undelivered",
    "failed": "SMS Failed",
    "read": "SMS Read",
}
PORTS: Final = {"https": "443", "http": "80"}
#: Parameters of the callback's query that become fields, or belong to Twilio or engage.
QUERY_FIELDS: Final = ("userId", "user_id", "workspaceId", "bodySHA256")


class Twilio(SecretProvider):
    """Status callbacks of one Twilio account."""

    setup = (
        "Enter the URL as StatusCallback of each message, with the user's id in its query\n"
        "(&userId=...), or as the status callback of the messaging service. Enter it exactly,\n"
        "because it is signed. Copy the account's auth token into the option auth_token."
    )

    secret_option = "auth_token"
    signing = Signing(
        signature="x-twilio-signature", encoding="base64", body=True, url=True, form=True
    )

    def __init__(self, options: Mapping[str, Any], context: ProviderContext) -> None:
        super().__init__(options, context)
        self._url = public_url(options, context)

    def verify(self, request: WebhookRequest, fetched: bytes | None) -> None:
        """Check HMAC-SHA1 over the URL and the form fields, or over a URL with the body's hash."""
        signature = decode_base64(one_header(request, "x-twilio-signature"))
        url = signed_url(self._url, request)
        rest = b""
        hashes = [value for name, value in _query(url) if name == "bodySHA256"]
        if hashes:
            expected = hashlib.sha256(request.body).hexdigest()
            if len(hashes) != 1 or not hmac.compare_digest(expected.encode(), hashes[0].encode()):
                raise SignatureMismatch("bodySHA256 is not the body's")
        else:
            # Of a repeated field, Twilio signs each distinct value once.
            fields = sorted(set(form_bytes(request.body)))
            rest = b"".join(name + value for name, value in fields)
        signed = [candidate.encode() + rest for candidate in _spellings(url)]
        check_hmac(self.keys, signed, [signature], algorithm="sha1")

    def translate(self, request: WebhookRequest) -> Translation:
        """Return one track event for a status in :data:`EVENTS`; ignore calls and inbound texts."""
        query = dict(_query(request.url))
        if "bodySHA256" in query:
            return Translation(ignored=1)
        fields = dict(form_fields(request.body))
        status = fields.get("MessageStatus") or fields.get("SmsStatus") or ""
        name = EVENTS.get(status.lower())
        message = text(fields.get("MessageSid") or fields.get("SmsSid"))
        user = user_id(query.get("userId"), query.get("user_id"))
        recipient = phone_recipient(fields.get("To")) or email_recipient(fields.get("To"))
        if name is None:
            return Translation(ignored=1)
        if message is None:
            raise PayloadInvalid("MessageSid: missing")
        # A callback has no time: the event happened when it arrived.
        document = track(
            name,
            message_id=event_id(message, status.lower()),
            timestamp=None,
            user=user,
            properties=spread(fields, query, "query", without=QUERY_FIELDS),
        )
        return Translation(events=[TranslatedEvent(document, recipient)])


def _query(url: str) -> list[tuple[str, str]]:
    return parse_qsl(url.partition("?")[2], keep_blank_values=True, max_num_fields=100)


def _spellings(url: str) -> list[str]:
    """Return the URL with and without its port: Twilio's own libraries accept both.

    Twilio signs a URL without its port, and has signed the standard port of a URL that has none.
    """
    match = re.match(r"(https?)://([^/?#]*)(.*)", url, re.DOTALL)
    if match is None:
        return [url]
    scheme, host, rest = match.groups()
    bare = re.sub(r":[0-9]+\Z", "", host)
    other = bare if bare != host else f"{host}:{PORTS[scheme]}"
    return [url, f"{scheme}://{other}{rest}"]


@hookimpl
def engage_register_webhook(register: Register[ProviderFactory]) -> None:
    """Register ``twilio``."""
    register("twilio", Twilio, options_schema("engage_schemas", "plugins/webhooks/twilio.json"))
