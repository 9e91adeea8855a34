# SPDX-License-Identifier: Apache-2.0
"""What a command works on: the config of ``--config``, a workspace of it, the plugins, the store.

Every store is opened and closed here. The options that several commands have are here too.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import getpass
import platform
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar

import click

from engage.api import ConfigError, StorageMissing, StorageUnavailable
from engage.audit import Actor, record_audit
from engage.cli.output import warn
from engage.config import Config, Workspace, load
from engage.registry import Registry, load_plugins
from engage.store.facade import Storage

if TYPE_CHECKING:
    from engage.app import App
    from engage.log.lag import Lag

__all__ = [
    "CONFIG_FILE",
    "DEFAULT_CONFIG",
    "Instance",
    "address_option",
    "audit",
    "config_option",
    "example",
    "json_option",
    "limit_option",
    "now",
    "on_instance",
    "operator",
    "parse_time",
    "registry_of",
    "the_only",
    "visitor_option",
    "workspace_option",
]

DEFAULT_CONFIG: Final = "engage.toml"
CONFIG_VARIABLE: Final = "ENGAGE_CONFIG"
#: An unreadable file is not a usage error: loading it reports why it cannot be read.
CONFIG_FILE: Final = click.Path(path_type=Path, readable=False)

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
Result = TypeVar("Result")
Parameters = ParamSpec("Parameters")


class Instance:
    """The config that a command is called with, and what is made of it.

    The config and the plugins are loaded when they are first needed: wrong usage is reported before
    a wrong config.

    :param path: of the config file.
    :param workspace_id: as given with ``--workspace``.
    :param reads_with: see :func:`engage.config.load`.
    """

    def __init__(
        self,
        ctx: click.Context,
        path: Path,
        workspace_id: str | None = None,
        reads_with: Sequence[str] | None = None,
    ) -> None:
        self.ctx = ctx
        self.path = path
        self.workspace_id = workspace_id
        self._reads_with = reads_with

    @functools.cached_property
    def config(self) -> Config:
        """The config; see :func:`engage.config.load`."""
        return load(self.path, reads_with=self._reads_with)

    @property
    def workspaces(self) -> Sequence[Workspace]:
        """The workspace of ``--workspace``; all of the config without it.

        :raises ConfigError: if the config does not have it.
        """
        chosen = [x for x in self.config.workspaces if self.workspace_id in (None, x.id)]
        if not chosen:
            raise ConfigError(f"{self.path} does not contain a workspace {self.workspace_id!r}")
        return chosen

    @property
    def workspace(self) -> Workspace:
        """The workspace that the command is for.

        :raises ConfigError: if there are several, and no ``--workspace``.
        """
        chosen = self.workspaces
        the_only(space.id for space in chosen)
        return chosen[0]

    def public_url(self, otherwise: str) -> str:
        """Return the beginning of the server's URLs.

        :param otherwise: what is true without ``server.public_url``, to be printed then.
        """
        server = self.config.server
        if server.public_url is not None:
            return server.public_url
        warn(f"server.public_url is not set: {otherwise}")
        return f"http://{server.host}:{server.port}"

    @functools.cached_property
    def registry(self) -> Registry:
        """The plugins; see :func:`registry_of`."""
        return registry_of(self.ctx, self.config)

    @contextlib.asynccontextmanager
    async def opened(self, *, create: bool = False) -> AsyncIterator[Storage]:
        """Make the configured storage, open it, and close it at the end.

        A store that exists is opened as it is: only a server brings one of an earlier version up to
        date.

        :param create: whether to create a store if there is none.
        :raises ConfigError: if the storage is unknown or its options are wrong.
        :raises StorageError: if the store cannot be opened.
        """
        store = self.registry.make_storage(self.config)
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

    def run(
        self,
        work: Callable[Concatenate[Storage, Parameters], Awaitable[Result]],
        *arguments: Parameters.args,
        **options: Parameters.kwargs,
    ) -> Result:
        """Open the store, and return what a function returns for it."""

        async def run() -> Result:
            async with self.opened() as store:
                return await work(store, *arguments, **options)

        return asyncio.run(run())

    def run_server(
        self,
        work: Callable[[App], Awaitable[Result]],
        *,
        without: Callable[[App], Awaitable[Result]] | None = None,
    ) -> Result:
        """Compose the server, open its store, and return what a function returns for the server.

        :param without: is called instead if there is no store; ``None``: that is an error.
        """
        # Imported here, because most commands do not need the server.
        from engage.app import build

        async def run() -> Result:
            called, app = work, build(self.config, self.registry, direct=True)
            try:
                try:
                    await app.open(create=False)
                except StorageMissing:
                    if without is None:
                        raise
                    called = without
                return await called(app)
            finally:
                await app.close()

        return asyncio.run(run())

    def lag(self) -> Lag | None:
        """Return how far the storage is behind the log; ``None`` if there is no log.

        :raises StorageIncompatible: if a server would not start on this log.
        """
        log, settings = self.registry.make_log(self.config), self.config.log
        if log is None or settings is None:
            return None
        from engage.log.lag import Lag

        async def read() -> Lag:
            lag = Lag(log, settings, timeout=self.config.storage.write_timeout, clock=now)
            try:
                await log.open(create=False)
                await log.check()
                await lag.read()
            except (StorageMissing, StorageUnavailable) as error:
                lag.error = str(error)
            finally:
                await log.close()
            return lag

        return asyncio.run(read())


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


def the_only(workspaces: Iterable[str]) -> str:
    """Return the workspace that a command without ``--workspace`` means.

    :raises ConfigError: if there are several.
    """
    names = list(dict.fromkeys(workspaces))
    if len(names) > 1:
        raise ConfigError(f"choose one with --workspace: {', '.join(names)}")
    return names[0]


def now() -> int:
    """Return the time in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def parse_time(text: str) -> datetime.datetime:
    """Parse a time in RFC 3339, or a date. It is in UTC unless it has an offset.

    :raises ValueError: if the text is neither.
    """
    read = datetime.datetime.fromisoformat(text.upper())
    return read if read.tzinfo is not None else read.replace(tzinfo=datetime.UTC)


