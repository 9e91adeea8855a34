# SPDX-License-Identifier: Apache-2.0
"""``engage suppressions``."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from engage.api import (
    ADDRESS_TRAITS,
    EngageError,
    EventStore,
    Suppression,
    SuppressionStore,
    suppressed_address,
)
from engage.cli.common import (
    config_option,
    load_chosen,
    now,
    print_table,
    safe,
    shown_time,
    with_store,
    workspace_option,
)
from engage.cli.letters import record
from engage.config import Config
from engage.erasure.erase import hashed_address
from engage.upkeep.export import all_pages

__all__ = ["suppressions"]

_COLUMNS = ("SINCE", "CHANNEL", "ADDRESS", "GROUP", "REASON", "HOW", "SOURCE")

_workspace_option = workspace_option("The workspace, if there are several.")
_channel_option = click.option(
    "--channel", metavar="NAME", help="Only this channel, such as email or sms."
)


@click.group(epilog="\b\nExample:\n  engage suppressions list ada@example.com")
def suppressions() -> None:
    """List or remove suppressed addresses.

    Nothing must be sent to them. Providers report them: spam complaints, hard bounces, and who
    unsubscribed or answered STOP. engage sends nothing itself.
    """


@suppressions.command("list", epilog="\b\nExample:\n  engage suppressions list --channel sms")
@config_option
@_workspace_option
@_channel_option
@click.option("--limit", type=click.IntRange(1, 20_000), default=50, show_default=True)
@click.argument("addresses", metavar="[ADDRESS]...", nargs=-1)
@click.pass_context
def list_(
    ctx: click.Context,
    config_path: Path,
    workspace_id: str | None,
    channel: str | None,
    limit: int,
    addresses: tuple[str, ...],
) -> None:
    """List suppressed addresses, or what is known of some.

    Each line has: since when, channel, address, subscription group (- is all of the channel),
    reason, how it became known, and the delivery that said so. `engage export suppressions` writes
    all of them, also those that were lifted.
    """
    config, workspace = load_chosen(config_path, workspace_id, reads_with=("erasures",))

    async def read(store: EventStore) -> Sequence[Suppression]:
        if addresses:
            return (await _find(store, config, workspace, channel, addresses))[:limit]
        found: list[Suppression] = []
        async for one in all_pages(functools.partial(_kept(store).scan_suppressions, workspace)):
            if not one.lifted and channel in (None, one.channel):
                if len(found) == limit:
                    click.echo(f"engage: there are more than {limit}; see --limit", err=True)
                    break
                found.append(one)
        return found

    rows = [
        (
            shown_time(one.at),
            one.channel,
            one.address,
            one.group_id or "-",
            one.reason,
            one.how or "-",
            one.source_id or "-",
        )
        for one in with_store(ctx, config, read)
    ]
    print_table(_COLUMNS, [[" ".join(cell.split()) for cell in row] for row in rows])


@suppressions.command(
    "remove", epilog="\b\nExample:\n  engage suppressions remove --reason bounce ada@example.com"
)
@config_option
@_workspace_option
@_channel_option
@click.option("--reason", metavar="NAME", help="Only this reason, such as bounce.")
@click.argument("addresses", metavar="ADDRESS...", nargs=-1, required=True)
@click.pass_context
def remove(
    ctx: click.Context,
    config_path: Path,
    workspace_id: str | None,
    channel: str | None,
    reason: str | None,
    addresses: tuple[str, ...],
) -> None:
    """Remove suppressions of addresses, whatever their reason.

    A later report of a provider suppresses the address again. The choices of users stay as they
    are: the removal subscribes no one. The exit status is 1 if nothing was removed.
    """
    config, workspace = load_chosen(config_path, workspace_id)

    async def lift(store: EventStore) -> Sequence[Suppression]:
        found = await _find(store, config, workspace, channel, addresses)
        found = [one for one in found if reason in (None, one.reason)]
        await _kept(store).suppress(
            [
                # The time of a provider may be in the future.
                dataclasses.replace(
                    one, at=max(now(), one.at + 1), lifted=True, how="operator", source_id=""
                )
                for one in found
            ]
        )
        for one in found:
            names = ("channel", "address", "group_id", "reason")
            about = {"workspace": workspace} | {name: getattr(one, name) for name in names}
            await record(store, "suppression-removed", about)
        return found

    removed = with_store(ctx, config, lift)
    for one in removed:
        cells = ["removed", one.channel, one.address, one.group_id or "-", one.reason]
        click.echo((" " if sys.stdout.isatty() else "\t").join(map(safe, cells)))
    if not removed:
        raise EngageError("none of these addresses is suppressed")


def _kept(store: EventStore) -> SuppressionStore:
    """:raises EngageError: if the storage does not keep suppressions."""
    if not isinstance(store, SuppressionStore):
        raise EngageError("the configured storage does not store suppressions")
    return store


async def _find(
    store: EventStore,
    config: Config,
    workspace: str,
    channel: str | None,
    addresses: Sequence[str],
) -> list[Suppression]:
    """Return the suppressions of addresses, in one channel or in all that the config names."""
    groups = [group for one in config.workspaces for group in one.subscription_groups]
    channels = [channel] if channel else {*ADDRESS_TRAITS, *(group.channel for group in groups)}
    pairs = {
        (name, known)
        for name in channels
        for address in addresses
        if (known := suppressed_address(name, address)) is not None
    }
    if config.erasures.key is not None:
        hashed = functools.partial(hashed_address, config.erasures.key, workspace)
        pairs |= {(name, hashed(name, address)) for name, address in pairs}
    found = await _kept(store).suppressions(workspace, pairs)
    return sorted(found, key=lambda one: (one.at, one.address, one.channel, one.group_id))
