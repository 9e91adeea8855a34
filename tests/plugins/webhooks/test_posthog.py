# SPDX-License-Identifier: Apache-2.0
"""Translation of PostHog's events."""

from __future__ import annotations

from typing import Any

import pytest

from support.provider_static import translate
from support.providers import recipient_of

VISITOR = "0190f5b2-0000-7000-8000-00000000000a"


def posthog(
    name: str, properties: Any = None, person: Any = None, distinct: str = "user-1", **rest: Any
) -> dict[str, Any]:
    event = {"event": name, "uuid": "e", "distinct_id": distinct, "properties": properties or {}}
    return translate("posthog", {"event": event | rest, "person": person}).events[0].document


def test_a_page_view_becomes_a_page_event() -> None:
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


def test_a_set_event_becomes_an_identify_event() -> None:
    document = posthog("$set", {"$set": {"plan": "pro"}, "$set_once": {"plan": "free", "first": 1}})
    assert document["type"] == "identify"
    assert document["traits"] == {"plan": "pro", "first": 1}


def test_a_groupidentify_event_becomes_a_group_event() -> None:
    properties = {"$group_type": "company", "$group_key": "acme", "$group_set": {"size": 3}}
    document = posthog("$groupidentify", properties)
    assert (document["type"], document["groupId"]) == ("group", "acme")
    assert document["traits"] == {"size": 3}
    assert document["userId"] == "user-1"
    assert document["properties"] == {"$group_type": "company"}
    nobody = posthog("$groupidentify", properties, distinct="$company_acme")
    assert "userId" not in nobody


@pytest.mark.parametrize("name", ["$create_alias", "$merge_dangerously"])
def test_an_alias_event_becomes_an_alias_event(name: str) -> None:
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
def test_a_visitor_without_a_person_is_anonymous(
    distinct: str, properties: Any, person: Any, field: str
) -> None:
    document = posthog("seen", properties, person, distinct)
    assert document[field] == distinct
    assert ("userId" in document) != ("anonymousId" in document)


def test_an_identify_event_always_has_a_user() -> None:
    document = posthog("$identify", {"$anon_distinct_id": VISITOR}, None, VISITOR[:-1] + "b")
    assert document["userId"] == VISITOR[:-1] + "b"
    assert document["anonymousId"] == VISITOR


def test_other_fields_are_kept() -> None:
    person = {"id": "p", "properties": {"email": "a@b.c"}}
    document = posthog("x", {"$lib": "web", "n": 1}, person, elements_chain="", url="https://p")
    assert document["properties"] == {
        "$lib": "web",
        "n": 1,
        "posthog": {"url": "https://p", "person": person},
    }


def test_a_payload_may_be_the_bare_event() -> None:
    payload = {"event": "x", "uuid": "e", "distinct_id": "u", "properties": {"n": 1}}
    [event] = translate("posthog", payload).events
    assert (event.document["userId"], event.document["properties"]) == ("u", {"n": 1})


def test_an_event_without_an_id_belongs_to_the_address_of_the_person() -> None:
    event = {"event": "x", "properties": {}}
    payload = {"event": event, "person": {"properties": {"email": "a@b.c"}}}
    [translated] = translate("posthog", payload).events
    assert recipient_of(translated) == ("email", "a@b.c")


def test_a_removed_trait_is_null() -> None:
    sets = {"$set": {"plan": None}, "$set_once": {"plan": "free", "source": "ad"}}
    assert posthog("$set", sets)["traits"] == {"plan": None, "source": "ad"}
    group = {"$group_key": "g", "$group_set": {"plan": None}}
    assert posthog("$groupidentify", group)["traits"] == {"plan": None}
