# SPDX-License-Identifier: Apache-2.0
"""Translation of Postmark's records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.provider_http import deliver
from support.provider_static import translate
from support.providers import recipient_of, request
from support.server_inprocess import serving


@pytest.mark.parametrize(
    ("kind", "name", "bounce"),
    [
        ("HardBounce", "Email Bounced", "hard"),
        ("BadEmailAddress", "Email Bounced", "hard"),
        ("SoftBounce", "Email Bounced", "soft"),
        ("Transient", "Email Bounced", "soft"),
        ("AutoResponder", "Email Bounced", "other"),
        ("SpamNotification", "Email Marked as Spam", None),
        ("Unsubscribe", "Email Unsubscribed", None),
        ("Subscribe", "Email Resubscribed", None),
    ],
)
def test_bounces_are_told_apart(kind: str, name: str, bounce: str | None) -> None:
    record = {"RecordType": "Bounce", "Type": kind, "Email": "a@b.c", "ID": 692560173}
    [event] = translate("postmark", record).events
    assert event.document["event"] == name
    assert event.document["properties"].get("bounceType") == bounce
    assert recipient_of(event) == ("email", "a@b.c")


@pytest.mark.parametrize(
    ("suppress", "name"), [(True, "Email Unsubscribed"), (False, "Email Resubscribed")]
)
def test_a_change_of_subscription_is_an_event(suppress: bool, name: str) -> None:
    record = {
        "RecordType": "SubscriptionChange",
        "Recipient": "a@b.c",
        "SuppressSending": suppress,
        "ChangedAt": "2020-02-01T10:53:34.416071Z",
    }
    [event] = translate("postmark", record).events
    assert event.document["event"] == name
    assert event.document["timestamp"] == "2020-02-01T10:53:34.416Z"


MESSAGE = "883953f4-6105-42a2-a16a-77a8eac79483"
BOUNCE = {
    "RecordType": "Bounce",
    "Type": "HardBounce",
    "ID": 42,
    "MessageID": MESSAGE,
    "Email": "Ann@Example.com",
    "BouncedAt": "2019-11-05T16:33:54.9070259Z",
    "Description": "The server was unable to deliver your message",
}
COMPLAINT = BOUNCE | {"RecordType": "SpamComplaint", "Type": "SpamComplaint"}


def suppressed(reason: str | None, **fields: Any) -> dict[str, Any]:
    """Return a record as in Postmark's documentation of the subscription change webhook."""
    return {
        "RecordType": "SubscriptionChange",
        "MessageID": MESSAGE,
        "ServerID": 123456,
        "MessageStream": "outbound",
        "ChangedAt": "2019-11-05T16:33:55.416071Z",
        "Recipient": "ann@example.com",
        "Origin": "Recipient",
        "SuppressSending": True,
        "SuppressionReason": reason,
        **fields,
    }


@pytest.mark.parametrize(
    ("reason", "name", "bounce"),
    [
        ("ManualSuppression", "Email Unsubscribed", None),
        ("HardBounce", "Email Bounced", "hard"),
        ("SpamComplaint", "Email Marked as Spam", None),
        (None, "Email Unsubscribed", None),
    ],
)
def test_a_suppression_is_named_by_its_reason(
    reason: str | None, name: str, bounce: str | None
) -> None:
    """Only an address that somebody took off the list has unsubscribed."""
    [event] = translate("postmark", suppressed(reason)).events
    assert event.document["event"] == name
    assert event.document["properties"].get("bounceType") == bounce
    [event] = translate("postmark", suppressed(reason, SuppressSending=False)).events
    assert event.document["event"] == "Email Resubscribed"
    assert "bounceType" not in event.document["properties"]


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        (BOUNCE, "HardBounce"),
        (COMPLAINT, "SpamComplaint"),
        (COMPLAINT | {"RecordType": "Bounce"}, "SpamComplaint"),
    ],
)
@pytest.mark.parametrize("order", [1, -1])
async def test_what_two_webhooks_report_is_one_event(
    report: dict[str, Any], reason: str, order: int, tmp_path: Path
) -> None:
    """A hard bounce with both webhooks on is "Email Bounced" once, in either order."""
    table = '[workspaces.webhooks.postmark]\nheader = "X-Secret"\nvalue = "a long word"\n'
    url = "https://events.example.com/api/public/webhooks/postmark"
    records = [report, suppressed(reason)][::order]
    async with serving(tmp_path, workspace=table) as server:
        for number, record in enumerate([*records, *records]):
            sent = request(json.dumps(record), {"X-Secret": "a long word"}, url=url)
            answer = await deliver(server, sent)
            assert answer.status == 200
            assert answer.json["accepted"] == (1 if number == 0 else 0)
        [event] = await server.events()
        assert event.document()["event"].startswith("Email ")
        assert await server.dead_letters() == []


def test_reports_of_different_events_are_different_events() -> None:
    records = [
        BOUNCE,
        BOUNCE | {"MessageID": "another"},
        BOUNCE | {"Email": "bob@example.com"},
        BOUNCE | {"Type": "SoftBounce"},
        BOUNCE | {"Type": "SoftBounce", "ID": 43},
        COMPLAINT,
        suppressed("ManualSuppression"),
        suppressed("ManualSuppression", ChangedAt="2019-11-06T00:00:00Z"),
        suppressed("HardBounce", SuppressSending=False, ChangedAt="2019-11-07T00:00:00Z"),
        # Without the id of a message, the time is all that tells two reports apart.
        suppressed("HardBounce", MessageID=None),
        suppressed("HardBounce", MessageID=None, ChangedAt="2019-11-06T00:00:00Z"),
        suppressed("HardBounce", MessageID="00000000-0000-0000-0000-000000000000"),
        BOUNCE | {"MessageID": "00000000-0000-0000-0000-000000000000"},
    ]
    events = [event for record in records for event in translate("postmark", record).events]
    assert len({event.document["messageId"] for event in events}) == len(records)


def test_two_clicks_have_two_ids_and_a_redelivery_the_same() -> None:
    click = {
        "RecordType": "Click",
        "MessageID": "m",
        "Recipient": "a@b.c",
        "ReceivedAt": "2019-11-05T16:33:54.9070259Z",
        "OriginalLink": "https://a",
    }
    others = [click, click | {"OriginalLink": "https://b"}, click | {"ReceivedAt": "2019-11-06"}]
    ids = [translate("postmark", other).events[0].document["messageId"] for other in others]
    assert len(set(ids)) == 3
    assert translate("postmark", click).events[0].document["messageId"] == ids[0]


def test_other_records_are_ignored() -> None:
    assert translate("postmark", {"RecordType": "Inbound"}).ignored == 1
