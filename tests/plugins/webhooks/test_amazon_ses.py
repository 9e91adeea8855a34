# SPDX-License-Identifier: Apache-2.0
"""Amazon SES: signatures of SNS, subscriptions, and the translation of events."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import ValidationError

from engage.api import (
    ConfigError,
    PayloadInvalid,
    Provider,
    ProviderContext,
    SignatureMismatch,
    TranslatedEvent,
    WebhookRequest,
)
from support.provider_sns import (
    CERTIFICATE_URL,
    ELSEWHERE,
    HOST,
    OTHER_KEY,
    SIGNED,
    TOPIC,
    certificate,
    confirmation,
    notification,
    sign,
    signed,
)
from support.providers import NOW, make, recipient_of, registered, request

PEM = certificate(now=NOW)


def delivery(envelope: Any, headers: Sequence[tuple[str, str]] = ()) -> WebhookRequest:
    return request(json.dumps(envelope), list(headers))


@pytest.fixture
def ses() -> Provider:
    return make("amazon-ses", {"allowed_topic_arns": [TOPIC]})


OPEN = {"eventType": "Open", "mail": {"destination": ["a@b.c"]}, "open": {}}


# ------------------------------------------------------------------------------------- verification
@pytest.mark.parametrize("version", ["1", "2"])
@pytest.mark.parametrize("changes", [{}, {"Subject": "Hello"}, {"Subject": None}])
def test_both_versions_verify_with_the_fetched_certificate(
    ses: Provider, version: str, changes: dict[str, Any]
) -> None:
    envelope = notification(OPEN, SignatureVersion=version, **changes)
    if envelope.get("Subject", "") is None:
        envelope = signed({k: v for k, v in envelope.items() if v is not None}) | {"Subject": None}
    else:
        envelope = signed(envelope)
    asked = ses.needs(delivery(envelope))
    assert asked is not None
    assert (asked.url, asked.cacheable) == (CERTIFICATE_URL, True)
    ses.verify(delivery(envelope), PEM)


def test_a_pinned_certificate_needs_no_call() -> None:
    other = certificate(OTHER_KEY, now=NOW)
    pinned = [other.decode(), PEM.decode()]
    ses = make("amazon-ses", {"allowed_topic_arns": [TOPIC], "signing_cert_pem": pinned})
    assert ses.needs(delivery(signed(notification(OPEN)))) is None
    ses.verify(delivery(signed(notification(OPEN))), None)


def test_require_v2_refuses_sha1() -> None:
    ses = make("amazon-ses", {"allowed_topic_arns": [TOPIC], "require_v2": True})
    ses.needs(delivery(signed(notification(OPEN))))
    with pytest.raises(SignatureMismatch):
        ses.needs(delivery(signed(notification(OPEN, SignatureVersion="1"))))


@pytest.mark.parametrize("pem", ["", "not a certificate", "ec", "small"])
def test_a_pinned_certificate_must_be_one(pem: str) -> None:
    if pem == "ec":
        pem = certificate(now=NOW, key=ec.generate_private_key(ec.SECP256R1())).decode()
    elif pem == "small":
        pem = certificate(
            now=NOW, key=rsa.generate_private_key(public_exponent=65537, key_size=1024)
        ).decode()
    with pytest.raises(ConfigError, match="signing_cert_pem"):
        make_loosely({"allowed_topic_arns": [TOPIC], "signing_cert_pem": pem})


def make_loosely(options: Mapping[str, Any]) -> Provider:
    """Make a provider from options that its schema might not allow."""
    return registered("amazon-ses").factory(
        options, ProviderContext(workspace_id="acme", public_url=None)
    )


@pytest.mark.parametrize(
    "topics", [[], ["ses-events"], ["arn:aws:sns:s3-us-west-2:123456789012:x"]]
)
def test_the_allow_list_is_required_and_of_topics(topics: list[str]) -> None:
    with pytest.raises(ValidationError):
        make("amazon-ses", {"allowed_topic_arns": topics})
    with pytest.raises(ValidationError):
        make("amazon-ses", {})


CERTIFICATES = {
    "another key": certificate(OTHER_KEY, now=NOW),
    "expired": certificate(now=NOW, days=(-2, -1)),
    "not yet valid": certificate(now=NOW, days=(1, 2)),
    "elliptic": certificate(now=NOW, key=ec.generate_private_key(ec.SECP256R1())),
    "not a certificate": b"<html>",
    "nothing": b"",
}


@pytest.mark.parametrize("case", CERTIFICATES)
def test_another_certificate_does_not_verify(ses: Provider, case: str) -> None:
    with pytest.raises((SignatureMismatch, ValueError)):
        ses.verify(delivery(signed(notification(OPEN))), CERTIFICATES[case])


def test_without_the_fetched_certificate_nothing_verifies(ses: Provider) -> None:
    with pytest.raises(SignatureMismatch):
        ses.verify(delivery(signed(notification(OPEN))), None)


NO_CERTIFICATES = [
    f"{HOST}/a.txt",
    f"{HOST}/a.pem",
    f"{HOST}/SimpleNotificationService-0a.pem?x=.pem",
    f"{HOST}/SimpleNotificationService-0a.pem#.pem",
    f"{HOST}/../SimpleNotificationService-0a.pem",
    f"{HOST}/x/SimpleNotificationService-0a.pem",
    f"{HOST}/?Action=GetTopicAttributes&x=.pem",
]


@pytest.mark.parametrize("url", [*ELSEWHERE, *NO_CERTIFICATES])
def test_a_certificate_from_elsewhere_is_never_fetched(ses: Provider, url: Any) -> None:
    envelope = signed(notification(OPEN, SigningCertURL=url))
    with pytest.raises(SignatureMismatch):
        ses.needs(delivery(envelope))
    with pytest.raises(SignatureMismatch):
        ses.verify(delivery(envelope), PEM)


def test_a_topic_in_china_has_a_certificate_from_china() -> None:
    topic = "arn:aws-cn:sns:cn-north-1:123456789012:ses-events"
    chinese = make("amazon-ses", {"allowed_topic_arns": [topic]})
    url = "https://sns.cn-north-1.amazonaws.com{}/SimpleNotificationService-0a.pem"
    envelope = notification(OPEN, TopicArn=topic, SigningCertURL=url.format(".cn"))
    needed = chinese.needs(delivery(signed(envelope)))
    assert needed is not None
    assert needed.url == url.format(".cn")
    envelope = notification(OPEN, TopicArn=topic, SigningCertURL=url.format(""))
    with pytest.raises(SignatureMismatch):
        chinese.needs(delivery(signed(envelope)))


@pytest.mark.parametrize(
    "query",
    [
        f"Action=ConfirmSubscription&TopicArn={TOPIC}&Token=other",
        f"Action=ConfirmSubscription&TopicArn={TOPIC}x&Token=2336412f37f",
        f"Action=ConfirmSubscription&TopicArn={TOPIC}&Token=2336412f37f&Token=other",
        "",
    ],
)
def test_a_confirmation_of_something_else_is_refused(ses: Provider, query: str) -> None:
    with pytest.raises(SignatureMismatch):
        ses.needs(delivery(signed(confirmation(SubscribeURL=f"{HOST}/?{query}"))))


def test_a_topic_that_is_not_allowed_is_refused_before_anything_is_fetched(ses: Provider) -> None:
    envelope = signed(notification(OPEN, TopicArn=TOPIC + "-mine"))
    with pytest.raises(SignatureMismatch, match="allowed_topic_arns"):
        ses.needs(delivery(envelope))


@pytest.mark.parametrize(
    ("header", "field"),
    [("message-type", "Type"), ("message-id", "MessageId"), ("topic-arn", "TopicArn")],
)
def test_headers_must_agree_with_the_body(ses: Provider, header: str, field: str) -> None:
    name = f"x-amz-sns-{header}"
    envelope = signed(notification(OPEN))
    right = envelope[field]
    ses.needs(delivery(envelope, [(name, right)]))
    for headers in ([(name, "other")], [(name, "")], [(name, right), (name, right)]):
        with pytest.raises(SignatureMismatch):
            ses.needs(delivery(envelope, headers))


def test_line_breaks_cannot_move_text_between_fields(ses: Provider) -> None:
    # Line breaks are not escaped in the signed text, so both envelopes have the same signed text.
    real = notification("a\nMessageId\nforged", MessageId="m-1")
    forged = real | {"Message": "a", "MessageId": "forged\nMessageId\nm-1"}
    assert sign(real) == sign(forged)
    ses.verify(delivery(signed(real)), PEM)
    with pytest.raises(SignatureMismatch):
        ses.verify(delivery(signed(forged)), PEM)


@pytest.mark.parametrize(
    "changes",
    [
        {"Type": "Other"},
        {"Type": None},
        {"Type": ["Notification"]},
        {"SignatureVersion": "3"},
        {"SignatureVersion": 2},
        {"SignatureVersion": None},
        {"Signature": None},
        {"Signature": ""},
        {"Signature": "%%%"},
        {"Signature": 7},
        {"MessageId": None},
        {"MessageId": 5},
        {"TopicArn": [TOPIC]},
        {"Timestamp": {}},
        {"Message": {"eventType": "Open"}},
        {"Subject": 3},
        {"Subject": "x" * 4097},
    ],
)
def test_a_missing_or_odd_field_does_not_verify(ses: Provider, changes: dict[str, Any]) -> None:
    with pytest.raises(SignatureMismatch):
        ses.needs(delivery(signed(notification(OPEN)) | changes))


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"null", b"\xff", b"{", b"[" * 100_000, b"[]," * 500_000]
)
def test_a_body_that_is_not_an_envelope_does_not_verify(ses: Provider, body: bytes) -> None:
    with pytest.raises(SignatureMismatch):
        ses.needs(request(body))


@given(st.data())
def test_any_flipped_bit_is_refused(data: st.DataObject) -> None:
    ses = make("amazon-ses", {"allowed_topic_arns": [TOPIC]})
    make_one = data.draw(st.sampled_from([lambda: notification(OPEN, Subject="Hi"), confirmation]))
    envelope = make_one()
    signature = bytearray(sign(envelope))
    part = data.draw(st.sampled_from([*SIGNED[envelope["Type"]], "Signature"]))
    raw = signature if part == "Signature" else bytearray(envelope[part].encode())
    bit = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[bit // 8] ^= 1 << bit % 8
    if part != "Signature":
        # Bytes that are not UTF-8 are sent unchanged.
        envelope[part] = raw.decode("utf-8", "surrogateescape")
    envelope["Signature"] = base64.b64encode(signature).decode()
    body = json.dumps(envelope, ensure_ascii=False).encode("utf-8", "surrogateescape")
    with pytest.raises(SignatureMismatch):
        ses.verify(request(body), PEM)


# -------------------------------------------------------------------------------------- translation
def test_a_subscription_is_confirmed_with_a_new_url(ses: Provider) -> None:
    envelope = signed(confirmation(Token="a1-+/&="))
    envelope["SubscribeURL"] = envelope["SubscribeURL"].replace("a1-+/&=", "a1-%2B%2F%26%3D")
    envelope = signed(envelope)
    ses.verify(delivery(envelope), PEM)
    translation = ses.translate(delivery(envelope))
    assert translation.events == ()
    assert translation.call is not None
    assert translation.call.cacheable is False
    assert translation.call.url == (
        f"{HOST}/?Action=ConfirmSubscription&TopicArn={TOPIC}&Token=a1-%2B%2F%26%3D"
    )


def test_the_validation_of_a_topic_is_not_an_event(ses: Provider) -> None:
    message = "Successfully validated SNS topic for Amazon SES event publishing."
    assert ses.translate(delivery(notification(message))).ignored == 1


@pytest.mark.parametrize("message", ["hello", "[]", "{}", '{"eventType": 3.5}'])
def test_a_message_that_is_not_an_event_is_a_dead_letter(ses: Provider, message: str) -> None:
    with pytest.raises(PayloadInvalid):
        ses.translate(delivery(notification(message)))


def test_another_type_of_event_is_ignored(ses: Provider) -> None:
    assert ses.translate(delivery(notification({"eventType": "New"}))).ignored == 1


def translated(ses: Provider, message: Any) -> Sequence[TranslatedEvent]:
    return ses.translate(delivery(notification(message))).events


@pytest.mark.parametrize(
    ("given_type", "expected"),
    [("Permanent", "hard"), ("Transient", "soft"), ("Undetermined", "undetermined"), (None, None)],
)
def test_bounces_are_told_apart(
    ses: Provider, given_type: str | None, expected: str | None
) -> None:
    bounce = {"bounceType": given_type, "timestamp": "2023-11-14T22:00:00Z"}
    message = {"eventType": "Bounce", "mail": {"destination": ["a@b.c"]}, "bounce": bounce}
    [event] = translated(ses, message)
    assert event.document["event"] == "Email Bounced"
    assert event.document["properties"].get("bounceType") == expected
    assert event.document["timestamp"] == "2023-11-14T22:00:00.000Z"


def test_feedback_notifications_belong_to_the_recipient(ses: Provider) -> None:
    message = {
        "notificationType": "Bounce",
        "mail": {"destination": ["x@b.c", "y@b.c", "z@b.c"], "messageId": "ses-1"},
        "bounce": {
            "bounceType": "Permanent",
            "bouncedRecipients": [
                {"emailAddress": "Y <y@b.c>"},
                {"emailAddress": "z@b.c"},
                {"emailAddress": "y@b.c"},
                "odd",
            ],
        },
    }
    first, second = translated(ses, message)
    assert [recipient_of(event)[1] for event in (first, second)] == ["y@b.c", "z@b.c"]
    assert first.document["messageId"] == "22b80b92-fdea-4c2c-8f9d-bdfb0c7bf324"
    assert second.document["messageId"] != first.document["messageId"]
    assert second.document["properties"]["email"] == "z@b.c"
    assert second.document["properties"]["mail"] == message["mail"]


def test_an_open_belongs_to_the_first_recipient(ses: Provider) -> None:
    message = {"eventType": "Open", "mail": {"destination": ["x@b.c", "y@b.c"]}, "open": {}}
    [event] = translated(ses, message)
    assert recipient_of(event) == ("email", "x@b.c")


def test_a_tag_names_the_user(ses: Provider) -> None:
    tags = {"userId": ["u1"], "plan": ["pro", "x"], "ses:source-ip": ["1.2.3.4"], "odd": "text"}
    message = {
        "eventType": "Click",
        "mail": {"destination": ["x@b.c", "y@b.c"], "tags": tags},
        "click": {"link": "https://example.com", "timestamp": "2023-11-14T22:00:00.5Z"},
    }
    [event] = translated(ses, message)
    assert event.document["userId"] == "u1"
    properties = event.document["properties"]
    assert properties["plan"] == "pro"
    assert "userId" not in properties
    assert "ses:source-ip" not in properties
    assert properties["mail"]["tags"] == tags
    assert properties["click"]["link"] == "https://example.com"
    assert properties["sns"] == {
        "MessageId": "22b80b92-fdea-4c2c-8f9d-bdfb0c7bf324",
        "TopicArn": TOPIC,
        "Timestamp": "2023-11-14T22:13:20.000Z",
    }


@pytest.mark.parametrize(
    ("preferences", "name"),
    [
        ({"unsubscribeAll": True}, "Email Unsubscribed"),
        ({"unsubscribeAll": False}, "Email Resubscribed"),
        (
            {
                "unsubscribeAll": False,
                "topicSubscriptionStatus": [{"subscriptionStatus": "OptOut"}],
            },
            "Email Unsubscribed",
        ),
        ({"unsubscribeAll": False, "topicSubscriptionStatus": 5}, "Email Resubscribed"),
        (None, "Email Unsubscribed"),
    ],
)
def test_a_change_of_preferences_is_a_subscription_event(
    ses: Provider, preferences: dict[str, Any], name: str
) -> None:
    message = {"eventType": "Subscription", "subscription": {"newTopicPreferences": preferences}}
    [event] = translated(ses, message)
    assert event.document["event"] == name


def test_an_odd_part_of_an_event_does_not_affect_the_rest(ses: Provider) -> None:
    message = {
        "eventType": "Delivery",
        "mail": {"timestamp": 7, "destination": "a@b.c", "tags": ["x"]},
        "delivery": {"recipients": "a@b.c", "timestamp": "soon"},
    }
    [event] = translated(ses, message)
    assert event.recipient is None
    assert "timestamp" not in event.document
    assert event.document["properties"]["delivery"] == message["delivery"]
