# SPDX-License-Identifier: Apache-2.0
"""What the webhook kit makes of the elements of a delivery: times, and ids of their content."""

from __future__ import annotations

from typing import Any

import pytest

from engage.api import PayloadInvalid
from engage.webhooks import content_id, iso_time, parse_json


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
    deep = {depth: parse_json('{"a":%s}' % ("[" * depth + "]" * depth)) for depth in (200, 400)}
    assert content_id(deep[200])
    with pytest.raises(PayloadInvalid, match="nested too deeply"):
        content_id(deep[400])
