# SPDX-License-Identifier: Apache-2.0
"""What the webhook kit makes of the elements of a delivery: times, and ids of their content."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from engage.api import PayloadInvalid, TranslatedEvent
from engage.webhooks import (
    content_id,
    email_recipients,
    iso_time,
    names_person,
    translated,
)
from support.each import each


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("2019-11-05T16:33:54.9070259Z", "2019-11-05T16:33:54.907Z"),
        ("2019-11-05T16:33:54.9070259-05:00", "2019-11-05T21:33:54.907Z"),
        ("2022-10-24 20:07:32.123000", "2022-10-24T20:07:32.123Z"),
        ("2024-11-22 23:41:11.894719+00", "2024-11-22T23:41:11.894Z"),
        ("2024-01-01t00:00:00z", "2024-01-01T00:00:00.000Z"),
        ("2024-01-01 00:00:00 UTC", "2024-01-01T00:00:00.000Z"),
        ("2024-01-01 00:00:00 -0500", "2024-01-01T05:00:00.000Z"),
        ("2016-12-31T23:59:60Z", "2016-12-31T23:59:59.999Z"),
        ("2017-01-01T00:59:60.5+01:00", "2016-12-31T23:59:59.999Z"),
        ("2024-01-01", "2024-01-01T00:00:00.000Z"),
        (" 2024-01-01T00:00:00Z ", "2024-01-01T00:00:00.000Z"),
        ("20240101T000000Z", "2024-01-01T00:00:00.000Z"),
        ("٢٠٢٤-٠١-٠١T٠٠:٠٠:٠٠Z", "2024-01-01T00:00:00.000Z"),
    ],
)
def test_a_time_is_read(written: str, read: str) -> None:
    assert iso_time(written) == read


@pytest.mark.parametrize(
    "written",
    [
        "",
        "soon",
        "UTC",
        "2024-01-01 00:00:00 CET",
        "2024-02-30T00:00:00Z",
        "2024-01-01T00:60:60Z",
        "1969-12-31T23:59:59Z",
        "2024-01-01T00:00:00Z" + " " * 64,
        "２０２４-01-01",
        1700000000,
        None,
    ],
)
def test_a_value_that_is_not_a_time_is_none(written: Any) -> None:
    assert iso_time(written) is None


def test_the_content_of_an_element_is_its_id() -> None:
    assert content_id({"a": 1, "b": [2]}) == content_id({"b": [2], "a": 1}) != content_id({"a": 1})


def test_an_element_that_is_nested_too_deeply_has_no_id() -> None:
    """JSON can be read to a greater depth than it can be written."""
    deep = {depth: orjson.loads('{"a":%s}' % ("[" * depth + "]" * depth)) for depth in (200, 400)}
    assert content_id(deep[200])
    with pytest.raises(PayloadInvalid, match="nested too deeply"):
        content_id(deep[400])


@each(
    "written, addresses",
    [
        ("Ann@Example.com ", ["Ann@Example.com"]),
        ("Ann <ann@example.com>", ["ann@example.com"]),
        ('"Doe, Ann; bob@example.com" <ann@example.com>', ["ann@example.com"]),
        ("bob@example.com <ann@example.com>", ["ann@example.com"]),
        ("=?utf-8?q?Ann?= <ann@example.com>", ["ann@example.com"]),
        ("ann@example.com (Ann, at home)", ["ann@example.com"]),
        ('"ann doe"@example.com', ['"ann doe"@example.com']),
        ("a@example.com,b@example.com", ["a@example.com", "b@example.com"]),
        ("A <a@example.com>; b@example.com,", ["a@example.com", "b@example.com"]),
        ("a@example.com, A@EXAMPLE.com", ["a@example.com"]),
        ("rfc822;a@example.com", ["a@example.com"]),
        ("Ünï@exämple.com", ["Ünï@exämple.com"]),
        (["a@example.com", None, 7, "no", "B <b@example.com>"], ["a@example.com", "b@example.com"]),
        ("a@b@example.com", []),
        ("ann @example.com", []),
        ("ann at example.com", []),
        ("undisclosed-recipients:;", []),
        ("<ann@example.com", []),
        ("@example.com", []),
        ("ann@", []),
        ("a" * 511 + "@b", []),
        (None, []),
        (7, []),
        ({"email": "a@example.com"}, []),
    ],
)
def test_addresses_are_read(written: Any, addresses: list[str]) -> None:
    assert [recipient.value for recipient in email_recipients(written)] == addresses
    # The first candidate that has any counts.
    either = email_recipients(written, "z@example.com")
    assert [one.value for one in either] == (addresses or ["z@example.com"])


@each(
    "payload, expected",
    [
        ({"email": "x"}, True),
        ({"data": [{"Customer_Id": 7}]}, True),
        ({"customerId": {"value": ["x"]}}, True),
        ([[{"to": ["x"]}]], True),
        ({"email": " ", "phone": None, "user": {}, "to": [], "customer": True}, False),
        ({"mail": "x", "emails_sent": 7, "customers": 3}, False),
        ("email", False),
        (None, False),
    ],
)
def test_a_payload_names_a_person(payload: Any, expected: bool) -> None:
    assert names_person(payload) is expected


def test_each_element_is_translated_by_itself() -> None:
    def translate(item: Any, index: int) -> Any:
        if item == "bad":
            raise PayloadInvalid("is bad")
        return TranslatedEvent({"item": item}, index=index) if item == "event" else item

    items = ["event", "bad", "ignored", "test", "unknown", "event", "test"]
    result = translated(items, translate, ["a", None, "", "a"])
    assert [event.index for event in result.events] == [0, 5]
    assert [(one.index, one.message) for one in result.rejected] == [(1, "is bad")]
    assert (result.ignored, result.tests, result.unknown) == (4, 2, {4: "unknown"})
    assert result.types == {"a"}
