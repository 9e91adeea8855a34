# SPDX-License-Identifier: Apache-2.0
"""Whose choices a report changes, and which addresses it suppresses: one rule for all providers."""

from __future__ import annotations

import base64
import contextlib
import hmac
import json
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from support.provider_http import PUBLIC_URL, deliver, public
from support.provider_senders import SENDERS, webhooks_table
from support.provider_sns import notification, signed
from support.providers import request
from support.server_inprocess import Serving, serving

MAIL = ("amazon-ses", "customerio", "mailchimp", "postmark", "resend", "sendgrid")
#: Those that name the recipients of a message, but not which of them a report is about.
ONE_OF = ("customerio", "resend")
GROUPS = "".join(
    f'[[workspaces.subscription_groups]]\nid = "{group}"\nchannel = "{channel}"\ntype = "opt_out"\n'
    for group, channel in (("news", "email"), ("alerts", "sms"))
)
CONFIG = (
    GROUPS
    + webhooks_table(providers={name: SENDERS[name] for name in (*MAIL, "twilio")})
    + "".join(f'[workspaces.unsubscribes.{name}]\naction = "channel"\n' for name in MAIL)
    + '[workspaces.unsubscribes.twilio]\naction = "channel"\n'
)
AT = "2026-01-31T12:00:00Z"
SECONDS = 1769860800


# ------------------------------------------------------------------------- a report of a provider
def ses(kind: str, named: Any, user: str | None) -> Any:
    """``named`` is a text, a list of texts, or ``None``."""
    listed = [{"emailAddress": one} for one in (named if isinstance(named, list) else [named])]
    mail = {"destination": [], "tags": {} if user is None else {"userId": [user]}}
    if kind == "unsubscribe":
        mail["destination"] = named if isinstance(named, list) else [named]
        change = {"newTopicPreferences": {"unsubscribeAll": True}, "timestamp": AT}
        return {"eventType": "Subscription", "mail": mail, "subscription": change}
    details = {"bounceType": "Permanent", "timestamp": AT, "bouncedRecipients": listed}
    if kind == "bounce":
        return {"eventType": "Bounce", "mail": mail, "bounce": details}
    complaint = {"complainedRecipients": listed, "timestamp": AT}
    return {"eventType": "Complaint", "mail": mail, "complaint": complaint}


def customerio(kind: str, named: Any, user: str | None) -> Any:
    metric = {"bounce": "bounced", "complaint": "spammed", "unsubscribe": "unsubscribed"}[kind]
    data = {"recipient": named, "customer_id": user, "identifiers": {"cio_id": "c1"}}
    return {"object_type": "email", "metric": metric, "event_id": "the id", "data": data}


def mandrill(kind: str, named: Any, user: str | None) -> Any:
    event = {"bounce": "hard_bounce", "complaint": "spam", "unsubscribe": "unsub"}[kind]
    about = {"email": named, "metadata": {} if user is None else {"userId": user}}
    return [{"event": event, "_id": "the id", "ts": SECONDS, "msg": about}]


def postmark(kind: str, named: Any, user: str | None) -> Any:
    more = {
        "bounce": {"RecordType": "Bounce", "Type": "HardBounce", "Email": named},
        "complaint": {"RecordType": "SpamComplaint", "Type": "SpamComplaint", "Email": named},
        "unsubscribe": {
            "RecordType": "SubscriptionChange",
            "SuppressionReason": "ManualSuppression",
            "Recipient": named,
        },
    }[kind]
    metadata = {} if user is None else {"userId": user}
    return {"MessageID": "the id", "BouncedAt": AT, "ChangedAt": AT, "Metadata": metadata, **more}


def resend(kind: str, named: Any, user: str | None) -> Any:
    tags = {} if user is None else {"userId": user}
    name = "email.complained" if kind == "complaint" else "email.bounced"
    data = {"to": named, "tags": tags, "bounce": {"type": "Permanent"}}
    return {"type": name, "created_at": AT, "data": data}


def sendgrid(kind: str, named: Any, user: str | None) -> Any:
    event = {"bounce": "bounce", "complaint": "spamreport", "unsubscribe": "unsubscribe"}[kind]
    more = {} if user is None else {"userId": user}
    return [{"event": event, "email": named, "timestamp": SECONDS, "sg_event_id": "the id", **more}]


