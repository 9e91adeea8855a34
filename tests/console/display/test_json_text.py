# SPDX-License-Identifier: Apache-2.0
"""JSON on several lines: nothing of it changes; where a person finds a JSON pointer's value."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engage.console.display.json_text import json_lines, places_of
from support.each import each


def text_of(source: str) -> str:
    """Return the lines as one text."""
    return "\n".join("".join(text for _, text in line.tokens) for line in json_lines(source))


@each(
    "value",
    [
        *({}, [], {"a": {}, "b": [], "c": [[], {}]}),
        {"event": "x", "n": [1, 2.5, None, True], "deep": {"a": [{"b": 'c,:{}[]\\"'}]}},
        [1, [2, [3]]],
    ],
)
def test_the_text_is_what_json_writes_with_an_indent(value: object) -> None:
    assert text_of(json.dumps(value)) == json.dumps(value, indent=2)


def test_numbers_stay_as_they_stand() -> None:
    source = '{"a":9007199254740993,"b":1.0,"c":1e400}'
    assert text_of(source) == '{\n  "a": 9007199254740993,\n  "b": 1.0,\n  "c": 1e400\n}'


def test_a_pointer_marks_the_line_of_its_value() -> None:
    source = '{"properties":{"price":"12","a/b":[{"x":1},{"x":2}]}}'
    marked = {"/properties/price", "/properties/a~1b/1/x"}
    lines = [line for line in json_lines(source, marked) if line.marked]
    texts = ["".join(text for _, text in line.tokens).strip() for line in lines]
    assert texts == ['"price": "12",', '"x": 2']


def test_a_pointer_that_the_text_does_not_have_marks_its_parent() -> None:
    source = '{"properties":{"price":"12"},"a":1}'
    lines = json_lines(source, {"/properties/x/y", "/b", ""})
    assert [index for index, line in enumerate(lines) if line.marked] == [1]


def test_a_long_name_with_many_values_needs_no_memory_for_pointers() -> None:
    tracemalloc.start()
    lines = json_lines(json.dumps({"k" * 500_000: [0] * 50_000}), {"/a"})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(lines) == 5001
    assert peak < 50_000_000


def test_a_text_that_is_not_json_is_shown_as_it_is() -> None:
    for text in ('{"a": "cut', "hello", "", "a\nb", '{"a":1}}]', '"'):
        assert text_of(text).replace("\n", "").replace(" ", "") == text.replace("\n", "").replace(
            " ", ""
        )


def test_the_number_of_lines_is_bounded() -> None:
    assert len(json_lines(json.dumps(list(range(20_000))))) == 5001


def line_of(text: str, pointer: str) -> int:
    """Return the line of one pointer."""
    return places_of(text, [pointer])[pointer][0]


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


@each(
    "pointer, line",
    [
        *(("", 1), ("/event", 2), ("/properties", 3), ("/properties/price", 3)),
        *(("/properties/products", 4), ("/properties/products/0/sku", 5)),
        *(("/properties/products/1", 6), ("/properties/products/1/sku", 6), ("/a~1b~0c", 10)),
        *(("/properties/missing", 3), ("/missing", 1), ("/properties/products/9/sku", 4)),
    ],
)
def test_the_line_of_a_pointer(pointer: str, line: int) -> None:
    assert line_of(TEXT, pointer) == line


@each("text", ["", "}", "not json", '{"a"', "[[[[", '"' * 999])
def test_what_is_not_json_does_no_harm(text: str) -> None:
    assert line_of(text, "/a") == 1


def test_a_text_that_is_not_json_has_the_line_where_that_shows() -> None:
    assert line_of(TEXT.replace('"x, ', ""), "") == 7
    assert line_of('{\n"a": 1,\n}', "/a") == 3


values = st.recursive(
    st.none() | st.integers() | st.text(max_size=4),
    lambda child: st.lists(child, max_size=3) | st.dictionaries(st.text(max_size=4), child),
    max_leaves=12,
)


@given(values)
def test_every_value_has_a_line(value: Any) -> None:
    def check(inner: Any, pointer: str) -> None:
        assert line_of(text, pointer) >= 1
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
    found = places_of(text, [deep, "/a"] * 50)
    assert found == {deep: (50_002, 3), "/a": (50_004, 2)}
    assert line_of("[" * 500_000, "/0/0/1") == 1
    assert line_of('{"a": "' + '\\"' * 500_000, "/a") == 1
    assert line_of('{"a": "' + "\\" * 500_001, "/a") == 1
