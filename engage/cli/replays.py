# SPDX-License-Identifier: Apache-2.0
"""``engage dead-letters check`` and ``replay``.

The server's modules are imported when one of these runs, because no other command needs them.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import orjson

from engage.api import ConfigError, EngageError, StorageMissing
from engage.cli.common import (
    config_option,
    load_chosen,
    load_with,
    one_line,
    operator,
    plural,
    registry_of,
    safe,
    the_only,
    workspace_option,
)
from engage.cli.letters import (
    key_option,
    letter_of,
    letters_option,
    new_id_option,
    pointer_option,
    reason_option,
    record,
    set_option,
    type_option,
    unverified_option,
)
from engage.cli.progress import Progress
from engage.config import Config
from engage.keys.effective import Key, list_keys
from engage.upkeep.letter_groups import LetterFilter

if TYPE_CHECKING:
    from engage.app import App
    from engage.errors import Problem
    from engage.pipeline.explain import Explained
    from engage.registry import Registry

__all__ = ["check", "replay"]

#: An id that engage makes; anything else is the name of a file.
_ID: Final = re.compile(r"[0-9a-f]{32}\Z")


@click.command(epilog="\b\nExample:\n  engage dead-letters check --type track event.json")
@config_option
@workspace_option("The workspace, if there are several.")
@type_option
@click.option("--key", metavar="ID", help="The id of the write key that sends the event.")
@new_id_option
@click.argument("what", metavar="[ID] [FILE|-]", nargs=-1)
@click.pass_context
def check(
    ctx: click.Context,
    config_path: Path,
    workspace_id: str | None,
    operation: str | None,
    key: str | None,
    new_id: bool,
    what: tuple[str, ...],
) -> None:
    """Find out what would happen to an event. Nothing is stored.

    The event is read from FILE, or from standard input. With the ID of a dead letter, that letter
    is checked as a replay would store it, with the event from FILE if there is one.

    The event as it would be stored is printed on standard output, everything else on standard
    error. The exit status is 1 if the event would not be stored.
    """
    from engage.pipeline.explain import Submission

    letter_id, text = _what(what)
    config = load_with(config_path, workspace_id)

    async def run() -> Explained:
        async with _app(registry_of(ctx, config), config, optional=letter_id is None) as (
            app,
            there,
        ):
            if letter_id is not None:
                workspace = workspace_id or the_only(one.id for one in config.workspaces)
                letter = await letter_of(app.store, workspace, letter_id)
                return await app.replays.check(letter, text, new_id=new_id)
            found = await list_keys(app.store, config.workspaces) if there else None
            used = _used_key(config, found.keys if found else None, workspace_id, key)
            assert text is not None
            submission = Submission(workspace_id=used[0], write_key_id=used[1], operation=operation)
            return await app.explainer.check(text, submission, look_up=there)

    _print_explained(asyncio.run(run()))


@click.command(
    epilog="\b\nExample:\n  engage dead-letters replay --workspace acme ID event.json\n"
    "  engage dead-letters replay --workspace acme --reason transform_failed --all\n"
    "  engage dead-letters replay --pointer /timestamp --set /timestamp=receivedAt --all"
)
@config_option
@letters_option
@new_id_option
@unverified_option
@set_option
@reason_option
@pointer_option
@key_option
@click.option("--all", "every", is_flag=True, help="Replay all letters that match.")
@click.argument("what", metavar="[ID] [FILE|-]", nargs=-1)
@click.pass_context
def replay(
    ctx: click.Context,
    config_path: Path,
    workspace_id: str | None,
    new_id: bool,
    unverified: bool,
    times: Sequence[str],
    reason: str | None,
    pointer: str | None,
    key: str | None,
    every: bool,
    what: tuple[str, ...],
) -> None:
    """Replay a dead letter, or all that match.

    The event goes through the server's steps again. With FILE, the event in it replaces the event
    of the letter. The letter is removed when its event is stored. Replaying a letter twice stores
    one event: an interrupted replay can be run again.
    """
    wanted = LetterFilter(reason=reason, pointer=pointer, key=key)
    if every == bool(what) or (what and (times or wanted != LetterFilter())):
        raise click.UsageError("name one dead letter, or choose several with --reason and --all")
    config, workspace = load_chosen(config_path, workspace_id)
    registry = registry_of(ctx, config)
    if every:
        asyncio.run(_replay_all(registry, config, workspace, wanted, new_id, unverified, times))
        return
    letter_id, *files = what
    if not _ID.match(letter_id) or len(files) > 1:
        raise click.UsageError("a replay needs the ID of a dead letter and at most one FILE")
    text = _read(files[0]) if files else None
    asyncio.run(_replay(registry, config, (workspace, letter_id), text, new_id, unverified))


async def _replay(
    registry: Registry,
    config: Config,
    place: tuple[str, str],
    text: bytes | None,
    new_id: bool,
    unverified: bool,
) -> None:
    from engage.pipeline.replay import audit_details

    async with _app(registry, config) as (app, _):
        letter = await letter_of(app.store, *place)
        replayed = await app.replays.replay(letter, text, new_id=new_id, unverified=unverified)
        details = audit_details(letter, text, replayed)
        details |= {"unverified": True} if unverified else {}
        await record(app.store, "letter-replayed", details)
    if replayed.outcome == "failed":
        _print_problems(replayed.errors)
        raise EngageError(f"not replayed: {replayed.code}: {replayed.message}")
    click.echo(f"{replayed.outcome}\t{safe(replayed.message_id or '-')}")


async def _replay_all(
    registry: Registry,
    config: Config,
    workspace_id: str,
    wanted: LetterFilter,
    new_ids: bool,
    unverified: bool,
    times: Sequence[str],
) -> None:
    from engage.pipeline.bulk_replay import BulkReplay

    async with _app(registry, config) as (app, _):
        replay = BulkReplay(
            app.store,
            app.replays,
            workspace_id,
            wanted,
            actor=operator(),
            clock=app.clock,
            new_ids=new_ids,
            unverified=unverified,
            times=times,
        )
        replay.start()
        try:
            with Progress("letters") as progress:
                while not await replay.wait(0.2):
                    fraction = None if replay.total is None else replay.done / max(replay.total, 1)
                    progress.show(replay.done, fraction)
        except asyncio.CancelledError:  # Ctrl-C
            replay.cancel()
            await replay.wait()
            raise
    click.echo(f"{replay.stored} stored, {replay.duplicates} stored before, {replay.failed} failed")
    for failure in replay.failures:
        line = f"{failure.letter_id}: {failure.code}: {failure.message}"
        click.echo(f"engage: {one_line(line)}", err=True)
    if replay.state != "done":
        raise EngageError(f"the replay stopped: {replay.message}")
    if replay.failed:
        raise EngageError(f"{replay.failed} of {plural(replay.done, 'dead letter')} failed")


@contextlib.asynccontextmanager
async def _app(
    registry: Registry, config: Config, *, optional: bool = False
) -> AsyncIterator[tuple[App, bool]]:
    """Compose the server and open its store.

    :param optional: whether a missing store is not an error.
    :return: the server, and whether there is a store.
    """
    from engage.app import build

    app = build(config, registry, direct=True)
    there = True
    try:
        try:
            await app.open(create=False)
        except StorageMissing:
            if not optional:
                raise
            there = False
        yield app, there
    finally:
        await app.close()


def _what(arguments: Sequence[str]) -> tuple[str | None, bytes | None]:
    """Return the id of a letter and the text of an event, of ``[ID] [FILE|-]``."""
    rest = list(arguments)
    letter_id = rest.pop(0) if rest and _ID.match(rest[0]) and not Path(rest[0]).exists() else None
    if len(rest) > 1:
        raise click.UsageError(f"{safe(arguments[0])} is not the id of a dead letter")
    if not rest and letter_id is not None:
        return letter_id, None
    return letter_id, _read(rest[0] if rest else "-")


def _read(file: str) -> bytes:
    return sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()


def _used_key(
    config: Config, keys: Sequence[Key] | None, workspace_id: str | None, key: str | None
) -> tuple[str, str]:
    """Return the ids of the workspace and the write key that send an event."""
    if keys is None:
        known = [
            (workspace.id, one.id, one.disabled)
            for workspace in config.workspaces
            for one in workspace.write_keys
        ]
    else:
        known = [(one.workspace_id, one.id, one.disabled or one.archived) for one in keys]
    known = [
        one for one in known if workspace_id in (None, one[0]) and (key is None or key == one[1])
    ]
    if not known:
        raise ConfigError(f"there is no write key {key!r}" if key else "there is no write key")
    the_only(one[0] for one in known)
    chosen = next((one for one in known if not one[2]), known[0])
    if chosen[2]:
        click.echo(f"engage: the key {safe(chosen[1])} is disabled: it gets a 403", err=True)
    return chosen[0], chosen[1]


def _print_explained(explained: Explained) -> None:
    from engage.pipeline.explain import describe_change

    event = explained.event
    if event is not None and explained.outcome != "dropped":
        pretty = orjson.OPT_INDENT_2 if sys.stdout.isatty() else None
        text = orjson.dumps(event.document(), option=pretty).decode()
        click.echo("\n".join(map(safe, text.split("\n"))) if pretty else text)
    if explained.outcome == "stored":
        click.echo("engage: it would be stored", err=True)
        for change in explained.changes:
            click.echo(f"engage: {one_line(describe_change(change))}", err=True)
    elif explained.outcome == "duplicate":
        click.echo("engage: it is stored already", err=True)
    elif explained.outcome == "dropped":
        raise EngageError("a transform drops it")
    else:
        _print_problems(explained.errors)
        refused = explained.outcome == "refused"
        raise EngageError(
            f"it would {'be refused' if refused else 'become a dead letter'}:"
            f" {explained.code}: {explained.message}"
        )


def _print_problems(problems: Sequence[Problem]) -> None:
    for problem in problems:
        click.echo(f"{one_line(problem.pointer) or '-'}\t{one_line(problem.message)}", err=True)
