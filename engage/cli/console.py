# SPDX-License-Identifier: Apache-2.0
"""``engage console``."""

from __future__ import annotations

from pathlib import Path

import click

from engage.cli.common import config_option, registry_of
from engage.config import load

__all__ = ["console"]


@click.command(epilog="\b\nExample:\n  engage console")
@config_option
@click.pass_context
def console(ctx: click.Context, config_path: Path) -> None:
    """Run the console alone until SIGTERM or Ctrl-C.

    `engage serve` runs it beside the server. Run it alone on another machine, for example one
    console for several servers with one MongoDB.
    """
    # Imported here, because no other command needs the server.
    from engage.server.console import serve_console

    config = load(config_path)
    registry = registry_of(ctx)
    registry.check(config)
    ctx.exit(serve_console(config, registry))
