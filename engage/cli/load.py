# SPDX-License-Identifier: Apache-2.0
"""``engage load``."""

from __future__ import annotations

import dataclasses
import sys
import time

import click

from engage.cli.instance import Instance, example, on_instance, parse_time
from engage.cli.output import Progress, warn

__all__ = ["load_command"]


@click.command("load", epilog=example("load --workers 2"))
@on_instance()
@click.option("--workers", type=click.IntRange(1, 256), help="Overrides log.loaders.")
@click.option(
    "--from",
    "since",
    metavar="TIME",
    help="Load records appended since this time (RFC 3339) again, and end.",
)
def load_command(instance: Instance, workers: int | None, since: str | None) -> None:
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
        raise click.UsageError("--workers and --from cannot be combined.")
    at = None if since is None else _parse_since(since)
    config = instance.config
    settings = log_section(config)
    if workers is not None:
        config = dataclasses.replace(config, log=dataclasses.replace(settings, loaders=workers))
    instance.registry.check(config)
    if at is None:
        instance.ctx.exit(run(config, instance.registry))
    _load_again(instance, at)


def _parse_since(text: str) -> int:
    """Return the time of ``--from`` in milliseconds since 1970 UTC."""
    try:
        at = parse_time(text).timestamp()
    except (ValueError, OverflowError) as error:
        raise click.BadParameter(
            "must be a time in RFC 3339, or a date.", param_hint="--from"
        ) from error
    if at > time.time():
        raise click.BadParameter("is in the future.", param_hint="--from")
    # A log takes a time before 1970 for an error.
    return max(0, int(at * 1000))


def _load_again(instance: Instance, since: int) -> None:
    from engage.server.load.reload import reload

    with Progress("records") as progress:
        done = reload(instance.config, instance.registry, since, progress.show)
    if sys.stdout.isatty():
        listed = ", ".join(f"{number:,} {name}" for name, number in done.outcomes.items() if number)
        click.echo(listed or "nothing was appended since then")
    elif done.outcomes:
        click.echo("\t".join(f"{name}={number}" for name, number in sorted(done.outcomes.items())))
    else:
        warn("nothing was appended since then")
    for number, why in sorted(done.paused.items()):
        warn(f"partition {number} was not read to the end: {why}")
    if done.interrupted:
        warn("stopped by a signal before the end; run the command again")
    if done.paused or done.interrupted:
        instance.ctx.exit(1)
