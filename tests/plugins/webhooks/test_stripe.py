# SPDX-License-Identifier: Apache-2.0
"""Stripe: the translation of events, and the signature header."""

from __future__ import annotations

import hmac
import json
import time
from pathlib import Path
from typing import Any

import pytest

from engage.api import PayloadInvalid, SignatureMismatch, Translation
from support.provider_http import deliver
from support.providers import NOW, make, recipient_of, request
from support.server_inprocess import Serving, serving

SECRET = {"secret": "whsec_x"}


def translate(kind: str | None, thing: dict[str, Any], **fields: Any) -> Translation:
    payload = {
        "id": "evt_1",
        "object": "event",
        "created": 1492774577,
        "type": kind,
        "data": {"object": thing, **fields.pop("data", {})},
        **fields,
    }
    return make("stripe", SECRET).translate(request(json.dumps(payload)))


NAMED = {"userId": "u"}


@pytest.mark.parametrize(
    ("thing", "user"),
    [
        ({"metadata": NAMED, "client_reference_id": "r", "customer": "c"}, "u"),
        ({"metadata": {"user_id": 7}, "customer": "c"}, "7"),
        ({"metadata": {}, "client_reference_id": "r", "customer": "c"}, "r"),
        ({"subscription_details": {"metadata": NAMED}, "customer": "c"}, "u"),
        ({"parent": {"subscription_details": {"metadata": NAMED}}, "customer": "c"}, "u"),
        ({"customer": {"id": "c", "object": "customer", "metadata": NAMED}}, "u"),
        ({"customer": {"id": "c", "metadata": NAMED}, "metadata": {"userId": "own"}}, "own"),
    ],
)
def test_an_event_belongs_to_the_user_that_was_sent_to_stripe(
    thing: dict[str, Any], user: str
) -> None:
    [event] = translate("x.y", thing).events
    assert event.document["userId"] == user


@pytest.mark.parametrize(
    ("thing", "email"),
    [
        ({"customer": "c"}, None),
        (
            {"customer": {"id": "c", "object": "customer", "metadata": {}, "email": "a@b.c"}},
            "a@b.c",
        ),
        ({"object": "customer", "id": "c", "email": "a@b.c"}, "a@b.c"),
        ({"object": "invoice", "customer": "c", "customer_email": "a@b.c"}, "a@b.c"),
    ],
)
def test_without_a_user_the_customer_decides(thing: dict[str, Any], email: str | None) -> None:
    """The trait ``stripeCustomerId`` finds the user, else the address, else it is the customer."""
    for kind in ("x.y", "customer.updated"):
        [event] = translate(kind, thing).events
        assert "userId" not in event.document
        assert [(one.trait, one.value) for one in event.lookups] == [("stripeCustomerId", "c")]
        assert (event.recipient.value if event.recipient else None) == email
        assert event.fallback == "c"


@pytest.mark.parametrize(
    "thing",
    [
        {"customer": None, "customer_account": "acct_2"},
        {"customer_account": {"id": "acct_2", "object": "v2.core.account"}},
    ],
)
def test_a_customer_may_be_an_account(thing: dict[str, Any]) -> None:
    [event] = translate("invoice.paid", thing).events
    assert [(one.trait, one.value) for one in event.lookups] == [("stripeCustomerId", "acct_2")]
    assert event.fallback == "acct_2"
    [both] = translate("invoice.paid", {"customer": "cus_1", "customer_account": "acct_2"}).events
    assert both.fallback == "cus_1"


def test_a_thin_event_that_may_have_a_customer_is_invalid() -> None:
    """If the endpoint has the wrong kind of payload, each event is lost."""
    thin = {"id": "evt", "object": "v2.core.event", "type": "v1.invoice.paid"}
    provider = make("stripe", SECRET)
    for related in ({"type": "invoice"}, {"type": "customer"}, {"type": "v2.core.account"}):
        with pytest.raises(PayloadInvalid, match="snapshot"):
            provider.translate(request(json.dumps({**thin, "related_object": related})))
    for other in (None, {}, {"type": "billing.meter"}):
        assert provider.translate(request(json.dumps({**thin, "related_object": other}))).ignored


# ---- on a server
STRIPE = '[workspaces.webhooks.stripe]\nsecret = "whsec_x"\n'


async def send(server: Serving, kind: str, id: str, thing: dict[str, Any]) -> None:
    payload = {"id": id, "created": 1492774577, "type": kind, "data": {"object": thing}}
    body, now = json.dumps(payload), str(int(time.time()))
    signature = hmac.new(b"whsec_x", f"{now}.{body}".encode(), "sha256").hexdigest()
    headers = {"Stripe-Signature": f"t={now},v1={signature}"}
    url = "https://events.example.com/api/public/webhooks/stripe"
    assert (await deliver(server, request(body, headers, url=url))).status == 200


async def owners(server: Serving) -> list[str]:
    """Return whom the stored events of Stripe belong to."""
    documents = [event.document() for event in await server.events() if event.origin == "stripe"]
    return [document["userId"] for document in documents]


CUSTOMER = {"object": "customer", "id": "cus_1", "email": "ann@example.com"}
INVOICE = {"object": "invoice", "id": "in_1", "customer": "cus_1"}


