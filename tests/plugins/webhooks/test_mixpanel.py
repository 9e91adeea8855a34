# SPDX-License-Identifier: Apache-2.0
"""Mixpanel: the translation of cohorts and event streams, and the answer that it expects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engage.api import PayloadInvalid, WebhookResult
from support.provider_cases import mixpanel_cohort as cohort
from support.provider_static import HEADER, translate
from support.providers import make, recipient_of, request
from support.server_inprocess import serving


@pytest.mark.parametrize(
    ("action", "name"),
    [
        ("members", "Cohort Entered"),
        ("add_members", "Cohort Entered"),
        ("remove_members", "Cohort Exited"),
    ],
)
def test_a_change_of_a_cohort_is_an_event(action: str, name: str) -> None:
    [event] = translate("mixpanel", cohort(action)).events
    assert event.document["event"] == name
    assert event.document["userId"] == "u"
    assert "timestamp" not in event.document
    assert event.document["properties"] == {
        "email": "a@b.c",
        "first_name": "A",
        "mixpanel_project_id": "1",
        "mixpanel_cohort_id": "2",
        "mixpanel_cohort_name": "Power",
        "mixpanel_session_id": "s",
    }


def test_a_member_without_a_user_belongs_to_another_id() -> None:
    [event] = translate("mixpanel", cohort(mixpanel_distinct_id="$device:d1")).events
    assert event.document["anonymousId"] == "d1"
    [event] = translate("mixpanel", cohort(mixpanel_distinct_id=None)).events
    assert recipient_of(event) == ("email", "a@b.c")
    translation = translate("mixpanel", cohort(mixpanel_distinct_id=None, email=None))
    assert [rejected.index for rejected in translation.rejected] == [0]


def test_a_repeated_page_has_the_same_ids_and_another_session_does_not() -> None:
    first, again = cohort(), cohort()
    other = cohort()
    other["parameters"]["mixpanel_session_id"] = "t"
    ids = [
        translate("mixpanel", payload).events[0].document["messageId"]
        for payload in (first, again, other, cohort("remove_members"))
    ]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 3


def test_a_cohort_gets_the_answer_that_mixpanel_expects() -> None:
    made = make("mixpanel", HEADER)
    result = WebhookResult(accepted=1, ignored=0)
    reply = made.reply(request(json.dumps(cohort("members"))), result)
    assert reply is not None
    assert json.loads(reply.body) == {"action": "members", "status": "success"}
    for body in ("[]", "{}", '{"action":"new"}', '{"action":7}', "{"):
        assert made.reply(request(body), result) is None


@pytest.mark.parametrize("payload", [{"action": "new"}, {"action": "members"}, {"action": ["x"]}])
def test_an_action_without_members_is_invalid(payload: Any) -> None:
    with pytest.raises(PayloadInvalid):
        translate("mixpanel", payload)


def test_a_stream_has_events() -> None:
    items = [
        {
            "event": "Signed Up",
            "properties": {
                "distinct_id": "u",
                "$device_id": "d",
                "time": 1_700_000_000,
                "$insert_id": "i-1",
                "plan": "pro",
            },
        },
        7,
        {"event_name": "Viewed", "distinct_id": "$device:d", "time": "1700000000123", "n": 1},
        {"event": "Dated", "properties": {"$user_id": "u", "time": "2023-11-14T22:13:20"}},
    ]
    translation = translate("mixpanel", items)
    one, two, three = (event.document for event in translation.events)
    assert one == {
        "type": "track",
        "event": "Signed Up",
        "userId": "u",
        "anonymousId": "d",
        "messageId": "i-1",
        "timestamp": "2023-11-14T22:13:20.000Z",
        "properties": {"plan": "pro"},
    }
    assert (two["anonymousId"], two["timestamp"]) == ("d", "2023-11-14T22:13:20.123Z")
    assert two["properties"] == {"n": 1}
    assert three["timestamp"] == "2023-11-14T22:13:20.000Z"
    assert [rejected.index for rejected in translation.rejected] == [1]


@pytest.mark.parametrize("time", ["²", "١٧", "1" * 30, "", "soon", [], 1e300])
def test_a_value_that_is_not_a_time_does_not_affect_others(time: Any) -> None:
    odd = {"event": "x", "properties": {"distinct_id": "u", "time": time, "$insert_id": "i"}}
    events = translate(
        "mixpanel", [odd, {"event": "y", "distinct_id": "u", "$insert_id": "j"}]
    ).events
    assert [event.document["event"] for event in events] == ["x", "y"]
    assert "timestamp" not in events[0].document
    assert events[0].document["properties"]["time"] == time


async def test_the_server_sends_the_answer_that_mixpanel_expects(tmp_path: Path) -> None:
    extra = '[workspaces.webhooks.mixpanel]\nheader = "X-Secret"\nvalue = "s3cret"\n'
    async with serving(tmp_path, config_extra=extra) as server:
        url, headers = "/api/public/webhooks/mixpanel", {"X-Secret": "s3cret"}
        for _ in range(2):
            answer = await server.send(url, cohort("members"), key=None, headers=headers)
            assert (answer.status, answer.json) == (200, {"action": "members", "status": "success"})
        [event] = await server.events()
        assert event.user_id == "u"
