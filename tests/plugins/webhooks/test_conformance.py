# SPDX-License-Identifier: Apache-2.0
"""The conformance suite on the providers that come with engage.

Each ``sign`` is written from the provider's documentation, not with the provider's code.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from urllib.parse import parse_qsl, quote_plus

import pytest

from engage.testing import ProviderConformance


def hex_hmac(key: str, signed: bytes, algorithm: str = "sha256") -> str:
    return hmac.new(key.encode(), signed, algorithm).hexdigest()


def base64_hmac(key: bytes, signed: bytes, algorithm: str = "sha256") -> str:
    return base64.b64encode(hmac.new(key, signed, algorithm).digest()).decode()


def whsec(text: str) -> str:
    return "whsec_" + base64.b64encode(text.encode()).decode()


def standard(prefix, body, options, timestamp):
    secret = options["secret"].removeprefix("whsec_")
    signed = f"msg_1.{timestamp}.".encode() + body
    return {
        f"{prefix}-id": "msg_1",
        f"{prefix}-timestamp": timestamp,
        f"{prefix}-signature": "v1," + base64_hmac(base64.b64decode(secret), signed),
    }


class TestStandardWebhooks(ProviderConformance):
    plugin = "engage_plugins.standard_webhooks"
    options = {"secret": whsec("one secret of enough bytes")}
    other_options = {"secret": whsec("another of enough bytes..")}
    body = b'{"type":"user.created","timestamp":"2023-11-14T22:13:20Z","data":{"id":"u1"}}'

    def sign(self, body, options, timestamp):
        return standard("webhook", body, options, timestamp)


class TestResend(ProviderConformance):
    plugin = "engage_plugins.resend"
    options = {"secret": whsec("one secret of resend....")}
    other_options = {"secret": whsec("another one of resend...")}
    body = json.dumps(
        {
            "type": "email.bounced",
            "created_at": "2023-11-14T22:13:20.000Z",
            "data": {
                "email_id": "56761188",
                "to": ["to@example.org"],
                "subject": "Hi",
                "bounce": {"type": "Permanent", "message": "no such box"},
                "tags": {"userId": "u1", "templateId": "t1"},
            },
        }
    ).encode()

    def sign(self, body, options, timestamp):
        return standard("svix", body, options, timestamp)


class TestSegment(ProviderConformance):
    plugin = "engage_plugins.segment"
    options = {"secret": "one"}
    other_options = {"secret": "another"}
    body = json.dumps(
        {"type": "track", "event": "Clicked", "userId": "u1", "messageId": "m1", "properties": {}}
    ).encode()

    def sign(self, body, options, timestamp):
        return {"X-Signature": hex_hmac(options["secret"], body, "sha1")}


class TestSegmentBatch(TestSegment):
    """An array, of which the first element is signed."""

    options = {"secret": "one", "allow_batch": True}
    other_options = {"secret": "another", "allow_batch": True}
    body = b"[" + TestSegment.body + b"," + TestSegment.body.replace(b"m1", b"m2") + b"]"

    def sign(self, body, options, timestamp):
        signed = body
        if body.startswith(b"[{"):
            text = body.decode()
            signed = text[1 : json.JSONDecoder().raw_decode(text, 1)[1]].encode()
        return {"X-Signature": hex_hmac(options["secret"], signed, "sha1")}

    def signed_parts(self, request):
        [(body, change)] = super().signed_parts(request)
        end = len(TestSegment.body) + 1
        yield body[1:end], lambda first: change(b"[" + first + body[end:])

    @pytest.mark.skip("what follows the first element is not signed, a comma or anything else")
    def test_a_signature_of_another_body(self): ...


class TestCustomerIo(ProviderConformance):
    plugin = "engage_plugins.customerio"
    options = {"signing_key": "one"}
    other_options = {"signing_key": "another"}
    secret_option = "signing_key"
    body = json.dumps(
        {
            "object_type": "email",
            "metric": "bounced",
            "event_id": "01E4C4G1S0AMNG0XVF2M7RPH5S",
            "timestamp": 1585250305,
            "data": {
                "customer_id": "7",
                "identifiers": {"id": "7", "email": "a@example.com", "cio_id": "c"},
                "recipient": "a@example.com",
                "href": "https://example.com",
                "link_id": 3,
            },
        }
    ).encode()

    def sign(self, body, options, timestamp):
        signed = b"v0:" + timestamp.encode() + b":" + body
        return {
            "X-CIO-Timestamp": timestamp,
            "X-CIO-Signature": hex_hmac(options["signing_key"], signed),
        }


class TestStripe(ProviderConformance):
    plugin = "engage_plugins.stripe"
    options = {"secret": "whsec_one"}
    other_options = {"secret": "whsec_another"}
    body = json.dumps(
        {
            "id": "evt_1",
            "object": "event",
            "created": 1492774577,
            "type": "invoice.paid",
            "data": {
                "object": {
                    "id": "in_1",
                    "object": "invoice",
                    "customer": "cus_1",
                    "customer_email": "a@example.com",
                    "metadata": {"userId": "u1", "plan": "pro"},
                },
                "previous_attributes": {"paid": False},
            },
            "livemode": True,
        }
    ).encode()

    def sign(self, body, options, timestamp):
        signature = hex_hmac(options["secret"], timestamp.encode() + b"." + body)
        return {"Stripe-Signature": f"t={timestamp},v1={signature},v0={'0' * 64}"}


class TestShopify(ProviderConformance):
    plugin = "engage_plugins.shopify"
    options = {"client_secret": "one"}
    other_options = {"client_secret": "another"}
    secret_option = "client_secret"
    headers = {"X-Shopify-Topic": "orders/create", "X-Shopify-Webhook-Id": "b54557e4"}
    body = json.dumps(
        {
            "id": 820982911946154508,
            "created_at": "2024-01-01T00:00:00-05:00",
            "email": "a@example.com",
            "total_price": "254.98",
            "customer": {"id": 115310627314723954, "email": "a@example.com"},
            "line_items": [{"id": 1, "product_id": 2}],
        }
    ).encode()

    def sign(self, body, options, timestamp):
        key = options["client_secret"].encode()
        return {"X-Shopify-Hmac-Sha256": base64_hmac(key, body)}


class TestShopifyCustomer(TestShopify):
    headers = {"X-Shopify-Topic": "customers/update", "X-Shopify-Webhook-Id": "b54557e4"}
    body = b'{"id":706405506930370084,"email":"a@example.com","first_name":"Bob","tags":""}'


class TestMailchimp(ProviderConformance):
    plugin = "engage_plugins.mailchimp"
    options = {"webhook_key": "one"}
    other_options = {"webhook_key": "another"}
    secret_option = "webhook_key"
    items = [
        {
            "event": "hard_bounce",
            "_id": "abc",
            "ts": 1461095246,
            "msg": {"_id": "abc", "email": "a@example.com", "metadata": {"userId": "u1"}},
        },
        {"event": "click", "_id": "abd", "ts": 1461095247, "url": "u", "msg": {"email": "b@c.d"}},
    ]
    body = f"mandrill_events={quote_plus(json.dumps(items))}&z=Gr%C3%BC%C3%9Fe".encode()

    def sign(self, body, options, timestamp):
        signed = self.url.encode() + b"".join(fields_of(body))
        key = options["webhook_key"].encode()
        return {"X-Mandrill-Signature": base64_hmac(key, signed, "sha1")}


class TestTwilio(ProviderConformance):
    plugin = "engage_plugins.twilio"
    options = {"auth_token": "one"}
    other_options = {"auth_token": "another"}
    secret_option = "auth_token"
    url = "https://events.example.com/api/public/webhooks/twilio?userId=u1&messageId=m-1"
    body = b"MessageSid=SM1&MessageStatus=delivered&To=%2B15558675310&Body=Gr%C3%BC%C3%9Fe+%26"

    def sign(self, body, options, timestamp):
        signed = self.url.encode() + b"".join(fields_of(body))
        key = options["auth_token"].encode()
        return {"X-Twilio-Signature": base64_hmac(key, signed, "sha1")}


class TestTwilioJson(TestTwilio):
    """A JSON body: the URL is signed, and carries the body's hash."""

    body = b'{"status":"delivered"}'
    url = f"https://events.example.com/api/x?bodySHA256={hashlib.sha256(body).hexdigest()}"

    def sign(self, body, options, timestamp):
        key = options["auth_token"].encode()
        return {"X-Twilio-Signature": base64_hmac(key, self.url.encode(), "sha1")}

    @pytest.mark.skip("such a delivery is not about a message")
    def test_a_genuine_delivery_becomes_events(self): ...


def fields_of(body: bytes) -> list[bytes]:
    """Names and values, as a provider that sent this body would have signed them: sorted, each
    pair once."""
    pairs = parse_qsl(body.decode("latin-1"), keep_blank_values=True, encoding="latin-1")
    return [(name + value).encode("latin-1") for name, value in sorted(set(pairs))]
