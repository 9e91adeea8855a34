# SPDX-License-Identifier: Apache-2.0
"""Conformance cases of the providers that come with engage: options, a body, how it is signed.

``tests/plugins/webhooks/test_conformance.py`` runs the conformance suite on each of them, and
``tests/deliveries/test_webhook_hostile.py`` sends their deliveries to a server. Each ``sign`` is
written from the provider's documentation, not with the provider's code.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import hmac
import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl, quote_plus

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from engage.api import WebhookRequest
from engage.testing import ProviderConformance
from engage.testing.providers import Part
from engage_plugins.sendgrid import SIGNATURE, TIMESTAMP
from support.provider_sns import TOPIC, certificate, notification, signed
from support.provider_static import basic
from support.providers import NOW, request


def _hex_hmac(key: str, signed: bytes, algorithm: str = "sha256") -> str:
    return hmac.new(key.encode(), signed, algorithm).hexdigest()


def _base64_hmac(key: bytes, signed: bytes, algorithm: str = "sha256") -> str:
    return base64.b64encode(hmac.new(key, signed, algorithm).digest()).decode()


def _whsec(text: str) -> str:
    return "whsec_" + base64.b64encode(text.encode()).decode()


def _standard(
    prefix: str, body: bytes, options: Mapping[str, Any], timestamp: str
) -> dict[str, str]:
    secret = options["secret"].removeprefix("whsec_")
    signed = f"msg_1.{timestamp}.".encode() + body
    return {
        f"{prefix}-id": "msg_1",
        f"{prefix}-timestamp": timestamp,
        f"{prefix}-signature": "v1," + _base64_hmac(base64.b64decode(secret), signed),
    }


def _fields_of(body: bytes) -> list[bytes]:
    """Return names and values as a provider signs them: sorted, each pair once."""
    pairs = parse_qsl(body.decode("latin-1"), keep_blank_values=True, encoding="latin-1")
    return [(name + value).encode("latin-1") for name, value in sorted(set(pairs))]


class StandardWebhooks(ProviderConformance):
    plugin = "engage_plugins.standard_webhooks"
    options = {"secret": _whsec("one secret of enough bytes")}
    other_options = {"secret": _whsec("another of enough bytes..")}
    body = b'{"type":"user.created","timestamp":"2023-11-14T22:13:20Z","data":{"id":"u1"}}'

    def sign(self, body: bytes, options: Mapping[str, Any], timestamp: str) -> Mapping[str, str]:
        return _standard("webhook", body, options, timestamp)


class Resend(ProviderConformance):
    plugin = "engage_plugins.resend"
    options = {"secret": _whsec("one secret of resend....")}
    other_options = {"secret": _whsec("another one of resend...")}
    body = (
        b'{"type":"email.bounced","created_at":"2023-11-14T22:13:20.000Z",'
        b'"data":{"email_id":"56761188","to":["to@example.org"],"subject":"Hi",'
        b'"bounce":{"type":"Permanent","message":"no such box"},"tags":{"userId":"u1",'
        b'"templateId":"t1"}}}'
    )
    opt_out_body = (
        b'{"type":"email.complained","created_at":"2023-11-14T22:13:20.000Z",'
        b'"data":{"email_id":"56761188","to":["to@example.org"]}}'
    )

    def sign(self, body: bytes, options: Mapping[str, Any], timestamp: str) -> Mapping[str, str]:
        return _standard("svix", body, options, timestamp)


class Segment(ProviderConformance):
    plugin = "engage_plugins.segment"
    options = {"secret": "one"}
    other_options = {"secret": "another"}
    body = b'{"type":"track","event":"Clicked","userId":"u1","messageId":"m1","properties":{}}'

    def sign(self, body: bytes, options: Mapping[str, Any], timestamp: str) -> Mapping[str, str]:
        return {"X-Signature": _hex_hmac(options["secret"], body, "sha1")}


class SegmentBatch(Segment):
    """A batch, of which only the first element is signed."""

    options = {"secret": "one", "allow_batch": True}
    other_options = {"secret": "another", "allow_batch": True}
    body = b"[" + Segment.body + b"," + Segment.body.replace(b"m1", b"m2") + b"]"

    def sign(self, body: bytes, options: Mapping[str, Any], timestamp: str) -> Mapping[str, str]:
        signed = body
        if body.startswith(b"[{"):
            text = body.decode()
            signed = text[1 : json.JSONDecoder().raw_decode(text, 1)[1]].encode()
        return {"X-Signature": _hex_hmac(options["secret"], signed, "sha1")}

    def signed_parts(self, request: WebhookRequest) -> Iterator[Part]:
        [(body, change)] = super().signed_parts(request)
        end = len(Segment.body) + 1
        yield body[1:end], lambda first: change(b"[" + first + body[end:])

    def test_a_signature_of_other_content_is_refused(self) -> None:
        """It is accepted: only the first element of a batch is signed."""


class CustomerIo(ProviderConformance):
    plugin = "engage_plugins.customerio"
    options = {"signing_key": "one"}
    other_options = {"signing_key": "another"}
    secret_option = "signing_key"
    body = (
        b'{"object_type":"email","metric":"bounced","event_id":"01E4C4G1S0AMNG0XVF2M7RPH5S",'
        b'"timestamp":1585250305,"data":{"customer_id":"7","identifiers":{"id":"7",'
        b'"email":"a@example.com","cio_id":"c"},"recipient":"a@example.com",'
        b'"href":"https://example.com","link_id":3}}'
    )
    opt_out_body = body.replace(b"bounced", b"spammed")

    def sign(self, body: bytes, options: Mapping[str, Any], timestamp: str) -> Mapping[str, str]:
        signed = b"v0:" + timestamp.encode() + b":" + body
        return {
            "X-CIO-Timestamp": timestamp,
            "X-CIO-Signature": _hex_hmac(options["signing_key"], signed),
        }


class Stripe(ProviderConformance):
    plugin = "engage_plugins.stripe"
    options = {"secret": "whsec_one"}
    other_options = {"secret": "whsec_another"}
    body = (
        b'{"id":"evt_1","object":"event","created":1492774577,"type":"invoice.paid",'
        b'"data":{"object":{"id":"in_1","object":"invoice","customer":"cus_1",'
        b'"customer_email":"a@example.com","metadata":{"userId":"u1","plan":"pro"}},'
        b'"previous_attributes":{"paid":false}},"livemode":true}'
    )

    def sign(self, body: bytes, options: Mapping[str, Any], timestamp: str) -> Mapping[str, str]:
        signature = _hex_hmac(options["secret"], timestamp.encode() + b"." + body)
        return {"Stripe-Signature": f"t={timestamp},v1={signature},v0={'0' * 64}"}


class Shopify(ProviderConformance):
    plugin = "engage_plugins.shopify"
    options = {"client_secret": "one"}
    other_options = {"client_secret": "another"}
    secret_option = "client_secret"
    headers = {"X-Shopify-Topic": "orders/create", "X-Shopify-Webhook-Id": "b54557e4"}
    body = (
        b'{"id":820982911946154508,"created_at":"2024-01-01T00:00:00-05:00",'
        b'"email":"a@example.com","total_price":"254.98","customer":{"id":115310627314723954,'
        b'"email":"a@example.com"},"line_items":[{"id":1,"product_id":2}]}'
    )

    def sign(self, body: bytes, options: Mapping[str, Any], timestamp: str) -> Mapping[str, str]:
        key = options["client_secret"].encode()
        return {"X-Shopify-Hmac-Sha256": _base64_hmac(key, body)}


class ShopifyCustomer(Shopify):
    headers = {"X-Shopify-Topic": "customers/update", "X-Shopify-Webhook-Id": "b54557e4"}
    body = b'{"id":706405506930370084,"email":"a@example.com","first_name":"Bob","tags":""}'


class Mailchimp(ProviderConformance):
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
    opt_out_body = body.replace(b"hard_bounce", b"unsub")

    def sign(self, body: bytes, options: Mapping[str, Any], timestamp: str) -> Mapping[str, str]:
        signed = self.url.encode() + b"".join(_fields_of(body))
        key = options["webhook_key"].encode()
        return {"X-Mandrill-Signature": _base64_hmac(key, signed, "sha1")}


class Twilio(ProviderConformance):
    plugin = "engage_plugins.twilio"
    options = {"auth_token": "one"}
    other_options = {"auth_token": "another"}
    secret_option = "auth_token"
    url = "https://events.example.com/api/public/webhooks/twilio?userId=u1&messageId=m-1"
    body = b"MessageSid=SM1&MessageStatus=delivered&To=%2B15558675310&Body=Gr%C3%BC%C3%9Fe+%26"
    opt_out_body = b"MessageSid=SM1&OptOutType=STOP&From=%2B15558675310&MessagingServiceSid=MG1"

    def sign(self, body: bytes, options: Mapping[str, Any], timestamp: str) -> Mapping[str, str]:
        signed = self.url.encode() + b"".join(_fields_of(body))
        key = options["auth_token"].encode()
        return {"X-Twilio-Signature": _base64_hmac(key, signed, "sha1")}


class TwilioSharedKey(Twilio):
    """Signed with a key of the account's choice, by its id."""

    options = {"shared_keys": {"webhooks_sharedkey_1": "one"}}
    other_options = {"shared_keys": {"webhooks_sharedkey_1": "another"}}
    secret_option = None  # type: ignore[assignment]
    headers = {
        "X-Twilio-Webhooks-Signature-Settings": "key=webhooks_sharedkey_1,algorithm=HMAC_SHA256"
    }

    def sign(self, body: bytes, options: Mapping[str, Any], timestamp: str) -> Mapping[str, str]:
        signed = self.url.encode() + b"".join(_fields_of(body))
        [key] = options["shared_keys"].values()
        return {"X-Twilio-Signature": _base64_hmac(key.encode(), signed)}


