# SPDX-License-Identifier: Apache-2.0
"""``engage load``."""

from __future__ import annotations

import dataclasses
import sys
import time
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
    help="Load records appended since this time (RFC 3339) again, and end.",
)
@click.pass_context
def load_command(
    ctx: click.Context, config_path: Path, workers: int | None, since: str | None
) -> None:
    """Write the records of the log to the storage.

    It runs until SIGTERM or Ctrl-C.

    With --from, the command reads the log again, up to its current end, and stores the events that
    are missing, for instance after a restore from a backup. It skips records that are past the
    retention of the config. The offsets of the loaders do not move.
    """
    # Imported here, because no other command needs the loaders.
    from engage.server.load.command import load as run
    from engage.server.load.endpoints import log_section

    if workers is not None and since is not None:
        raise click.UsageError("--workers and --from cannot be combined.", ctx)
    at = None if since is None else _parse_since(ctx, since)
    config = load(config_path)
    settings = log_section(config)
    if workers is not None:
        config = dataclasses.replace(config, log=dataclasses.replace(settings, loaders=workers))
    registry = registry_of(ctx, config)
    registry.check(config)
    if at is None:
        ctx.exit(run(config, registry))
    _load_again(ctx, config, registry, at)


def _parse_since(ctx: click.Context, text: str) -> int:
    """Return the time of ``--from`` in milliseconds since 1970 UTC."""
    try:
        at = parse_time(text).timestamp()
    except (ValueError, OverflowError) as error:
        raise click.BadParameter(
            "must be a time in RFC 3339, or a date.", ctx, param_hint="--from"
        ) from error
    if at > time.time():
        raise click.BadParameter("is in the future.", ctx, param_hint="--from")
    # A log takes a time before 1970 for an error.
    return max(0, int(at * 1000))


def _load_again(ctx: click.Context, config: Config, registry: Registry, since: int) -> None:
    from engage.server.load.reload import reload

    with Progress("records") as progress:
        done = reload(config, registry, since, progress.show)
    if sys.stdout.isatty():
        listed = ", ".join(f"{number:,} {name}" for name, number in done.outcomes.items() if number)
        click.echo(listed or "nothing was appended since then")
    elif done.outcomes:
        click.echo("\t".join(f"{name}={number}" for name, number in sorted(done.outcomes.items())))
    else:
        click.echo("engage: nothing was appended since then", err=True)
    for number, why in sorted(done.paused.items()):
        click.echo(f"engage: partition {number} was not read to the end: {safe(why)}", err=True)
    if done.interrupted:
        click.echo("engage: stopped by a signal before the end; run the command again", err=True)
    if done.paused or done.interrupted:
        ctx.exit(1)
