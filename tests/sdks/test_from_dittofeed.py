# SPDX-License-Identifier: Apache-2.0
"""Who moves from Dittofeed changes no client: its SDK, requests, links and deliveries are sent to a
server with the config of docs/from-dittofeed.md."""

from __future__ import annotations

import base64
import hmac
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from sdks.catalogue import SDKS

from support import dittofeed_page
from support.commands import run
from support.dittofeed_page import (
    AUTHORIZATION,
    ENVIRONMENT,
    KEY,
    OPT_IN,
    OPT_OUT,
    PUBLIC_URL,
    WORKSPACE,
    sign,
)
from support.server_process import Server
from support.waiting import wait_for

pytestmark = [pytest.mark.sdk, pytest.mark.timeout(300)]

[SDK] = [sdk for sdk in SDKS if sdk.module == "@dittofeed/sdk-node"]
PUT = "/api/public/subscription-management/user-subscriptions"


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server that all tests share: each has users of its own."""
    with dittofeed_page.start(tmp_path_factory.mktemp("dittofeed")) as server:
        yield server


def call(moved: Server, *calls: Mapping[str, Any]) -> None:
    """Make calls with Dittofeed's SDK for Node, with the write key as its dashboard shows it."""
    options = {"writeKey": AUTHORIZATION}
    assert SDK.run(moved.url, "", calls, options=options) == []


def put(moved: Server, link: Mapping[str, str], **changes: bool) -> httpx.Response:
    """Send a change as JSON."""
    body = {
        "workspaceId": link["w"],
        "identifier": link["i"],
        "identifierKey": link["ik"],
        "hash": link["h"],
        "changes": {{"offers": OPT_IN, "news": OPT_OUT}[name]: on for name, on in changes.items()},
    }
    return moved.client.put(PUT, json=body)


def choices(moved: Server, link: Mapping[str, str], **changes: bool) -> tuple[bool, bool]:
    """Return what is subscribed after a change: the newsletter, and the offers."""
    answer = put(moved, link, **changes)
    assert answer.status_code == 200, answer.text
    subscriptions = answer.json()["subscriptions"]
    return subscriptions[OPT_OUT], subscriptions[OPT_IN]


def events_of(moved: Server, **fields: str) -> list[dict[str, Any]]:
    return [event for event in moved.export("events") if fields.items() <= event.items()]


def test_links_in_old_mails_work_before_and_after_the_sign_up(moved: Server) -> None:
    """A visitor fills in the newsletter form, and becomes a user later."""
    address = "zoë@example.com"
    as_visitor, as_user, other = sign(("v-1", address), ("u-1", address), ("u-2", address))
    call(moved, {"call": "identify", "anonymousId": "v-1", "traits": {"email": address}})
    [visitor] = [one for one in moved.export("visitors") if one["anonymousId"] == "v-1"]
    assert visitor["traits"] == {"email": address}
    # Dittofeed signed the anonymous id as a user id: such a link only unsubscribes.
    assert put(moved, as_visitor, news=False).json()["subscriptions"] == {OPT_OUT: False}
    assert put(moved, as_visitor, offers=True).json()["code"] == "link_expired"
    assert put(moved, as_user).json()["code"] == "invalid_user_hash"

    call(moved, {"call": "identify", "userId": "u-1", "anonymousId": "v-1", "traits": {"n": 1}})
    [user] = [one for one in moved.export("users") if one["userId"] == "u-1"]
    assert user["traits"] == {"email": address, "n": 1}
    assert put(moved, other).status_code == 401
    # The new link of the user is signed for the same address, which only the visitor has. The
    # choice stays the visitor's.
    assert choices(moved, as_user) == (True, False)
    assert choices(moved, as_user, offers=True) == (True, True)
    assert put(moved, as_visitor, offers=False).json()["subscriptions"] == {OPT_IN: False}
    assert choices(moved, as_user) == (True, True)
    form = {
        "workspaceId": as_user["w"],
        "identifier": as_user["i"],
        "hash": as_user["h"],
        "identifierKey": "email",
        f"changes[{OPT_OUT}]": "false",
        f"changes[{OPT_IN}]": "0",
    }
    assert moved.client.put(PUT, data=form).status_code == 200
    assert choices(moved, as_user) == (False, False)


