# SPDX-License-Identifier: Apache-2.0
"""``engage users``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from engage.cli.common import config_option, load_chosen, now, safe, with_store, workspace_option
from engage.pipeline.removal import remove_traits

_workspace_option = workspace_option("The workspace of the user, if there are several.")


@click.group(epilog="\b\nExample:\n  engage users remove-trait --workspace acme u-1 email plan")
def users() -> None:
    """Change users as the operator of the server."""


@users.command(
    "remove-trait",
    epilog="\b\nExample:\n  engage users remove-trait --workspace acme u-1 email plan",
)
@config_option
@_workspace_option
@click.argument("user")
@click.argument("traits", metavar="TRAIT...", nargs=-1, required=True)
@click.pass_context
def remove_trait(
    ctx: click.Context,
    config_path: Path,
    workspace_id: str | None,
    user: str,
    traits: tuple[str, ...],
) -> None:
    """Remove traits of a user.

    The user no longer has the traits, is not found by them, and has room for others, until a client
    sets them again. The removal is an event, which `engage export events` shows.
    """
    config, workspace = load_chosen(config_path, workspace_id)
    removed = with_store(
        ctx,
        config,
        lambda store: remove_traits(store, workspace, user, traits, now=now()),
    )
    for trait in removed:
        click.echo(f"removed {safe(trait)}" if sys.stdout.isatty() else f"removed\t{safe(trait)}")
    for trait in dict.fromkeys(traits):
        if trait not in removed:
            click.echo(f"engage: the user does not have the trait '{safe(trait)}'", err=True)
    if not removed:
        ctx.exit(1)
