# SPDX-License-Identifier: Apache-2.0
"""What is not stored of a delivery, and how an operator learns of it: tests of the services, what
is about nobody, and what engage does not understand."""

from __future__ import annotations

import base64
import contextlib
import hmac
import json
import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from engage.api import Translation, WebhookRequest
from engage.deliveries.receive import type_of
from engage.monitoring.logs import ACCESS
from engage.monitoring.metrics import Metrics
from support.provider_http import PUBLIC_URL, deliver, public
from support.provider_senders import SENDERS, webhooks_table
from support.providers import make, request
from support.server_inprocess import Serving, serving

KEY = "shopify-secret"
NAMES = (
    *("customerio", "mailchimp", "postmark", "rudderstack", "segment", "sendgrid"),
    *("standard-webhooks", "stripe", "twilio"),
)
CONFIG = (
    '[[workspaces.subscription_groups]]\nid = "news"\nchannel = "email"\ntype = "opt_out"\n'
    + webhooks_table(providers={name: SENDERS[name] for name in NAMES})
    + f'[workspaces.webhooks.shopify]\nclient_secret = "{KEY}"\n'
    + "".join(
        f'[workspaces.unsubscribes.{name}]\naction = "channel"\n'
        for name in ("mailchimp", "postmark", "sendgrid")
    )
)


def delivery(provider: str, payload: Any, **headers: str) -> WebhookRequest:
    """Return a signed delivery; of Shopify with further headers."""
    target = f"/api/public/webhooks/{provider}?workspaceId=acme"
    data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    if provider == "shopify":
        signature = base64.b64encode(hmac.digest(KEY.encode(), data, "sha256")).decode()
        sent = {"X-Shopify-Hmac-Sha256": signature, "X-Shopify-Webhook-Id": "w1", **headers}
        return request(data, sent, url=PUBLIC_URL + target)
    pairs, body = SENDERS[provider].deliver(target, time.time(), payload=data)
    sent = {name: value.decode("latin-1") for name, value in pairs}
    return request(body, sent, url=PUBLIC_URL + target)


@contextlib.contextmanager
def recorded() -> Iterator[list[Mapping[str, Any]]]:
    """Record the fields of the lines of requests in the log."""
    lines: list[Mapping[str, Any]] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(vars(record))  # type: ignore[method-assign]
    access = logging.getLogger(ACCESS)
    level = access.level
    access.addHandler(handler)
    access.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        access.removeHandler(handler)
        access.setLevel(level)


async def outcomes(folder: Path, *deliveries: WebhookRequest, letters: int = 0) -> list[str]:
    """Send deliveries, check that nothing is stored, and return the outcome of each; the metric
    and the log have the same ones."""
    metrics = Metrics()
    with recorded() as lines:
        async with serving(folder, workspace=CONFIG, server=public(), metrics=metrics) as server:
            for delivery in deliveries:
                answer = await deliver(server, delivery)
                assert answer.status == 200, answer.body
            await nothing(server)
            assert len(await server.dead_letters()) == letters
    logged = [line["outcome"] for line in lines]
    counted: dict[str, int] = {}
    for (_, outcome), count in metrics.numbers["webhook_deliveries"].items():
        if count:
            counted[str(outcome)] = counted.get(str(outcome), 0) + int(count)
    assert counted == {outcome: logged.count(outcome) for outcome in logged}
    return logged


async def nothing(server: Serving) -> None:
    """Check that there is no event, user, choice or suppression."""
    store = server.app.store
    assert not await server.events()
    assert not (await store.scan_subscriptions("acme", after=None, limit=1)).items
    assert not (await store.scan_suppressions("acme", after=None, limit=1)).items


# ----------------------------------------------------------------------------------------- tests
MANDRILL = [
    {
        "event": kind,
        "_id": f"exampleaaaaaaaaaaaaaaaaaaaaaaaaa{index}",
        "ts": 1365109999,
        "msg": {"email": address, "metadata": {"user_id": 111}, "tags": ["webhook-example"]},
    }
    for index, (kind, address) in enumerate(
        (
            ("send", "example.webhook@mandrillapp.com"),
            ("hard_bounce", "example.webhook@mandrillapp.com"),
            ("unsub", "Example.Webhook@MandrillApp.com "),
            ("spam", "example.webhook@mandrillapp.com"),
            ("new kind", "example.webhook@mandrillapp.com"),
        )
    )
]
NO_MESSAGE = "00000000-0000-0000-0000-000000000000"
POSTMARK = {
    "RecordType": "Bounce",
    "ID": 42,
    "Type": "HardBounce",
    "MessageID": NO_MESSAGE,
    "Email": "john@example.com",
    "Metadata": {"example": "value", "example_2": "value"},
}
SENDGRID = {
    "email": "example@test.com",
    "timestamp": 1513299569,
    "sg_event_id": "e1",
    "sg_message_id": "14c5d75ce93.dfd.64b469.filter0001.16648.5515E0B88.0",
    "event": "spamreport",
}
OF_SHOPIFY = "gid://shopify/Customer/"
CUSTOMER = {"id": 706405506930370084, "email": "bob@biller.com"}
ORDER = {"id": 820982911946154508, "email": "jon@example.com", "customer": None}
STRIPE = {"id": "evt_00000000000000", "type": "customer.created", "livemode": False}
STRIPE |= {"data": {"object": {"object": "customer", "id": "cus_00000000000000"}}}
PING = {"id": "evt_1", "object": "v2.core.event", "type": "v2.core.event_destination.ping"}


