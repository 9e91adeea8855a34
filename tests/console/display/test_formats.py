# SPDX-License-Identifier: Apache-2.0
"""How pages show numbers."""

from __future__ import annotations

from engage.console.display.formats import one_line, percent, plural, size, span
from support.each import each


@each(
    "part, whole, shown",
    [(0, 5, "0"), (1, 1, "100"), (1, 3, "33"), (1, 200, "0.5"), (999, 1000, "100")],
)
def test_a_share_is_a_short_number(part: int, whole: int, shown: str) -> None:
    assert percent(part, whole) == f"{shown}\u202f%"


def test_a_count_has_the_right_noun() -> None:
    assert plural(1, "event") == "1 event"
    assert plural(0, "event") == "0 events"
    assert plural(2000, "reply", "replies") == "2\u202f000 replies"


@each(
    "seconds, shown",
    [(0, "0 s"), (119.4, "119 s"), (120, "2 min"), (7200, "2 h"), (604_800, "7 days")],
)
def test_a_duration_has_one_unit(seconds: float, shown: str) -> None:
    assert span(seconds) == shown.replace(" ", "\u202f")


@each(
    "count, shown",
    [
        *((1023, "1023 bytes"), (1536, "1.5 KiB"), (1_024_000, "1000 KiB"), (5 << 20, "5 MiB")),
        (1023 << 30, "1023 GiB"),
    ],
)
def test_a_size_has_its_unit_and_no_exponent(count: int, shown: str) -> None:
    assert size(count).replace("\u202f", " ") == shown


def test_one_line_cuts() -> None:
    assert one_line('{"a":\n 1}', 20) == '{"a": 1}'
    assert one_line("x" * 50, 10) == "x" * 9 + "…"