def operator() -> Actor:
    """Return who runs this command, for the audit."""
    try:
        who = getpass.getuser()
    except (ImportError, KeyError, OSError):  # The user has no name, as in some containers.
        who = "unknown"
    return Actor(who=who, origin=f"command line on {platform.node() or 'unknown'}")


async def audit(store: Storage, action: str, details: Mapping[str, Any]) -> None:
    """Record in the audit what the operator did; see :func:`engage.audit.record_audit`."""
    await record_audit(store, operator(), action, details, now=now())


# ------------------------------------------------------------------------------------ options
def example(*lines: str) -> str:
    """Return the end of the help of a command: how to call it, without ``engage``."""
    return "\n  ".join(["\b\nExample:", *(f"engage {line}" for line in lines)])


def config_option(function: Callable[..., Any]) -> Callable[..., Any]:
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


def workspace_option(text: str) -> Decorator:
    """Return the option ``--workspace ID``, which a command receives as ``workspace_id``.

    :param text: what the workspace is for, for ``--help``.
    """
    return click.option("--workspace", "workspace_id", metavar="ID", help=text)


def on_instance(
    workspace: str | None = None, *, reads_with: Sequence[str] | None = None
) -> Decorator:
    """Return the option ``--config``, and ``--workspace`` for a command that is for one.

    The command receives an :class:`Instance` as its first argument.

    :param workspace: see :func:`workspace_option`.
    :param reads_with: see :func:`engage.config.load`.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def command(config_path: Path, workspace_id: str | None = None, **options: Any) -> Any:
            ctx = click.get_current_context()
            return function(Instance(ctx, config_path, workspace_id, reads_with), **options)

        return config_option(command if workspace is None else workspace_option(workspace)(command))

    return decorate


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
limit_option = click.option(
    "--limit", type=click.IntRange(1, 20_000), default=50, show_default=True
)


def json_option(text: str = "Print one JSON object.") -> Decorator:
    """Return the option ``--json``, which a command receives as ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help=text)
