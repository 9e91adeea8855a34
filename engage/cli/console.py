# SPDX-License-Identifier: Apache-2.0
"""``engage console``, ``console-link``, ``console-logout`` and ``console-password``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from engage.api import ConfigError
from engage.cli.common import config_option, now, opened, operator, registry_of
from engage.config import Config, ConsoleConfig, load
from engage.store.facade import Storage
from engage.upkeep.audit import record_audit

if TYPE_CHECKING:
    from engage.registry import Registry

__all__ = ["console", "console_link", "console_logout", "console_password"]


@click.command(epilog="\b\nExample:\n  engage console")
@config_option
@click.pass_context
def console(ctx: click.Context, config_path: Path) -> None:
    """Run the console alone until SIGTERM or Ctrl-C.

    `engage serve` runs the console beside the server. Run it alone on another machine, for example
    one console for several servers with one MongoDB.
    """
    # Imported here, because no other command needs the server.
    from engage.server.console import serve_console

    config = load(config_path)
    registry = registry_of(ctx, config)
    registry.check(config)
    ctx.exit(serve_console(config, registry))


@click.command("console-link", epilog="\b\nExample:\n  engage console-link")
@config_option
@click.pass_context
def console_link(ctx: click.Context, config_path: Path) -> None:
    """Print a link that signs you in to the console.

    The link works once, for 10 minutes.
    """
    from engage.server.console import make_link

    config = load(config_path)
    settings = _settings(config)
    if settings.port == 0 and settings.public_url is None:
        raise ConfigError(
            f"{config.path}: console.port is 0, so this command does not know the port; set it, or"
            " console.public_url"
        )

    async def make() -> str:
        async with _records(registry_of(ctx, config), config) as records:
            url = await make_link(settings, records, now())
            await record_audit(records, operator(), "link-made", {}, now=now())
        return url

    click.echo(asyncio.run(make()))


@click.command("console-logout", epilog="\b\nExample:\n  engage console-logout")
@config_option
@click.pass_context
def console_logout(ctx: click.Context, config_path: Path) -> None:
    """Sign everyone out of the console.

    It takes effect within two seconds, on every console of the store.
    """
    from engage.server.console import end_sessions

    config = load(config_path)
    _settings(config)

    async def end() -> None:
        async with _records(registry_of(ctx, config), config) as records:
            await end_sessions(records, now())
            await record_audit(records, operator(), "all-signed-out", {}, now=now())

    asyncio.run(end())
    click.echo("All sessions of the console end within 2 seconds.")


@click.command("console-password", epilog="\b\nExample:\n  engage console-password")
def console_password() -> None:
    """Ask for a password and print its config line.

    The line has a hash of the password (scrypt). It belongs in the section [console].
    """
    from engage.server.console import password_setting

    password = click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
    click.echo(f'password = "{password_setting(password)}"')


def _settings(config: Config) -> ConsoleConfig:
    if config.console is None:
        raise ConfigError(f"{config.path}: there is no [console] section, so there is no console")
    return config.console


@contextlib.asynccontextmanager
async def _records(registry: Registry, config: Config) -> AsyncIterator[Storage]:
    """Open the store, if its storage keeps records."""
    async with opened(registry, config) as store:
        yield store
