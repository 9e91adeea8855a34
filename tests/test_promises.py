# SPDX-License-Identifier: Apache-2.0
"""Each promise of the documentation is shown by a test; ``promises.toml`` says by which."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
TABLE = tomllib.loads((ROOT / "tests/promises.toml").read_text("utf-8"))
SHORT = TABLE.pop("short")

pytestmark = pytest.mark.checkout


def ids(names: Any) -> set[str]:
    """Return the ids of the tests with these names."""
    parts = [name.partition("::") for name in ([names] if isinstance(names, str) else names)]
    return {f"tests/{SHORT.get(first, first)}::{rest}" for first, _, rest in parts}


def shown_by(promise: object) -> tuple[set[str], set[str]]:
    """Return the tests that show a promise, and those that show the rest of it elsewhere."""
    match promise:
        case False:
            return set(), set()
        case str() | [_, *_]:
            return ids(promise), set()
        case {"test": str() | [_, *_] as names, "all": str() | [_, *_] as others}:
            return ids(names), ids(others)
    raise AssertionError(f"{promise!r} names no test")


def all_tests() -> tuple[set[str], set[str]]:
    promises = [one for page in TABLE.values() for part in page.values() for one in part.values()]
    quick, elsewhere = zip(*map(shown_by, promises), strict=True)
    return set().union(*quick), set().union(*elsewhere)


def sections(page: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the headings of a page, each with its lines up to the next one; without blocks of code
    and the heads of tables."""
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text("utf-8"), flags=re.S | re.M)
    text = re.sub(r"^\|.*\n\|[-|]+\|$", "", text, flags=re.M)
    for heading, body in re.findall(r"^#+ (.*)\n((?:(?!#).*\n)*)", text, flags=re.M):
        yield heading, [line for line in body.splitlines() if line]


@pytest.mark.parametrize("page", TABLE)
def test_the_words_of_a_promise_are_in_one_line_of_its_section(page: str) -> None:
    found = dict(sections(page))
    wrong = [
        (heading, words)
        for heading, promises in TABLE[page].items()
        for words in promises
        if sum(words in line for line in found.get(heading, ())) != 1
    ]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("page", TABLE)
def test_each_heading_row_and_item_has_a_promise(page: str) -> None:
    """Of README.md, those in the sections that the table has."""
    missing = []
    for number, (heading, lines) in enumerate(sections(page)):
        promises = TABLE[page].get(heading)
        if promises is None and page == "README.md":
            continue
        if not promises and number:  # The first heading is the title of the page.
            missing.append(heading)
        missing += [
            f"{heading}: {line}"
            for line in lines
            if line.startswith(("| ", "- ")) and not any(words in line for words in promises or ())
        ]
    assert not missing, "\n".join(missing)


def without_parameters(names: Iterable[str]) -> set[str]:
    return {name.partition("[")[0] for name in names}


@pytest.mark.timeout(900)
def test_each_test_is_one_of_make_test(request: pytest.FixtureRequest) -> None:
    missing, _ = all_tests()
    if request.config.option.part == "quick":
        missing -= without_parameters(item.nodeid for item in request.session.items)
    if missing:
        # This run has not collected them.
        files = sorted({name.partition("::")[0] for name in missing})
        options = ("--part", "quick", "--collect-only", "-q", "-p", "no:cacheprovider")
        result = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *files],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stdout
        missing -= without_parameters(result.stdout.splitlines())
    assert not missing, "\n".join(sorted(missing))


def test_each_test_of_the_longer_runs_exists() -> None:
    """Their files may need packages that are not installed."""
    missing = []
    for name in sorted(all_tests()[1]):
        path, _, function = name.partition("::")
        tree = ast.parse((ROOT / path).read_text("utf-8"))
        functions = {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        if function not in functions:
            missing.append(name)
    assert not missing, "\n".join(missing)