def of_shopify(topic: str, payload: Any, test: str | None = "true") -> WebhookRequest:
    headers = {} if test is None else {"X-Shopify-Test": test}
    return delivery("shopify", payload, **{"X-Shopify-Topic": topic, **headers})


TESTS: dict[str, WebhookRequest] = {
    "mailchimp": delivery("mailchimp", MANDRILL),
    "postmark": delivery("postmark", POSTMARK),
    "postmark, by its address": delivery("postmark", POSTMARK | {"Metadata": {}}),
    "postmark, by its metadata": delivery("postmark", POSTMARK | {"Email": "x@y.z"}),
    "sendgrid": delivery("sendgrid", [SENDGRID, SENDGRID | {"event": "open"}]),
    "shopify, a customer": of_shopify("customers/create", CUSTOMER),
    "shopify, an order": of_shopify("orders/create", ORDER, "TRUE"),
    "shopify, a guest's order": of_shopify("orders/paid", {**ORDER, "customer": {"id": None}}),
    "shopify, a part of an order": of_shopify(
        "fulfillments/create", {"id": 1, "order_id": ORDER["id"], "email": "a@b.c"}
    ),
    "shopify, a contract": of_shopify(
        "subscription_contracts/create",
        {"id": 402440842, "customer_id": 1, "admin_graphql_api_customer_id": OF_SHOPIFY + "1"},
    ),
    "shopify, a customer with tags": of_shopify(
        "customer.tags_added", {"customerId": OF_SHOPIFY + "1", "tags": ["tag1"]}
    ),
    "shopify, a customer in a segment": of_shopify(
        "customer.joined_segment", {"customer_id": OF_SHOPIFY + "2"}
    ),
    "shopify, a way to pay": of_shopify(
        "customer_payment_methods/create", {"token": "t", "customer_id": 82850125}
    ),
    "shopify, a contact": of_shopify(
        "company_contact_roles/assign",
        {"company_contact": {"customer_admin_graphql_api_id": OF_SHOPIFY + "12123842227812391"}},
    ),
    "stripe": delivery("stripe", STRIPE),
    "stripe, a destination": delivery("stripe", PING),
}


async def test_a_test_of_a_service_is_about_nobody(tmp_path: Path) -> None:
    assert set(await outcomes(tmp_path, *TESTS.values())) == {"test"}


async def test_a_real_delivery_is_no_test(tmp_path: Path) -> None:
    """A mark that is not signed counts with the content of the test only; a delivery may have both
    tests and events."""
    real = [
        of_shopify("customers/create", CUSTOMER, None),
        of_shopify("customers/create", CUSTOMER, "false"),
        of_shopify("customers/create", {"id": 1, "email": "bob@biller.com"}),
        of_shopify("orders/create", {"id": 7, "email": "bob@biller.com"}),
        of_shopify("customer.tags_added", {"customerId": OF_SHOPIFY + "12"}),
        # The id of a message that Postmark does not know.
        delivery("postmark", POSTMARK | {"Email": "ann@example.com", "Metadata": {}}),
        delivery("postmark", POSTMARK | {"MessageID": "1"}),
        delivery("sendgrid", [SENDGRID | {"sg_message_id": "15.filter", "sg_event_id": "e2"}]),
        delivery("sendgrid", [SENDGRID | {"email": "ann@example.com"}]),
        delivery("stripe", STRIPE | {"id": "evt_1"}),
    ]
    mixed = [*MANDRILL, {"event": "open", "_id": "m", "ts": 1, "msg": {"email": "ann@example.com"}}]
    async with serving(tmp_path, workspace=CONFIG, server=public()) as server:
        for index, one in enumerate(real):
            pairs = [(name, value) for name, value in one.headers if name != "X-Shopify-Webhook-Id"]
            one = request(one.body, [*pairs, ("X-Shopify-Webhook-Id", f"w{index}")], url=one.url)
            assert (await deliver(server, one)).json["ignored"] == 0, index
        answer = await deliver(server, delivery("mailchimp", mixed))
        assert answer.json == {"success": True, "accepted": 1, "ignored": 5}
        assert len(await server.events()) == len(real) + 1