class TwilioJson(Twilio):
    """A JSON body: the URL is signed and has the hash of the body."""

    body = b'{"status":"delivered"}'
    url = f"https://events.example.com/api/x?bodySHA256={hashlib.sha256(body).hexdigest()}"

    def sign(self, body: bytes, options: Mapping[str, Any], timestamp: str) -> Mapping[str, str]:
        key = options["auth_token"].encode()
        return {"X-Twilio-Signature": _base64_hmac(key, self.url.encode(), "sha1")}

    def test_a_genuine_delivery_becomes_events(self) -> None:
        """It has no events: a delivery in JSON has no message."""

    def test_an_opt_out_is_reported(self) -> None:
        """As above."""


class WithHeader(ProviderConformance):
    """A provider that sends a header with a secret."""

    options = {"header": "X-Secret", "value": "one Secret"}
    other_options = {"header": "X-Secret", "value": "another"}
    secret_option = "value"

    def sign(self, body: bytes, options: Mapping[str, Any], timestamp: str) -> Mapping[str, str]:
        return {"x-secret": options["value"]}


class WithBasic(ProviderConformance):
    """A provider that sends HTTP Basic."""

    options = {"basic_user": "hook", "basic_password": "pä:Ss"}
    other_options = {"basic_user": "hook", "basic_password": "another"}
    secret_option = "basic_password"

    def sign(self, body: bytes, options: Mapping[str, Any], timestamp: str) -> Mapping[str, str]:
        return {"Authorization": basic(f"hook:{options['basic_password']}")}


