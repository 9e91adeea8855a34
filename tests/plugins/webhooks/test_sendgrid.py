# SPDX-License-Identifier: Apache-2.0
"""SendGrid: signatures with elliptic curves, and the translation of events."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa, utils

from engage.api import (
    ConfigError,
    PayloadInvalid,
    Provider,
    SignatureMismatch,
    Translation,
    WebhookRequest,
)
from engage_plugins.sendgrid import SIGNATURE, TIMESTAMP
from support.providers import NOW, make, recipient_of, request

KEY, OTHER = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
BODY = b'[{"event":"open","email":"a@b.c","sg_event_id":"e1"}]\r\n'


def spki(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> str:
    form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    return base64.b64encode(key.public_key().public_bytes(*form)).decode()


OPTIONS = {"verification_key": spki(KEY)}


def sign(
    body: bytes = BODY, timestamp: str = str(int(NOW)), key: ec.EllipticCurvePrivateKey = KEY
) -> bytes:
    return key.sign(timestamp.encode("latin-1") + body, ec.ECDSA(hashes.SHA256()))


def delivery(
    body: bytes = BODY, timestamp: str = str(int(NOW)), signature: bytes | str | None = None
) -> WebhookRequest:
    raw = sign(body, timestamp) if signature is None else signature
    encoded = raw if isinstance(raw, str) else base64.b64encode(raw).decode()
    return request(body, {SIGNATURE: encoded, TIMESTAMP: timestamp})


@pytest.fixture
def sendgrid() -> Provider:
    return make("sendgrid", OPTIONS)


def test_a_key_may_be_a_list_and_pem() -> None:
    form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    pem = KEY.public_key().public_bytes(*form).decode()
    both = make("sendgrid", {"verification_key": [spki(OTHER), pem]})
    both.verify(delivery(), None)
    assert both.credentials()[1] == make("sendgrid", OPTIONS).credentials()[0]
    with pytest.raises(SignatureMismatch):
        make("sendgrid", {"verification_key": spki(OTHER)}).verify(delivery(), None)


@pytest.mark.parametrize(
    "key",
    [
        "not base64!",
        "AAAA",
        spki(ec.generate_private_key(ec.SECP384R1())),
        spki(rsa.generate_private_key(public_exponent=65537, key_size=2048)),
    ],
)
def test_a_key_must_be_one_of_sendgrid(key: str) -> None:
    with pytest.raises(ConfigError, match="verification_key"):
        make("sendgrid", {"verification_key": key})


def test_the_signature_is_canonical_der(sendgrid: Provider) -> None:
    r, s = utils.decode_dss_signature(sign())
    r_bytes, s_bytes = (b"\0" + number.to_bytes(32, "big") for number in (r, s))
    integers = b"".join(b"\x02" + bytes([len(part)]) + part for part in (b"\0" + r_bytes, s_bytes))
    for raw in (b"\x30" + bytes([len(integers)]) + integers, sign() + b"\0", b"\x30\0", b"x" * 70):
        with pytest.raises(SignatureMismatch):
            sendgrid.verify(delivery(signature=raw), None)


# -------------------------------------------------------------------------------------- translation
def translate(sendgrid: Provider, *items: Any) -> Translation:
    return sendgrid.translate(request(json.dumps(items)))


@pytest.mark.parametrize(
    ("details", "expected"),
    [
        ({"type": "bounce", "status": "5.1.1"}, "hard"),
        ({"type": "blocked", "status": "5.7.1"}, "soft"),
        ({"type": "bounce", "status": "4.2.2"}, "soft"),
        ({}, "hard"),
    ],
)
def test_bounces_are_told_apart(sendgrid: Provider, details: dict[str, str], expected: str) -> None:
    [event] = translate(sendgrid, {"event": "bounce", "email": "a@b.c", **details}).events
    assert event.document["properties"]["bounceType"] == expected


def test_a_bad_element_does_not_affect_others(sendgrid: Provider) -> None:
    good = {"event": "open", "email": "a@b.c", "sg_event_id": "e1"}
    translation = translate(sendgrid, 7, good, {"event": 3}, {"event": "new kind"}, None, good)
    assert [event.index for event in translation.events] == [1, 5]
    assert [rejected.index for rejected in translation.rejected] == [0, 2, 4]
    assert translation.ignored == 1


def test_an_empty_list_has_no_events(sendgrid: Provider) -> None:
    translation = translate(sendgrid)
    assert (translation.events, translation.ignored, translation.rejected) == ([], 0, [])


@pytest.mark.parametrize("body", [b"{}", b"null", b"\xff", b"[" * 100_000, b"[NaN]", b""])
def test_a_body_that_is_not_a_list_of_events_is_invalid(sendgrid: Provider, body: bytes) -> None:
    with pytest.raises(PayloadInvalid):
        sendgrid.translate(request(body))


def test_other_fields_are_properties(sendgrid: Provider) -> None:
    item = {
        "event": "click",
        "email": "A <A@b.c>",
        "timestamp": "1700000000",
        "userId": "",
        "sg_event_id": "x" * 300,
        "smtp-id": "<1>",
        "category": ["a"],
        "messageId": "m-1",
        "workspaceId": "other",
    }
    [event] = translate(sendgrid, item).events
    assert event.document["timestamp"] == "2023-11-14T22:13:20.000Z"
    assert "userId" not in event.document
    assert recipient_of(event) == ("email", "A@b.c")
    assert len(event.document["messageId"]) <= 256
    properties = event.document["properties"]
    for field in ("smtp-id", "category", "messageId", "workspaceId", "sg_event_id"):
        assert properties[field] == item[field]


def test_the_user_is_a_custom_argument(sendgrid: Provider) -> None:
    item = {"event": "open", "email": "a@b.c"}
    for arguments, user, left in (
        ({"userId": "u1"}, "u1", {}),
        ({"user_id": 7}, "7", {}),
        ({"userId": "u1", "user_id": "u2"}, "u1", {"user_id": "u2"}),
        ({"userId": {"x": 1}}, None, {"userId": {"x": 1}}),
        ({"userId": "u" * 513}, None, {"userId": "u" * 513}),
    ):
        [event] = translate(sendgrid, item | arguments).events
        assert event.document.get("userId") == user
        properties = event.document["properties"]
        assert {key: properties[key] for key in arguments if key in properties} == left


def test_the_same_element_without_an_id_gets_the_same_id(sendgrid: Provider) -> None:
    one, two = {"event": "open", "email": "a@b.c"}, {"event": "open", "email": "b@b.c"}
    first, second, third = translate(sendgrid, one, two, one).events
    assert first.document["messageId"] == third.document["messageId"]
    assert first.document["messageId"] != second.document["messageId"]


def test_a_late_event_names_the_one_that_the_message_was_sent_with(sendgrid: Provider) -> None:
    """Recipients of one message share its smtp-id."""
    sent = {"event": "processed", "email": "A@b.c", "smtp-id": "<1>", "sg_event_id": "e1"}
    [first] = translate(sendgrid, sent).events
    assert first.document["messageId"] != "e1"
    for kind in ("bounce", "spamreport"):
        late = {"event": kind, "email": "a@B.c", "smtp-id": "<1>", "sg_event_id": "e2"}
        own, other, without, invalid = translate(
            sendgrid,
            late,
            {**late, "email": "b@b.c"},
            {**late, "smtp-id": None},
            {**late, "smtp-id": {"x": 1}},
        ).events
        assert own.earlier == first.document["messageId"]
        assert own.document["messageId"] == "e2"
        assert other.earlier not in (None, own.earlier)
        assert (without.earlier, invalid.earlier) == (None, None)
    [dropped] = translate(sendgrid, {**sent, "event": "dropped"}).events
    assert (dropped.earlier, dropped.document["messageId"]) == (None, "e1")
    [plain] = translate(sendgrid, {**sent, "smtp-id": ""}).events
    assert plain.document["messageId"] == "e1"