def test_calls_of_the_sdk_and_of_the_api_are_stored(moved: Server) -> None:
    """Dittofeed's operations, also with the scheme that its OpenAPI description names."""
    call(
        moved,
        {"call": "track", "userId": "u-3", "event": "Signed Up", "properties": {"plan": "pro"}},
        {"call": "page", "userId": "u-3", "name": "Home"},
        {"call": "screen", "anonymousId": "v-3", "name": "Start"},
    )
    batch = {
        "context": {"ip": "10.0.0.1"},
        "batch": [
            {"type": "track", "messageId": "b-1", "userId": "u-3", "event": "A"},
            {"type": "group", "messageId": "b-2", "anonymousId": "v-3", "groupId": "g-2"},
            {"type": "track", "messageId": "b-3", "userId": "u-3"},
        ],
    }
    group = {"messageId": "g-1", "userId": "u-3", "groupId": "g-1", "traits": {"name": "Unit"}}
    left = {"messageId": "g-2", "userId": "u-3", "groupId": "g-3", "assigned": False}
    for path, body in (("group", group), ("group", left), ("batch", batch)):
        for scheme in ("Basic", "Bearer"):
            answer = moved.post(
                f"/api/public/apps/{path}",
                body,
                key=None,
                headers={"Authorization": f"{scheme} {KEY}"},
            )
            assert answer.status_code == 200, answer.text
    assert [rejection["index"] for rejection in answer.json()["rejected"]] == [2]
    assert answer.json()["duplicates"] == 2
    names = [event.get("event") or event.get("name") for event in events_of(moved, userId="u-3")]
    assert sorted(filter(None, names)) == ["A", "Home", "Signed Up"]
    [first] = events_of(moved, messageId="b-1")
    assert first["context"]["ip"] == "10.0.0.1"
    [user] = [one for one in moved.export("users") if one["userId"] == "u-3"]
    assert user["groups"] == ["g-1"]
    [visitor] = [one for one in moved.export("visitors") if one["anonymousId"] == "v-3"]
    assert visitor["groups"] == ["g-2"]
    wrong = AUTHORIZATION[:-4] + "AAA="
    assert (
        moved.post(
            "/api/public/apps/group", group, key=None, headers={"Authorization": wrong}
        ).json()["code"]
        == "invalid_write_key"
    )


def test_a_change_by_track_is_reported_and_has_no_effect(moved: Server) -> None:
    [link] = sign(("u-4", "d@example.com"))
    change = {"subscriptionId": OPT_OUT, "action": "Unsubscribe"}
    call(
        moved,
        {"call": "identify", "userId": "u-4", "traits": {"email": "d@example.com"}},
        {"call": "track", "userId": "u-4", "event": "DFSubscriptionChange", "properties": change},
    )
    assert choices(moved, link) == (True, False)
    wait_for(
        lambda: "DFSubscriptionChange change no subscription (1 " in command(moved, "check"),
        what="the count of events without effect",
    )