# ----------------------------------------------------------------- nobody, and what is not known
async def test_what_is_about_nobody_is_ignored(tmp_path: Path) -> None:
    deliveries = [
        of_shopify("products/update", {"id": 1, "title": "T"}, None),
        of_shopify("locations/create", {"id": 1, "phone": "+15550001"}, None),
        of_shopify("customer_groups/create", {"id": 1, "name": "N"}, None),
        of_shopify("orders/create", {"id": 1, "email": "", "customer": None, "user_id": 5}, None),
        of_shopify("refunds/create", {"id": 1, "order_id": 2, "user_id": 5}, None),
        delivery("stripe", {"id": "e", "type": "payout.paid", "data": {"object": {"id": "po"}}}),
        delivery("mailchimp", [{"type": "blacklist", "action": "add", "reject": {"email": "a@b"}}]),
        delivery("mailchimp", [{"event": "inbound", "msg": {"email": "a@b.c"}}]),
        delivery("twilio", b"CallSid=CA1&CallStatus=completed&To=%2B15550001"),
        delivery("twilio", b"MessageSid=S&MessageStatus=queued&To=%2B15550001"),
        delivery("postmark", {"RecordType": "Inbound", "From": "a@b.c", "To": "c@d.e"}),
    ]
    assert set(await outcomes(tmp_path, *deliveries)) == {"ignored"}


async def test_what_is_not_known_and_names_nobody_is_not_understood(tmp_path: Path) -> None:
    deliveries = [
        delivery("mailchimp", [{"event": "new", "msg": {"subject": "s"}}]),
        delivery("sendgrid", [{"event": "new", "email": " ", "to": []}]),
        delivery("postmark", {"RecordType": "New", "Email": None}),
        delivery("segment", {"type": "new"}),
        delivery("rudderstack", {"type": "new", "userId": None}),
        delivery("customerio", {"object_type": "email", "metric": "sent", "data": {"id": 1}}),
        delivery("standard-webhooks", {"type": "stock.low", "data": {"sku": "s", "user": {}}}),
        delivery("twilio", b"MessageSid=S&MessageStatus=new"),
    ]
    assert set(await outcomes(tmp_path, *deliveries)) == {"not_understood"}


def guest(**fields: Any) -> dict[str, Any]:
    return {
        "id": "evt_2",
        "type": "t",
        "data": {"object": {"id": "cs_1", "customer": None, **fields}},
    }


async def test_a_guest_of_stripe_is_found_by_the_phone_number(tmp_path: Path) -> None:
    details = {"email": None, "phone": "+15550001", "name": None, "address": {"country": "DE"}}
    nobody = guest(customer_details=details | {"phone": None}) | {"id": "evt_3"}
    async with serving(tmp_path, workspace=CONFIG, server=public()) as server:
        await deliver(server, delivery("stripe", guest(customer_details=details)))
        assert (await deliver(server, delivery("stripe", nobody))).json["ignored"] == 1
        assert [event.anonymous_id for event in await server.events()] == ["phone:+15550001"]


async def test_what_names_a_person_and_cannot_be_read_is_a_dead_letter(tmp_path: Path) -> None:
    thin = {"id": "evt_1", "object": "v2.core.event", "type": "v1.customer.created"}
    deliveries = [
        delivery("mailchimp", [{"event": "new", "msg": {"email": "ann@example.com"}}]),
        delivery("sendgrid", [{"event": "new", "email": "ann@example.com"}]),
        delivery("postmark", {"RecordType": "New", "Recipient": "ann@example.com"}),
        delivery("segment", {"type": "new", "userId": "u"}),
        delivery("rudderstack", {"type": "new", "anonymousId": 7}),
        delivery(
            "customerio",
            {"object_type": "email", "metric": "sent", "data": {"identifiers": {"new_id": 1}}},
        ),
        delivery("standard-webhooks", {"type": "x", "data": {"user": {"key": "u"}}}),
        delivery("twilio", b"MessageSid=S&MessageStatus=new&To=%2B15550001"),
        delivery("stripe", thin | {"related_object": {"type": "customer", "id": "cus_1"}}),
        delivery("stripe", thin | {"related_object": {"type": "invoice", "id": "in_1"}}),
        delivery(
            "stripe", {"id": "e", "type": "t", "data": {"object": {"customer": {"ref": "c"}}}}
        ),
        delivery("stripe", guest(customer_details={"email": "ann at example.com", "phone": None})),
        delivery("stripe", guest(billing_details={"email": None, "phone": "no number"})),
        of_shopify("customers/new", {"ids": [1]}, None),
        of_shopify("customer.new", {"person": 1}, None),
        of_shopify("customers_new_consent/update", {"consent": {}}, None),
        of_shopify("subscriptions/new", {"order": {"customer": {"number": "c"}}}, None),
        of_shopify("orders/create", {"id": 1, "email": "ann at example.com"}, None),
    ]
    found = await outcomes(tmp_path, *deliveries, letters=len(deliveries))
    assert set(found) == {"untranslated"}


