# SPDX-License-Identifier: Apache-2.0
"""``engage copy``."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path

import click

from engage.cli.common import CONFIG_FILE, opened, registry_of, safe
from engage.cli.progress import Progress
from engage.config import Config, load
from engage.registry import Registry
from engage.storage.copy import Counts, copy_all


@click.command(epilog="\b\nExample:\n  engage copy --from sqlite.toml --to mongo.toml")
@click.option(
    "--from", "source", type=CONFIG_FILE, required=True, help="Config of the store to read."
)
@click.option(
    "--to", "target", type=CONFIG_FILE, required=True, help="Config of the store to fill."
)
@click.pass_context
def copy(ctx: click.Context, source: Path, target: Path) -> None:
    """Copy everything from one store to another.

    That is all events, subscriptions with their history, and dead letters.

    The store to fill is created where there is none. What is there already is left alone, so a copy
    that was cut off can be run again. Profiles come from the events, and are compared at the end.
    Exit status 1 if anything did not arrive.
    """
    if source.resolve() == target.resolve():
        raise click.UsageError("--from and --to are the same file.", ctx)
    registry = registry_of(ctx)
    configs = (load(source), load(target))
    for config in configs:
        registry.check(config)
    if not asyncio.run(_copy(registry, *configs)):
        click.echo("engage: not everything arrived", err=True)
        ctx.exit(1)


async def _copy(registry: Registry, source: Config, target: Config) -> bool:
    async with (
        opened(registry, source) as reading,
        opened(registry, target, create=True) as writing,
    ):
        # A store on another machine opens also while that cannot be reached.
        await writing.check()
        complete = True
        with Progress("copied") as progress:
            counting = copy_all(reading, writing, lambda counts: progress.show(counts.total))
            async with contextlib.aclosing(counting) as done:
                async for counts in done:
                    _say(counts)
                    complete = complete and counts.arrived
        return complete


def _say(counts: Counts) -> None:
    what = "the same" if counts.kind == "profiles" else "copied"
    numbers = {
        what: counts.copied,
        "duplicate": counts.duplicate,
        "conflicting": counts.conflicting,
        "refused": counts.refused,
    }
    if sys.stdout.isatty():
        listed = ", ".join(f"{number:,} {name}" for name, number in numbers.items())
        click.echo(f"\r\x1b[K{click.style(counts.kind, bold=True)}: {listed}")
    else:
        click.echo("\t".join([counts.kind, *(f"{name}={n}" for name, n in numbers.items())]))
    for reason in counts.reasons:
        click.echo(f"engage: {counts.kind}: {safe(reason)}", err=True)
