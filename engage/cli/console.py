# SPDX-License-Identifier: Apache-2.0
"""``engage console``, ``console-link``, ``console-logout`` and ``console-password``."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from engage.api import ConfigError, EngageError, RecordStore
from engage.cli.common import config_option, opened, registry_of
from engage.config import Config, ConsoleConfig, load
from engage.storage.audit import Actor, record_audit

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
    registry = registry_of(ctx)
    registry.check(config)
    ctx.exit(serve_console(config, registry))


@click.command("console-link", epilog="\b\nExample:\n  engage console-link")
@config_option
@click.pass_context
def console_link(ctx: click.Context, config_path: Path) -> None:
    """Print a link that signs you in to the console.

    The link works once, for 10 minutes.
    """
    from engage.console.addresses import Addresses
    from engage.console.links import hash_of, link_record, new_token

    config = load(config_path)
    settings = _settings(config)
    if settings.port == 0 and settings.public_url is None:
        raise ConfigError(
            f"{config.path}: console.port is 0, so this command does not know the port; set it, or"
            " console.public_url"
        )

    async def make() -> str:
        token = new_token()
        async with _records(registry_of(ctx), config) as records:
            now = time.time_ns() // 1_000_000
            await records.put_record(link_record(hash_of(token), now), expected_version=0)
            await record_audit(records, _actor(), "link-made", {}, now=now)
        return f"{Addresses(settings, settings.port).url}/link?t={token}"

    click.echo(asyncio.run(make()))


@click.command("console-logout", epilog="\b\nExample:\n  engage console-logout")
@config_option
@click.pass_context
def console_logout(ctx: click.Context, config_path: Path) -> None:
    """Sign everyone out of the console.

    It takes effect within two seconds, on every console of the store.
    """
    from engage.console.sessions import new_secret

    config = load(config_path)
    _settings(config)

    async def end() -> None:
        async with _records(registry_of(ctx), config) as records:
            now = time.time_ns() // 1_000_000
            await records.put_record(new_secret(now))
            await record_audit(records, _actor(), "all-signed-out", {}, now=now)

    asyncio.run(end())
    click.echo("All sessions of the console end within 2 seconds.")


@click.command("console-password", epilog="\b\nExample:\n  engage console-password")
def console_password() -> None:
    """Ask for a password and print its config line.

    The line has a hash of the password (scrypt). It belongs in the section [console].
    """
    from engage.console.passwords import MAX_LENGTH, hash_password

    password = click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
    if len(password) < 8:
        raise EngageError("the password must have at least 8 characters")
    if len(password) > MAX_LENGTH:
        raise EngageError(f"the password must have at most {MAX_LENGTH} characters")
    click.echo(f'password = "{hash_password(password)}"')


def _settings(config: Config) -> ConsoleConfig:
    if config.console is None:
        raise ConfigError(f"{config.path}: there is no [console] section, so there is no console")
    return config.console


@contextlib.asynccontextmanager
async def _records(registry: Registry, config: Config) -> AsyncIterator[RecordStore]:
    """Open the store, if its storage keeps records."""
    async with opened(registry, config) as store:
        if not isinstance(store, RecordStore):
            raise EngageError(
                f"the storage {config.storage.backend} keeps no records, so links and sessions are"
                " only in the memory of the console; restart the server in a terminal: it prints a"
                " link"
            )
        yield store


def _actor() -> Actor:
    try:
        who = getpass.getuser()
    except (KeyError, OSError, ImportError):  # The user of a container may have no name.
        who = ""
    return Actor(who=who, origin="command line")
