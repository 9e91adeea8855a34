# SPDX-License-Identifier: Apache-2.0
"""Resolve ``${NAME}`` and ``${file:PATH}`` in the strings of a configuration.

``${NAME}`` stands for an environment variable. ``${file:PATH}`` stands for the content of a file,
relative to the folder of the config file, without line breaks at its end. ``$${`` stands for a
literal ``${``. The values are not resolved again. A reference to something that is missing or empty
is an error, because an empty secret would let anyone in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from engage.config.schema_check import dotted

if TYPE_CHECKING:
    from pathlib import Path

    from engage.config.schema_check import Path as KeyPath

__all__ = ["MAX_BYTES", "resolve"]

_REFERENCE: Final = re.compile(r"\$\$\{|\$\{([^{}]*)(\}?)")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
#: Bytes that a config file may have, or a file to which it refers.
MAX_BYTES: Final = 1024 * 1024


class _Unresolved(Exception):
    pass


def resolve(
    document: Mapping[str, Any],
    base_dir: Path,
    environ: Mapping[str, str],
    left_out: Callable[[KeyPath], bool] = lambda _: False,
) -> tuple[dict[str, Any], list[str]]:
    """Resolve all references of a document.

    :param base_dir: the folder to which file names are relative.
    :param environ: the environment variables.
    :param left_out: asked for each value with a reference, whether it is left out.
    :return: a new document, and one line for each reference that cannot be resolved. The lines
        name keys, variables and files, never a value.
    """
    problems: list[str] = []

    def replacement(match: re.Match[str]) -> str:
        if match[0] == "$${":
            return "${"
        name, closed = match[1], match[2]
        if not closed:
            raise _Unresolved("${ without }; write $${ for a literal ${")
        if name.startswith("file:"):
            return _content(base_dir, name.removeprefix("file:"))
        if not _NAME.fullmatch(name):
            raise _Unresolved("a reference is ${NAME} or ${file:PATH}; write $${ for a literal ${")
        value = environ.get(name)
        if not value:
            state = "not set" if value is None else "empty"
            raise _Unresolved(f"the environment variable {name} is {state}")
        return value

    def walk(value: Any, path: tuple[str | int, ...]) -> Any:
        texts = value if isinstance(value, list) else [value]
        refers = any(isinstance(text, str) and "${" in text for text in texts)
        if refers and left_out(path):
            return None  # TOML has no such value.
        if isinstance(value, Mapping):
            walked = {key: walk(item, (*path, key)) for key, item in value.items()}
            return {key: item for key, item in walked.items() if item is not None}
        if isinstance(value, list):
            return [walk(item, (*path, index)) for index, item in enumerate(value)]
        if isinstance(value, str) and "${" in value:
            try:
                return _REFERENCE.sub(replacement, value)
            except _Unresolved as unresolved:
                problems.append(f"{dotted(path)}: {unresolved}")
        return value

    return walk(document, ()), problems


def _content(base_dir: Path, name: str) -> str:
    if not name:
        raise _Unresolved("${file:} does not name a file; write ${file:PATH}")
    try:
        with (base_dir / name).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise _Unresolved(f"the file {name} is larger than {MAX_BYTES // 1024} KiB")
        text = data.decode("utf-8-sig").rstrip("\r\n")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise _Unresolved(f"the file {name} cannot be read: {reason}") from error
    if not text:
        raise _Unresolved(f"the file {name} is empty")
    return text
