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
from engage.upkeep.copy import Counts, copy_all


@click.command(epilog="\b\nExample:\n  engage copy --from sqlite.toml --to mongo.toml")
@click.option(
    "--from", "source", type=CONFIG_FILE, required=True, help="Config file of the store to read."
)
@click.option(
    "--to", "target", type=CONFIG_FILE, required=True, help="Config file of the store to copy to."
)
@click.pass_context
def copy(ctx: click.Context, source: Path, target: Path) -> None:
    """Copy everything from one store to another.

    Copies all events, subscriptions with their history, suppressed addresses, dead letters, the
    write keys and the audit of the console, and the counters of its plots. Sessions, sign-in links
    and refused requests are not copied.

    The target store is created if it does not exist. Records that it already has are not changed,
    except write keys that were changed later at the source, so an interrupted copy can be run
    again. Profiles are built from the events, and compared at the
    end. The exit status is 1 if any record was not copied.
    """
    if source.resolve() == target.resolve():
        raise click.UsageError("--from and --to must be different files.", ctx)
    sides = [(registry_of(ctx, config), config) for config in (load(source), load(target))]
    for registry, config in sides:
        registry.check(config)
    if not asyncio.run(_copy(*sides)):
        click.echo("engage: some records were not copied", err=True)
        ctx.exit(1)


async def _copy(source: tuple[Registry, Config], target: tuple[Registry, Config]) -> bool:
    async with opened(*source) as reading, opened(*target, create=True) as writing:
        # A store on another machine can be opened while that machine cannot be reached.
        await writing.check()
        complete = True
        with Progress("copied") as progress:
            counting = copy_all(reading, writing, lambda counts: progress.show(counts.total))
            async with contextlib.aclosing(counting) as done:
                async for counts in done:
                    _print(counts)
                    complete = complete and counts.arrived
        return complete


def _print(counts: Counts) -> None:
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
