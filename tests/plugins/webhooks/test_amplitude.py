# SPDX-License-Identifier: Apache-2.0
"""Translation of Amplitude's events."""

from __future__ import annotations

from typing import Any

from support.provider_static import translate


def amplitude(**event: Any) -> dict[str, Any]:
    return translate("amplitude", {"uuid": "u-1", **event}).events[0].document


def test_an_event_becomes_a_track_event() -> None:
    document = amplitude(
        event_type="click",
        user_id=None,
        device_id="d-1",
        event_time="2022-10-24 20:07:32.123000",
        event_properties={"platform": "mine"},
        user_properties={"plan": "pro"},
        platform="iOS",
        ip_address="1.2.3.4",
    )
    assert document == {
        "type": "track",
        "event": "click",
        "anonymousId": "d-1",
        "messageId": "u-1",
        "timestamp": "2022-10-24T20:07:32.123Z",
        "context": {"ip": "1.2.3.4"},
        "properties": {
            "platform": "mine",
            "amplitude": {"platform": "iOS", "user_properties": {"plan": "pro"}},
        },
    }


def test_a_page_view_becomes_a_page_event() -> None:
    document = amplitude(
        event_type="[Amplitude] Page Viewed",
        user_id=7,
        event_properties={
            "[Amplitude] Page URL": "https://example.com/a",
            "[Amplitude] Page Path": "/a",
            "[Amplitude] Page Title": "A",
        },
    )
    assert (document["type"], document["name"], document["userId"]) == ("page", "A", "7")
    assert document["properties"]["url"] == "https://example.com/a"
    assert document["properties"]["path"] == "/a"


def test_an_event_without_an_id_has_amplitudes_id() -> None:
    assert amplitude(event_type="x", amplitude_id=12)["anonymousId"] == "amplitude:12"


def test_a_value_that_is_not_a_time_stays_in_the_properties() -> None:
    document = amplitude(event_type="x", user_id="u", event_time="soon")
    assert "timestamp" not in document
    assert document["properties"]["amplitude"] == {"event_time": "soon"}


def test_an_event_without_a_uuid_uses_its_insert_id() -> None:
    event = {"uuid": None, "$insert_id": "i", "event_type": "x", "user_id": "u"}
    assert amplitude(**event)["messageId"] == "i"


def test_a_removed_trait_is_null() -> None:
    event = {"event_type": "$identify", "user_id": "u", "user_properties": {"plan": None}}
    assert amplitude(**event)["traits"] == {"plan": None}
