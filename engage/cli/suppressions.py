# SPDX-License-Identifier: Apache-2.0
"""``engage suppressions``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import IO, Final

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
from engage.cli.instance import Instance, audit, example, limit_option, now, on_instance
from engage.cli.output import one_line, print_cells, print_table, safe, shown_time, warn
from engage.config import Config, SubscriptionGroup
from engage.people.addresses import named_addresses
from engage.reading.scans import PAGE, all_pages
from engage.store.facade import Storage
from engage.store.suppressions import hashed_address

__all__ = ["suppressions"]

_COLUMNS = ("SINCE", "CHANNEL", "ADDRESS", "GROUP", "REASON", "HOW", "SOURCE")

_WORKSPACE: Final = "The workspace, if there are several."
_channel_option = click.option(
    "--channel", metavar="NAME", help="Only this channel, such as email or sms."
)


@click.group(epilog=example("suppressions list ada@example.com"))
def suppressions() -> None:
    """List or remove suppressed addresses.

    Nothing must be sent to them. Providers report them: spam complaints, hard bounces, and who
    unsubscribed or answered STOP. engage sends nothing itself.
    """


@suppressions.command("list", epilog=example("suppressions list --channel sms"))
@on_instance(_WORKSPACE, reads_with=("erasures",))
@_channel_option
@limit_option
@click.argument("addresses", metavar="[ADDRESS]...", nargs=-1)
def list_(instance: Instance, channel: str | None, limit: int, addresses: tuple[str, ...]) -> None:
    """List suppressed addresses, or what is known of some.

    Each line has: since when, channel, address, subscription group (- is all of the channel),
    reason, how it became known, and the delivery that said so. `engage export suppressions` writes
    all of them, also those that were lifted.
    """
    workspace = instance.workspace.id

    async def read(store: Storage) -> Sequence[Suppression]:
        if addresses:
            return (await _find(store, instance, channel, addresses))[:limit]
        active: list[Suppression] = []
        async for row in all_pages(functools.partial(store.scan_suppressions, workspace)):
            if not row.lifted and channel in (None, row.channel):
                if len(active) == limit:
                    warn(f"there are more than {limit}; see --limit")
                    break
                active.append(row)
        return active

    rows = [
        (
            *(shown_time(row.at), row.channel, row.address, row.group_id or "-"),
            *(row.reason, row.how or "-", row.source_id or "-"),
        )
        for row in instance.run(read)
    ]
    print_table(_COLUMNS, [map(one_line, row) for row in rows])


@suppressions.command(
    "remove", epilog=example("suppressions remove --reason bounce ada@example.com")
)
@on_instance(_WORKSPACE)
@_channel_option
@click.option("--reason", metavar="NAME", help="Only this reason, such as bounce.")
@click.argument("addresses", metavar="ADDRESS...", nargs=-1, required=True)
def remove(
    instance: Instance, channel: str | None, reason: str | None, addresses: tuple[str, ...]
) -> None:
    """Remove suppressions of addresses, whatever their reason.

    A later report of a provider suppresses the address again. The choices of users stay as they
    are: the removal subscribes no one. The exit status is 1 if nothing was removed.
    """
    workspace = instance.workspace.id

    async def lift(store: Storage) -> Sequence[Suppression]:
        matches = await _find(store, instance, channel, addresses)
        matches = [row for row in matches if reason in (None, row.reason)]
        await store.suppress(
            [
                # The time of a provider may be in the future.
                dataclasses.replace(
                    row, at=max(now(), row.at + 1), lifted=True, how="operator", source_id=""
                )
                for row in matches
            ]
        )
        for row in matches:
            names = ("channel", "address", "group_id", "reason")
            about = {"workspace": workspace} | {name: getattr(row, name) for name in names}
            await audit(store, "suppression-removed", about)
        return matches

    removed = instance.run(lift)
    for row in removed:
        print_cells("removed", row.channel, row.address, row.group_id or "-", row.reason)
    if not removed:
        of_reason = "" if reason is None else f" with the reason {reason}"
        raise EngageError(f"none of these addresses is suppressed{of_reason}")


@suppressions.command(
    "check", epilog=example("suppressions check --group newsletter addresses.txt")
)
@on_instance(_WORKSPACE, reads_with=("erasures",))
@click.option("--group", "group_id", metavar="ID", required=True, help="The subscription group.")
@click.argument("file", type=click.File(encoding="utf-8-sig"))
def check(instance: Instance, group_id: str, file: IO[str]) -> None:
    """Print which addresses of a file must not be written to.

    FILE has one address in each line; - reads standard input. Each line of the answer has an
    address and the reason: that of a suppression, also one of an erased person; `unsubscribed`, if
    a user or visitor who has the address is; or, of a group of the type opt_in, `not subscribed`,
    if none of them is. A line that is no address of the channel is named on standard error, and the
    exit status is 1 then.
    """
    config, workspace = instance.config, instance.workspace
    name = workspace.id
    groups = [group for group in workspace.subscription_groups if group.id == group_id]
    if not groups or groups[0].channel not in ADDRESS_TRAITS:
        raise EngageError(f"{group_id!r} is no subscription group of {name} with addresses")
    addresses, channel, wrong = list[str](), groups[0].channel, 0
    for number, text in enumerate(map(str.strip, file), 1):
        if _is_address(channel, text):
            addresses.append(text)
        elif text:
            wrong += 1
            warn(f"line {number}: {safe(text)!r} is no address of {channel}")

    async def look(store: Storage) -> None:
        for start in range(0, len(addresses), PAGE):
            part = addresses[start : start + PAGE]
            pairs = _pairs(config, name, [channel], part)
            stored = await store.suppressions(name, pairs.keys())
            reasons = {
                pairs[row.channel, row.address]: row.reason
                for row in stored
                if row.group_id in ("", group_id)
            }
            for address in part:
                form = suppressed_address(channel, address) or ""
                reason = reasons.get(form) or await _unwanted(store, name, groups[0], address)
                if reason is not None:
                    click.echo(f"{safe(address)}\t{reason}")

    instance.run(look)
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
    holders = {holder async for holder in all_pages(read)}
    merged = await store.find_users(workspace, trait, [value])
    holders |= {Subject(Kind.USER, user) for user in merged.get(value, ())}
    chosen = {(await store.state(workspace, holder)).get(group.id) for holder in holders}
    if False in chosen:
        return "unsubscribed"
    return None if True in chosen or group.type == "opt_out" else "not subscribed"


async def _find(
    store: Storage, instance: Instance, channel: str | None, addresses: Sequence[str]
) -> list[Suppression]:
    """Return the suppressions of addresses, in one channel or in all that the config names."""
    config, workspace = instance.config, instance.workspace.id
    groups = [group for space in config.workspaces for group in space.subscription_groups]
    channels = [channel] if channel else {*ADDRESS_TRAITS, *(group.channel for group in groups)}
    pairs = _pairs(config, workspace, channels, addresses)
    matches = await store.suppressions(workspace, pairs.keys())
    return sorted(matches, key=lambda row: (row.at, row.address, row.channel, row.group_id))


def _pairs(
    config: Config, workspace: str, channels: Iterable[str], addresses: Sequence[str]
) -> dict[tuple[str, str], str]:
    """Return the forms in which addresses may be suppressed, with their channel → the form that is
    not hashed."""
    pairs = {
        (name, form): form
        for name in channels
        for address in addresses
        if (form := suppressed_address(name, address)) is not None
    }
    if config.erasures.key is not None:
        hashed = functools.partial(hashed_address, config.erasures.key, workspace)
        pairs |= {(name, hashed(name, form)): form for name, form in pairs}
    return pairs
