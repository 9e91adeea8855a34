# SPDX-License-Identifier: Apache-2.0
"""``engage dead-letters``.

The server's modules are imported when a command needs them, because most commands do not.
"""

from __future__ import annotations

import asyncio
import functools
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import orjson

from engage.api import EVENT_TYPES, ConfigError, DeadLetter, EngageError
from engage.api.times import EVENT_TIMES
from engage.cli.instance import (
    Instance,
    audit,
    example,
    limit_option,
    on_instance,
    operator,
    the_only,
)
from engage.cli.output import (
    Progress,
    one_line,
    plural,
    print_json,
    print_table,
    safe,
    shown_time,
    warn,
)
from engage.config import Workspace
from engage.errors import Problem
from engage.keys.effective import Key, list_keys
from engage.reading.letter_groups import (
    LetterFilter,
    delete_letters,
    group_letters,
    newest_letters,
    pointer_of,
)
from engage.store.facade import Storage

if TYPE_CHECKING:
    from engage.app import App
    from engage.pipeline.bulk_replay import BulkReplay
    from engage.pipeline.explain import Explained
    from engage.pipeline.replay import Replayed

__all__ = ["dead_letters"]

_GROUP_COLUMNS: Final = ("COUNT", "REASON", "POINTER", "KEY", "FIRST", "LAST", "EXAMPLE", "MESSAGE")
_COLUMNS: Final = ("RECEIVED", "ID", "REASON", "POINTER", "KEY", "USER", "MESSAGE")
#: An id that engage makes; anything else is the name of a file.
_ID: Final = re.compile(r"[0-9a-f]{32}\Z")
#: What ``--set`` can leave out, and the name of the time.
_TIMES: Final = {f"/{name}=receivedAt": name for name in EVENT_TIMES}

_WORKSPACE: Final = "The workspace of the letters, if there are several."
_new_id_option = click.option(
    "--new-id", is_flag=True, help="Give the event a new message id, which a conflict needs."
)
_event_argument = click.argument("what", metavar="[ID] [FILE|-]", nargs=-1)


