# SPDX-License-Identifier: Apache-2.0
"""engage.console.source_lines: where a person finds what a JSON pointer names."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engage.console.source_lines import lines_of


def line_of(text: str, pointer: str) -> int | None:
    """Return the line of one pointer."""
    return lines_of(text, [pointer])[pointer]


TEXT = """{
  "event": "a",
  "properties": {"price": "12",
    "products": [
      {"sku": 1},
      {"sku":
        "x, {\\"y\\": 1}"}
    ]
  },
  "a/b~c": null
}"""


@pytest.mark.parametrize(
    ("pointer", "line"),
    [
        ("", 1),
        ("/event", 2),
        ("/properties", 3),
        ("/properties/price", 3),
        ("/properties/products", 4),
        ("/properties/products/0/sku", 5),
        ("/properties/products/1", 6),
        ("/properties/products/1/sku", 6),
        ("/a~1b~0c", 10),
        ("/properties/missing", 3),
        ("/missing", 1),
        ("/properties/products/9/sku", 4),
    ],
)
def test_the_line_of_a_pointer(pointer: str, line: int) -> None:
    assert line_of(TEXT, pointer) == line


@pytest.mark.parametrize("text", ["", "}", "not json", '{"a"', "[[[[", '"' * 999])
def test_what_is_not_json_does_no_harm(text: str) -> None:
    assert line_of(text, "/a") in (None, 1)


values = st.recursive(
    st.none() | st.integers() | st.text(max_size=4),
    lambda child: st.lists(child, max_size=3) | st.dictionaries(st.text(max_size=4), child),
    max_leaves=12,
)


@given(values)
def test_every_value_has_a_line(value: Any) -> None:
    def check(inner: Any, pointer: str) -> None:
        assert line_of(text, pointer) is not None
        members: Any = inner.items() if isinstance(inner, dict) else ()
        if isinstance(inner, list):
            members = ((str(index), item) for index, item in enumerate(inner))
        for name, item in members:
            check(item, f"{pointer}/{name.replace('~', '~0').replace('/', '~1')}")

    text = json.dumps(value, indent=1)
    check(value, "")


def test_a_long_name_with_many_values_costs_what_it_costs_to_read_it() -> None:
    """The pointers of all values would be 25 GB."""
    text = json.dumps({"k" * 500_000: [0] * 50_000, "a": 1}, indent=1)
    deep = f"/{'k' * 500_000}/49999"
    started = time.process_time()
    found = lines_of(text, [deep, "/a"] * 50)
    assert time.process_time() - started < 5
    assert found == {deep: 50_002, "/a": 50_004}
    assert line_of("[" * 500_000, "/0/0/1") == 1
    assert line_of('{"a": "' + '\\"' * 500_000, "/a") == 1
    assert line_of('{"a": "' + "\\" * 500_001, "/a") == 1
