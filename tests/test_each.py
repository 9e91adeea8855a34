# SPDX-License-Identifier: Apache-2.0
"""One test for many cases runs every case, and names every case that fails."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from support.each import each


def check(tmp_path: Path, first: int, second: int) -> None:
    assert tmp_path == Path("folder")
    if second == 0:
        pytest.fail("is zero")
    assert first % second == 0


async def check_later(tmp_path: Path, first: int, second: int) -> None:
    check(tmp_path, first, second)


CASES = each("first, second", [(4, 2), (5, 2), (4, 0), ("x", 2), (6, 3)])


async def test_all_cases_that_fail_are_named_with_the_reason() -> None:
    async def run_sync(tmp_path: Path) -> None:
        CASES(check)(tmp_path=tmp_path)

    for test in (run_sync, CASES(check_later)):
        assert list(inspect.signature(test).parameters) == ["tmp_path"]
        with pytest.raises(AssertionError) as failed:
            await test(tmp_path=Path("folder"))
        assert str(failed.value) == (
            "3 of 5 cases failed:\n"
            "  5, 2\n  AssertionError: assert (5 % 2) == 0\n"
            "  4, 0\n  Failed: is zero\n"
            "  'x', 2\n  TypeError: not all arguments converted during string formatting"
        )


def test_a_list_without_cases_and_a_case_without_a_value_fail() -> None:
    with pytest.raises(AssertionError, match="without a case"):
        each("first", [])(check)()
    with pytest.raises(ValueError, match="shorter"):
        each("first, second", [(1,)])


@each("number", range(3))
def test_cases_share_the_fixtures(number: int, tmp_path: Path) -> None:
    file = tmp_path / "file"
    assert number == (len(file.read_text()) if file.exists() else 0)
    file.write_text("x" * (number + 1))