def command(moved: Server, *arguments: str) -> str:
    """Run ``engage`` with the config of the page."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        done = run(*arguments, "--config", moved.config)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize(
    ("operation", "body", "where"),
    [
        ("group", {"groupId": "g", "assigned": "false"}, "/assigned"),
        ("track", {"event": 5}, "/event"),
        ("track", {"event": "E", "userId": ["u-8"]}, "/userId"),
        ("track", {"event": "E", "timestamp": "yesterday"}, "/timestamp"),
        ("track", {"event": "E", "type": "identify"}, "/type"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_page_calls_refused_is_refused(
    moved: Server, operation: str, body: dict[str, Any], where: str
) -> None:
    answer = moved.post(
        f"/api/public/apps/{operation}",
        {"messageId": "r-1", "userId": "u-8", **body},
        key=None,
        headers={"Authorization": AUTHORIZATION},
    )
    assert answer.status_code == 400
    assert [error["pointer"] for error in answer.json()["errors"]] == [where]


# -------------------------------------------------------------------------------------- deliveries
#: Dittofeed's arguments of a message, with the names under which it sends them.
ARGUMENTS = {
    "workspaceId": WORKSPACE,
    "userId": "u-5",
    "messageId": "m-5",
    "templateId": "t-5",
    "journeyId": "j-5",
    "nodeId": "n-5",
    "runId": "r-5",
}
ADDRESS = "e@example.com"
NOW = int(time.time())
#: Dittofeed's name of an event → that of engage, by the table of the page.
NAMES: dict[str, str] = dict(
    re.findall(r"^\| `(DF\w+)` \| `([^`]+)` \|", dittofeed_page.TEXT, re.MULTILINE)
)
Headers = dict[str, str]


def base64_hmac(secret: bytes, signed: str, algorithm: str) -> str:
    return base64.b64encode(hmac.new(secret, signed.encode(), algorithm).digest()).decode()


def sendgrid(path: str, kind: str) -> tuple[Headers, str]:
    """Bounces and spam reports come late, without arguments."""
    item = {"event": kind, "email": ADDRESS, "timestamp": NOW, "smtp-id": "<s-5>"}
    late = kind in ("bounce", "spamreport")
    body = (
        json.dumps([{**item, "sg_event_id": f"e-{kind}", **({} if late else ARGUMENTS)}]) + "\r\n"
    )
    signature = dittofeed_page.SENDGRID_KEY.sign(f"{NOW}{body}".encode(), ec.ECDSA(hashes.SHA256()))
    return {
        "X-Twilio-Email-Event-Webhook-Signature": base64.b64encode(signature).decode(),
        "X-Twilio-Email-Event-Webhook-Timestamp": str(NOW),
    }, body


def resend(path: str, kind: str) -> tuple[Headers, str]:
    data = {"email_id": "r-5", "to": [ADDRESS], "tags": ARGUMENTS}
    body = json.dumps({"type": kind, "created_at": "2026-03-01T00:00:00.000Z", "data": data})
    key = base64.b64decode(ENVIRONMENT["RESEND_WEBHOOK_KEY"].removeprefix("whsec_"))
    now = str(int(time.time()))
    signature = base64_hmac(key, f"{kind}.{now}.{body}", "sha256")
    return {
        "svix-id": kind,
        "svix-timestamp": now,
        "svix-signature": f"v1,{signature}",
    }, body


def postmark(path: str, kind: str) -> tuple[Headers, str]:
    times = dict.fromkeys(("DeliveredAt", "ReceivedAt", "BouncedAt"), "2026-03-01T00:00:00Z")
    body = {"RecordType": kind, "MessageID": "p-5", "MessageStream": "outbound", "Tag": ""}
    metadata = {**ARGUMENTS, "recipient": ADDRESS}
    secret = ENVIRONMENT["POSTMARK_WEBHOOK_KEY"]
    return {"X-Postmark-Secret": secret}, json.dumps({**body, **times, "Metadata": metadata})


def mailchimp(path: str, kind: str) -> tuple[Headers, str]:
    message = {"_id": "m-5", "email": ADDRESS, "metadata": ARGUMENTS}
    events = json.dumps([{"event": kind, "ts": NOW, "msg": message}])
    signed = f"{PUBLIC_URL}{path}mandrill_events{events}"
    signature = base64_hmac(ENVIRONMENT["MAILCHIMP_WEBHOOK_KEY"].encode(), signed, "sha1")
    return {"X-Mandrill-Signature": signature}, urlencode({"mandrill_events": events})


def twilio(path: str, kind: str) -> tuple[Headers, str]:
    fields = {"MessageSid": "SM5", "SmsSid": "SM5", "SmsStatus": kind, "To": "+15558675310"}
    signed = PUBLIC_URL + path + "".join(name + fields[name] for name in sorted(fields))
    signature = base64_hmac(ENVIRONMENT["TWILIO_AUTH_TOKEN"].encode(), signed, "sha1")
    return {"X-Twilio-Signature": signature}, urlencode(fields)


Deliver = Callable[[str, str], tuple[Headers, str]]
#: How a provider delivers → its names of events, and Dittofeed's; in the order of their arrival.
DELIVERIES: dict[Deliver, dict[str, str]] = {
    sendgrid: {
        "processed": "EmailProcessed",
        "delivered": "EmailDelivered",
        "open": "EmailOpened",
        "click": "EmailClicked",
        "bounce": "EmailBounced",
        "dropped": "EmailDropped",
        "spamreport": "EmailMarkedSpam",
    },
    resend: {
        "email.delivered": "EmailDelivered",
        "email.opened": "EmailOpened",
        "email.clicked": "EmailClicked",
        "email.bounced": "EmailBounced",
        "email.complained": "EmailMarkedSpam",
    },
    postmark: {
        "Delivery": "EmailDelivered",
        "Open": "EmailOpened",
        "Click": "EmailClicked",
        "Bounce": "EmailBounced",
        "SpamComplaint": "EmailMarkedSpam",
    },
    mailchimp: {
        "delivered": "EmailDelivered",
        "open": "EmailOpened",
        "click": "EmailClicked",
        "hard_bounce": "EmailBounced",
        "spam": "EmailMarkedSpam",
    },
    twilio: {"delivered": "SmsDelivered", "failed": "SmsFailed"},
}


@pytest.fixture(scope="module")
def recipient(moved: Server) -> None:
    """Make the user of the deliveries, and one who had the address first."""
    for user in ("u-6", "u-5"):
        call(moved, {"call": "identify", "userId": user, "traits": {"email": ADDRESS}})


@pytest.mark.usefixtures("recipient")
@pytest.mark.parametrize("deliver", DELIVERIES, ids=lambda deliver: deliver.__name__)
def test_deliveries_become_the_events_of_the_table(moved: Server, deliver: Deliver) -> None:
    """At both paths of Dittofeed; the arguments decide whose they are, and stay."""
    provider, kinds = deliver.__name__, DELIVERIES[deliver]
    for prefix in ("/api/webhooks", "/api/public/webhooks"):
        path = f"{prefix}/{provider}" + (f"?{urlencode(ARGUMENTS)}" if deliver is twilio else "")
        for kind in kinds:
            headers, body = deliver(path, kind)
            answer = moved.client.post(path, content=body, headers=headers)
            assert answer.status_code == 200, answer.text
    stored = events_of(moved, source=f"webhook:{provider}")
    assert [one["event"] for one in stored] == [NAMES[f"DF{name}"] for name in kinds.values()]
    for one in stored:
        assert one["userId"] == "u-5"
        assert one["properties"]["templateId"] == "t-5"
        assert one["properties"]["journeyId"] == "j-5"


def test_every_name_of_the_table_is_tested() -> None:
    assert {f"DF{name}" for kinds in DELIVERIES.values() for name in kinds.values()} == {*NAMES}


# -------------------------------------------------------------------------------------------- users
def test_the_users_and_choices_of_an_export_are_loaded(
    moved: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines are what the queries of the page return; loading them again changes nothing."""
    address, visitor = "f@example.com", "g@example.com"
    users: list[dict[str, Any]] = [
        {"type": "identify", "messageId": "l-1", "userId": "u-7", "traits": {"email": address}}
        | {"timestamp": "2024-01-02T03:04:05.678Z", "context": {"hidden": True}},
        {"type": "identify", "messageId": "l-2", "anonymousId": "v-8"}
        | {"traits": {"email": visitor, "n": "\u2028"}},
        {"type": "identify", "messageId": "l-3", "anonymousId": "v-7", "timestamp": "yesterday"},
    ]
    group: dict[str, Any] = {
        "type": "group",
        "messageId": "l-4",
        "userId": "u-7",
        "anonymousId": None,
    }
    group |= {"groupId": "g-7", "assigned": True, "timestamp": "2024-01-02T03:04:05.678Z"}
    for name, lines in (("users", users), ("groups", [group])):
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (tmp_path / f"{name}.ndjson").write_text(text, "utf-8")
    load, import_ = dittofeed_page.blocks("sh")
    for duplicates in (0, 3):
        done = subprocess.run(
            ["bash", "-e", "-c", load],
            cwd=tmp_path,
            env={**os.environ, "KEY": KEY, "HOST": moved.url},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        answer = json.loads(done.stdout)
        assert answer["duplicates"] == duplicates
        assert [rejection["messageId"] for rejection in answer["rejected"]] == ["l-3"]
    assert sorted(os.listdir(tmp_path)) == ["groups.ndjson", "users.ndjson"]
    [user] = [one for one in moved.export("users") if one["userId"] == "u-7"]
    assert (user["traits"], user["groups"]) == ({"email": address}, ["g-7"])
    as_user, _ = sign(("u-7", address), ("v-8", visitor))
    assert choices(moved, as_user) == (True, False)

    (tmp_path / "choices.csv").write_text(
        '"userId","anonymousId","groupId","subscribed","updatedAt","how"\n'
        f'"u-7","","{OPT_OUT}",0,1770001446678,"Dittofeed"\n'
        f'"u-7","","{OPT_IN}",1,1770001446678,"Dittofeed"\n'
        f'"","v-8","{OPT_OUT}",0,1770001446678,"Dittofeed"\n'
    )
    monkeypatch.chdir(tmp_path)
    assert "3 choices imported" in command(moved, *import_.split()[1:])
    assert choices(moved, as_user) == (False, True)
    assert ("v-8", False) in {
        (state["anonymousId"], state["subscribed"]) for state in moved.export("subscriptions")
    }
    assert "v-8" not in {one["userId"] for one in moved.export("users")}
    assert choices(moved, as_user, news=True) == (True, True)
    command(moved, *import_.split()[1:])
    assert choices(moved, as_user) == (True, True)
