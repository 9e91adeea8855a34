# SPDX-License-Identifier: Apache-2.0
"""The code that the commands share: ``--config``, the plugins, the store, errors and times."""

from __future__ import annotations

import contextlib
import datetime
import getpass
import os
import platform
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import IO, Any, Final, TypeVar

import click

from engage.api import EventStore, StorageMissing
from engage.config import Config
from engage.config.schema_check import SettingsError
from engage.monitoring.visible import visible as safe
from engage.registry import Registry, load_plugins
from engage.upkeep.audit import Actor

__all__ = [
    "CONFIG_FILE",
    "DEFAULT_CONFIG",
    "CommandFailed",
    "config_option",
    "now",
    "opened",
    "operator",
    "parse_time",
    "registry_of",
    "safe",
]

DEFAULT_CONFIG: Final = "engage.toml"
CONFIG_VARIABLE: Final = "ENGAGE_CONFIG"
#: An unreadable file is not a usage error: loading it reports why it cannot be read.
CONFIG_FILE: Final = click.Path(path_type=Path, readable=False)

Function = TypeVar("Function", bound=Callable[..., Any])


def parse_time(text: str) -> datetime.datetime:
    """Parse a time in RFC 3339, or a date. It is in UTC unless it has an offset.

    :raises ValueError: if the text is neither.
    """
    read = datetime.datetime.fromisoformat(text.upper())
    return read if read.tzinfo is not None else read.replace(tzinfo=datetime.UTC)


def now() -> int:
    """Return the time in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def operator() -> Actor:
    """Return who runs this command, for the audit."""
    try:
        who = getpass.getuser()
    except (ImportError, KeyError, OSError):  # The user has no name, as in some containers.
        who = "unknown"
    return Actor(who=who, origin=f"command line on {platform.node() or 'unknown'}")


class CommandFailed(click.ClickException):
    """A command failed: exit status 1, and one line for each problem."""

    exit_code = 1

    def __init__(self, error: Exception) -> None:
        problems = error.problems if isinstance(error, SettingsError) else (_message(error),)
        self.lines = [safe(" ".join(problem.split())) for problem in problems]
        super().__init__(self.lines[0])

    def show(self, file: IO[Any] | None = None) -> None:
        """Write the lines to standard error."""
        for line in self.lines:
            click.echo(f"engage: {line}", file=file, err=True)


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        place = f"{os.fsdecode(error.filename)}: " if error.filename else ""
        return f"{place}{error.strerror}"
    return str(error)


def config_option(function: Function) -> Function:
    """Add the option ``--config PATH`` to a command, which receives it as ``config_path``."""
    option = click.option(
        "--config",
        "config_path",
        type=CONFIG_FILE,
        default=DEFAULT_CONFIG,
        envvar=CONFIG_VARIABLE,
        show_default=True,
        show_envvar=True,
        help="Path of the config file.",
    )
    return option(function)


def registry_of(ctx: click.Context) -> Registry:
    """Return the installed plugins, which are loaded once per run of the command line.

    :raises PluginError: if a plugin is broken, or if two plugins conflict.
    """
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
    """Make the configured storage, open it, and close it at the end.

    A store that exists is opened as it is: only a server brings one of an earlier version up to
    date.

    :param create: whether to create a store if there is none.
    :raises ConfigError: if the storage is unknown or its options are wrong.
    :raises StorageError: if the store cannot be opened.
    """
    store = registry.make_storage(config)
    try:
        try:
            await store.open(create=False)
        except StorageMissing:
            if not create:
                raise
            await store.open(create=True)
        yield store
    finally:
        await store.close()
