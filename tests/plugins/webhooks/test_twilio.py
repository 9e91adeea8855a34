# SPDX-License-Identifier: Apache-2.0
"""Twilio: the translation of status callbacks, and the signed URL."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import jsonschema
import pytest

from engage.api import (
    ConfigError,
    PayloadInvalid,
    ProviderContext,
    SignatureMismatch,
    Translation,
    WebhookResult,
)
from support.providers import make, recipient_of, registered, request

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
        ("read", "SMS Read"),
    ],
)
def test_a_state_is_an_event(status: str, name: str) -> None:
    [event] = translate(MessageStatus=status).events
    assert event.document["event"] == name
    assert "timestamp" not in event.document


@pytest.mark.parametrize("status", ["sending", "accepted", "received", "canceled", ""])
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


def test_all_values_of_a_repeated_field_are_kept() -> None:
    body = "MessageSid=SM1&MessageStatus=delivered&To=%2B1&N=2&N=1&M=3&M=3&L="
    delivery = request(body, url=f"{URL}?userId=u1&tag=a&tag=b")
    [event] = make("twilio", TOKEN).translate(delivery).events
    properties = event.document["properties"]
    assert (properties["N"], properties["M"], properties["L"]) == (["2", "1"], ["3", "3"], "")
    assert properties["tag"] == ["a", "b"]
    assert (properties["To"], event.document["userId"]) == ("+1", "u1")


def test_a_json_body_is_signed_with_its_hash() -> None:
    body = '{"a": 1}'
    url = f"{URL}?bodySHA256={hashlib.sha256(body.encode()).hexdigest()}"
    verify(url, body, url)
    for other in ('{"a": 2}', "", "a=1"):
        with pytest.raises(SignatureMismatch):
            verify(url, other, url)
    with pytest.raises(SignatureMismatch):
        verify(f"{url}&bodySHA256=x", body, f"{url}&bodySHA256=x")


# ---- signatures by the settings of the delivery
FORM = "MessageSid=SM1&MessageStatus=delivered"
#: Made with ``RequestValidator.compute_signature`` of Twilio's library for Python, 9.13.0, for
#: ``URL?userId=u1`` and the fields of :data:`FORM`.
SIGNATURES = {
    ("token", "HMAC_SHA1"): "Vfv5y9H5hzdZ02+W3XDqf1pXY/E=",
    ("token", "HMAC_SHA256"): "TL43Sah2caEvLonLUi0Tk30kD8pEfKlrxDIfoSWmhCc=",
    ("shared", "HMAC_SHA1"): "kT7p1+owE0+oDs/jtoE1riajovs=",
    ("shared", "HMAC_SHA256"): "cb9mISVXLS6QaXtRK6oRGKE21AjMJ4k1WIQLvcKr9Gk=",
}
SETTINGS = "X-Twilio-Webhooks-Signature-Settings"
BOTH = {"auth_token": "token", "shared_keys": {"k1": "shared", "k2": ["other", "shared"]}}


def accepts(options: Mapping[str, Any], signed: tuple[str, str], *settings: str) -> bool:
    """Return whether a delivery with this signature and these settings is verified."""
    headers = [("X-Twilio-Signature", SIGNATURES[signed])]
    headers += [(SETTINGS, value) for value in settings]
    delivery = request(FORM, headers, url=URL + "?userId=u1")
    try:
        make("twilio", options).verify(delivery, None)
    except SignatureMismatch:
        return False
    return True


@pytest.mark.parametrize("algorithm", ["HMAC_SHA1", "HMAC_SHA256"])
def test_a_signature_counts_only_for_the_algorithm_that_the_settings_name(algorithm: str) -> None:
    other = {"HMAC_SHA1": "HMAC_SHA256", "HMAC_SHA256": "HMAC_SHA1"}[algorithm]
    for setting in (f"key=k1,algorithm={algorithm}", f" algorithm = {algorithm.lower()} ,key=k1"):
        assert accepts(BOTH, ("shared", algorithm), setting)
        assert not accepts(BOTH, ("shared", other), setting)


def test_without_settings_the_auth_token_signs_with_sha_1() -> None:
    assert accepts(BOTH, ("token", "HMAC_SHA1"))
    for signed in SIGNATURES:
        assert signed == ("token", "HMAC_SHA1") or not accepts(BOTH, signed)
    # As in Twilio's libraries, settings without an algorithm mean SHA-1.
    assert accepts(BOTH, ("shared", "HMAC_SHA1"), "key=k1")
    assert not accepts(BOTH, ("shared", "HMAC_SHA256"), "key=k1")


def test_a_signature_counts_only_for_the_key_that_the_settings_name() -> None:
    sha256 = "algorithm=HMAC_SHA256"
    for key in ("k1", "k2"):
        assert accepts(BOTH, ("shared", "HMAC_SHA256"), f"key={key},{sha256}")
        assert not accepts(BOTH, ("token", "HMAC_SHA256"), f"key={key},{sha256}")
    # The secret of a key that is not listed may be in auth_token.
    assert accepts(BOTH, ("token", "HMAC_SHA256"), f"key=k3,{sha256}")
    assert not accepts(BOTH, ("shared", "HMAC_SHA256"), f"key=k3,{sha256}")
    only = {"shared_keys": {"k1": "shared"}}
    assert accepts(only, ("shared", "HMAC_SHA256"), f"key=k1,{sha256}")
    assert not accepts(only, ("shared", "HMAC_SHA256"), f"key=k3,{sha256}")
    assert not accepts(only, ("shared", "HMAC_SHA1"))


@pytest.mark.parametrize(
    "settings",
    [
        ("",),
        ("key=k1,algorithm=HMAC_SHA512",),
        ("key=k1,algorithm=none",),
        ("key=k1,algorithm=HMAC_SHA1,algorithm=HMAC_SHA256",),
        ("key=k3,key=k1,algorithm=HMAC_SHA256",),
        ("key=k1,algorithm=HMAC_SHA256", "key=k1,algorithm=HMAC_SHA256"),
        ("a,b,c,d,e,f,g,h,key=k1,algorithm=HMAC_SHA256",),
    ],
)
def test_odd_settings_are_refused(settings: tuple[str, ...]) -> None:
    assert not any(accepts(BOTH, signed, *settings) for signed in SIGNATURES)


def test_every_secret_is_a_credential_and_none_is_empty() -> None:
    assert set(make("twilio", BOTH).credentials()) == {b"token", b"shared", b"other"}
    with pytest.raises(jsonschema.ValidationError):
        make("twilio", {})
    with pytest.raises(ConfigError):
        make("twilio", {"shared_keys": {}})
    factory = registered("twilio").factory
    with pytest.raises(ConfigError):
        factory(
            {"shared_keys": {"k": ""}}, ProviderContext(workspace_id="a", public_url="https://a")
        )


# ---- channels
@pytest.mark.parametrize(
    ("fields", "channel"),
    [
        ({"From": "+14155550100"}, "SMS"),
        ({"From": "whatsapp:+14155550100", "To": "whatsapp:+15558675310"}, "WhatsApp"),
        ({"From": "rcs:acme_agent", "To": "rcs:+15558675310"}, "RCS"),
        ({"From": "rcs:acme_agent"}, "RCS"),
        ({"From": "MG1", "ChannelPrefix": "whatsapp"}, "WhatsApp"),
        ({"From": "+14155550100", "To": "+15558675310", "ChannelPrefix": "sms"}, "SMS"),
        ({"From": "messenger:1", "To": "messenger:2"}, "Messenger"),
    ],
)
def test_an_event_is_named_by_its_channel(fields: dict[str, str], channel: str) -> None:
    [event] = translate(**fields).events
    assert event.document["event"] == f"{channel} Delivered"
    if channel == "Messenger":
        assert event.recipient is None
    else:
        assert recipient_of(event) == ("phone", "+15558675310")


# ---- opt-outs
def received(**fields: str) -> dict[str, str]:
    """Return the fields of a received message, which is what Advanced Opt-Out reports."""
    message = {"MessageSid": "SM2", "SmsStatus": "received", "Body": "stop", "To": "+14155550100"}
    return {**message, "From": "+15558675310", **fields}


@pytest.mark.parametrize(
    ("kind", "sender", "name"),
    [
        ("STOP", "+15558675310", "SMS Unsubscribed"),
        ("START", "+15558675310", "SMS Resubscribed"),
        ("stop", "whatsapp:+15558675310", "WhatsApp Unsubscribed"),
    ],
)
def test_an_opt_out_is_an_event_of_the_sender(kind: str, sender: str, name: str) -> None:
    body = urlencode(received(OptOutType=kind, From=sender))
    url = URL + "?workspaceId=acme&userId=nobody"
    [event] = make("twilio", TOKEN).translate(request(body, url=url)).events
    assert event.document["event"] == name
    assert recipient_of(event) == ("phone", "+15558675310")
    assert "userId" not in event.document
    assert event.document["properties"]["OptOutType"] == kind


def test_other_received_messages_are_ignored() -> None:
    for fields in ({}, {"OptOutType": "HELP"}, {"OptOutType": ""}):
        body = urlencode(received(**fields))
        assert make("twilio", TOKEN).translate(request(body, url=URL)).ignored == 1


def test_a_received_message_is_answered_with_twiml() -> None:
    """Twilio reports JSON as an error (12300), but only for received messages."""
    provider, done = make("twilio", TOKEN), WebhookResult(accepted=1, ignored=0)
    for fields in (received(), received(OptOutType="STOP")):
        answer = provider.reply(request(urlencode(fields), url=URL), done)
        assert answer is not None
        assert answer.body == b"<Response/>"
        assert answer.content_type.startswith("text/xml")
    for body, url in ((FORM, URL), ('{"a":"%"}', URL + "?bodySHA256=x")):
        assert provider.reply(request(body, url=url), done) is None
