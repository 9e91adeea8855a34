# SPDX-License-Identifier: Apache-2.0
"""``engage export``."""

from __future__ import annotations

import contextlib
import csv
import datetime
import errno
import functools
import io
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal, get_args

import click
import orjson

from engage.api import EVENT_TYPES, EngageError, ForeignCursor
from engage.cli.instance import (
    CONFIG_FILE,
    Instance,
    address_option,
    example,
    now,
    on_instance,
    parse_time,
    visitor_option,
)
from engage.cli.output import Progress, plural, safe, warn
from engage.people.addresses import named_addresses
from engage.people.person import export_person, other_addresses, other_visitors, person_of
from engage.reading.cursor_file import CursorFile
from engage.reading.export import KINDS, RecordKind, Selection
from engage.reading.export import export as records
from engage.reading.scans import PAGE
from engage.store.facade import Storage

#: What a spreadsheet would run, or an apostrophe: an import takes off one in front of it. A number
#: and a phone number are neither.
_FORMULA: Final = re.compile(
    r"[=@\t\r']|[+-](?![0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?\Z)(?!(?<=\+)[0-9 ().-]+\Z)"
)
#: The errors of syncing something other than a file, such as a pipe. None: it has no descriptor.
_NO_SYNC: Final = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EROFS, None})
_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