async def test_a_customer_and_its_user_are_one_person(tmp_path: Path) -> None:
    """Invoices, charges and subscriptions of a customer with ``metadata.userId`` are the user's."""
    async with serving(tmp_path, workspace=STRIPE) as server:
        await send(server, "customer.created", "e1", {**CUSTOMER, "metadata": {"userId": "u1"}})
        await send(server, "invoice.paid", "e2", INVOICE)
        await send(server, "charge.succeeded", "e3", {"object": "charge", "customer": "cus_1"})
        await send(server, "customer.updated", "e4", {**CUSTOMER, "metadata": {}})
        assert await owners(server) == ["u1"] * 4


async def test_a_trait_of_the_api_links_a_user_to_a_customer(tmp_path: Path) -> None:
    async with serving(tmp_path, workspace=STRIPE) as server:
        for user, traits in (
            ("u1", {"stripeCustomerId": "cus_1"}),
            ("u2", {"email": "ann@example.com"}),
        ):
            answer = await server.send("/v1/identify", {"userId": user, "traits": traits})
            assert answer.status == 200
        paid = {**INVOICE, "customer_email": "ann@example.com"}
        await send(server, "invoice.paid", "e1", paid)
        await send(server, "invoice.paid", "e2", {**paid, "customer": "cus_2"})
        await send(server, "invoice.paid", "e3", {**INVOICE, "customer": "cus_2"})
        assert await owners(server) == ["u1", "u2", "cus_2"]


async def test_events_move_to_the_user_as_soon_as_one_is_known(tmp_path: Path) -> None:
    """A user that was made of a customer does not keep the customer's events."""
    async with serving(tmp_path, workspace=STRIPE) as server:
        await send(server, "customer.created", "e1", CUSTOMER)
        await send(server, "invoice.paid", "e2", INVOICE)
        await server.send("/v1/identify", {"userId": "u1", "traits": {"email": CUSTOMER["email"]}})
        await send(server, "customer.updated", "e3", {**CUSTOMER, "name": "Ann"})
        await send(server, "invoice.paid", "e4", INVOICE)
        assert await owners(server) == ["cus_1", "cus_1", "u1", "u1"]


@pytest.mark.parametrize(
    "thing",
    [
        {"customer_email": "a@b.c"},
        {"receipt_email": "a@b.c"},
        {"customer_details": {"email": "a@b.c"}},
        {"billing_details": {"email": "a@b.c"}},
    ],
)
def test_an_event_without_a_customer_belongs_to_the_address(thing: dict[str, Any]) -> None:
    [event] = translate("charge.succeeded", thing).events
    assert "userId" not in event.document
    assert recipient_of(event) == ("email", "a@b.c")


def test_an_event_without_a_user_is_ignored() -> None:
    assert translate("payout.paid", {"id": "po_1", "object": "payout"}).ignored == 1
    thin = {"id": "evt", "object": "v2.core.event", "type": "v1.billing.meter.no_meter_found"}
    assert make("stripe", SECRET).translate(request(json.dumps(thin))).ignored == 1


def test_a_removed_field_of_a_customer_is_null() -> None:
    thing = {
        "id": "cus_1",
        "object": "customer",
        "email": "a@b.c",
        "phone": None,
        "metadata": {"userId": "u", "plan": "pro"},
    }
    [event] = translate("customer.updated", thing, livemode=True).events
    assert event.document == {
        "type": "identify",
        "messageId": "evt_1",
        "userId": "u",
        "timestamp": "2017-04-21T11:36:17.000Z",
        "traits": {"email": "a@b.c", "phone": None, "stripeCustomerId": "cus_1", "plan": "pro"},
        "properties": {"stripeEvent": {"livemode": True}},
    }
    [deleted] = translate("customer.deleted", thing).events
    assert deleted.document["type"] == "track"


def test_fields_of_the_event_and_of_its_object_are_separate() -> None:
    [event] = translate(
        "invoice.paid",
        {"id": "in_1", "customer": "c", "livemode": True},
        data={"previous_attributes": {"paid": False}},
        pending_webhooks=3,
        api_version="2024-06-20",
    ).events
    assert event.document["properties"] == {
        "id": "in_1",
        "customer": "c",
        "livemode": True,
        "stripeEvent": {"api_version": "2024-06-20", "previous_attributes": {"paid": False}},
    }


def test_a_payload_without_a_type_is_invalid() -> None:
    with pytest.raises(PayloadInvalid):
        translate(None, {})


def test_an_odd_signature_beside_a_good_one_is_ignored() -> None:
    now = str(int(NOW))
    good = hmac.new(b"whsec_x", f"{now}.{{}}".encode(), "sha256").hexdigest()
    header = {"Stripe-Signature": f"t={now}, v1=xyz ,v1={good},v0=1"}
    make("stripe", SECRET).verify(request("{}", header), None)


@pytest.mark.parametrize("header", ["t={t}, v1={good}", " t={t},v1={good}", "t={t},v1 ={good}"])
def test_the_header_has_one_spelling(header: str) -> None:
    """As in Stripe's library for Python."""
    now = str(int(NOW))
    good = hmac.new(b"whsec_x", f"{now}.{{}}".encode(), "sha256").hexdigest()
    sent = {"Stripe-Signature": header.format(t=now, good=good)}
    with pytest.raises(SignatureMismatch):
        make("stripe", SECRET).verify(request("{}", sent), None)
