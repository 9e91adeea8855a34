# SPDX-License-Identifier: Apache-2.0
"""``engage verify``."""

from __future__ import annotations

import functools
import json
import sys
import time

import click

from engage.api import EngageError, StorageError, StorageUnavailable
from engage.cli.instance import Instance, example, json_option, now, on_instance
from engage.cli.output import CommandFailed, Progress, print_counts, warn
from engage.pipeline.validate import Schemas
from engage.store.erasures import ERASURE
from engage.store.facade import Storage
from engage.verify import Report, Settings
from engage.verify import verify as verified


@click.command(epilog=example("verify --json > verified.json"))
@on_instance(reads_with=("log", "erasures"))
@json_option("Print the result as JSON.")
@click.option("--repair", is_flag=True, help="Repair users, visitors, groups and links.")
def verify(instance: Instance, *, as_json: bool, repair: bool) -> None:
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
        report = instance.run(_verify, _settings(instance), repair=repair)
    except (EngageError, OSError) as error:
        CommandFailed(error).show()
        instance.ctx.exit(2)
    seconds = time.monotonic() - started
    if as_json:
        click.echo(json.dumps(_document(report, seconds)))
    else:
        _print(report, seconds)
    for failure in report.failures:
        warn(f"could not be looked at: {failure}")
    if report.different:
        if repair:
            names = ", ".join(report.different)
            warn(f"not repaired: {names}: see docs/verify.md#repairing")
        instance.ctx.exit(1)
    if report.failures:
        instance.ctx.exit(2)


def _settings(instance: Instance) -> Settings:
    # What the loaders of a log have not stored yet changes profiles while they are read.
    config, lag = instance.config, instance.lag()
    if lag is not None and lag.error is not None:
        raise StorageUnavailable(lag.error)
    return Settings(
        context=instance.registry.storage_context(config),
        visitors_days=config.retention.visitors_days,
        is_valid=Schemas.load().is_valid,
        lag=0 if lag is None else int(lag.seconds * 1000),
        erasures_key=config.erasures.key,
    )


async def _verify(store: Storage, settings: Settings, *, repair: bool) -> Report:
    if repair and not store.isolated:
        raise StorageError("this storage cannot repair itself: see docs/verify.md#repairing")
    erased = repair and (await store.list_records(ERASURE, limit=1)).items
    if erased and settings.erasures_key is None:
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
                warn(f"was different: {what}: {message}")
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
        unprovable = sum(n for (key, _), n in report.unprovable.items() if key == what)
        numbers = {"checked": report.checked[what], "different": different}
        colour = "red" if different else None
        print_counts(what, {**numbers, "unprovable": unprovable}, colour=colour)
    for (what, reason), count in sorted(report.unprovable.items()):
        warn(f"unprovable: {what}: {count:,}: {reason}")
    for what, message in report.differences:
        warn(f"different: {what}: {message}")
    if (more := report.different.total() - len(report.differences)) > 0:
        warn(f"and {more:,} more")
    if report.repaired:
        print_counts("repaired", dict(report.repaired))
    if sys.stdout.isatty():
        click.echo(f"{seconds:,.0f} s")
