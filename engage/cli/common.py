# SPDX-License-Identifier: Apache-2.0
"""What the commands share: ``--config``, the plugins, the store, how to fail in one line."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import IO, Any, Final, TypeVar

import click

from engage.api import EventStore
from engage.config import Config
from engage.config.schema_check import SettingsError
from engage.registry import Registry, load_plugins

__all__ = ["CONFIG_FILE", "Failed", "config_option", "moment", "opened", "registry_of", "safe"]

DEFAULT_CONFIG: Final = "engage.toml"
CONFIG_VARIABLE: Final = "ENGAGE_CONFIG"
#: A file that may not be read is no wrong usage: whoever loads it says why it fails.
CONFIG_FILE: Final = click.Path(path_type=Path, readable=False)

#: C0 and C1 controls, and what reorders or hides text: bidi marks, embeddings and isolates,
#: zero-width and line-separating characters, the byte order mark, tags.
_UNSAFE: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e0fff]"
)

Function = TypeVar("Function", bound=Callable[..., Any])


def safe(text: str) -> str:
    """Escape what could act on a terminal, as JSON does it: JSON stays the same JSON.

    :return: the text with each control or bidi character as ``\\uXXXX``.
    """

    def escaped(match: re.Match[str]) -> str:
        code = ord(match[0])
        if code > 0xFFFF:
            code -= 0x10000
            return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"
        return f"\\u{code:04x}"

    return _UNSAFE.sub(escaped, text)


def moment(text: str) -> datetime.datetime:
    """Read RFC 3339, or a date; UTC unless it says otherwise.

    :raises ValueError: it is neither.
    """
    read = datetime.datetime.fromisoformat(text.upper())
    return read if read.tzinfo is not None else read.replace(tzinfo=datetime.UTC)


class Failed(click.ClickException):
    """A command failed: exit status 1 and one line for each thing that is wrong."""

    exit_code = 1

    def __init__(self, error: Exception) -> None:
        problems = error.problems if isinstance(error, SettingsError) else (_said(error),)
        self.lines = [safe(" ".join(problem.split())) for problem in problems]
        super().__init__(self.lines[0])

    def show(self, file: IO[Any] | None = None) -> None:
        """Write the lines to standard error."""
        for line in self.lines:
            click.echo(f"engage: {line}", file=file, err=True)


def _said(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        place = f"{os.fsdecode(error.filename)}: " if error.filename else ""
        return f"{place}{error.strerror}"
    return str(error)


def config_option(function: Function) -> Function:
    """Give a command ``--config PATH``, passed on as ``config_path``."""
    option = click.option(
        "--config",
        "config_path",
        type=CONFIG_FILE,
        default=DEFAULT_CONFIG,
        envvar=CONFIG_VARIABLE,
        show_default=True,
        show_envvar=True,
        help="The config file.",
    )
    return option(function)


def registry_of(ctx: click.Context) -> Registry:
    """:return: the installed plugins, found once per run of the command line."""
    root = ctx.find_root()
    if root.obj is None:
        built_in = root.command.commands if isinstance(root.command, click.Group) else {}
        root.obj = load_plugins(reserved_commands=built_in)
    registry: Registry = root.obj
    return registry


@contextlib.asynccontextmanager
async def opened(
    registry: Registry, config: Config, *, create: bool = False
) -> AsyncIterator[EventStore]:
    """Make the configured storage, open it, and close it in the end.

    :param create: whether a store may be created where there is none.
    """
    store = registry.make_storage(config)
    try:
        await store.open(create=create)
        yield store
    finally:
        await store.close()
