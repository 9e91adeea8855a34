# SPDX-License-Identifier: Apache-2.0
"""Twilio: what became of text messages.

Twilio sends a status once and does not try again after an error. Whose message it was stands in the
query of the status callback's URL, which is signed.
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
#: Of the callback's query: what has a field of its own, or is Twilio's or ours.
QUERY_FIELDS: Final = ("userId", "user_id", "workspaceId", "bodySHA256")


class Twilio(SecretProvider):
    """Status callbacks of one Twilio account."""

    setup = (
        "Give the URL as StatusCallback of each message, with the user's id in its query "
        "(&userId=...),\n"
        "or as the status callback of the messaging service. It is signed: send it "
        "exactly so.\n"
        "The account's auth token is the option auth_token."
    )

    secret_option = "auth_token"
    signing = Signing(
        signature="x-twilio-signature", encoding="base64", body=True, url=True, form=True
    )

    def __init__(self, options: Mapping[str, Any], context: ProviderContext) -> None:
        super().__init__(options, context)
        self._url = public_url(options, context)

    def verify(self, request: WebhookRequest, fetched: bytes | None) -> None:
        """HMAC-SHA1 over the URL and the decoded form fields, or the URL with the body's hash."""
        signature = decode_base64(one_header(request, "x-twilio-signature"))
        url = signed_url(self._url, request)
        rest = b""
        hashes = [value for name, value in _query(url) if name == "bodySHA256"]
        if hashes:
            expected = hashlib.sha256(request.body).hexdigest()
            if len(hashes) != 1 or not hmac.compare_digest(expected.encode(), hashes[0].encode()):
                raise SignatureMismatch("bodySHA256 is not the body's")
        else:
            # Of a name that is there twice Twilio signs each value once.
            fields = sorted(set(form_bytes(request.body)))
            rest = b"".join(name + value for name, value in fields)
        signed = [candidate.encode() + rest for candidate in _spellings(url)]
        check_hmac(self.keys, signed, [signature], algorithm="sha1")

    def translate(self, request: WebhookRequest) -> Translation:
        """One event for a status that says something; calls and inbound messages are ignored."""
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
        # There is no time of the event in a callback: it happened when it arrived.
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
    """The URL with and without its port: Twilio's own libraries take either.

    Twilio leaves out whichever port there is, and once signed the standard one where there is none.
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
    """Bring ``twilio``."""
    register("twilio", Twilio, options_schema("engage_schemas", "plugins/webhooks/twilio.json"))
