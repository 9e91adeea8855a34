# SPDX-License-Identifier: Apache-2.0
"""``engage erase``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
import orjson

from engage.api import EngageError
from engage.cli.instance import (
    Instance,
    address_option,
    example,
    json_option,
    on_instance,
    operator,
    visitor_option,
)
from engage.cli.output import Progress, plural, print_table, safe, shown_time
from engage.config import Workspace
from engage.config.erasures_file import Erasure, key_of, read
from engage.people.addresses import named_addresses
from engage.people.erase import Receipt, erase_user, in_words, repeat
from engage.people.person import (
    OtherVisitor,
    export_person,
    other_addresses,
    other_visitors,
    person_of,
)
from engage.people.requests import Request, erasure_requests
from engage.store.facade import Storage

__all__ = ["erase", "repeated"]

#: The exit status if visitors are left that may be the user's, and if nothing was known of the id.
LEFT: Final = 3
UNKNOWN: Final = 4
_NOTHING: Final = "nothing was known of this user id"

_WORKSPACE: Final = "The workspace of the user, if there are several."


@click.group(invoke_without_command=True, epilog=example("erase user --workspace acme --user u-1"))
@on_instance()
@click.option(
    "--from",
    "file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="Carry out the erasures of a file again, such as engage.toml.erasures.",
)
def erase(instance: Instance, file: Path | None) -> None:
    """Erase a person.

    With --from, everything that a file of erasures names is erased again, in any store: after a
    backup was brought back, or at another host. Those that this store has carried out are left
    out; the others are compared with all ids in the store.
    """
    if subcommand := instance.ctx.invoked_subcommand:
        if file is not None:
            raise click.UsageError(f"--from does not apply to {subcommand}.")
        return
    if file is None:
        click.echo(instance.ctx.get_help())
        return
    config = instance.config
    erasures, _ = read(file, key_of(config))
    with Progress("") as progress:
        counts = instance.run(repeat, config, erasures, report=progress.say)
    click.echo(repeated(file, erasures, counts))


@erase.command("user", epilog=example("erase user --workspace acme --user u-1"))
@on_instance(_WORKSPACE)
@click.option("--user", required=True, metavar="ID", help="The id of the user.")
@address_option
@visitor_option
@click.option(
    "--linked-visitors",
    "linked",
    is_flag=True,
    help="Also all linked visitors that no other user was ever linked to.",
)
@json_option()
@click.option("--dry-run", is_flag=True, help="Only print which ids and addresses it would take.")
@click.option("--yes", is_flag=True, help="Do not ask; needed without a terminal.")
def user_(
    instance: Instance,
    user: str,
    addresses: Sequence[str],
    visitors: Sequence[str],
    *,
    linked: bool,
    as_json: bool,
    dry_run: bool,
    yes: bool,
) -> None:
    """Erase all that was received of a user until now, and print a receipt.

    These are its events, its profile, its choices and its dead letters, and those of the visitors
    that a server key or an operator linked to it. With --visitor and --linked-visitors, also other
    visitors, and with --address what is known under an address: make sure that they are the
    person's, because anyone can claim them. The receipt names the visitors and the addresses that
    are left.

    What the person does later makes a new user. The receipt has a hash of the id, and is in the
    audit. The exit status is 3 if visitors are left that may be the person's, and 4 if nothing was
    known of the id, also of --dry-run. It cannot be undone.
    """
    if not yes and not dry_run and not sys.stdin.isatty():
        raise click.UsageError("it needs --yes when there is no terminal")
    config, workspace = instance.config, instance.workspace
    named = named_addresses(addresses)
    whom: Any = {"addresses": named, "visitors": visitors, "linked": linked}
    if not yes or dry_run:
        preview, exists = instance.run(_preview, workspace, user, whom)
        for line in preview:
            click.echo(safe(line), err=not dry_run)
        if dry_run:
            instance.ctx.exit(0 if exists else UNKNOWN)
        click.confirm(f"Erase {safe(user)} in {workspace.id} for ever?", abort=True, err=True)

    async def run(store: Storage) -> Receipt:
        options: Any = {"actor": operator(), "report": progress.say, **whom}
        try:
            return await erase_user(store, config, workspace.id, user, **options)
        except EngageError as error:
            raise EngageError(in_words(error)) from error

    with Progress("") as progress:
        receipt = instance.run(run)
    if as_json:
        click.echo(orjson.dumps(receipt.document()).decode())
    else:
        _print(receipt)
    if not receipt.existed:
        instance.ctx.exit(UNKNOWN)
    if receipt.other_visitors:
        instance.ctx.exit(LEFT)


async def _preview(
    store: Storage, workspace: Workspace, user_id: str, whom: Mapping[str, Any]
) -> tuple[list[str], bool]:
    """Return in words which ids and addresses an erasure would take, and whether there is anything.

    :param whom: arguments of :func:`~engage.people.person.person_of`.
    """
    person = await person_of(store, workspace, user_id, **whom)
    others = await other_addresses(store, workspace, person)
    left, addresses = await other_visitors(store, workspace, person), person.addresses
    ids = [name for name in person.visitors if name not in addresses]
    everything = export_person(store, workspace, user_id, addresses, ids)
    async with contextlib.aclosing(everything) as lines:
        exists = await anext(lines, None) is not None
    preview = [
        *(() if exists else (_NOTHING,)),
        f"user: {user_id}",
        f"anonymous ids: {', '.join(ids) or '-'}",
        *_addresses([name.partition(":")[2] for name in addresses], others),
        *_visitors(left),
    ]
    return preview, exists


def _visitors(left: Sequence[OtherVisitor]) -> Iterator[str]:
    """Yield in words which visitors are left."""
    if left:
        yield "visitors that are left and may be the person's; see --visitor and --linked-visitors:"
    yield from (f"  {visitor.described()}" for visitor in left)


def _addresses(named: Sequence[str], others: Mapping[str, bool]) -> Iterator[str]:
    """Yield in words which addresses are taken, and which are left.

    :param others: see :func:`~engage.people.person.other_addresses`.
    """
    yield f"addresses: {', '.join(named) or '-'}"
    shared = " (other users have it too)"
    if left := [address + shared * many for address, many in others.items()]:
        yield f"addresses of this user that are left: {', '.join(left)}; see --address"


def _print(receipt: Receipt) -> None:
    if not receipt.existed:
        click.echo(_NOTHING)
    click.echo(f"{_erased(receipt.counts)}, in {receipt.seconds:.1f} s")
    click.echo(f"workspace: {receipt.workspace}")
    click.echo(f"hash of the id: {receipt.user}")
    click.echo(f"received before: {shown_time(receipt.at)}")
    for line in _addresses(receipt.addresses, dict.fromkeys(receipt.other_addresses, False)):
        click.echo(safe(line))
    for line in _visitors(receipt.other_visitors):
        click.echo(safe(line))
    if not receipt.overwritten:
        click.echo("what was erased may still be in the files of the store: see docs/erasure.md")


@erase.command("requests", epilog=example("erase requests --workspace acme"))
@on_instance(_WORKSPACE, reads_with=())
def requests(instance: Instance) -> None:
    """List the requests to erase that providers passed on.

    Such as Shopify's `customers/redact` and Segment's `delete`. None of them proves who asks: look
    at it, and use `engage erase user`, which also removes the request.
    """
    workspace = instance.workspace.id
    names = instance.registry.erasure_requests(instance.config, workspace)

    async def look(store: Storage) -> Sequence[Request]:
        return [request async for request in erasure_requests(store, workspace, names)]

    rows = [
        (shown_time(row.received_at), row.origin, row.user_id or row.anonymous_id or "-")
        for row in instance.run(look)
    ]
    print_table(("RECEIVED", "FROM", "USER"), rows)


def repeated(file: Path, erasures: Sequence[Erasure], counts: Mapping[str, int]) -> str:
    """Return in words what carrying out a file of erasures has erased."""
    return f"{plural(len(erasures), 'erased id')} in {safe(str(file))}; {_erased(counts)}"


def _erased(counts: Mapping[str, int]) -> str:
    """Return what was erased, in words."""
    some = [f"{name} {count}" for name, count in counts.items() if count]
    return "erased: " + (", ".join(some) or "nothing")
