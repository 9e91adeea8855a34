# SPDX-License-Identifier: Apache-2.0
"""The judgement of the tests in which processes die."""

from __future__ import annotations

import pytest

from support.each import each
from support.exactly_once import NotExactlyOnce, check_exactly_once


@each(
    "stored, message",
    [
        *(("ab", None), ("abc", None), ("a", r"1 lost: \['b'\]")),
        *(("aba", r"1 stored twice: \['a'\]"), ("abd", r"1 stored, and never sent: \['d'\]")),
        ("", r"2 lost: \['a', 'b'\]"),
    ],
)
def test_what_is_wrong_is_named(stored: str, message: str | None) -> None:
    if message is None:
        check_exactly_once(stored, "ab", "abc")
    else:
        with pytest.raises(NotExactlyOnce, match=f"^{message}$"):
            check_exactly_once(stored, "ab", "abc")


def test_what_may_be_there_is_accepted() -> None:
    check_exactly_once("aabz", "ab", once=False)
