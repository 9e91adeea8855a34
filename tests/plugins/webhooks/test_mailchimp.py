# SPDX-License-Identifier: Apache-2.0
"""Mailchimp Transactional (Mandrill): the translation of events, the probe, the signed URL."""

from __future__ import annotations

import base64
import hmac
import json
from typing import Any
from urllib.parse import quote_plus

import pytest

from engage.api import PayloadInvalid, SignatureMismatch, Translation
from support.providers import make, request

KEY = {"webhook_key": "key"}


def body(*items: Any) -> str:
    return f"mandrill_events={quote_plus(json.dumps(items))}"


def translate(*items: Any) -> Translation:
    return make("mailchimp", KEY).translate(request(body(*items)))


def item(kind: str = "click", **fields: Any) -> dict[str, Any]:
    message = {"email": "A@b.c", "subject": "Hi", "ts": 1, **fields.pop("msg", {})}
    return {"event": kind, "_id": "m1", "ts": 1461095246, "msg": message, **fields}


def ids(*items: Any) -> list[str]:
    return [event.document["messageId"] for event in translate(*items).events]


def test_other_fields_stay_in_the_properties() -> None:
    [event] = translate(item(url="u", location={"city": "X"}, msg={"metadata": {"a": 1}})).events
    assert event.document == {
        "type": "track",
        "event": "Email Link Clicked",
        "messageId": event.document["messageId"],
        "timestamp": "2016-04-19T19:47:26.000Z",
        "properties": {
            "email": "A@b.c",
            "sentTs": 1,
            "_id": "m1",
            "url": "u",
            "location": {"city": "X"},
            "subject": "Hi",
            "a": 1,
        },
    }


def test_two_clicks_have_two_ids_and_a_redelivery_the_same() -> None:
    assert ids(item(url="a")) == ids(item(url="a", location={"later": "enriched"}))
    different = [
        item(url="a"),
        item(url="b"),
        item(url="a", ip="1.2.3.4"),
        item("open", url="a"),
        item(url="a") | {"ts": 1461095247},
        item(url="a") | {"_id": "m2"},
    ]
    assert len(set(ids(*different))) == len(different)


def test_empty_metadata_may_be_a_list() -> None:
    [event] = translate(item(msg={"metadata": []})).events
    assert "metadata" not in event.document["properties"]


def test_a_bad_element_does_not_affect_others() -> None:
    translation = translate(
        item(), 7, {"event": "open"}, {"event": "inbound", "msg": {}}, item("x")
    )
    assert len(translation.events) == 1
    assert [rejected.index for rejected in translation.rejected] == [1, 2]
    assert translation.ignored == 2


@pytest.mark.parametrize("form", ["", "x=1", "mandrill_events=", "mandrill_events=%7B%7D"])
def test_a_body_without_a_list_is_invalid(form: str) -> None:
    with pytest.raises(PayloadInvalid):
        make("mailchimp", KEY).translate(request(form))


def test_an_empty_list_is_a_probe_with_any_signature() -> None:
    for form in ("mandrill_events=%5B%5D", "mandrill_events=%5b%5d", "mandrill_events=[]\r\n"):
        assert make("mailchimp", KEY).probe(request(form)) is not None
    for form in ("mandrill_events=%5B%5D&x=1", "mandrill_events=", "", "&" * 64):
        assert make("mailchimp", KEY).probe(request(form)) is None
    assert make("mailchimp", KEY).probe(request(body(item()))) is None


def test_the_signed_url_may_be_configured() -> None:
    def signed(url: str) -> str:
        text = f"{url}mandrill_events[1]"
        return base64.b64encode(hmac.new(b"key", text.encode(), "sha1").digest()).decode()

    def verify(public_url: str, url: str, target: str = "") -> None:
        delivery = request(
            "mandrill_events=%5B1%5D",
            {"X-Mandrill-Signature": signed(url)},
            url=f"https://inner.example/x{target}",
        )
        make("mailchimp", {**KEY, "public_url": public_url}).verify(delivery, None)

    verify("https://outer.example/y", "https://outer.example/y")
    verify("https://outer.example/y", "https://outer.example/y?a=1", "?a=1")
    verify("https://outer.example/y?b=2", "https://outer.example/y?b=2", "?a=1")
    with pytest.raises(SignatureMismatch):
        verify("https://outer.example/y", "https://inner.example/x")
