# SPDX-License-Identifier: Apache-2.0
"""``engage load``."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import click

from engage.cli.common import config_option, parse_time, registry_of, safe
from engage.cli.progress import Progress
from engage.config import Config, load
from engage.registry import Registry

__all__ = ["load_command"]


@click.command(
    "load",
    epilog="\b\nExample:\n  engage load --workers 2",
)
@config_option
@click.option("--workers", type=click.IntRange(1, 256), help="Overrides log.loaders.")
@click.option(
    "--from",
    "since",
    metavar="TIME",
    help="Load what was appended since this time (RFC 3339) again, and end.",
)
@click.pass_context
def load_command(
    ctx: click.Context, config_path: Path, workers: int | None, since: str | None
) -> None:
    """Write what is in the log to the storage.

    It runs until SIGTERM or Ctrl-C.

    With --from, the command reads the log again beside the loaders, up to its current end, and
    stores what is missing: after the store was restored from a backup, for instance. It skips what
    is past the retention of the config. The places of the loaders do not move.
    """
    # Imported here, because no other command needs the loaders.
    from engage.server.load import load as run
    from engage.server.load_endpoints import log_section

    config = load(config_path)
    settings = log_section(config)
    if workers is not None:
        config = dataclasses.replace(config, log=dataclasses.replace(settings, loaders=workers))
    registry = registry_of(ctx)
    registry.check(config)
    if since is None:
        ctx.exit(run(config, registry))
    try:
        at = parse_time(since)
    except ValueError as error:
        raise click.BadParameter(
            "must be a time in RFC 3339, or a date.", ctx, param_hint="--from"
        ) from error
    _load_again(ctx, config, registry, int(at.timestamp() * 1000))


def _load_again(ctx: click.Context, config: Config, registry: Registry, since: int) -> None:
    from engage.server.reload import reload

    with Progress("records") as progress:
        done = reload(config, registry, since, progress.show)
    if sys.stdout.isatty():
        listed = ", ".join(f"{number:,} {name}" for name, number in done.outcomes.items() if number)
        click.echo(listed or "nothing was appended since then")
    else:
        click.echo("\t".join(f"{name}={number}" for name, number in sorted(done.outcomes.items())))
    for number, why in sorted(done.paused.items()):
        click.echo(f"engage: partition {number} was not read further: {safe(why)}", err=True)
    if done.paused:
        ctx.exit(1)
