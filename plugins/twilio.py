# SPDX-License-Identifier: Apache-2.0
"""Twilio: what happened to text messages, and who has opted out of them.

Twilio sends a status once and does not retry after an error. The query of the callback's URL, which
is signed, names the user.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal
from urllib.parse import parse_qsl

from engage.api import (
    ConfigError,
    OptOut,
    PayloadInvalid,
    Provider,
    ProviderContext,
    Recipient,
    Reply,
    SignatureMismatch,
    Signing,
    TranslatedEvent,
    Translation,
    WebhookRequest,
    WebhookResult,
)
from engage.webhooks import (
    check_hmac,
    decode_base64,
    email_recipient,
    event_id,
    form_bytes,
    form_fields,
    form_values,
    one_header,
    own_user_id,
    parse_json,
    phone_recipient,
    public_url,
    registration,
    secrets,
    signed_url,
    spread,
    text,
    track,
    user_id_notice,
)

#: State of a sent message → the part of the event's name after the channel.
STATES: Final = {
    "sent": "Sent",
    "delivered": "Delivered",
    "undelivered": "Undelivered",
    "failed": "Failed",
    "read": "Read",
}
#: States of messages that say nothing yet, or nothing about the person.
IGNORED: Final = frozenset(
    (
        *("queued", "accepted", "scheduled", "sending", "receiving", "received", "canceled"),
        *("partially_delivered", "help", ""),
    )
)
#: Meaning of a received message, according to Twilio's Advanced Opt-Out → the same.
OPT_OUTS: Final = {"stop": "Unsubscribed", "start": "Resubscribed"}
#: Prefix of an address → the channel's name; an address of SMS or MMS has no prefix.
CHANNELS: Final = {"whatsapp": "WhatsApp", "rcs": "RCS", "messenger": "Messenger"}
#: The header that names the key and the algorithm of a signature that is not made with the auth
#: token.
SETTINGS: Final = "x-twilio-webhooks-signature-settings"
MAX_SETTINGS: Final = 8
ALGORITHMS: Final = {"HMAC_SHA1": "sha1", "HMAC_SHA256": "sha256"}
PORTS: Final = {"https": "443", "http": "80"}
#: Parameters of the callback's query that become fields, or belong to Twilio or engage.
QUERY_FIELDS: Final = ("userId", "user_id", "workspaceId", "bodySHA256")


class Twilio(Provider):
    """Status callbacks and opt-outs of one Twilio account."""

    setup = (
        "1. Copy the auth token of the account into the option auth_token, and restart\n"
        "   engage. If a webhook rule of the account signs with a SharedKey, copy its secret\n"
        "   into shared_keys instead, under the id of the key.\n"
        "2. Enter the URL as StatusCallback of each message, with the id of the user in its\n"
        "   query (&userId=...), or as the status callback of the messaging service. Enter it\n"
        "   exactly, because it is signed.\n"
        "3. For opt-outs, enable Advanced Opt-Out in the messaging service, and enter the URL\n"
        "   as its webhook for incoming messages."
    )

    opt_out_channels = ("sms", "whatsapp", "rcs")
    # A form of at most a few KiB.
    max_body = 64 * 1024
    signing = Signing(
        signature="x-twilio-signature", encoding="base64", body=True, url=True, form=True
    )

    def __init__(self, options: Mapping[str, Any], context: ProviderContext) -> None:
        """:raises ConfigError: if a secret is empty, or if there is none."""
        tokens = secrets(options, "auth_token") if "auth_token" in options else []
        self._tokens = [token.encode() for token in tokens]
        shared: Mapping[str, Any] = options.get("shared_keys", {})
        self._shared = {
            name: [secret.encode() for secret in secrets(shared, name)] for name in shared
        }
        if not self.credentials():
            raise ConfigError("shared_keys: must contain a key, because auth_token is not set")
        self._url = public_url(options, context)

    def credentials(self) -> Sequence[bytes]:
        """Return the auth tokens and the secrets of the shared keys."""
        return [*self._tokens, *(secret for keys in self._shared.values() for secret in keys)]

    def verify(self, request: WebhookRequest, fetched: bytes | None) -> None:
        """Check the HMAC over the URL and the form fields, or over a URL with the body's hash."""
        keys, algorithm = self._signer(request)
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
        check_hmac(keys, signed, [signature], algorithm=algorithm)

    def _signer(self, request: WebhookRequest) -> tuple[Sequence[bytes], str]:
        """Return the secrets and the hash that the signature settings name.

        Without settings, Twilio signs with the auth token and SHA-1. A key whose id is not in
        ``shared_keys`` must have a secret that is in ``auth_token``.

        :raises SignatureMismatch: if the settings occur twice or cannot be read.
        """
        if not request.values(SETTINGS):
            return self._tokens, "sha1"
        settings: dict[str, str] = {}
        items = one_header(request, SETTINGS).split(",", MAX_SETTINGS)
        if len(items) > MAX_SETTINGS:
            raise SignatureMismatch(f"{SETTINGS}: too many settings")
        for item in items:
            name, _, value = item.partition("=")
            if settings.setdefault(name.strip().lower(), value.strip()) != value.strip():
                raise SignatureMismatch(f"{SETTINGS}: a setting is repeated")
        # Twilio's libraries also accept SHA-1 if the settings name no algorithm.
        algorithm = ALGORITHMS.get((settings.get("algorithm") or "HMAC_SHA1").upper())
        if algorithm is None:
            raise SignatureMismatch(f"{SETTINGS}: the algorithm is unknown")
        return self._shared.get(settings.get("key", ""), self._tokens), algorithm

    def translate(self, request: WebhookRequest) -> Translation:
        """Return one track event for a state of a sent message or an opt-out; ignore the rest."""
        query = dict(_query(request.url))
        if "bodySHA256" in query:
            return Translation(ignored=1, unknown={0: parse_json(request.body)})
        pairs = form_fields(request.body)
        fields = dict(pairs)
        message = text(fields.get("MessageSid") or fields.get("SmsSid"))
        opt_out = fields.get("OptOutType", "").lower()
        channel = _channel(fields)
        opt_outs: tuple[OptOut, ...] = ()
        if opt_out:
            # Received, so it belongs to the sender; the URL is the same for all of them.
            status, name, user = opt_out, OPT_OUTS.get(opt_out), None
            taken: tuple[str, ...] = ()
            recipient = _recipient(fields.get("From", ""))
            if channel.lower() in self.opt_out_channels:
                kind: Literal["stop", "start"] = "stop" if opt_out == "stop" else "start"
                # Twilio goes on with the messages of other services to this number.
                service = text(fields.get("MessagingServiceSid"))
                groups = () if service is None else (service,)
                opt_outs = (OptOut(kind, channel.lower(), groups),)
        else:
            status = (fields.get("MessageStatus") or fields.get("SmsStatus") or "").lower()
            name = STATES.get(status)
            user, taken = own_user_id(query)
            recipient = _recipient(fields.get("To", ""))
        if name is None:
            left = {} if status in IGNORED else {0: fields}
            return Translation(ignored=1, unknown=left, types=[status])
        if message is None:
            raise PayloadInvalid("MessageSid: missing", kind=status)
        # A callback has no time: the event happened when it arrived.
        document = track(
            f"{channel} {name}",
            message_id=event_id(message, status),
            timestamp=None,
            user=user,
            properties=spread(
                form_values(pairs), form_values(_query(request.url)), "query", without=QUERY_FIELDS
            ),
        )
        notice = user_id_notice(taken)
        event = TranslatedEvent(document, recipient, opt_outs=opt_outs, notice=notice)
        return Translation(events=[event], types=[status])

    def reply(self, request: WebhookRequest, result: WebhookResult) -> Reply | None:
        """Answer a received message with TwiML that sends nothing back.

        Twilio reports any other answer to a received message as an error (12300).
        """
        if "bodySHA256" in dict(_query(request.url)):
            return None
        fields = dict(form_bytes(request.body))
        if fields.get(b"SmsStatus", b"").lower() != b"received" and b"OptOutType" not in fields:
            return None
        return Reply(body=b"<Response/>", content_type="text/xml; charset=utf-8")


def _channel(fields: Mapping[str, str]) -> str:
    """Return the name of the channel, which every address except a phone number begins with."""
    prefixes = [fields.get("ChannelPrefix", "")]
    prefixes += [fields.get(name, "").rpartition(":")[0] for name in ("From", "To")]
    channels = (CHANNELS.get(prefix.lower()) for prefix in prefixes)
    return next(filter(None, channels), "SMS")


def _recipient(address: str) -> Recipient | None:
    """Return whom an address belongs to; an id of Messenger is not a phone number."""
    if address.lower().startswith("messenger:"):
        return None
    return phone_recipient(address) or email_recipient(address)


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


engage_register_webhook = registration("twilio", Twilio)
