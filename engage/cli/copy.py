# SPDX-License-Identifier: Apache-2.0
"""Copies of a whole store: ``engage copy``, ``backup`` and ``restore``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import click

from engage.api import (
    Backup,
    BackupStore,
    EngageError,
    OnBytes,
    StorageError,
)
from engage.cli.common import (
    CONFIG_FILE,
    config_option,
    now,
    opened,
    operator,
    plural,
    print_counts,
    registry_of,
    safe,
    shown_time,
)
from engage.cli.erase import repeated
from engage.cli.progress import Progress
from engage.config import Config, load
from engage.erasure.erase import repeat
from engage.keys.changes import change_key
from engage.registry import Registry
from engage.store.facade import Storage
from engage.upkeep import erasures
from engage.upkeep.audit import record_audit
from engage.upkeep.backups import LEFT_OUT, record_backup
from engage.upkeep.copy import Counts, copy_all

__all__ = ["backup", "copy", "restore"]


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
    print_counts(counts.kind, numbers)
    for reason in counts.reasons:
        click.echo(f"engage: {counts.kind}: {safe(reason)}", err=True)


# --------------------------------------------------------------------------- backup and restore
@click.command(epilog="\b\nExample:\n  engage backup /backup/engage-$(date +%F).db")
@config_option
@click.argument("target", type=click.Path(path_type=Path))
@click.pass_context
def backup(ctx: click.Context, config_path: Path, target: Path) -> None:
    """Write the store into a new file while the server runs.

    The file has everything that was acknowledged before the command began, in one state, except
    what lets people sign in to the console. It gets its name when it is complete, verified and on
    the disk. `engage restore` makes a store of it.
    """
    config = load(config_path, reads_with=())
    registry, store = _backup_store(ctx, config)
    with Progress("MiB") as progress:
        made = store.back_up(target, without=LEFT_OUT, on_bytes=_showing(progress))
    click.echo(f"{safe(str(target))}: {_described(made)}")
    try:
        asyncio.run(_record(registry, config, made, str(target.absolute())))
    except StorageError as error:
        problem = f"the backup is complete, but the console does not show it: {error}"
        click.echo(f"engage: {safe(problem)}", err=True)


async def _record(registry: Registry, config: Config, made: Backup, target: str) -> None:
    async with opened(registry, config) as store:
        await record_backup(store, made, target, operator())


@click.command(epilog="\b\nExample:\n  engage restore /backup/engage-2025-01-31.db")
@config_option
@click.option(
    "--erasures",
    "erasures_file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="File of erasures to repeat, instead of the one beside the config.",
)
@click.argument("file", type=click.Path(path_type=Path))
@click.pass_context
def restore(ctx: click.Context, config_path: Path, erasures_file: Path | None, file: Path) -> None:
    """Make the store of the config from a backup.

    The store must not exist. Erasures since the backup are repeated, and write keys that were
    disabled or archived since are disabled again. The store exists when all of that is done; a
    command that fails or is killed leaves none. What was received after the backup is missing.
    """
    config = load(config_path)
    _, store = _backup_store(ctx, config)
    path = erasures_file or erasures.erasures_path(config)
    erased, notes = erasures.read(path, config.erasures.key)
    counts: Mapping[str, int] = {}

    async def prepare(restored: Storage, made: Backup) -> None:
        nonlocal counts
        if erased:
            counts = await repeat(restored, config, erased, report=progress.say)
        await _disable_keys(restored, config, notes)
        details = {"madeAt": shown_time(made.made_at), "events": made.events}
        await record_audit(restored, operator(), "store-restored", details, now=now())

    with Progress("MiB") as progress:
        made = store.restore(file, prepare=prepare, on_bytes=_showing(progress))
    click.echo(f"restored {_described(made)}; what was received since is missing")
    if path.exists():
        click.echo(repeated(path, erased, counts))
    else:
        click.echo(f"{safe(str(path))} does not exist: no erasure is repeated")
    if config.log is not None:
        click.echo(
            "`engage load --from TIME`, with a time some minutes before that, stores what the log"
            " still has"
        )


def _backup_store(ctx: click.Context, config: Config) -> tuple[Registry, BackupStore]:
    """Return the storage of a config, or end with the lines to type instead."""
    registry = registry_of(ctx, config)
    store = registry.make_storage(config)
    if isinstance(store, BackupStore):
        return registry, store
    copied, sqlite = config.path, "sqlite.toml"
    lines = store.backup_commands() or (
        f"engage copy --from {copied} --to {sqlite} && engage backup --config {sqlite} TARGET",
        f"engage restore --config {sqlite} FILE && engage copy --from {sqlite} --to {copied}",
    )
    name = safe(config.storage.backend)
    click.echo(f"engage: not for the storage {name!r}; type this instead", err=True)
    for purpose, line in zip(("to back up", "to restore"), lines, strict=True):
        click.echo(f"  {purpose}: {safe(line)}", err=True)
    raise click.exceptions.Exit(1)


def _showing(progress: Progress) -> OnBytes:
    return lambda done, total: progress.show(done >> 20, done / total if total else 1)


def _described(made: Backup) -> str:
    return f"{plural(made.events, 'event')}, {made.size:,} bytes, as of {shown_time(made.made_at)}"


async def _disable_keys(store: Storage, config: Config, notes: Iterable[erasures.KeyNote]) -> None:
    """Disable again what was disabled since; see :class:`~engage.upkeep.erasures.KeyNote`."""
    for note in {(note.workspace, note.write_key): note for note in notes}.values():
        if note.state == "enabled":
            continue
        names = (note.workspace, note.write_key, note.state)
        try:
            await change_key(
                store,
                config.workspaces,
                *names,
                actor=operator(),
                now=now(),
                notes=erasures.erasures_path(config),
            )
        except StorageError:
            raise
        except EngageError as error:
            # Such as a key that is newer than the backup.
            click.echo(f"engage: {safe(str(error))}", err=True)
