# SPDX-License-Identifier: Apache-2.0
"""Copies of a whole store: ``engage copy``, ``backup`` and ``restore``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import click

from engage.api import Backup, BackupStore, EngageError, OnBytes, StorageError
from engage.cli.erase import repeated
from engage.cli.instance import CONFIG_FILE, Instance, audit, example, on_instance, operator
from engage.cli.keys import change_key
from engage.cli.output import Progress, plural, print_counts, safe, shown_time, warn
from engage.config import Config
from engage.config import erasures_file as erasures
from engage.copy.backups import LEFT_OUT, record_backup
from engage.copy.copy import Counts, copy_all
from engage.people.erase import repeat
from engage.store.facade import Storage

__all__ = ["backup", "copy", "restore"]


@click.command(epilog=example("copy --from sqlite.toml --to mongo.toml"))
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
        raise click.UsageError("--from and --to must be different files.")
    sides = Instance(ctx, source), Instance(ctx, target)
    for side in sides:
        side.registry.check(side.config)
    if not sides[0].run(_copy, sides[1]):
        warn("some records were not copied")
        ctx.exit(1)


async def _copy(reading: Storage, target: Instance) -> bool:
    async with target.opened(create=True) as writing:
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
        warn(f"{counts.kind}: {reason}")


# --------------------------------------------------------------------------- backup and restore
@click.command(epilog=example("backup /backup/engage-$(date +%F).db"))
@on_instance(reads_with=())
@click.argument("target", type=click.Path(path_type=Path))
def backup(instance: Instance, target: Path) -> None:
    """Write the store into a new file while the server runs.

    The file has everything that was acknowledged before the command began, in one state, except
    what lets people sign in to the console. It gets its name when it is complete, verified and on
    the disk. `engage restore` makes a store of it.
    """
    store = _backup_store(instance)
    with Progress("MiB") as progress:
        made = store.back_up(target, without=LEFT_OUT, on_bytes=_showing(progress))
    click.echo(f"{safe(str(target))}: {_described(made)}")
    try:
        instance.run(record_backup, made, str(target.absolute()), operator())
    except StorageError as error:
        warn(f"the backup is complete, but the console does not show it: {error}")


@click.command(epilog=example("restore /backup/engage-2025-01-31.db"))
@on_instance()
@click.option(
    "--erasures",
    "erasures_file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="File of erasures to repeat, instead of the one beside the config.",
)
@click.argument("file", type=click.Path(path_type=Path))
def restore(instance: Instance, erasures_file: Path | None, file: Path) -> None:
    """Make the store of the config from a backup.

    The store must not exist. Erasures since the backup are repeated, and write keys that were
    disabled or archived since are disabled again. The store exists when all of that is done; a
    command that fails or is killed leaves none. What was received after the backup is missing.
    """
    config, store = instance.config, _backup_store(instance)
    path = erasures_file or erasures.erasures_path(config)
    erased, notes = erasures.read(path, config.erasures.key)
    counts: Mapping[str, int] = {}

    async def prepare(restored: Storage, made: Backup) -> None:
        nonlocal counts
        if erased:
            counts = await repeat(restored, config, erased, report=progress.say)
        await _disable_keys(restored, config, notes)
        details = {"madeAt": shown_time(made.made_at), "events": made.events}
        await audit(restored, "store-restored", details)

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


def _backup_store(instance: Instance) -> BackupStore:
    """Return the storage of a config, or end with the lines to type instead."""
    config = instance.config
    store = instance.registry.make_storage(config)
    if isinstance(store, BackupStore):
        return store
    copied, sqlite = config.path, "sqlite.toml"
    own = store.backup_commands()
    lines = own or (
        f"engage copy --from {copied} --to {sqlite} && engage backup --config {sqlite} TARGET",
        f"engage restore --config {sqlite} FILE && engage copy --from {sqlite} --to {copied}",
    )
    name = safe(config.storage.backend)
    warn(f"not for the storage {name!r}; type this instead")
    for purpose, line in zip(("to back up", "to restore"), lines, strict=True):
        click.echo(f"  {purpose}: {safe(line)}", err=True)
    if own is None:
        click.echo(
            f'make {sqlite} first: a copy of {safe(str(copied))} with backend = "sqlite" in'
            " [storage], and the path of a new file in [storage.sqlite]",
            err=True,
        )
    raise click.exceptions.Exit(1)


def _showing(progress: Progress) -> OnBytes:
    return lambda done, total: progress.show(done >> 20, done / total if total else 1)


def _described(made: Backup) -> str:
    return f"{plural(made.events, 'event')}, {made.size:,} bytes, as of {shown_time(made.made_at)}"


async def _disable_keys(store: Storage, config: Config, notes: Iterable[erasures.KeyNote]) -> None:
    """Disable again what was disabled since; see :class:`~engage.config.erasures_file.KeyNote`."""
    for note in {(note.workspace, note.write_key): note for note in notes}.values():
        if note.state == "enabled":
            continue
        try:
            await change_key(store, config, note.workspace, note.write_key, note.state)
        except StorageError:
            raise
        except EngageError as error:
            # Such as a key that is newer than the backup.
            warn(str(error))
