# SPDX-License-Identifier: Apache-2.0
"""The files of the console: their sizes, and what must not be in them."""

from __future__ import annotations

import re
from pathlib import Path

import engage.console
from support.each import each

CONSOLE = Path(engage.console.__file__).parent
TEMPLATES = sorted((CONSOLE / "templates").glob("*.html"))
SCRIPTS = sorted((CONSOLE / "static").glob("*.js"))
STYLES = sorted((CONSOLE / "static").glob("*.css"))

KIT = Path(__file__).parent / "kit.html"


def rules(path: Path) -> str:
    """Return a style sheet without its comments and without space that means nothing."""
    text = re.sub(r"/\*.*?\*/", "", path.read_text("utf-8"), flags=re.DOTALL)
    return re.sub(r"\s*([{};:,>])\s*", r"\1", " ".join(text.split()))


def test_there_are_files() -> None:
    assert len(TEMPLATES) > 10
    assert len(SCRIPTS) >= 4
    vendored = {path.name for path in (CONSOLE / "static/vendor/uplot-1.6.32").iterdir()}
    assert vendored == {"LICENSE", "uPlot.iife.min.js", "uPlot.min.css"}
    assert (CONSOLE / "static/icon.svg").is_file()


def test_the_common_style_sheet_is_small() -> None:
    assert len(rules(CONSOLE / "static/console.css")) <= 14 * 1024


@each("path", SCRIPTS)
def test_a_script_is_short_and_writes_text_only(path: Path) -> None:
    text = path.read_text("utf-8")
    assert text.count("\n") < 200
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|DOMParser",
        text,
    )


@each("path", TEMPLATES)
def test_a_template_has_nothing_that_the_policy_forbids(path: Path) -> None:
    text = path.read_text("utf-8")
    assert "{% raw" not in text
    assert "autoescape" not in text
    assert "{% module" not in text
    # What they return is not escaped.
    assert set(re.findall(r"{% apply (\w+)", text)) <= {"card", "table"}
    assert not re.search(r"<script(?![^>]*\bsrc=)", text)
    assert not re.search(r"<[^>]*\s(style|on[a-z]+)=", text)
    assert "<style" not in text
    assert "javascript:" not in text


@each("path", [*TEMPLATES, *SCRIPTS, *STYLES])
def test_nothing_is_loaded_from_elsewhere(path: Path) -> None:
    text = path.read_text("utf-8")
    assert not re.search(r"""(src|href)\s*=\s*["'](https?:)?//""", text)
    assert not re.search(r"url\(|@import", text)
    # Links begin at the console's root, which may be a path of a proxy.
    assert not re.search(r"""(src|href|action)="/""", text)


def test_the_kit_shows_the_classes_of_the_list() -> None:
    """The list is the comment at the top of the style sheet; ``kit.html`` shows each once."""
    text = (CONSOLE / "static/console.css").read_text("utf-8")
    listed = set(re.findall(r"\.([a-z][a-z-]*)", text.partition("*/")[0]))
    shown = KIT.read_text("utf-8")
    left_out = {name for name in listed if not re.search(rf"\b{name}\b", shown)}
    assert left_out == set()
