# SPDX-License-Identifier: Apache-2.0
"""Translation of RudderStack's events."""

from __future__ import annotations

from support.provider_static import translate


def test_a_payload_may_be_a_list_or_a_batch() -> None:
    good = {"type": "TRACK", "event": "x", "userId": "u", "messageId": "1", "request_ip": "1.2.3.4"}
    items = [good, {"type": "delete", "userId": "u"}, 7, {"event": "x"}]
    for payload in (items, {"batch": items}):
        translation = translate("rudderstack", payload)
        [event] = translation.events
        assert event.document["type"] == "track"
        assert event.document["context"] == {"request_ip": "1.2.3.4", "ip": "1.2.3.4"}
        assert translation.ignored == 1
        assert [rejected.index for rejected in translation.rejected] == [2, 3]


def test_a_missing_time_or_id_is_replaced() -> None:
    item = {"type": "page", "userId": "u", "originalTimestamp": "2024-01-01T00:00:00.000Z"}
    first, second = (translate("rudderstack", item).events[0].document for _ in range(2))
    assert first["timestamp"] == "2024-01-01T00:00:00.000Z"
    assert first["messageId"] == second["messageId"]


def test_different_events_without_an_id_have_different_ids() -> None:
    item = {"type": "track", "event": "x", "userId": "u", "properties": {"n": 1}}
    ids = [
        translate("rudderstack", {**item, **more}).events[0].document["messageId"]
        for more in ({}, {"properties": {"n": 2}}, {"messageId": 5})
    ]
    assert len(set(ids)) == 3
    assert ids[2] == "5"
