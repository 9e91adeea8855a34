# SPDX-License-Identifier: Apache-2.0
"""``engage keys``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import click

from engage.api import EngageError
from engage.cli.common import (
    config_option,
    load_chosen,
    load_with,
    now,
    operator,
    print_table,
    safe,
    shown_time,
    with_store,
    workspace_option,
)
from engage.keys.changes import KeyState, change_key, create_key
from engage.keys.effective import Key, list_keys, rate_of, shown_rate, words
from engage.upkeep.erasures import erasures_path

_workspace_option = workspace_option("The workspace of the key, if there are several.")
_COLUMNS: Final = (
    *("WORKSPACE", "ID", "KEY", "STATE", "SOURCE", "CREATED", "NAME"),
    *("KIND", "ORIGINS", "OPERATIONS", "RATE"),
)
_IN_EFFECT: Final = "The server follows within 2.5 seconds; it need not be restarted."


@click.group(epilog="\b\nExample:\n  engage keys add --workspace acme --id ios --name 'iOS app'")
def keys() -> None:
    """Create, disable and list write keys.

    Keys of the config file can be listed and disabled; keys that are created here are in the store.
    A running server follows within 2.5 seconds.
    """


@keys.command("list", epilog="\b\nExample:\n  engage keys list --workspace acme")
@config_option
@workspace_option("Only the keys of this workspace.")
@click.pass_context
def list_(ctx: click.Context, config_path: Path, workspace_id: str | None) -> None:
    """List all write keys, also those that are disabled.

    Each line has: workspace, id, key (a server key is not known), state (active, disabled or
    archived), source (config or store), time of creation, name, kind (public or server), origins,
    operations, rate.
    """
    config = load_with(config_path, workspace_id, reads_with=("write_keys",))
    found = with_store(ctx, config, lambda store: list_keys(store, config.workspaces))
    rows = [_row(key) for key in found.keys if workspace_id in (None, key.workspace_id)]
    print_table(_COLUMNS, rows)
    for problem in found.problems:
        click.echo(f"engage: {safe(problem)}", err=True)


@keys.command("add", epilog="\b\nExample:\n  engage keys add --workspace acme --id ios")
@config_option
@_workspace_option
@click.option(
    "--id",
    "key_id",
    metavar="ID",
    required=True,
    help="Stored with each event instead of the key.",
)
@click.option("--name", metavar="TEXT", default="", help="A name for people.")
@click.option(
    "--kind",
    type=click.Choice(["public", "server"]),
    help="public (the default): for web pages and apps. server: a secret of your servers.",
)
@click.option(
    "--origins",
    metavar="URL,…",
    default="",
    help="Only these web pages may use it, such as https://shop.example.com.",
)
@click.option(
    "--operations",
    metavar="TYPE,…",
    default="",
    help="It may send only events of these types, such as track,page.",
)
@click.option(
    "--rate",
    metavar="NUMBER",
    default="",
    help="Events a second, or events_per_second=100,burst=500,bytes_per_second=1000000.",
)
@click.pass_context
def add(
    ctx: click.Context,
    config_path: Path,
    workspace_id: str | None,
    key_id: str,
    name: str,
    kind: str | None,
    origins: str,
    operations: str,
    rate: str,
) -> None:
    """Create a write key, and print it.

    Every process of the server accepts it from its first use on. A server key is printed only now:
    the store keeps its SHA-256.
    """
    options = {
        "kind": kind,
        "origins": words(origins),
        "operations": words(operations),
        "rate": rate_of(rate),
    }
    config, chosen = load_chosen(config_path, workspace_id)
    for problem in config.cors.missing(words(origins)):
        raise EngageError(problem)
    key = with_store(
        ctx,
        config,
        lambda store: create_key(
            store,
            config.workspaces,
            chosen,
            key_id,
            name=name,
            options={option: chosen for option, chosen in options.items() if chosen},
            actor=operator(),
            now=now(),
        ),
    )
    click.echo(key.key)


def _changing(name: str, state: KeyState, example: str, text: str) -> None:
    epilog = f"\b\nExample:\n  engage keys {name} --workspace acme {example}"

    @keys.command(name, help=text, epilog=epilog)
    @config_option
    @_workspace_option
    @click.argument("key_id", metavar="ID")
    @click.pass_context
    def change(
        ctx: click.Context, config_path: Path, workspace_id: str | None, key_id: str
    ) -> None:
        config, chosen = load_chosen(config_path, workspace_id)
        changed = with_store(
            ctx,
            config,
            lambda store: change_key(
                store,
                config.workspaces,
                chosen,
                key_id,
                state,
                actor=operator(),
                now=now(),
                notes=erasures_path(config),
            ),
        )
        where = f"the key {safe(key_id)!r} of the workspace {safe(chosen)!r}"
        if not changed:
            click.echo(f"engage: {where} is {state} already", err=True)
        elif sys.stdout.isatty():
            click.echo(f"{where[0].upper()}{where[1:]} is {state}. {_IN_EFFECT}")
        else:
            click.echo(f"{state}\t{safe(key_id)}")


_changing(
    "disable",
    "disabled",
    "ios",
    "Refuse requests with a write key (403).\n\nThe key may be one of the config file.",
)
_changing("enable", "enabled", "ios", "Accept requests with a write key again.")
_changing(
    "archive",
    "archived",
    "ios-2024",
    "Disable a write key of the store for good.\n\nIt cannot be enabled again. Its id stays taken,"
    " because stored events have it.",
)


def _row(key: Key) -> tuple[str, ...]:
    state = "archived" if key.archived else "disabled" if key.disabled else "active"
    created = "-" if key.created_at is None else shown_time(key.created_at)
    return (
        *(key.workspace_id, key.id, key.key or "-", state, key.source, created, key.name or "-"),
        *(key.kind, ",".join(key.origins) or "-", ",".join(key.operations) or "-"),
        shown_rate(key.rate) or "-",
    )
