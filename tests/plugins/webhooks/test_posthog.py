# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from support.provider_static import translate

VISITOR = "0190f5b2-0000-7000-8000-00000000000a"


def posthog(name, properties=None, person=None, distinct="user-1", **rest):
    event = {"event": name, "uuid": "e", "distinct_id": distinct, "properties": properties or {}}
    return translate("posthog", {"event": event | rest, "person": person}).events[0].document


def test_posthog_pages():
    properties = {
        "$current_url": "https://example.com/a",
        "$pathname": "/a",
        "title": "A",
        "$referrer": "https://example.com",
        "$browser": "Firefox",
    }
    for name in ("$pageview", "$pageleave"):
        document = posthog(name, properties)
        assert (document["type"], document["name"]) == ("page", "A")
        assert document["properties"] == properties | {
            "url": "https://example.com/a",
            "path": "/a",
            "referrer": "https://example.com",
            "event": name,
        }


def test_posthog_traits():
    document = posthog("$set", {"$set": {"plan": "pro"}, "$set_once": {"plan": "free", "first": 1}})
    assert document["type"] == "identify"
    assert document["traits"] == {"plan": "pro", "first": 1}


def test_posthog_groups():
    properties = {"$group_type": "company", "$group_key": "acme", "$group_set": {"size": 3}}
    document = posthog("$groupidentify", properties)
    assert (document["type"], document["groupId"]) == ("group", "acme")
    assert document["traits"] == {"size": 3}
    assert document["userId"] == "user-1"
    assert document["properties"] == {"$group_type": "company"}
    nobody = posthog("$groupidentify", properties, distinct="$company_acme")
    assert "userId" not in nobody


@pytest.mark.parametrize("name", ["$create_alias", "$merge_dangerously"])
def test_posthog_aliases(name):
    document = posthog(name, {"alias": "anon-1"})
    assert (document["type"], document["userId"], document["previousId"]) == (
        "alias",
        "user-1",
        "anon-1",
    )
    swapped = posthog(name, {"alias": "user-1"}, distinct=VISITOR)
    assert (swapped["userId"], swapped["previousId"]) == ("user-1", VISITOR)
    assert posthog(name, {})["type"] == "track"


@pytest.mark.parametrize(
    ("distinct", "properties", "person", "field"),
    [
        ("user-1", {}, None, "userId"),
        (VISITOR, {}, None, "anonymousId"),
        (VISITOR, {}, {"properties": {}}, "userId"),
        (VISITOR, {"$process_person_profile": False}, {"properties": {}}, "anonymousId"),
        (VISITOR.replace("-7", "-4", 1), {}, None, "userId"),
    ],
)
def test_posthog_visitors_are_anonymous(distinct, properties, person, field):
    document = posthog("seen", properties, person, distinct)
    assert document[field] == distinct
    assert ("userId" in document) != ("anonymousId" in document)


def test_posthog_identify_is_of_a_user_whatever_the_id_looks_like():
    document = posthog("$identify", {"$anon_distinct_id": VISITOR}, None, VISITOR[:-1] + "b")
    assert document["userId"] == VISITOR[:-1] + "b"
    assert document["anonymousId"] == VISITOR


def test_posthog_keeps_what_has_no_field():
    person = {"id": "p", "properties": {"email": "a@b.c"}}
    document = posthog("x", {"$lib": "web", "n": 1}, person, elements_chain="", url="https://p")
    assert document["properties"] == {
        "$lib": "web",
        "n": 1,
        "posthog": {"url": "https://p", "person": person},
    }


def test_posthog_may_send_the_bare_event():
    payload = {"event": "x", "uuid": "e", "distinct_id": "u", "properties": {"n": 1}}
    [event] = translate("posthog", payload).events
    assert (event.document["userId"], event.document["properties"]) == ("u", {"n": 1})


def test_posthog_without_an_id_goes_by_the_persons_address():
    event = {"event": "x", "properties": {}}
    payload = {"event": event, "person": {"properties": {"email": "a@b.c"}}}
    [event] = translate("posthog", payload).events
    assert event.recipient.value == "a@b.c"


def test_posthog_keeps_a_trait_that_was_taken_away():
    sets = {"$set": {"plan": None}, "$set_once": {"plan": "free", "source": "ad"}}
    assert posthog("$set", sets)["traits"] == {"plan": None, "source": "ad"}
    group = {"$group_key": "g", "$group_set": {"plan": None}}
    assert posthog("$groupidentify", group)["traits"] == {"plan": None}