REPORTS: dict[str, Callable[[str, Any, str | None], Any]] = {
    "amazon-ses": ses,
    "customerio": customerio,
    "mailchimp": mandrill,
    "postmark": postmark,
    "resend": resend,
    "sendgrid": sendgrid,
}


async def report(server: Serving, provider: str, payload: Any) -> None:
    """Send a report, signed as the provider signs."""
    target = f"/api/public/webhooks/{provider}?workspaceId=acme"
    now, data = time.time(), json.dumps(payload)
    name = str(uuid.uuid5(uuid.NAMESPACE_OID, data))
    data = data.replace("the id", name)
    if provider == "amazon-ses":
        body, pairs = json.dumps(signed(notification(data, MessageId=name))).encode(), []
    elif provider == "resend":
        key = base64.b64decode(SENDERS["resend"].options["secret"].removeprefix("whsec_"))
        text = f"{name}.{int(now)}.{data}".encode()
        signature = base64.b64encode(hmac.digest(key, text, "sha256")).decode()
        values = {"id": name, "timestamp": str(int(now)), "signature": f"v1,{signature}"}
        body, pairs = data.encode(), [(f"svix-{part}", value) for part, value in values.items()]
    else:
        headers, body = SENDERS[provider].deliver(target, now, payload=data.encode())
        pairs = [(name, value.decode("latin-1")) for name, value in headers]
    for _ in range(2):  # The second one is a duplicate.
        answer = await deliver(server, request(body, pairs, url=PUBLIC_URL + target))
        assert answer.status == 200, answer.body


@contextlib.asynccontextmanager
async def people(folder: Path, *cases: str) -> AsyncIterator[Serving]:
    """Serve with these people, for each case with its name and a dash before ids and addresses:

    - the user ``ann``, who has ann@example.com and had old@example.com, and whose visitor
      ``ann-phone`` gave web@example.com
    - the user ``new``, of whom no address is known
    - the visitor ``anon``, who gave anon@example.com
    """
    async with serving(folder, workspace=CONFIG, server=public()) as server:
        for case in cases or ("x",):
            for body in (
                {"userId": "ann", "traits": {"email": "Old@example.com"}},
                {"userId": "ann", "traits": {"email": "ann@example.com", "phone": "+15550001"}},
                {"anonymousId": "ann-phone", "traits": {"email": "web@example.com"}},
                {"userId": "ann", "anonymousId": "ann-phone"},
                {"userId": "new", "traits": {"name": "New"}},
                {"anonymousId": "anon", "traits": {"email": "anon@example.com"}},
            ):
                assert (await server.send("/v1/identify", of_case(case, body))).status == 200
        yield server


