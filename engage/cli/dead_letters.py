# SPDX-License-Identifier: Apache-2.0
"""``engage dead-letters``: the commands ``list``, ``show`` and ``delete``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

from engage.api import DeadLetter, EngageError
from engage.cli.common import (
    config_option,
    load_chosen,
    one_line,
    plural,
    print_table,
    safe,
    shown_time,
    with_store,
)
from engage.cli.letters import (
    key_option,
    letter_of,
    letters_option,
    pointer_option,
    reason_option,
    record,
)
from engage.cli.replays import check, replay
from engage.errors import Problem
from engage.store.facade import Storage
from engage.upkeep.letter_groups import (
    LetterFilter,
    delete_letters,
    group_letters,
    newest_letters,
    pointer_of,
)

__all__ = ["dead_letters"]

_GROUP_COLUMNS: Final = ("COUNT", "REASON", "POINTER", "KEY", "FIRST", "LAST", "EXAMPLE", "MESSAGE")
_COLUMNS: Final = ("RECEIVED", "ID", "REASON", "POINTER", "KEY", "USER", "MESSAGE")


@click.group("dead-letters", epilog="\b\nExample:\n  engage dead-letters list --workspace acme")
def dead_letters() -> None:
    """Look at refused events, correct and replay them.

    A dead letter is an event that was refused although its write key was valid, or a webhook
    delivery that could not be translated.
    """


@dead_letters.command(
    "list", epilog="\b\nExample:\n  engage dead-letters list --workspace acme --groups"
)
@config_option
@letters_option
@reason_option
@pointer_option
@key_option
@click.option("--limit", type=click.IntRange(1, 20_000), default=50, show_default=True)
@click.option("--groups", is_flag=True, help="Group the letters by their error.")
@click.pass_context
def list_(
    ctx: click.Context,
    config_path: Path,
    workspace_id: str | None,
    reason: str | None,
    pointer: str | None,
    key: str | None,
    limit: int,
    groups: bool,
) -> None:
    """List dead letters, newest first.

    Each line has: time of arrival, id, reason, JSON pointer of the first error, write key (or
    webhook provider), user, message. With --groups: count, reason, pointer, key, first and last
    time, and the id and the message of the newest.
    """
    config, workspace = load_chosen(config_path, workspace_id, reads_with=())
    wanted = LetterFilter(reason=reason, pointer=pointer, key=key)

    async def read(store: Storage) -> Sequence[tuple[str, ...]]:
        if not groups:
            found = await newest_letters(store, workspace, wanted, limit=limit)
            return [_letter_row(letter) for letter in found]
        grouped = await group_letters(store, workspace)
        if not grouped.complete:
            click.echo(f"engage: only {grouped.letters} letters were read", err=True)
        return [
            (
                str(group.count),
                group.reason,
                group.pointer or "-",
                group.key or group.origin,
                shown_time(group.first),
                shown_time(group.last),
                group.example.id,
                group.example.message,
            )
            for group in grouped.groups
            if wanted.matches(group.example)
        ][:limit]

    rows = [[" ".join(cell.split()) for cell in row] for row in with_store(ctx, config, read)]
    print_table(_GROUP_COLUMNS if groups else _COLUMNS, rows)


@dead_letters.command(
    "show",
    epilog="\b\nExample:\n  engage dead-letters show --workspace acme --item ID > e.json",
)
@config_option
@letters_option
@click.argument("letter_id", metavar="ID")
@click.option("--item", is_flag=True, help="Print only the event, to be edited.")
@click.pass_context
def show(
    ctx: click.Context, config_path: Path, workspace_id: str | None, letter_id: str, item: bool
) -> None:
    """Print a dead letter: why it was refused, and the event."""
    from engage.pipeline.replay import obstacle_of, text_of

    config, workspace = load_chosen(config_path, workspace_id, reads_with=())
    letter = with_store(ctx, config, lambda store: letter_of(store, workspace, letter_id))
    if not item:
        fields: list[tuple[str, str | None]] = [
            ("id", letter.id),
            ("received", shown_time(letter.received_at)),
            ("reason", letter.reason),
            ("message", letter.message),
            *(
                ("error", str(Problem(error["pointer"], error["message"])))
                for error in letter.errors
            ),
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
    click.echo("\n".join(map(safe, text.split("\n"))) if sys.stdout.isatty() else text)


@dead_letters.command(epilog="\b\nExample:\n  engage dead-letters delete --workspace acme ID")
@config_option
@letters_option
@reason_option
@pointer_option
@key_option
@click.option("--all", "every", is_flag=True, help="Delete all letters that match.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.argument("ids", metavar="[ID...]", nargs=-1)
@click.pass_context
def delete(
    ctx: click.Context,
    config_path: Path,
    workspace_id: str | None,
    reason: str | None,
    pointer: str | None,
    key: str | None,
    every: bool,
    yes: bool,
    ids: tuple[str, ...],
) -> None:
    """Delete dead letters. Their events are lost."""
    wanted = LetterFilter(reason=reason, pointer=pointer, key=key)
    if every == bool(ids) or (ids and wanted != LetterFilter()):
        raise click.UsageError("name dead letters, or choose several with --reason and --all")
    config, workspace = load_chosen(config_path, workspace_id)
    if every and not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("--all needs --yes when there is no terminal")
        click.confirm(f"Delete all matching dead letters of {workspace}?", abort=True, err=True)

    async def run(store: Storage) -> int:
        if every:
            count = await delete_letters(store, workspace, wanted)
            details: dict[str, Any] = {"reason": reason, "pointer": pointer, "key": key}
        else:
            count = await store.remove(workspace, ids)
            details = {"letters": list(ids)}
        details = {"workspace": workspace, "count": count, **details}
        await record(store, "letters-deleted", details)
        return count

    count = with_store(ctx, config, run)
    click.echo(plural(count, "dead letter") + " deleted")
    if not every and count < len(set(ids)):
        raise EngageError(f"{len(set(ids)) - count} of them did not exist")


def _letter_row(letter: DeadLetter) -> tuple[str, ...]:
    return (
        shown_time(letter.received_at),
        letter.id,
        letter.reason,
        pointer_of(letter) or "-",
        letter.write_key_id or letter.origin,
        letter.user_id or letter.anonymous_id or "-",
        letter.message,
    )


dead_letters.add_command(check)
dead_letters.add_command(replay)
