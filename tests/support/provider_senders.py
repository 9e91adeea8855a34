# SPDX-License-Identifier: Apache-2.0
"""Genuine deliveries of each provider to a server, in parts that a forger may change.

Every ``sign`` is written from the provider's documentation, not with the provider's code.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hmac
import json
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlencode

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from support import provider_sns as sns
from support.providers import mappings

PUBLIC_URL = "https://events.example.com"

#: A header's name, and its value as bytes.
Header = tuple[str, bytes]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sender:
    """How a provider sends deliveries."""

    #: The options of the workspace, and of another one.
    options: Mapping[str, Any]
    other: Mapping[str, Any]
    #: A payload of one event or more.
    payload: bytes
    #: (options, body, URL, seconds as text) → the headers that prove it.
    sign: Callable[[Mapping[str, Any], bytes, str, str], list[Header]]
    #: (options, payload) → the body.
    wrap: Callable[[Mapping[str, Any], bytes], bytes] = lambda options, payload: payload
    headers: tuple[Header, ...] = ()
    #: The header with the signature or the credential; ``None``: it is in the body.
    proof: str | None = None
    #: Whether the proof has a time, and how old it may be.
    timed: bool = False
    #: Whether a proof fits one body only.
    signs: bool = True

    def deliver(
        self,
        target: str,
        now: float | str,
        *,
        payload: bytes | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[list[Header], bytes]:
        """Return the headers and the body of a delivery to a path and query."""
        chosen = self.options if options is None else options
        body = self.wrap(chosen, self.payload if payload is None else payload)
        timestamp = now if isinstance(now, str) else str(int(now))
        proof = self.sign(chosen, body, PUBLIC_URL + target, timestamp)
        return [*self.headers, *proof], body


def _hex(key: str, signed: bytes, algorithm: str = "sha256") -> bytes:
    return hmac.new(key.encode(), signed, algorithm).hexdigest().encode()


def _base64(key: bytes, signed: bytes, algorithm: str = "sha256") -> bytes:
    return base64.b64encode(hmac.new(key, signed, algorithm).digest())


def _standard(prefix: str) -> Callable[[Mapping[str, Any], bytes, str, str], list[Header]]:
    def sign(options: Mapping[str, Any], body: bytes, url: str, timestamp: str) -> list[Header]:
        key = base64.b64decode(options["secret"].removeprefix("whsec_"))
        signed = b"msg_1." + timestamp.encode() + b"." + body
        return [
            (f"{prefix}-id", b"msg_1"),
            (f"{prefix}-timestamp", timestamp.encode()),
            (f"{prefix}-signature", b"v1," + _base64(key, signed)),
        ]

    return sign


def _whsec(text: str) -> dict[str, str]:
    return {"secret": "whsec_" + base64.b64encode(text.encode()).decode()}


def _form(signed_name: str, key_name: str) -> Callable[..., list[Header]]:
    def sign(options: Mapping[str, Any], body: bytes, url: str, timestamp: str) -> list[Header]:
        try:
            fields = sorted(set(parse_qsl(body.decode("ascii"), keep_blank_values=True)))
        except ValueError:
            fields = []
        text = url + "".join(name + value for name, value in fields)
        signed = text.encode("utf-8", "surrogateescape")
        return [(signed_name, _base64(options[key_name].encode(), signed, "sha1"))]

    return sign


def _customerio(options: Mapping[str, Any], body: bytes, url: str, timestamp: str) -> list[Header]:
    signed = b"v0:" + timestamp.encode() + b":" + body
    return [
        ("X-CIO-Timestamp", timestamp.encode()),
        ("X-CIO-Signature", _hex(options["signing_key"], signed)),
    ]


def _stripe(options: Mapping[str, Any], body: bytes, url: str, timestamp: str) -> list[Header]:
    signed = _hex(options["secret"], timestamp.encode() + b"." + body)
    return [("Stripe-Signature", b"t=" + timestamp.encode() + b",v1=" + signed)]


def _segment(options: Mapping[str, Any], body: bytes, url: str, timestamp: str) -> list[Header]:
    return [("X-Signature", _hex(options["secret"], body, "sha1"))]


def _shopify(options: Mapping[str, Any], body: bytes, url: str, timestamp: str) -> list[Header]:
    return [("X-Shopify-Hmac-Sha256", _base64(options["client_secret"].encode(), body))]


@functools.cache
def _sendgrid_key(number: int) -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def _sendgrid_options(number: int) -> dict[str, str]:
    form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    key = _sendgrid_key(number).public_key().public_bytes(*form)
    return {"verification_key": base64.b64encode(key).decode()}


def _sendgrid(options: Mapping[str, Any], body: bytes, url: str, timestamp: str) -> list[Header]:
    key = _sendgrid_key(1 if options == _sendgrid_options(1) else 0)
    raw = key.sign(timestamp.encode() + body, ec.ECDSA(hashes.SHA256()))
    return [
        ("X-Twilio-Email-Event-Webhook-Signature", base64.b64encode(raw)),
        ("X-Twilio-Email-Event-Webhook-Timestamp", timestamp.encode()),
    ]


def _sns_wrap(options: Mapping[str, Any], payload: bytes) -> bytes:
    text = payload.decode("utf-8", "replace")
    topic = options["allowed_topic_arns"][0]
    return json.dumps(sns.signed(sns.notification(text, TopicArn=topic))).encode()


def _static(secret: str, *, basic: bool = False) -> dict[str, Any]:
    if not basic:
        return {"header": "X-Secret", "value": secret}
    return {"basic_user": "hook", "basic_password": secret}


def _credential(options: Mapping[str, Any], body: bytes, url: str, timestamp: str) -> list[Header]:
    if "basic_user" not in options:
        return [("x-secret", options["value"].encode())]
    pair = f"{options['basic_user']}:{options['basic_password']}".encode()
    return [("Authorization", b"Basic " + base64.b64encode(pair))]


def _recorded(provider: str) -> bytes:
    found = next(mapping["input"] for mapping in mappings(provider) if mapping["expected_events"])
    return json.dumps(found.get("body", found) if isinstance(found, dict) else found).encode()


def _twilio_wrap(options: Mapping[str, Any], payload: bytes) -> bytes:
    fields = {"MessageSid": "SM1", "MessageStatus": "delivered", "To": "+15558675310"}
    return payload if payload != TWILIO else urlencode(fields).encode()


def _mailchimp_wrap(options: Mapping[str, Any], payload: bytes) -> bytes:
    return urlencode({"mandrill_events": payload}).encode()


#: Stands for the form of a status callback, which is not JSON.
TWILIO = b"status callback"

SENDERS: dict[str, Sender] = {
    "standard-webhooks": Sender(
        options=_whsec("standard, of one workspace"),
        other=_whsec("standard, of another one.."),
        payload=b'{"type":"user.created","data":{"id":"u1"}}',
        sign=_standard("webhook"),
        proof="webhook-signature",
        timed=True,
    ),
    "resend": Sender(
        options=_whsec("resend, of one workspace.."),
        other=_whsec("resend, of another one...."),
        payload=_recorded("resend"),
        sign=_standard("svix"),
        proof="svix-signature",
        timed=True,
    ),
    "segment": Sender(
        options={"secret": "segment-1"},
        other={"secret": "segment-2"},
        payload=b'{"type":"track","event":"x","userId":"u","messageId":"m"}',
        sign=_segment,
        proof="X-Signature",
    ),
    "mailchimp": Sender(
        options={"webhook_key": "mailchimp-1"},
        other={"webhook_key": "mailchimp-2"},
        payload=_recorded("mailchimp"),
        sign=_form("X-Mandrill-Signature", "webhook_key"),
        wrap=_mailchimp_wrap,
        proof="X-Mandrill-Signature",
    ),
    "twilio": Sender(
        options={"auth_token": "twilio-1"},
        other={"auth_token": "twilio-2"},
        payload=TWILIO,
        sign=_form("X-Twilio-Signature", "auth_token"),
        wrap=_twilio_wrap,
        proof="X-Twilio-Signature",
    ),
    "customerio": Sender(
        options={"signing_key": "customerio-1"},
        other={"signing_key": "customerio-2"},
        payload=_recorded("customerio"),
        sign=_customerio,
        proof="X-CIO-Signature",
        timed=True,
    ),
    "stripe": Sender(
        options={"secret": "whsec_stripe-1"},
        other={"secret": "whsec_stripe-2"},
        payload=_recorded("stripe"),
        sign=_stripe,
        proof="Stripe-Signature",
        timed=True,
    ),
    "shopify": Sender(
        options={"client_secret": "shopify-1"},
        other={"client_secret": "shopify-2"},
        payload=_recorded("shopify"),
        sign=_shopify,
        headers=(("X-Shopify-Topic", b"orders/create"), ("X-Shopify-Webhook-Id", b"w1")),
        proof="X-Shopify-Hmac-Sha256",
    ),
    "sendgrid": Sender(
        options=_sendgrid_options(0),
        other=_sendgrid_options(1),
        payload=_recorded("sendgrid"),
        sign=_sendgrid,
        proof="X-Twilio-Email-Event-Webhook-Signature",
        timed=True,
    ),
    "amazon-ses": Sender(
        options={
            "allowed_topic_arns": [sns.TOPIC],
            "signing_cert_pem": sns.certificate().decode(),
        },
        other={
            "allowed_topic_arns": [sns.TOPIC + "-other"],
            "signing_cert_pem": sns.certificate().decode(),
        },
        payload=_recorded("amazon-ses"),
        sign=lambda options, body, url, timestamp: [],
        wrap=_sns_wrap,
    ),
    "postmark": Sender(
        options=_static("postmark-1", basic=True),
        other=_static("postmark-2", basic=True),
        payload=_recorded("postmark"),
        sign=_credential,
        proof="Authorization",
        signs=False,
    ),
    "mixpanel": Sender(
        options=_static("mixpanel-1", basic=True),
        other=_static("mixpanel-2", basic=True),
        payload=b'[{"event":"x","properties":{"distinct_id":"u","$insert_id":"i"}}]',
        sign=_credential,
        proof="Authorization",
        signs=False,
    ),
    **{
        provider: Sender(
            options=_static(f"{provider}-1"),
            other=_static(f"{provider}-2"),
            payload=_recorded(provider),
            sign=_credential,
            proof="X-Secret",
            signs=False,
        )
        for provider in ("rudderstack", "posthog", "amplitude", "mparticle")
    },
}


def webhooks_table(which: str = "options", providers: Mapping[str, Sender] = SENDERS) -> str:
    """Return the tables ``[workspaces.webhooks.…]`` of a config, with ``options`` or ``other``."""
    lines = []
    for provider, sender in providers.items():
        lines.append(f"[workspaces.webhooks.{provider}]")
        options = getattr(sender, which)
        # Strings, lists and booleans of JSON are valid TOML.
        lines += [f"{name} = {json.dumps(value)}" for name, value in options.items()]
    return "\n".join(lines) + "\n"