def of_case(case: str, value: Any) -> Any:
    """Put the name of a case before the ids and addresses in a value."""
    if isinstance(value, dict):
        return {key: of_case(case, inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [of_case(case, inner) for inner in value]
    if value in ("ann", "ann-phone", "new", "anon", "nobody"):
        return f"{case}-{value}"
    return re.sub(r"(\w+)@", rf"{case}-\1@", value) if isinstance(value, str) else value


async def changed(server: Serving, case: str = "x") -> tuple[set[str], set[str]]:
    """Return whose choices changed, and the suppressed addresses without their domain."""
    store = server.app.store
    choices = await store.scan_subscriptions("acme", after=None, limit=1000)
    assert not any(item.subscribed for item in choices.items)
    page = await store.scan_suppressions("acme", after=None, limit=1000)
    users = {str(user.user_id) for user in choices.items}
    addresses = {item.address.removesuffix("@example.com") for item in page.items}
    return (
        {user.removeprefix(f"{case}-") for user in users if user.startswith(f"{case}-")},
        {one.removeprefix(f"{case}-") for one in addresses if one.startswith((f"{case}-", "+"))},
    )


NOBODY: set[str] = set()
#: The user id that came with the message; what is named, without the domain; whose choices change;
#: what a complaint or a bounce suppresses; what an unsubscription suppresses.
VECTORS: dict[str, tuple[str | None, str, set[str], set[str], set[str]]] = {
    "the user's address": ("ann", "ann", {"ann"}, {"ann"}, NOBODY),
    "in capitals, with a name": ("ann", "Ann <ANN", {"ann"}, {"ann"}, NOBODY),
    "an address that the user had": ("ann", "old", {"ann"}, {"old"}, NOBODY),
    "an address of the user's visitor": ("ann", "web", {"ann"}, {"web"}, NOBODY),
    "a copy to another address": ("ann", "bob", NOBODY, {"bob"}, {"bob"}),
    "a copy to another person": ("ann", "anon", NOBODY, {"anon"}, {"anon"}),
    "a user without a known address": ("new", "bob", {"new"}, {"bob"}, NOBODY),
    "a user that engage does not know": ("nobody", "bob", {"nobody"}, {"bob"}, NOBODY),
    "the address of a visitor": ("anon", "anon", {"anon"}, {"anon"}, NOBODY),
    "the id of a visitor as a user id": ("anon", "bob", {"anon"}, {"bob"}, NOBODY),
    "the visitor of a user": ("ann-phone", "ann", {"ann-phone"}, {"ann"}, NOBODY),
    "no user id, and the address of a user": (None, "ann", NOBODY, {"ann"}, {"ann"}),
    "no user id, and another address": (None, "bob", NOBODY, {"bob"}, {"bob"}),
}
#: Resend reports contacts, and no user id with them.
CASES = [
    (provider, kind)
    for provider in MAIL
    for kind in ("bounce", "complaint", "unsubscribe")
    if (provider, kind) != ("resend", "unsubscribe")
]


@pytest.mark.parametrize("vector", VECTORS)
async def test_whose_report_it_is(tmp_path: Path, vector: str) -> None:
    user, named, users, reported, unsubscribed = VECTORS[vector]
    address = f"{named}@example.com" + (">" if "<" in named else "")
    async with people(tmp_path, *(f"{kind}-{provider}" for provider, kind in CASES)) as server:
        for provider, kind in CASES:
            case = f"{kind}-{provider}"
            await report(server, provider, of_case(case, REPORTS[provider](kind, address, user)))
            expected = unsubscribed if kind == "unsubscribe" else reported
            assert await changed(server, case) == (users, expected), case
        assert not await server.dead_letters()


async def test_every_address_that_is_named_counts(tmp_path: Path) -> None:
    """In one text. If the service does not say which of them it means, nothing changes."""
    named = "bob@example.com, ann@example.com; Bob <BOB@example.com>"
    cases = [(provider, user) for provider in MAIL for user in ("ann", None)]
    async with people(tmp_path, *(f"{user}-{name}".lower() for name, user in cases)) as server:
        for provider, user in cases:
            case, unknown = f"{user}-{provider}".lower(), provider in ONE_OF
            payload = of_case(case, REPORTS[provider]("bounce", named, user))
            await report(server, provider, payload)
            both = ({user} if user else NOBODY, {"ann", "bob"})
            assert await changed(server, case) == ((NOBODY, NOBODY) if unknown else both), case
        events = [event.document() for event in await server.events() if event.origin != "api"]
    assert len(events) == len(cases) + 1  # Without a user, SES has one for each address.
    for event in events:
        unknown = event["source"].removeprefix("webhook:") in ONE_OF
        assert event["properties"].get("recipientUnknown", False) is unknown
        assert ("email" in event["properties"]) is not unknown


@pytest.mark.parametrize("user", ["ann", None])
async def test_every_recipient_that_ses_lists_counts(tmp_path: Path, user: str | None) -> None:
    named = ["bob@example.com", "ann@example.com", "rfc822;eve@example.com", "not an address"]
    async with people(tmp_path) as server:
        await report(server, "amazon-ses", of_case("x", ses("bounce", named, user)))
        assert await changed(server) == ({user} if user else NOBODY, {"ann", "bob", "eve"})


@pytest.mark.parametrize(
    ("fields", "unknown"),
    [
        ({"to": ["ann@example.com", "bob@example.com"]}, True),
        ({"to": ["ann@example.com"], "cc": ["bob@example.com"]}, True),
        ({"to": ["ann@example.com"], "bcc": "bob@example.com"}, True),
        ({"to": ["ann@example.com", "not an address"]}, True),
        ({"to": ["ann@example.com", "ANN@example.com"], "cc": [], "bcc": None}, False),
    ],
)
async def test_a_report_of_one_of_several_recipients_changes_nothing(
    tmp_path: Path, fields: dict[str, Any], unknown: bool
) -> None:
    async with people(tmp_path, "one", "two") as server:
        for case, user in (("one", "ann"), ("two", None)):
            payload = resend("complaint", None, user)
            payload["data"] |= fields
            # SES names the recipients of a mail only, if it lists none who complained.
            mail = ses("complaint", [], user)
            mail["mail"]["destination"] = [
                one
                for field in fields.values()
                for one in (field if isinstance(field, list) else [field])
            ]
            for provider, sent in (("resend", payload), ("amazon-ses", mail)):
                await report(server, provider, of_case(case, sent))
                expected = ({user} if user else NOBODY, {"ann"})
                found = await changed(server, case)
                assert found == ((NOBODY, NOBODY) if unknown else expected), provider


async def test_a_report_that_names_no_address_is_of_the_user(tmp_path: Path) -> None:
    cases = [f"{number}-{provider}" for number in range(3) for provider in MAIL]
    async with people(tmp_path, *cases) as server:
        for case in cases:
            number, _, provider = case.partition("-")
            named = (None, "", "  ")[int(number)]
            await report(server, provider, of_case(case, REPORTS[provider]("bounce", named, "ann")))
            assert await changed(server, case) == ({"ann"}, NOBODY), case


async def test_an_address_that_cannot_be_read_is_a_dead_letter(tmp_path: Path) -> None:
    async with people(tmp_path, *MAIL) as server:
        for provider in MAIL:
            for user in ("ann", None):
                payload = REPORTS[provider]("bounce", "ann at example.com", user)
                await report(server, provider, of_case(provider, payload))
            assert await changed(server, provider) == (NOBODY, NOBODY), provider
        letters = await server.dead_letters()
    assert sorted(letter.origin for letter in letters) == sorted([*MAIL, *MAIL])
    for letter in letters:
        assert "the address of a report cannot be read" in letter.message
        assert "ann at" not in letter.message


async def test_a_customer_who_leaves_everything_is_the_user(tmp_path: Path) -> None:
    """Customer.io names the profile then: the addresses in it are not what the report is about."""
    async with people(tmp_path) as server:
        payload = {**customerio("unsubscribe", None, "ann"), "object_type": "customer"}
        payload["data"]["email_address"] = "bob@example.com"
        await report(server, "customerio", of_case("x", payload))
        assert await changed(server) == ({"ann"}, NOBODY)
        del payload["data"]["customer_id"]
        await report(server, "customerio", of_case("x", payload))
        assert await changed(server) == ({"ann"}, {"bob"})


async def test_a_number_is_compared_as_an_address_is(tmp_path: Path) -> None:
    async with people(tmp_path) as server:
        for number in ("+1 555 0001", "+1 555 0002"):
            payload = customerio("unsubscribe", number, "ann")
            payload |= {"object_type": "sms"}
            await report(server, "customerio", of_case("x", payload))
        assert await changed(server) == ({"ann"}, {"+15550002"})


async def test_a_report_of_a_channel_without_addresses_is_of_the_user(tmp_path: Path) -> None:
    """The recipient of a push message is a device."""
    groups = '[[workspaces.subscription_groups]]\nid = "app"\nchannel = "push"\ntype = "opt_in"\n'
    async with serving(tmp_path, workspace=groups + CONFIG, server=public()) as server:
        payload = customerio("unsubscribe", "a device", "ann") | {"object_type": "push"}
        await report(server, "customerio", of_case("x", payload))
        assert await changed(server) == ({"ann"}, NOBODY)
        assert not await server.dead_letters()


async def test_stop_is_of_the_number_alone(tmp_path: Path) -> None:
    target = "/api/public/webhooks/twilio?workspaceId=acme&userId=x-ann"
    form = b"MessageSid=SM1&OptOutType=STOP&From=%2B1+555+0001&To=%2B15559999"
    async with people(tmp_path) as server:
        headers, body = SENDERS["twilio"].deliver(target, time.time(), payload=form)
        pairs = [(name, value.decode()) for name, value in headers]
        assert (await deliver(server, request(body, pairs, url=PUBLIC_URL + target))).status == 200
        assert await changed(server) == (NOBODY, {"+15550001"})


async def test_the_id_of_an_earlier_event_did_not_come_with_the_message(tmp_path: Path) -> None:
    sent = sendgrid("bounce", "ann@example.com", "ann")
    sent[0] |= {"event": "processed", "smtp-id": "<1>", "sg_event_id": "sent"}
    bounce = sendgrid("bounce", "ann@example.com", None)
    bounce[0] |= {"smtp-id": "<1>"}
    async with people(tmp_path) as server:
        await report(server, "sendgrid", of_case("x", [*sent, *bounce]))
        assert await changed(server) == (NOBODY, {"ann"})
        [event] = [one for one in await server.events() if one.name == "Email Bounced"]
        assert event.user_id == "x-ann"
