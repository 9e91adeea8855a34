# SPDX-License-Identifier: Apache-2.0
"""``engage tail``."""

from __future__ import annotations

import asyncio
import select
import sys
from collections.abc import Awaitable, Sequence
from typing import Final, TypeVar

import click

from engage.api import EVENT_TYPES
from engage.cli.instance import Instance, example, json_option, on_instance
from engage.cli.output import discard_output, print_json, safe, shown_time, warn
from engage.reading.export import render
from engage.reading.live import RING, Live, Row, RowFilter
from engage.reading.time_limit import within as time_limit
from engage.store.facade import Storage

__all__ = ["tail"]

#: Seconds between two looks at what has been read, which costs the store nothing.
_PAUSE: Final = 0.2

Result = TypeVar("Result")


class _Reader:
    """Calls the store within a time limit."""

    async def read(self, call: Awaitable[Result], *, within: float | None = None) -> Result:
        async with time_limit(within):
            return await call


@click.command(
    epilog=example("tail --type track --user ann", "tail --json --status stored | jq .properties")
)
@on_instance("Only this workspace's events.", reads_with=())
@click.option("--status", type=click.Choice(("stored", "rejected")), help="Only these events.")
@click.option("--type", "type_", type=click.Choice(EVENT_TYPES), help="Only events of this type.")
@click.option("--name", metavar="TEXT", help="Only events whose name begins so.")
@click.option("--user", metavar="TEXT", help="Only events whose user begins so.")
@click.option("--key", metavar="ID", help="Only events of this write key or webhook provider.")
@click.option(
    *("-n", "--lines"),
    type=click.IntRange(0, RING),
    default=10,
    show_default=True,
    help="Maximum number of earlier events that are shown first.",
)
@json_option("Print the events as JSON, as an export.")
def tail(
    instance: Instance,
    status: str | None,
    type_: str | None,
    name: str | None,
    user: str | None,
    key: str | None,
    lines: int,
    *,
    as_json: bool,
) -> None:
    """Print events as they are stored or rejected.

    Each line has: time of arrival, workspace, stored or rejected, type, name, user, write key (or
    webhook provider), and part of the event or the reason. With --json it is the line that
    `engage export` prints of an event or of a dead letter.

    A name and a user are given by their beginnings, or whole and in quotation marks ('"Order"').

    The store is read once a second, also while the server runs. If more events arrive than one read
    returns, some are left out, which is said on standard error. Ctrl-C ends the command, and so
    does a reader of its output that ends: the exit status is 0 then.
    """
    filters = [
        RowFilter(
            workspace_id=workspace.id,
            status=status or "",
            type=type_ or "",
            name=name or "",
            user=user or "",
            key=key or "",
        )
        for workspace in instance.workspaces
    ]
    try:
        instance.run(_follow, filters, lines, as_json=as_json)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:
        discard_output()


async def _follow(
    store: Storage, filters: Sequence[RowFilter], lines: int, *, as_json: bool
) -> None:
    live = Live(store, _Reader(), keep_items=as_json)
    last, error = -1, None
    try:
        while True:
            for row_filter in filters:
                await live.look(row_filter.workspace_id)
            if live.error != error:
                error = live.error
                warn(f"the storage does not answer: {error}" if error else "it answers again")
            if last >= 0 and any(live.has_gap(x.workspace_id, last) for x in filters):
                warn("more events arrived than can be shown; some were left out")
            rows = [row for row_filter in filters for row in live.rows(row_filter, max(last, 0))]
            rows.sort(key=lambda row: (row.at, row.n))
            for row in rows if last >= 0 else rows[len(rows) - min(lines, len(rows)) :]:
                _print(row, as_json=as_json, several=len(filters) > 1)
            if error is None:
                last = live.last
            if not _is_read():
                raise BrokenPipeError
            await asyncio.sleep(_PAUSE)
    finally:
        await live.close()


def _is_read() -> bool:
    """Return whether a pipe still has its reader; otherwise the next event would tell."""
    if not hasattr(select, "poll"):
        return True
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return not any(events & select.POLLERR for _, events in poll.poll(0))


def _print(row: Row, *, as_json: bool, several: bool) -> None:
    if as_json:
        try:
            line = render("events" if row.status == "stored" else "dead-letters", row.item).json
        except Exception as error:  # As in an export: another program may have written it.
            warn(f"left out: {row.id}: {type(error).__name__}: {error}")
        else:
            print_json(line)
        return
    at, place = shown_time(row.at), safe(row.workspace_id)
    if not sys.stdout.isatty():
        cells = (at, place, row.status, row.type, row.name, row.user, row.key, row.preview)
        click.echo("\t".join(cells))
        return
    where = f"{place:<12} " if several else ""
    start = f"{at[11:23]} {where}{row.type:<8} {row.name:<20} {row.user:<20} {row.key:<12}"
    text = f"rejected: {row.preview}" if row.status == "rejected" else row.preview
    click.secho(f"{start} {text}".rstrip(), fg="red" if row.status == "rejected" else None)