def _filter_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that choose letters; the command receives them as ``letter_filter``."""

    @functools.wraps(function)
    def command(
        instance: Instance, reason: str | None, pointer: str | None, key: str | None, **options: Any
    ) -> Any:
        letter_filter = LetterFilter(reason=reason, pointer=pointer, key=key)
        return function(instance, letter_filter=letter_filter, **options)

    at = "Only letters whose first error is at this JSON pointer."
    command = click.option("--key", metavar="ID", help="Only letters of this write key.")(command)
    command = click.option("--pointer", metavar="POINTER", help=at)(command)
    return click.option("--reason", metavar="CODE", help="Only letters with this reason.")(command)


@click.group("dead-letters", epilog=example("dead-letters list --workspace acme"))
def dead_letters() -> None:
    """Look at refused events, correct and replay them.

    A dead letter is an event that was refused although its write key was valid, or a webhook
    delivery that could not be translated.
    """


@dead_letters.command("list", epilog=example("dead-letters list --workspace acme --groups"))
@on_instance(_WORKSPACE, reads_with=())
@_filter_options
@limit_option
@click.option("--groups", is_flag=True, help="Group the letters by their error.")
def list_(instance: Instance, letter_filter: LetterFilter, limit: int, *, groups: bool) -> None:
    """List dead letters, newest first.

    Each line has: time of arrival, id, reason, JSON pointer of the first error, write key (or
    webhook provider), user, message. With --groups: count, reason, pointer, key, first and last
    time, and the id and the message of the newest.
    """
    workspace = instance.workspace.id
    rows: Sequence[Sequence[str]]
    if groups:
        grouped = instance.run(group_letters, workspace)
        if not grouped.complete:
            warn(f"only {grouped.letters} letters were read")
        rows = [
            (
                *(str(group.count), group.reason, group.pointer or "-", group.key or group.origin),
                *(shown_time(group.first), shown_time(group.last)),
                *(group.example.id, group.example.message),
            )
            for group in grouped.groups
            if letter_filter.matches(group.example)
        ][:limit]
    else:
        rows = [
            (
                *(shown_time(letter.received_at), letter.id, letter.reason),
                *(pointer_of(letter) or "-", letter.write_key_id or letter.origin),
                *(letter.user_id or letter.anonymous_id or "-", letter.message),
            )
            for letter in instance.run(newest_letters, workspace, letter_filter, limit=limit)
        ]
    print_table(_GROUP_COLUMNS if groups else _COLUMNS, [map(one_line, row) for row in rows])


@dead_letters.command(
    "show", epilog=example("dead-letters show --workspace acme --item ID > e.json")
)
@on_instance(_WORKSPACE, reads_with=())
@click.argument("letter_id", metavar="ID")
@click.option("--item", is_flag=True, help="Print only the event, to be edited.")
def show(instance: Instance, letter_id: str, *, item: bool) -> None:
    """Print a dead letter: why it was refused, and the event."""
    from engage.pipeline.replay import obstacle_of, text_of

    letter = instance.run(_letter_of, instance.workspace.id, letter_id)
    if not item:
        errors = [str(Problem(error["pointer"], error["message"])) for error in letter.errors]
        fields = [
            ("id", letter.id),
            ("received", shown_time(letter.received_at)),
            ("reason", letter.reason),
            ("message", letter.message),
            *(("error", error) for error in errors),
            ("key", letter.write_key_id),
            ("origin", letter.origin),
            ("type", letter.operation),
            ("envelope", None if letter.envelope is None else letter.envelope.decode()),
            ("replay", obstacle_of(letter) or "possible"),
        ]
        for name, value in fields:
            if value is not None:
                click.echo(f"{name}: {one_line(value)}")
        click.echo()
    text = text_of(letter)
    click.echo(safe(text, lines=True) if sys.stdout.isatty() else text)


@dead_letters.command(epilog=example("dead-letters delete --workspace acme ID"))
@on_instance(_WORKSPACE)
@_filter_options
@click.option("--all", "every", is_flag=True, help="Delete all letters that match.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.argument("ids", metavar="[ID...]", nargs=-1)
def delete(
    instance: Instance, letter_filter: LetterFilter, ids: tuple[str, ...], *, every: bool, yes: bool
) -> None:
    """Delete dead letters. Their events are lost."""
    if every == bool(ids) or (ids and letter_filter != LetterFilter()):
        raise click.UsageError("name dead letters, or choose several with --reason and --all")
    workspace = instance.workspace.id
    if every and not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("--all needs --yes when there is no terminal")
        click.confirm(f"Delete all matching dead letters of {workspace}?", abort=True, err=True)

    async def remove(store: Storage) -> int:
        if every:
            count = await delete_letters(store, workspace, letter_filter)
            details = {name: getattr(letter_filter, name) for name in ("reason", "pointer", "key")}
        else:
            count = await store.remove(workspace, ids)
            details = {"letters": list(ids)}
        about = {"workspace": workspace, "count": count, **details}
        await audit(store, "letters-deleted", about)
        return count

    count = instance.run(remove)
    click.echo(plural(count, "dead letter") + " deleted")
    if not every and count < len(set(ids)):
        raise EngageError(f"{len(set(ids)) - count} of them did not exist")


async def _letter_of(store: Storage, workspace_id: str, letter_id: str) -> DeadLetter:
    """Return a dead letter.

    :raises EngageError: if there is none with this id.
    """
    letter = await store.dead_letter(workspace_id, letter_id)
    if letter is None:
        raise EngageError(
            f"the workspace {workspace_id!r} has no dead letter {letter_id!r}; it was replayed,"
            " deleted or has expired"
        )
    return letter


# -------------------------------------------------------------------------------------- check
@dead_letters.command(epilog=example("dead-letters check --type track event.json"))
@on_instance("The workspace, if there are several.")
@click.option(
    "--type",
    "operation",
    type=click.Choice((*EVENT_TYPES, "batch")),
    help="The type of the call; batch: the event has its type, as in a batch.",
)
@click.option("--key", metavar="ID", help="The id of the write key that sends the event.")
@_new_id_option
@_event_argument
def check(
    instance: Instance,
    operation: str | None,
    key: str | None,
    what: tuple[str, ...],
    *,
    new_id: bool,
) -> None:
    """Find out what would happen to an event. Nothing is stored.

    The event is read from FILE, or from standard input. With the ID of a dead letter, that letter
    is checked as a replay would store it, with the event from FILE if there is one.

    The event as it would be stored is printed on standard output, everything else on standard
    error. The exit status is 1 if the event would not be stored.
    """
    from engage.pipeline.explain import Submission

    letter_id, text = _what(what)

    workspaces, everywhere = instance.workspaces, instance.config.workspaces

    async def check_letter(app: App) -> Explained:
        assert letter_id is not None
        letter = await _letter_of(app.store, instance.workspace.id, letter_id)
        return await app.replays.check(letter, text, new_id=new_id)

    async def check_event(app: App, *, look_up: bool = True) -> Explained:
        keys = (await list_keys(app.store, everywhere)).keys if look_up else None
        workspace_id, key_id = _used_key(workspaces, keys, key)
        submission = Submission(workspace_id=workspace_id, write_key_id=key_id, operation=operation)
        assert text is not None
        return await app.explainer.check(text, submission, look_up=look_up)

    if letter_id is None:
        without = functools.partial(check_event, look_up=False)
        explained = instance.run_server(check_event, without=without)
    else:
        explained = instance.run_server(check_letter)
    _print_explained(explained)


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
    workspaces: Sequence[Workspace], keys: Sequence[Key] | None, named: str | None
) -> tuple[str, str]:
    """Return the ids of the workspace and the write key that send an event.

    :param keys: ``None``: there is no store, only the config.
    """
    if keys is None:
        all_keys = [(x.id, key.id, key.disabled) for x in workspaces for key in x.write_keys]
    else:
        all_keys = [(key.workspace_id, key.id, key.disabled or key.archived) for key in keys]
    ids = {workspace.id for workspace in workspaces}
    matching = [key for key in all_keys if key[0] in ids and named in (None, key[1])]
    if not matching:
        raise ConfigError(f"there is no write key {named!r}" if named else "there is no write key")
    the_only(workspace for workspace, *_ in matching)
    workspace, key_id, disabled = min(matching, key=lambda key: key[2])
    if disabled:
        warn(f"the key {key_id} is disabled: it gets a 403")
    return workspace, key_id


def _print_explained(explained: Explained) -> None:
    from engage.pipeline.explain import describe_change

    event = explained.event
    if event is not None and explained.outcome != "dropped":
        pretty = orjson.OPT_INDENT_2 if sys.stdout.isatty() else None
        print_json(orjson.dumps(event.document(), option=pretty))
    if explained.outcome == "stored":
        warn("it would be stored")
        for change in explained.changes:
            warn(one_line(describe_change(change)))
    elif explained.outcome == "duplicate":
        warn("it is stored already")
    elif explained.outcome == "dropped":
        raise EngageError("a transform drops it")
    else:
        _print_problems(explained.errors)
        what = "be refused" if explained.outcome == "refused" else "become a dead letter"
        raise EngageError(f"it would {what}: {explained.code}: {explained.message}")


def _print_problems(problems: Sequence[Problem]) -> None:
    for problem in problems:
        click.echo(f"{one_line(problem.pointer) or '-'}\t{one_line(problem.message)}", err=True)


# ------------------------------------------------------------------------------------- replay
@dead_letters.command(
    epilog=example(
        "dead-letters replay --workspace acme ID event.json",
        "dead-letters replay --workspace acme --reason transform_failed --all",
        "dead-letters replay --pointer /timestamp --set /timestamp=receivedAt --all",
    )
)
@on_instance(_WORKSPACE)
@_new_id_option
@click.option(
    "--unverified",
    is_flag=True,
    help="Replay also an event whose user was not verified, from before verify_identity.",
)
@click.option(
    "--set",
    "times",
    type=click.Choice(list(_TIMES)),
    multiple=True,
    callback=lambda _context, _option, chosen: [_TIMES[name] for name in chosen],
    help="Leave out a time that cannot be read, so that the event happened when it arrived.",
)
@_filter_options
@click.option("--all", "every", is_flag=True, help="Replay all letters that match.")
@_event_argument
def replay(
    instance: Instance,
    letter_filter: LetterFilter,
    times: Sequence[str],
    what: tuple[str, ...],
    *,
    new_id: bool,
    unverified: bool,
    every: bool,
) -> None:
    """Replay a dead letter, or all that match.

    The event goes through the server's steps again. With FILE, the event in it replaces the event
    of the letter. The letter is removed when its event is stored. Replaying a letter twice stores
    one event: an interrupted replay can be run again.
    """
    from engage.pipeline.bulk_replay import BulkReplay
    from engage.pipeline.replay import audit_details

    if every == bool(what) or (what and (times or letter_filter != LetterFilter())):
        raise click.UsageError("name one dead letter, or choose several with --reason and --all")
    workspace = instance.workspace.id

    async def replay_all(app: App) -> BulkReplay:
        replay = BulkReplay(
            *(app.store, app.replays, workspace, letter_filter),
            actor=operator(),
            clock=app.clock,
            new_ids=new_id,
            unverified=unverified,
            times=times,
        )
        return await _followed(replay)

    if every:
        _print_all(instance.run_server(replay_all))
        return
    letter_id, *files = what
    if not _ID.match(letter_id) or len(files) > 1:
        raise click.UsageError("a replay needs the ID of a dead letter and at most one FILE")
    text = _read(files[0]) if files else None

    async def replay_one(app: App) -> Replayed:
        letter = await _letter_of(app.store, workspace, letter_id)
        replayed = await app.replays.replay(letter, text, new_id=new_id, unverified=unverified)
        details = audit_details(letter, text, replayed)
        details |= {"unverified": True} if unverified else {}
        await audit(app.store, "letter-replayed", details)
        return replayed

    replayed = instance.run_server(replay_one)
    if replayed.outcome == "failed":
        _print_problems(replayed.errors)
        raise EngageError(f"not replayed: {replayed.code}: {replayed.message}")
    click.echo(f"{replayed.outcome}\t{safe(replayed.message_id or '-')}")


async def _followed(replay: BulkReplay) -> BulkReplay:
    """Carry out a replay, and show how far it is."""
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
    return replay


def _print_all(replay: BulkReplay) -> None:
    click.echo(f"{replay.stored} stored, {replay.duplicates} stored before, {replay.failed} failed")
    for failure in replay.failures:
        warn(one_line(f"{failure.letter_id}: {failure.code}: {failure.message}"))
    if replay.state != "done":
        raise EngageError(f"the replay stopped: {replay.message}")
    if replay.failed:
        raise EngageError(f"{replay.failed} of {plural(replay.done, 'dead letter')} failed")
