# SPDX-License-Identifier: Apache-2.0
"""``engage suppressions``."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

import click

from engage.api import (
    ADDRESS_TRAITS,
    EngageError,
    Kind,
    Subject,
    Suppression,
    identifier_value,
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
from engage.config import Config, SubscriptionGroup
from engage.erasure.addresses import named_addresses
from engage.store.facade import Storage
from engage.store.suppressions import hashed_address
from engage.upkeep.export import PAGE, all_pages

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

    async def read(store: Storage) -> Sequence[Suppression]:
        if addresses:
            return (await _find(store, config, workspace, channel, addresses))[:limit]
        found: list[Suppression] = []
        async for one in all_pages(functools.partial(store.scan_suppressions, workspace)):
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

    async def lift(store: Storage) -> Sequence[Suppression]:
        found = await _find(store, config, workspace, channel, addresses)
        found = [one for one in found if reason in (None, one.reason)]
        await store.suppress(
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
        of_reason = "" if reason is None else f" with the reason {reason}"
        raise EngageError(f"none of these addresses is suppressed{of_reason}")


@suppressions.command(
    "check", epilog="\b\nExample:\n  engage suppressions check --group newsletter addresses.txt"
)
@config_option
@_workspace_option
@click.option("--group", "group_id", metavar="ID", required=True, help="The subscription group.")
@click.argument("file", type=click.File(encoding="utf-8-sig"))
@click.pass_context
def check(
    ctx: click.Context,
    config_path: Path,
    workspace_id: str | None,
    group_id: str,
    file: IO[str],
) -> None:
    """Print which addresses of a file must not be written to.

    FILE has one address in each line; - reads standard input. Each line of the answer has an
    address and the reason: that of a suppression, also one of an erased person; `unsubscribed`, if
    a user or visitor who has the address is; or, of a group of the type opt_in, `not subscribed`,
    if none of them is. A line that is no address of the channel is named on standard error, and the
    exit status is 1 then.
    """
    config, name = load_chosen(config_path, workspace_id, reads_with=("erasures",))
    [workspace] = [one for one in config.workspaces if one.id == name]
    groups = [one for one in workspace.subscription_groups if one.id == group_id]
    if not groups or groups[0].channel not in ADDRESS_TRAITS:
        raise EngageError(f"{group_id!r} is no subscription group of {name} with addresses")
    addresses, channel, wrong = list[str](), groups[0].channel, 0
    for number, text in enumerate(map(str.strip, file), 1):
        if _is_address(channel, text):
            addresses.append(text)
        elif text:
            wrong += 1
            click.echo(
                f"engage: line {number}: {safe(text)!r} is no address of {channel}", err=True
            )

    async def look(store: Storage) -> None:
        for start in range(0, len(addresses), PAGE):
            part = addresses[start : start + PAGE]
            pairs = _pairs(config, name, [channel], part)
            found = await store.suppressions(name, pairs.keys())
            reasons = {
                pairs[one.channel, one.address]: one.reason
                for one in found
                if one.group_id in ("", group_id)
            }
            for address in part:
                form = suppressed_address(channel, address) or ""
                reason = reasons.get(form) or await _unwanted(store, name, groups[0], address)
                if reason is not None:
                    click.echo(f"{safe(address)}\t{reason}")

    with_store(ctx, config, look)
    if wrong:
        raise EngageError(f"lines without an address: {wrong}")


def _is_address(channel: str, text: str) -> bool:
    """Return whether a text is an address alone: what is around it would be looked up too."""
    try:
        named = named_addresses([text])
    except EngageError:
        return False
    return named == {f"{ADDRESS_TRAITS[channel]}:{suppressed_address(channel, text)}"}


async def _unwanted(
    store: Storage, workspace: str, group: SubscriptionGroup, address: str
) -> str | None:
    """Return why the users and visitors who have an address do not want a group."""
    trait = ADDRESS_TRAITS[group.channel]
    value = identifier_value(trait, address) or ""
    read = functools.partial(store.holders, workspace, trait, value)
    holders = {one async for one in all_pages(read)}
    merged = await store.find_users(workspace, trait, [value])
    holders |= {Subject(Kind.USER, one) for one in merged.get(value, ())}
    chosen = {(await store.state(workspace, one)).get(group.id) for one in holders}
    if False in chosen:
        return "unsubscribed"
    return None if True in chosen or group.type == "opt_out" else "not subscribed"


async def _find(
    store: Storage,
    config: Config,
    workspace: str,
    channel: str | None,
    addresses: Sequence[str],
) -> list[Suppression]:
    """Return the suppressions of addresses, in one channel or in all that the config names."""
    groups = [group for one in config.workspaces for group in one.subscription_groups]
    channels = [channel] if channel else {*ADDRESS_TRAITS, *(group.channel for group in groups)}
    pairs = _pairs(config, workspace, channels, addresses)
    found = await store.suppressions(workspace, pairs.keys())
    return sorted(found, key=lambda one: (one.at, one.address, one.channel, one.group_id))


def _pairs(
    config: Config, workspace: str, channels: Iterable[str], addresses: Sequence[str]
) -> dict[tuple[str, str], str]:
    """Return the forms in which addresses may be suppressed, with their channel → the form that is
    not hashed."""
    pairs = {
        (name, known): known
        for name in channels
        for address in addresses
        if (known := suppressed_address(name, address)) is not None
    }
    if config.erasures.key is not None:
        hashed = functools.partial(hashed_address, config.erasures.key, workspace)
        pairs |= {(name, hashed(name, form)): form for name, form in pairs}
    return pairs
