# SPDX-License-Identifier: Apache-2.0
"""``engage verify``."""

from __future__ import annotations

import asyncio
import functools
import json
import sys
import time
from pathlib import Path

import click

from engage.api import EngageError, StorageError, StorageUnavailable
from engage.cli.check import lag_of
from engage.cli.common import (
    CommandFailed,
    config_option,
    now,
    opened,
    print_counts,
    registry_of,
    safe,
)
from engage.cli.progress import Progress
from engage.config import Config, load
from engage.pipeline.validate import Schemas
from engage.registry import Registry
from engage.store.erasures import ERASURE
from engage.upkeep.verify import Report, Settings
from engage.upkeep.verify import verify as verified


@click.command(epilog="\b\nExample:\n  engage verify --json > verified.json")
@config_option
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--repair", is_flag=True, help="Repair users, visitors, groups and links.")
@click.pass_context
def verify(ctx: click.Context, config_path: Path, as_json: bool, repair: bool) -> None:
    """Prove that the store is what its events say.

    Reads everything, also while the server runs, and changes nothing. Compares users, visitors,
    groups and links with what the stored events make of them, and keys, choices and dead letters
    with what they follow from. What depends on more than the stored events is counted as
    unprovable.

    With --repair, deletes what no event made of users, visitors, groups and links that differ, and
    applies their events again. Then it verifies the store once more: the result is the second one.

    The exit status is 1 if something differs, and 2 if the store could not be looked at.
    """
    started = time.monotonic()
    try:
        config = load(config_path, reads_with=("log", "erasures"))
        report = asyncio.run(_verify(registry_of(ctx, config), config, repair=repair))
    except (EngageError, OSError) as error:
        CommandFailed(error).show()
        ctx.exit(2)
    seconds = time.monotonic() - started
    if as_json:
        click.echo(json.dumps(_document(report, seconds)))
    else:
        _print(report, seconds)
    for failure in report.failures:
        click.echo(f"engage: could not be looked at: {safe(failure)}", err=True)
    if report.different:
        if repair:
            names = ", ".join(report.different)
            click.echo(f"engage: not repaired: {names}: see docs/verify.md#repairing", err=True)
        ctx.exit(1)
    if report.failures:
        ctx.exit(2)


async def _verify(registry: Registry, config: Config, *, repair: bool) -> Report:
    # What the loaders of a log have not stored yet changes profiles while they are read.
    lag = await lag_of(registry, config)
    if lag is not None and lag.error is not None:
        raise StorageUnavailable(lag.error)
    settings = Settings(
        context=registry.storage_context(config),
        visitors_days=config.retention.visitors_days,
        is_valid=Schemas.load().is_valid,
        lag=0 if lag is None else int(lag.seconds * 1000),
        erasures_key=config.erasures.key,
    )
    async with opened(registry, config) as store:
        if repair and not store.isolated:
            raise StorageError("this storage cannot repair itself: see docs/verify.md#repairing")
        erased = repair and (await store.list_records(ERASURE, limit=1)).items
        if erased and config.erasures.key is None:
            raise StorageError("people were erased from this store: --repair needs [erasures] key")
        with Progress("read") as progress:
            look = functools.partial(
                verified,
                store,
                settings,
                clock=now,
                on_progress=lambda what, count: progress.show(count, noun=what),
            )
            report = await look(repair=repair)
            if report.repaired:
                for what, message in report.differences:
                    click.echo(f"engage: was different: {what}: {safe(message)}", err=True)
                again = await look()
                again.repaired = report.repaired
                report = again
            return report


def _document(report: Report, seconds: float) -> dict[str, object]:
    return {
        "checked": report.checked,
        "different": report.different,
        "differences": [{"what": what, "message": text} for what, text in report.differences],
        "unprovable": [
            {"what": what, "reason": reason, "count": count}
            for (what, reason), count in sorted(report.unprovable.items())
        ],
        "failures": report.failures,
        "seconds": round(seconds, 1),
        **({"repaired": report.repaired} if report.repaired else {}),
    }


def _print(report: Report, seconds: float) -> None:
    for what in dict.fromkeys((*report.checked, *report.different)):
        different = report.different[what]
        unprovable = sum(n for (one, _), n in report.unprovable.items() if one == what)
        numbers = {"checked": report.checked[what], "different": different}
        colour = "red" if different else None
        print_counts(what, {**numbers, "unprovable": unprovable}, colour=colour)
    for (what, reason), count in sorted(report.unprovable.items()):
        click.echo(f"engage: unprovable: {what}: {count:,}: {reason}", err=True)
    for what, message in report.differences:
        click.echo(f"engage: different: {what}: {safe(message)}", err=True)
    if (more := report.different.total() - len(report.differences)) > 0:
        click.echo(f"engage: and {more:,} more", err=True)
    if report.repaired:
        print_counts("repaired", dict(report.repaired))
    if sys.stdout.isatty():
        click.echo(f"{seconds:,.0f} s")
