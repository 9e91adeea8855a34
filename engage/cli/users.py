# SPDX-License-Identifier: Apache-2.0
"""``engage users``."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import click

from engage.api import ConfigError
from engage.cli.common import config_option, now, opened, registry_of, safe
from engage.config import Config, load
from engage.pipeline.removal import remove_traits
from engage.registry import Registry


@click.group(epilog="\b\nExample:\n  engage users remove-trait --workspace acme u-1 email plan")
def users() -> None:
    """Change users as the operator of the server."""


@users.command(
    "remove-trait",
    epilog="\b\nExample:\n  engage users remove-trait --workspace acme u-1 email plan",
)
@config_option
@click.option("--workspace", metavar="ID", required=True, help="The workspace of the user.")
@click.argument("user")
@click.argument("traits", metavar="TRAIT...", nargs=-1, required=True)
@click.pass_context
def remove_trait(
    ctx: click.Context, config_path: Path, workspace: str, user: str, traits: tuple[str, ...]
) -> None:
    """Remove traits of a user.

    The user does not have the traits any more, is not found by them, and has room for others, until
    a client sets them again. The removal is an event, which `engage export events` shows.
    """
    config = load(config_path)
    if all(known.id != workspace for known in config.workspaces):
        raise ConfigError(f"{config_path} does not contain a workspace {workspace!r}")
    removed = asyncio.run(_remove(registry_of(ctx), config, workspace, user, traits))
    for trait in removed:
        click.echo(f"removed {safe(trait)}" if sys.stdout.isatty() else f"removed\t{safe(trait)}")
    for trait in dict.fromkeys(traits):
        if trait not in removed:
            click.echo(f"engage: the user does not have the trait '{safe(trait)}'", err=True)
    if not removed:
        ctx.exit(1)


async def _remove(
    registry: Registry, config: Config, workspace: str, user: str, traits: tuple[str, ...]
) -> list[str]:
    async with opened(registry, config) as store:
        return list(await remove_traits(store, workspace, user, traits, now=now()))
