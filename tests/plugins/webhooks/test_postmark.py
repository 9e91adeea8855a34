# SPDX-License-Identifier: Apache-2.0
"""Translation of Postmark's records."""

from __future__ import annotations

import pytest

from support.provider_static import translate
from support.providers import recipient_of


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


def test_two_clicks_have_two_ids_and_a_redelivery_the_same() -> None:
    click = {
        "RecordType": "Click",
        "MessageID": "m",
        "Recipient": "a@b.c",
        "ReceivedAt": "2019-11-05T16:33:54.9070259Z",
        "OriginalLink": "https://a",
    }
    others = [click, click | {"OriginalLink": "https://b"}, click | {"ReceivedAt": "2019-11-06"}]
    ids = [translate("postmark", one).events[0].document["messageId"] for one in others]
    assert len(set(ids)) == 3
    assert translate("postmark", click).events[0].document["messageId"] == ids[0]


def test_other_records_are_ignored() -> None:
    assert translate("postmark", {"RecordType": "Inbound"}).ignored == 1
