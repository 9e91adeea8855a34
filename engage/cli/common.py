# SPDX-License-Identifier: Apache-2.0
"""The code that the commands share: ``--config``, the plugins, the store, errors and times."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import getpass
import os
import platform
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, TypeVar

import click

from engage.api import MAX_TIME, ConfigError, StorageMissing, render_time
from engage.config import Config, load
from engage.config.schema_check import SettingsError
from engage.monitoring.visible import visible as safe
from engage.registry import Registry, load_plugins
from engage.store.facade import Storage
from engage.upkeep.audit import Actor

__all__ = [
    "CONFIG_FILE",
    "DEFAULT_CONFIG",
    "CommandFailed",
    "address_option",
    "config_option",
    "discard_output",
    "load_chosen",
    "load_with",
    "now",
    "one_line",
    "opened",
    "operator",
    "parse_time",
    "plural",
    "print_counts",
    "print_table",
    "registry_of",
    "safe",
    "shown_time",
    "the_only",
    "visitor_option",
    "with_store",
    "workspace_option",
]

DEFAULT_CONFIG: Final = "engage.toml"
CONFIG_VARIABLE: Final = "ENGAGE_CONFIG"
#: An unreadable file is not a usage error: loading it reports why it cannot be read.
CONFIG_FILE: Final = click.Path(path_type=Path, readable=False)

Function = TypeVar("Function", bound=Callable[..., Any])
Result = TypeVar("Result")


def parse_time(text: str) -> datetime.datetime:
    """Parse a time in RFC 3339, or a date. It is in UTC unless it has an offset.

    :raises ValueError: if the text is neither.
    """
    read = datetime.datetime.fromisoformat(text.upper())
    return read if read.tzinfo is not None else read.replace(tzinfo=datetime.UTC)


def now() -> int:
    """Return the time in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def shown_time(milliseconds: int) -> str:
    """Return a stored time in RFC 3339. One that another program wrote may be out of range."""
    return render_time(max(0, min(milliseconds, MAX_TIME)))


def one_line(text: str) -> str:
    """Return a client's text in one line, without anything that a terminal would interpret."""
    return safe(" ".join(text.split()))


def plural(count: int, noun: str) -> str:
    """Return a number with its noun in singular or plural."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def print_counts(what: str, numbers: Mapping[str, int], *, colour: str | None = None) -> None:
    """Print numbers of something: for a person in a terminal, and for a program elsewhere.

    :param colour: of its name.
    """
    if sys.stdout.isatty():
        listed = ", ".join(f"{number:,} {name}" for name, number in numbers.items())
        click.echo(f"\r\x1b[K{click.style(what, bold=True, fg=colour)}: {listed}")
    else:
        click.echo("\t".join([what, *(f"{name}={n}" for name, n in numbers.items())]))


def print_table(columns: Sequence[str], found: Sequence[Sequence[str]]) -> None:
    """Print rows: in columns on a terminal, otherwise with tabs and without a head."""
    rows = [[safe(cell) for cell in row] for row in found]
    if not sys.stdout.isatty():
        for row in rows:
            click.echo("\t".join(row))
        return
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for number, row in enumerate((list(columns), *rows)):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.secho("  ".join(cells).rstrip(), bold=number == 0)


def load_with(
    config_path: Path, workspace_id: str | None, *, reads_with: Sequence[str] | None = None
) -> Config:
    """Load a config that has a workspace.

    :param reads_with: see :func:`engage.config.load`.
    :raises ConfigError: if it does not.
    """
    config = load(config_path, reads_with=reads_with)
    if workspace_id is not None and all(one.id != workspace_id for one in config.workspaces):
        raise ConfigError(f"{config_path} does not contain a workspace {workspace_id!r}")
    return config


def the_only(workspaces: Iterable[str]) -> str:
    """Return the workspace that a command without ``--workspace`` means.

    :raises ConfigError: if there are several.
    """
    names = list(dict.fromkeys(workspaces))
    if len(names) > 1:
        raise ConfigError(f"choose one with --workspace: {', '.join(names)}")
    return names[0]


def load_chosen(
    config_path: Path, workspace_id: str | None, *, reads_with: Sequence[str] | None = None
) -> tuple[Config, str]:
    """Load a config, and return it with the workspace that a command is for.

    :param workspace_id: as given with ``--workspace``.
    :param reads_with: see :func:`engage.config.load`.
    :raises ConfigError: if the config does not contain it, or if none is given and there are
        several.
    """
    config = load_with(config_path, workspace_id, reads_with=reads_with)
    return config, workspace_id or the_only(one.id for one in config.workspaces)


def operator() -> Actor:
    """Return who runs this command, for the audit."""
    try:
        who = getpass.getuser()
    except (ImportError, KeyError, OSError):  # The user has no name, as in some containers.
        who = "unknown"
    return Actor(who=who, origin=f"command line on {platform.node() or 'unknown'}")


def discard_output() -> None:
    """Redirect output that cannot be written to the null device.

    Otherwise Python would try to write it again at exit, and fail with status 120.
    """
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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


def workspace_option(text: str) -> Callable[[Function], Function]:
    """Return the option ``--workspace ID``, which a command receives as ``workspace_id``.

    :param text: what the workspace is for, for ``--help``.
    """
    return click.option("--workspace", "workspace_id", metavar="ID", help=text)


address_option = click.option(
    "--address",
    "addresses",
    metavar="ADDRESS",
    multiple=True,
    help="An e-mail address or a phone number that is this person's; any number of times.",
)


visitor_option = click.option(
    "--visitor",
    "visitors",
    metavar="ID",
    multiple=True,
    help="An anonymous id that is this person's; any number of times.",
)


def registry_of(ctx: click.Context, config: Config | None) -> Registry:
    """Return the installed plugins, which are loaded once per run of the command line.

    :param config: adds the plugins of its ``[plugins] files``; ``None``: there is no config.
    :raises PluginError: if a plugin is broken, or if two plugins conflict.
    """
    root = ctx.find_root()
    if root.obj is None or (config is not None and config.plugins.files):
        built_in = root.command.commands if isinstance(root.command, click.Group) else {}
        root.obj = load_plugins(config, reserved_commands=built_in)
    registry: Registry = root.obj
    return registry


@contextlib.asynccontextmanager
async def opened(
    registry: Registry, config: Config, *, create: bool = False
) -> AsyncIterator[Storage]:
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


def with_store(
    ctx: click.Context, config: Config, work: Callable[[Storage], Awaitable[Result]]
) -> Result:
    """Return what a function returns for the store of a config, which it gets opened."""

    async def run() -> Result:
        async with opened(registry_of(ctx, config), config) as store:
            return await work(store)

    return asyncio.run(run())