async def test_an_unknown_element_does_not_affect_the_others(tmp_path: Path) -> None:
    known = {"event": "open", "email": "ann@example.com", "sg_event_id": "e"}
    async with serving(tmp_path, workspace=CONFIG, server=public()) as server:
        for index, more in enumerate(({}, {"email": "ben@example.com"})):
            items = [{"event": "new", **more}, known | {"sg_event_id": f"e{index}"}]
            answer = await deliver(server, delivery("sendgrid", items))
            assert answer.json == {"success": True, "accepted": 1, "ignored": 1 - index}
        [letter] = await server.dead_letters()
        assert letter.errors[0]["pointer"] == "/0"
        assert "ben" not in letter.message


# --------------------------------------------------------------------------- the line in the log
async def test_the_line_of_a_delivery_has_provider_type_and_outcome(tmp_path: Path) -> None:
    refused = delivery("shopify", {"id": 1}, **{"X-Shopify-Topic": "orders/create"})
    with recorded() as recorder:
        async with serving(tmp_path, workspace=CONFIG, server=public()) as server:
            await deliver(server, of_shopify("orders/create", {"id": 1, "email": "a@b.c"}, None))
            await deliver(server, request(b"{}", list(refused.headers), url=refused.url))
            await deliver(server, delivery("stripe", b"{"))
            await deliver(server, delivery("segment", {"type": "a\n b" + "x" * 99}))
            await server.send("/api/public/webhooks/nobody", {})
            await server.send("/v1/track", {"userId": "u", "event": "E"})
    names = ("provider", "workspace", "type", "outcome")
    lines = [tuple(line.get(name) for name in names) for line in recorder]
    assert lines == [
        ("shopify", "acme", "orders/create", "accepted"),
        ("shopify", None, None, "invalid_signature"),
        ("stripe", "acme", "unknown", "untranslated"),
        ("segment", "acme", "a??b" + "x" * 99, "not_understood"),
        (None, None, None, "unknown_provider"),
        (None, "acme", None, None),
    ]


def test_the_type_of_a_delivery_is_short() -> None:
    assert type_of(Translation()) == "unknown"
    assert type_of(Translation(types=["", "b", "a", "b"])) == "a,b"
    assert type_of(Translation(types=["x" * 99, "y" * 99, "z" * 99])) == f"{'x' * 99},{'y' * 99},"


# ------------------------------------------------------------------------------------- user ids
async def test_the_field_of_earlier_versions_counts_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    event = {"event": "open", "_id": "m", "ts": 1}
    async with serving(tmp_path, workspace=CONFIG, server=public()) as server:
        for index, metadata in enumerate(({"userId": "new"}, {"user_id": 111}, {"user_id": 112})):
            message = {"email": "ann@example.com", "metadata": metadata}
            await deliver(
                server, delivery("mailchimp", [event | {"_id": str(index), "msg": message}])
            )
            assert caplog.text.count("the user id is in user_id") == (1 if index else 0)
        assert [one.user_id for one in await server.events()] == ["new", "111", "112"]
    assert "webhook mailchimp: " in caplog.text
    assert "111" not in caplog.text


@pytest.mark.parametrize(
    ("provider", "options", "sent"),
    [
        ("stripe", {"secret": "s"}, {"type": "t", "data": {"object": {"metadata": "USER"}}}),
        (
            "resend",
            {"secret": "MDEyMzQ1Njc4OWFiY2RlZg=="},
            {"type": "email.sent", "data": {"tags": "USER"}},
        ),
    ],
)
def test_other_services_have_the_same_warning(
    provider: str, options: dict[str, Any], sent: dict[str, Any]
) -> None:
    for field in ("userId", "user_id"):
        data = json.dumps(sent).replace('"USER"', json.dumps({field: "u"}))
        [event] = make(provider, options).translate(request(data)).events
        assert event.document["userId"] == "u"
        assert bool(event.notice) is (field == "user_id")
