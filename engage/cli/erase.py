# SPDX-License-Identifier: Apache-2.0
"""``engage erase``."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import orjson

from engage.api import EventStore
from engage.cli.common import (
    config_option,
    load_chosen,
    opened,
    operator,
    plural,
    print_table,
    registry_of,
    safe,
    shown_time,
    with_store,
    workspace_option,
)
from engage.cli.progress import Progress
from engage.config import load
from engage.erasure.erase import Receipt, erase_user, repeat
from engage.erasure.requests import Request, erasure_requests
from engage.upkeep.erasures import Erasure, key_of, read

__all__ = ["erase", "repeated"]

Result = TypeVar("Result")

_workspace_option = workspace_option("The workspace of the user, if there are several.")
_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.group(
    invoke_without_command=True,
    epilog="\b\nExample:\n  engage erase user --workspace acme --user u-1",
)
@config_option
@click.option(
    "--from",
    "file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="Carry out the erasures of a file again, such as engage.toml.erasures.",
)
@click.pass_context
def erase(ctx: click.Context, config_path: Path, file: Path | None) -> None:
    """Erase a person.

    With --from, everything that a file of erasures names is erased again, in any store: after a
    backup was brought back, or at another host. Those that this store has carried out are left
    out; the others are compared with all ids in the store.
    """
    if ctx.invoked_subcommand is not None:
        if file is not None:
            raise click.UsageError(f"--from does not apply to {ctx.invoked_subcommand}.", ctx)
        return
    if file is None:
        click.echo(ctx.get_help())
        return
    config = load(config_path)
    erasures, _ = read(file, key_of(config))

    async def run(report: Callable[[str, int], None]) -> Mapping[str, int]:
        async with opened(registry_of(ctx, config), config) as store:
            return await repeat(store, config, erasures, report=report)

    click.echo(repeated(file, erasures, _with_progress(run)))


@erase.command("user", epilog="\b\nExample:\n  engage erase user --workspace acme --user u-1")
@config_option
@_workspace_option
@click.option("--user", required=True, metavar="ID", help="The id of the user.")
@_json_option
@click.option("--yes", is_flag=True, help="Do not ask; without a terminal, it never asks.")
@click.pass_context
def user_(
    ctx: click.Context,
    config_path: Path,
    workspace_id: str | None,
    user: str,
    *,
    as_json: bool,
    yes: bool,
) -> None:
    """Erase all that was received of a user until now, and print a receipt.

    These are its events, its profile, the visitors that belong to it, its choices and its dead
    letters. What the person does later makes a new user. The receipt has a hash of the id, and is
    in the audit; it says so if nothing was known of the id. It cannot be undone.
    """
    config, workspace = load_chosen(config_path, workspace_id)
    if not yes and sys.stdin.isatty():
        click.confirm(f"Erase {safe(user)} in {workspace} for ever?", abort=True, err=True)

    async def run(report: Callable[[str, int], None]) -> Receipt:
        async with opened(registry_of(ctx, config), config) as store:
            return await erase_user(store, config, workspace, user, actor=operator(), report=report)

    receipt = _with_progress(run)
    if as_json:
        click.echo(orjson.dumps(receipt.document()).decode())
        return
    if not receipt.known:
        click.echo("nothing was known of this user id")
    click.echo(f"{_erased(receipt.counts)}, in {receipt.seconds:.1f} s")
    click.echo(f"workspace: {receipt.workspace}")
    click.echo(f"hash of the id: {receipt.user}")
    click.echo(f"received before: {shown_time(receipt.at)}")
    if not receipt.overwritten:
        click.echo("what was erased may still be in the files of the store: see docs/erasure.md")


@erase.command("requests", epilog="\b\nExample:\n  engage erase requests --workspace acme")
@config_option
@_workspace_option
@click.pass_context
def requests(ctx: click.Context, config_path: Path, workspace_id: str | None) -> None:
    """List the requests to erase that providers passed on.

    Such as Shopify's `customers/redact` and Segment's `delete`. None of them proves who asks: look
    at it, and use `engage erase user`, which also removes the request.
    """
    config, workspace = load_chosen(config_path, workspace_id)
    names = registry_of(ctx, config).erasure_requests(config, workspace)

    async def look(store: EventStore) -> Sequence[Request]:
        return [one async for one in erasure_requests(store, workspace, names)]

    rows = [
        (shown_time(one.received_at), one.origin, one.user_id or one.anonymous_id or "-")
        for one in with_store(ctx, config, look)
    ]
    print_table(("RECEIVED", "FROM", "USER"), rows)


def _with_progress(
    run: Callable[[Callable[[str, int], None]], Coroutine[Any, Any, Result]],
) -> Result:
    with Progress("") as progress:
        return asyncio.run(run(progress.say))


def repeated(file: Path, erasures: Sequence[Erasure], counts: Mapping[str, int]) -> str:
    """Return in words what carrying out a file of erasures has erased."""
    return f"{plural(len(erasures), 'erased id')} in {safe(str(file))}; {_erased(counts)}"


def _erased(counts: Mapping[str, int]) -> str:
    """Return what was erased, in words."""
    some = [f"{name} {count}" for name, count in counts.items() if count]
    return "erased: " + (", ".join(some) or "nothing")
