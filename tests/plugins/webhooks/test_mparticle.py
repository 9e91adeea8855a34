# SPDX-License-Identifier: Apache-2.0
"""Translation of mParticle's batches."""

from __future__ import annotations

from support.provider_static import HEADER, translate
from support.providers import recipient_of


def test_commerce_events_get_their_names() -> None:
    events = [
        {"event_type": "commerce_event", "data": {"product_action": {"action": "purchase"}}},
        {"event_type": "commerce_event", "data": {"promotion_action": {"action": "view"}}},
        {"event_type": "commerce_event", "data": {"product_impressions": [{}]}},
        {"event_type": "commerce_event", "data": {"product_action": {"action": "new"}}},
    ]
    translation = translate("mparticle", {"mpid": 600, "message_id": "b", "events": events})
    assert [event.document["event"] for event in translation.events] == [
        "Order Completed",
        "Promotion Viewed",
        "Product List Viewed",
        "new",
    ]
    first = translation.events[0].document
    assert first["userId"] == "600"
    assert first["properties"] == {"product_action": {"action": "purchase"}}
    assert first["context"] == {"mparticle": {"mpid": 600}}


def test_session_events_are_ignored_and_bad_ones_rejected() -> None:
    events = [
        {"event_type": "session_start", "data": {}},
        {"event_type": "application_state_transition", "data": {}},
        {"event_type": "custom_event", "data": {"event_name": "x"}},
        {"event_type": "custom_event"},
        7,
    ]
    translation = translate("mparticle", {"mpid": "600", "events": events})
    assert translation.ignored == 2
    assert [event.index for event in translation.events] == [2]
    assert [rejected.index for rejected in translation.rejected] == [3, 4]


def test_development_events_are_ignored_by_default() -> None:
    batch = {
        "environment": "development",
        "mpid": "0",
        "user_identities": {"email": "a@b.c", "mobile_number": "+1"},
        "user_attributes": {"$Mobile": "+2", "$City": "Bonn", "plan": "pro"},
        "events": [],
        "timestamp_unixtime_ms": 1_402_521_613_976,
    }
    assert translate("mparticle", batch).ignored == 1
    [event] = translate("mparticle", batch, HEADER | {"development": True}).events
    assert event.document["type"] == "identify"
    assert event.document["timestamp"] == "2014-06-11T21:20:13.976Z"
    assert event.document["traits"] == {
        "email": "a@b.c",
        "phone": "+1",
        "city": "Bonn",
        "plan": "pro",
    }
    assert "userId" not in event.document
    assert recipient_of(event) == ("email", "a@b.c")


def test_identities_may_be_a_list() -> None:
    batch = {
        "mpid": "600",
        "message_id": "b",
        "user_identities": [
            {"identity_type": "customer_id", "identity": "u"},
            {"identity_type": "email", "identity": "a@example.com"},
            {"identity": "of no type"},
        ],
        "user_attributes": {"$LastName": "L", "plan": None},
    }
    [event] = translate("mparticle", batch).events
    assert event.document["userId"] == "u"
    # A removed attribute is null.
    assert event.document["traits"] == {"email": "a@example.com", "lastName": "L", "plan": None}
