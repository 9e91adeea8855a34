# SPDX-License-Identifier: Apache-2.0
"""``engage users``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from engage.cli.common import config_option, load_with, now, safe, with_store
from engage.pipeline.removal import remove_traits


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

    The user no longer has the traits, is not found by them, and has room for others, until a client
    sets them again. The removal is an event, which `engage export events` shows.
    """
    removed = with_store(
        ctx,
        load_with(config_path, workspace),
        lambda store: remove_traits(store, workspace, user, traits, now=now()),
    )
    for trait in removed:
        click.echo(f"removed {safe(trait)}" if sys.stdout.isatty() else f"removed\t{safe(trait)}")
    for trait in dict.fromkeys(traits):
        if trait not in removed:
            click.echo(f"engage: the user does not have the trait '{safe(trait)}'", err=True)
    if not removed:
        ctx.exit(1)
