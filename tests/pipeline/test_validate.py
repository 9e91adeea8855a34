# SPDX-License-Identifier: Apache-2.0
"""Problems of invalid payloads, as clients get them."""

from __future__ import annotations

from typing import Any

import pytest

from engage.errors import MAX_ERRORS, Problem
from support.each import each
from support.pipeline import SCHEMAS


def only(kind: str, value: Any) -> tuple[str, str]:
    """Return the pointer and the words of the only problem."""
    problems = SCHEMAS.problems(kind, value)
    assert len(problems) == 1, problems
    return problems[0].pointer, problems[0].message


@each(
    "kind, value, pointer, message",
    [
        (
            "track",
            {"userId": "u" * 513, "event": "e"},
            "/userId",
            "is too long (513 characters; the limit is 512)",
        ),
        ("track", {"event": "e"}, "", "userId or anonymousId is required"),
        ("track", {"userId": None, "event": "e"}, "", "userId or anonymousId is required"),
        ("track", {"userId": "u"}, "/event", "is required"),
        ("track", {"userId": "u", "event": 5}, "/event", "must be a string, not 5"),
        (
            "track",
            {"userId": True, "event": "e"},
            "/userId",
            "must be a string or an integer, not true",
        ),
        ("track", {"userId": [1], "event": "e"}, "/userId", "must be a string or an integer"),
        ("track", {"userId": "  ", "event": "e"}, "/userId", "must not be blank"),
        (
            "track",
            {"userId": "u", "event": "e", "context": 1},
            "/context",
            "must be an object, not 1",
        ),
        (
            "track",
            {"userId": "u", "event": "e", "type": "page"},
            "/type",
            'must be track on this route, not "page"',
        ),
        ("track", [], "", "must be an object"),
        ("alias", {"anonymousId": "a", "userId": "u"}, "/previousId", "is required"),
        ("alias", {"previousId": "p"}, "/userId", "is required"),
        ("group", {"userId": "u", "groupId": ""}, "/groupId", "must not be empty"),
        ("batch", {}, "/batch", "is required"),
        ("item", {"type": "x"}, "/type", None),
        ("item", {}, "/type", "is required"),
        (
            "subscriptions",
            {
                "workspaceId": "w",
                "identifier": "i",
                "identifierKey": "k",
                "hash": "h",
                "changes": {"a/b~c": 1},
            },
            "/changes/a~1b~0c",
            "must be true or false, not 1",
        ),
    ],
)
def test_a_problem_has_a_place_and_words(
    kind: str, value: Any, pointer: str, message: str | None
) -> None:
    found, words = only(kind, value)
    assert found == pointer
    assert message in (None, words)


@each(
    "kind, value, pointer, message",
    [
        ("track", {"userId": "u", "evnt": "e"}, "/event", "`event` (you sent `evnt`)"),
        ("track", {"user_id": "u", "event": "e"}, "", "`userId` (you sent `user_id`)"),
        ("page", {"anonymousID": "a"}, "", "`anonymousId` (you sent `anonymousID`)"),
        ("group", {"userId": "u", "group_id": 1}, "/groupId", "`groupId` (you sent `group_id`)"),
        ("item", {"typ": "track"}, "/type", "`type` (you sent `typ`)"),
    ],
)
def test_a_misspelt_member_is_named(kind: str, value: Any, pointer: str, message: str) -> None:
    found, words = only(kind, value)
    assert found == pointer
    assert words.endswith(f"is required; did you mean {message}?")


def test_a_member_of_another_name_is_no_misspelling() -> None:
    """Even if the names are alike: this one is what it says."""
    problems = SCHEMAS.problems("subscriptions", {"identifierKey": "k"})
    assert Problem("/identifier", "is required") in problems


def test_several_problems_come_in_order() -> None:
    value = {"userId": 1.5, "event": "", "properties": [], "timestamp": -5}
    assert [problem.pointer for problem in SCHEMAS.problems("track", value)] == [
        "/event",
        "/properties",
        "/timestamp",
        "/userId",
    ]


def test_long_values_and_names_are_cut() -> None:
    _, message = only("track", {"userId": "u", "event": "e", "timestamp": "x" * 60})
    assert len(message) < 200
    _, message = only("track", {"userId": "u", "event": "e", "context": "\x00" * 100_000})
    assert len(message) < 120
    pointer, _ = only(
        "subscriptions",
        {
            "workspaceId": "w",
            "identifier": "i",
            "identifierKey": "k",
            "hash": "h",
            "changes": {"g" * 10_000: 1},
        },
    )
    assert len(pointer) < 120


def test_a_value_that_is_too_long_is_not_searched() -> None:
    """Searching 20 MiB of blanks would take seconds."""
    pointer, message = only("track", {"userId": " " * 20_000_000, "event": "e"})
    assert (pointer, message) == ("/userId", "is too long (20000000 characters; the limit is 512)")
    assert "blank" in only("track", {"userId": " " * 512, "event": "e"})[1]


def test_an_object_with_too_many_members_is_not_searched() -> None:
    """Checking each member of a body of 1 MiB would take 0.2 s."""

    class Unsearched(dict[str, bool]):
        def __iter__(self) -> Any:
            pytest.fail("its members are looked at")

        items = keys = values = __iter__

    changes = Unsearched(dict.fromkeys(map(str, range(100_000)), True))
    value = {"workspaceId": "w", "identifier": "i", "identifierKey": "k", "hash": "h"}
    found = SCHEMAS.problems("subscriptions", {**value, "changes": changes})
    assert [(problem.pointer, problem.message) for problem in found] == [
        ("/changes", "has too many members (100000; the limit is 1000)")
    ]


def test_the_number_of_problems_is_limited() -> None:
    changes = dict.fromkeys(map(str, range(1000)), 5)
    value = {"workspaceId": "w", "identifier": "i", "identifierKey": "k", "hash": "h"}
    assert len(SCHEMAS.problems("subscriptions", {**value, "changes": changes})) == MAX_ERRORS


def test_a_valid_event_has_no_problems() -> None:
    assert SCHEMAS.problems("identify", {"userId": 5, "traits": None, "x": [1]}) == []


def test_integers_beyond_64_bits_are_described() -> None:
    """A transform can make such an integer."""
    assert isinstance(SCHEMAS.problems("track", {"userId": "u", "event": 2**70})[0], Problem)
