# SPDX-License-Identifier: Apache-2.0
"""JSON on several lines: nothing of it changes, and the right lines are marked."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from engage.console.pretty import json_lines, one_line


def text_of(source: str) -> str:
    """Return the lines as one text."""
    return "\n".join("".join(text for _, text in line.tokens) for line in json_lines(source))


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        {"a": {}, "b": [], "c": [[], {}]},
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


def test_one_line_cuts() -> None:
    assert one_line('{"a":\n 1}', 20) == '{"a": 1}'
    assert one_line("x" * 50, 10) == "x" * 9 + "…"