class Amplitude(WithHeader):
    plugin = "engage_plugins.amplitude"
    body = (
        b'{"user_id":"u","device_id":"d","event_type":"[Amplitude] Page Viewed",'
        b'"event_time":"2022-10-24 20:07:32.123000","uuid":"e",'
        b'"event_properties":{"[Amplitude] Page Title":"A"},'
        b'"user_properties":{"email":"a@example.com"}}'
    )


class MParticle(WithHeader):
    plugin = "engage_plugins.mparticle"
    body = (
        b'{"mpid":"600","message_id":"b","environment":"production",'
        b'"user_identities":{"customer_id":"u","email":"a@example.com"},'
        b'"user_attributes":{"$FirstName":"Milo"},"events":[{"event_type":"custom_event",'
        b'"data":{"event_name":"x","timestamp_unixtime_ms":"1402521613976"}},'
        b'{"event_type":"commerce_event","data":{"product_action":{"action":"purchase"},'
        b'"event_id":1}},{"event_type":"screen_view","data":{"screen_name":"Home"}}]}'
    )


class PostHog(WithHeader):
    plugin = "engage_plugins.posthog"
    body = (
        b'{"event":{"uuid":"e","event":"$identify","distinct_id":"u",'
        b'"properties":{"$set":{"plan":"pro"},"$anon_distinct_id":"a","$ip":"1.2.3.4"},'
        b'"timestamp":"2024-01-01T00:00:00.000Z"},'
        b'"person":{"properties":{"email":"a@example.com"}}}'
    )


class PostHogGroup(PostHog):
    body = (
        b'{"event":{"uuid":"e","event":"$groupidentify","distinct_id":"u",'
        b'"properties":{"$group_type":"t","$group_key":"g","$group_set":{"n":1}}}}'
    )


class Postmark(WithBasic):
    plugin = "engage_plugins.postmark"
    body = (
        b'{"RecordType":"Bounce","ID":692560173,"Type":"HardBounce","MessageID":"883953f4",'
        b'"Email":"a@example.com","BouncedAt":"2019-11-05T16:33:54.9070259Z",'
        b'"Metadata":{"userId":"u1","plan":"pro"}}'
    )
    opt_out_body = body.replace(b"HardBounce", b"Unsubscribe")