class Time(click.ParamType[int]):
    """A time in RFC 3339, or a date, as milliseconds since 1970 UTC."""

    name = "time"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Parse the time; anything else is a usage error."""
        if isinstance(value, int):
            return value
        try:
            since = parse_time(str(value)) - _EPOCH
        except ValueError:
            self.fail(
                f"{value!r} is not a time; use for example 2026-01-31 or 2026-01-31T12:00:00Z",
                param,
                ctx,
            )
        return since // datetime.timedelta(milliseconds=1)


@click.command(epilog=example("export events --since 2026-01-31 --type track > events.ndjson"))
@click.argument("kind", type=click.Choice((*get_args(RecordKind), "user")))
@on_instance("Only this workspace's records.", reads_with=())
@click.option(
    "--since", type=Time(), help="Only records that arrived, or were changed, at or after TIME."
)
@click.option("--type", "type_", type=click.Choice(EVENT_TYPES), help="Only events of this type.")
@click.option("--user", metavar="ID", help="Only this user's records.")
@address_option
@visitor_option
@click.option("--limit", type=click.IntRange(min=1), help="Maximum number of records.")
@click.option(
    "--format",
    "format_",
    type=click.Choice(("ndjson", "csv")),
    default="ndjson",
    show_default=True,
    help="Only subscriptions can be CSV.",
)
@click.option("--after", metavar="CURSOR", help="Continue an export that had read up to CURSOR.")
@click.option(
    "--cursor-file",
    type=CONFIG_FILE,
    help="Go on from the place in this file, and keep it there: no event is left out.",
)
def export(
    instance: Instance,
    kind: RecordKind | Literal["user"],
    since: int | None,
    type_: str | None,
    user: str | None,
    addresses: tuple[str, ...],
    visitors: tuple[str, ...],
    limit: int | None,
    format_: str,
    after: str | None,
    cursor_file: Path | None,
) -> None:
    """Export stored records as NDJSON.

    Writes one JSON object per line to standard output. Events and dead letters are in order of
    arrival. A record that cannot be written as JSON is left out and named on standard error; the
    exit status is 1 then.

    With --cursor-file, the events are in an order to which others are only added at the end: each
    run writes the events that were acknowledged since the run before, and an event twice rather
    than not at all.

    `user` is everything about the user --user, and about the visitors that a server key or an
    operator linked to it: each line has its kind in `record`. With --visitor, it has other visitors
    too, and with --address what is known under that address, and the deliveries that were given to
    the user by it. What is left out is named on standard error.
    """
    if kind == "user":
        others = (since, type_, limit, after, cursor_file)
        if user is None or any(other is not None for other in others):
            options = "no other option than --workspace, --address and --visitor"
            raise click.UsageError(f"user needs --user, and takes {options}")
        _export_person(instance, user, named_addresses(addresses), visitors)
        return
    if addresses or visitors:
        option = "--address" if addresses else "--visitor"
        raise click.UsageError(f"{option} does not apply to {kind}.")
    workspace = instance.workspace_id
    given = {"workspace": workspace, "since": since, "type": type_, "user": user}
    for name, value in given.items():
        if value is not None and name not in KINDS[kind].filters.split():
            raise click.UsageError(f"--{name} does not apply to {kind}.")
    if cursor_file is not None and (kind != "events" or after is not None or limit is not None):
        raise click.UsageError("--cursor-file is for events, without --after and --limit.")
    if format_ == "csv" and kind != "subscriptions":
        raise click.UsageError(f"--format csv does not apply to {kind}.")
    if workspace not in (None, *(space.id for space in instance.config.workspaces)):
        # Not an error: the records of a workspace remain when it is removed from the config.
        warn(f"{instance.path} does not contain a workspace {safe(workspace)!r}")
    place = None if cursor_file is None else CursorFile(cursor_file)
    selection = Selection(
        workspace=workspace,
        since=since,
        type=type_,
        user=user,
        after=after if place is None else place.read(),
        on_cursor=None if place is None else functools.partial(_keep, place),
    )
    problems = 0

    def left_out(problem: str) -> None:
        nonlocal problems
        problems += 1
        warn(f"left out: {problem}")

    names = KINDS[kind].members.split()
    if format_ == "csv" and after is None:
        click.echo(_csv_line(names))
    line: Callable[[bytes], bytes]
    line = functools.partial(_as_csv, names) if format_ == "csv" else bytes
    with _explained(selection, place):
        instance.run(_export, kind, selection, limit, left_out, line)
    if problems:
        instance.ctx.exit(1)


@contextlib.contextmanager
def _explained(selection: Selection, place: CursorFile | None) -> Iterator[None]:
    """Say which cursor is wrong."""
    try:
        yield
    except ForeignCursor as error:
        raise error if place is None else place.foreign(error) from error
    except ValueError as error:
        if selection.after is None:
            raise
        where = "--after" if place is None else str(place.path)
        raise click.UsageError(f"{where}: {error}") from error


def _keep(place: CursorFile, cursor: str) -> None:
    """Write a cursor when the events before it are where a power cut leaves them."""
    sys.stdout.buffer.flush()
    try:
        os.fsync(sys.stdout.fileno())
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    place.write(cursor, now())


def _export_person(
    instance: Instance, user: str, addresses: Collection[str], visitors: Collection[str]
) -> None:
    workspace, whom = instance.workspace, (user, addresses, visitors)
    terminal = sys.stdout.isatty()

    async def write(store: Storage) -> bool:
        exists, deliveries = False, Counter[str]()
        person = await person_of(store, workspace, *whom)
        if left := ", ".join(await other_addresses(store, workspace, person)):
            warn(f"addresses of this user that are left out: {left}; see --address")
        for visitor in await other_visitors(store, workspace, person):
            warn(f"left out: the visitor {visitor.described()}; see --visitor")
        async for line in export_person(store, workspace, *whom, left_out=deliveries):
            sys.stdout.buffer.write((safe(line.decode()).encode() if terminal else line) + b"\n")
            exists = True
        for address, count in deliveries.items():
            records = plural(count, "record")
            warn(f"left out: {records} of webhooks found by {address}; see --address")
        return exists

    if not instance.run(write):
        where = f"the user {user!r} of the workspace {workspace.id!r}"
        raise EngageError(f"nothing is known of {where}")


async def _export(
    store: Storage,
    kind: RecordKind,
    selection: Selection,
    limit: int | None,
    left_out: Callable[[str], None],
    as_line: Callable[[bytes], bytes],
) -> None:
    terminal, output = sys.stdout.isatty(), sys.stdout.buffer
    started = now()
    count = first = 0
    stream = records(store, kind, selection, left_out)
    async with contextlib.aclosing(stream):
        with Progress(kind.replace("-", " "), shown=not terminal) as progress:
            async for record in stream:
                line = as_line(record.json)
                output.write((safe(line.decode()).encode() if terminal else line) + b"\n")
                count += 1
                first = first or record.at
                if count == limit:
                    break
                if count % PAGE == 0:
                    output.flush()
                    # Records are in order of arrival, so their time shows the progress.
                    part = (record.at - first) / (started - first) if started > first else None
                    progress.show(count, part if limit is None else count / limit)
            output.flush()


def _as_csv(names: Sequence[str], record: bytes) -> bytes:
    """Return a record of texts and booleans as a line of CSV."""
    values = map(orjson.loads(record).get, names)
    texts = [str(value).lower() if isinstance(value, bool) else value or "" for value in values]
    return _csv_line([f"'{text}" if _FORMULA.match(text) else text for text in texts]).encode()


def _csv_line(values: Sequence[str]) -> str:
    line = io.StringIO(newline="")
    csv.writer(line).writerow(values)
    return line.getvalue().removesuffix("\r\n")
