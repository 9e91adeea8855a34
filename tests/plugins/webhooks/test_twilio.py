# SPDX-License-Identifier: Apache-2.0
"""Twilio: the translation of status callbacks, and the signed URL."""

from __future__ import annotations

import base64
import hashlib
import hmac
from urllib.parse import urlencode

import pytest

from engage.api import PayloadInvalid, SignatureMismatch, Translation
from support.providers import make, recipient_of, request

TOKEN = {"auth_token": "token"}
URL = "https://events.example.com/api/public/webhooks/twilio"


def translate(query: str = "", **fields: str) -> Translation:
    sent = {"MessageSid": "SM1", "MessageStatus": "delivered", "To": "+15558675310", **fields}
    return make("twilio", TOKEN).translate(request(urlencode(sent), url=URL + query))


def signature(text: str) -> str:
    return base64.b64encode(hmac.new(b"token", text.encode(), "sha1").digest()).decode()


def verify(url: str, body: bytes | str, signed: str) -> None:
    delivery = request(body, {"X-Twilio-Signature": signature(signed)}, url=url)
    make("twilio", TOKEN).verify(delivery, None)


@pytest.mark.parametrize(
    ("status", "name"),
    [
        ("sent", "SMS Sent"),
        ("delivered", "SMS Delivered"),
        ("undelivered", "SMS Undelivered"),
        ("failed", "SMS Failed"),
        ("read", "SMS Read"),
    ],
)
def test_a_state_is_an_event(status: str, name: str) -> None:
    [event] = translate(MessageStatus=status).events
    assert event.document["event"] == name
    assert "timestamp" not in event.document


@pytest.mark.parametrize("status", ["queued", "sending", "accepted", "received", "canceled", ""])
def test_other_states_are_ignored(status: str) -> None:
    assert translate(MessageStatus=status).ignored == 1


def test_each_state_of_a_message_has_another_id() -> None:
    ids = [
        translate(**fields).events[0].document["messageId"]
        for fields in ({}, {}, {"MessageStatus": "sent"}, {"MessageSid": "SM2"})
    ]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 3


def test_the_query_names_the_user_and_adds_properties() -> None:
    [event] = translate("?workspaceId=acme&userId=u1&campaign=x&To=y").events
    document = event.document
    assert document["userId"] == "u1"
    assert document["properties"]["campaign"] == "x"
    assert document["properties"]["To"] == "+15558675310"
    assert document["properties"]["query"]["To"] == "y"
    assert "userId" not in document["properties"]


@pytest.mark.parametrize("to", ["+15558675310", "whatsapp:+15558675310"])
def test_an_event_without_a_user_belongs_to_the_number(to: str) -> None:
    [event] = translate(To=to).events
    assert event.recipient is not None
    assert recipient_of(event) == ("phone", "+15558675310")


def test_a_state_without_a_user_is_kept() -> None:
    [event] = translate(To="", MessageStatus="undelivered").events
    # The core refuses an event without an id and keeps the delivery.
    assert event.recipient is None
    with pytest.raises(PayloadInvalid):
        translate(MessageSid="")


def test_calls_are_ignored() -> None:
    call = request("CallSid=CA1&CallStatus=completed&To=%2B1", url=URL)
    assert make("twilio", TOKEN).translate(call).ignored == 1


@pytest.mark.parametrize(
    ("url", "signed"),
    [
        ("https://a.example/x", "https://a.example:443/x"),
        ("https://a.example:443/x", "https://a.example/x"),
        ("http://a.example/x?y=1", "http://a.example:80/x?y=1"),
        ("https://a.example:8443/x", "https://a.example:8443/x"),
        ("https://a.example:8443/x", "https://a.example/x"),
        ("http://u:p@a.example:8080/x", "http://u:p@a.example/x"),
        ("https://u:p@a.example/x", "https://u:p@a.example:443/x"),
    ],
)
def test_the_signed_url_may_have_the_default_port(url: str, signed: str) -> None:
    verify(url, "a=1", signed + "a1")


@pytest.mark.parametrize(
    ("url", "signed"),
    [
        ("https://a.example/x", "https://a.example:80/x"),
        ("https://a.example/x", "http://a.example/x"),
        ("https://a.example/x", "https://a.example:8443/x"),
        ("https://a.example:8443/x", "https://a.example:443/x"),
        ("https://a.example/x?a=1&b=2", "https://a.example/x?b=2&a=1"),
    ],
)
def test_another_url_does_not_verify(url: str, signed: str) -> None:
    with pytest.raises(SignatureMismatch):
        verify(url, "a=1", signed + "a1")


def test_a_repeated_value_is_signed_once() -> None:
    verify(URL, "b=2&a=3&a=1&a=3&c=", f"{URL}a1a3b2c")


def test_a_json_body_is_signed_with_its_hash() -> None:
    body = '{"a": 1}'
    url = f"{URL}?bodySHA256={hashlib.sha256(body.encode()).hexdigest()}"
    verify(url, body, url)
    for other in ('{"a": 2}', "", "a=1"):
        with pytest.raises(SignatureMismatch):
            verify(url, other, url)
    with pytest.raises(SignatureMismatch):
        verify(f"{url}&bodySHA256=x", body, f"{url}&bodySHA256=x")
