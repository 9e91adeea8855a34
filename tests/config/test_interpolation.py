# SPDX-License-Identifier: Apache-2.0
"""References in a config: ``${NAME}`` and ``${file:PATH}``."""

from __future__ import annotations

from pathlib import Path

from engage.config.interpolation import resolve
from support.each import each


def test_values_come_from_the_environment_and_from_files(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("from a file\r\n\n")
    document = {
        "a": "${ONE}",
        "b": ["x${ONE}y${TWO}z", {"c": "${file:secret}"}],
        "d": "$${ONE}",
        "e": 5,
        "f": "$ONE {ONE} $",
    }
    resolved, problems = resolve(document, tmp_path, {"ONE": "1", "TWO": "${ONE}"})
    assert problems == []
    assert resolved == {
        "a": "1",
        "b": ["x1y${ONE}z", {"c": "from a file"}],
        "d": "${ONE}",
        "e": 5,
        "f": "$ONE {ONE} $",
    }
    assert document["a"] == "${ONE}"


def test_a_file_may_have_an_absolute_path(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    resolved, problems = resolve({"a": f"${{file:{tmp_path}/secret}}"}, Path("/"), {})
    assert (resolved, problems) == ({"a": "s"}, [])


@each(
    "text, problem",
    [
        ("${MISSING}", "the environment variable MISSING is not set"),
        ("${EMPTY}", "the environment variable EMPTY is empty"),
        ("${file:missing}", "the file missing cannot be read: No such file or directory"),
        ("${file:empty}", "the file empty is empty"),
        ("${file:newline}", "the file newline is empty"),
        ("${file:binary}", "the file binary cannot be read: it is not UTF-8 text"),
        ("${file:large}", "the file large is larger than 1024 KiB"),
        ("${file:folder}", "the file folder cannot be read: Is a directory"),
        ("${file:a\0b}", "the file a\0b cannot be read: it is not UTF-8 text"),
        ("${file:}", "${file:} does not name a file; write ${file:PATH}"),
        ("${}", "a reference is ${NAME} or ${file:PATH}; write $${ for a literal ${"),
        ("${A-B}", "a reference is ${NAME} or ${file:PATH}; write $${ for a literal ${"),
        ("${OPEN", "${ without }; write $${ for a literal ${"),
    ],
)
def test_a_reference_that_cannot_be_resolved_names_the_key(
    tmp_path: Path, text: str, problem: str
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "newline").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff")
    (tmp_path / "large").write_bytes(b"x" * (1024 * 1024 + 1))
    (tmp_path / "folder").mkdir(exist_ok=True)
    _, problems = resolve({"a": [{"b": text}]}, tmp_path, {"EMPTY": "", "A-B": "x"})
    assert problems == [f"a[0].b: {problem}"]