class RudderStack(WithHeader):
    plugin = "engage_plugins.rudderstack"
    body = (
        b'[{"type":"track","event":"x","userId":"u","messageId":"m","channel":"web",'
        b'"context":{"ip":"1.2.3.4"},"timestamp":"2024-01-01T00:00:00.000Z"},{"type":"identify",'
        b'"anonymousId":"a","traits":{"email":"a@example.com"}}]'
    )


def mixpanel_cohort(action: str = "add_members", **member: Any) -> dict[str, Any]:
    """Make a page of a cohort with one member, whose fields ``member`` changes."""
    parameters = {
        "mixpanel_project_id": "1",
        "mixpanel_cohort_id": "2",
        "mixpanel_cohort_name": "Power",
        "mixpanel_session_id": "s",
        "page_info": {"total_pages": 1, "page_count": 1},
        "members": [{"email": "a@b.c", "mixpanel_distinct_id": "u", "first_name": "A"} | member],
    }
    return {"action": action, "parameters": parameters}


class MixpanelCohort(WithBasic):
    plugin = "engage_plugins.mixpanel"
    body = json.dumps(mixpanel_cohort()).encode()


class MixpanelStream(WithHeader):
    plugin = "engage_plugins.mixpanel"
    body = b'[{"event":"x","properties":{"distinct_id":"u","time":1700000000,"$insert_id":"i"}}]'


#: The certificate that belongs to the key of :mod:`support.provider_sns`.
SES_CERTIFICATE = certificate(now=NOW)


class AmazonSes(ProviderConformance):
    """A body is the message, which SNS wraps in an envelope."""

    plugin = "engage_plugins.amazon_ses"
    options = {"allowed_topic_arns": [TOPIC]}
    other_options = {"allowed_topic_arns": [TOPIC + "-other"]}
    secret_option = None
    fetched = SES_CERTIFICATE
    body = (
        b'{"eventType":"Bounce","mail":{"timestamp":"2024-01-01T00:00:00.000Z",'
        b'"destination":["a@example.com","b@example.com"],"tags":{"plan":["pro"],'
        b'"ses:configuration-set":["c"]}},"bounce":{"bounceType":"Permanent",'
        b'"bouncedRecipients":[{"emailAddress":"a@example.com"}],'
        b'"timestamp":"2024-01-01T00:00:02.000Z"}}'
    )
    opt_out_body = body

    def delivery(self, body: bytes, options: Mapping[str, Any], timestamp: str) -> WebhookRequest:
        message = body.decode("utf-8", "replace")
        envelope = notification(message, TopicArn=options["allowed_topic_arns"][0], Subject="Hi")
        return request(json.dumps(signed(envelope)))


_SENDGRID_KEYS = {
    name: ec.generate_private_key(ec.SECP256R1()) for name in ("of the workspace", "of another")
}


def _sendgrid_options(name: str) -> dict[str, str]:
    form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    key = _SENDGRID_KEYS[name].public_key().public_bytes(*form)
    return {"verification_key": base64.b64encode(key).decode()}


@functools.cache
def _sendgrid_signature(body: bytes, timestamp: str, key: str) -> bytes:
    # Cached: no two signatures of a key are alike, and hypothesis repeats what it drew.
    return _SENDGRID_KEYS[key].sign(timestamp.encode() + body, ec.ECDSA(hashes.SHA256()))


class SendGrid(ProviderConformance):
    plugin = "engage_plugins.sendgrid"
    options = _sendgrid_options("of the workspace")
    other_options = _sendgrid_options("of another")
    secret_option = "verification_key"
    body = (
        b'[{"event":"bounce","email":"a@example.com","timestamp":1700000000,"sg_event_id":"e1",'
        b'"type":"blocked","status":"5.7.1","category":["news"]},{"event":"open",'
        b'"email":"a@example.com","userId":"u1","plan":"pro"}]'
    )
    opt_out_body = (
        b'[{"event":"group_unsubscribe","email":"a@example.com","timestamp":1700000000,'
        b'"sg_event_id":"e2","asm_group_id":10}]'
    )

    def sign(self, body: bytes, options: Mapping[str, Any], timestamp: str) -> Mapping[str, str]:
        key = "of another" if options == self.other_options else "of the workspace"
        raw = _sendgrid_signature(body, timestamp, key)
        return {SIGNATURE: base64.b64encode(raw).decode(), TIMESTAMP: timestamp}


#: Name → case; the name begins with the provider's: ``segment-SegmentBatch``.
CASES: dict[str, type[ProviderConformance]] = {
    f"{case.plugin.rpartition('.')[2]}-{name}": case
    for name, case in tuple(vars().items())
    if isinstance(case, type) and issubclass(case, ProviderConformance) and hasattr(case, "plugin")
}
