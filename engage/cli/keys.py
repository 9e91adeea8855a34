# SPDX-License-Identifier: Apache-2.0
"""``engage keys``."""

from __future__ import annotations

import sys
from typing import Any, Final

import click

from engage.api import EngageError
from engage.cli.instance import Instance, example, now, on_instance, operator
from engage.cli.output import print_table, safe, shown_time, warn
from engage.config import Config
from engage.config.erasures_file import erasures_path
from engage.keys import changes
from engage.keys.effective import Key, list_keys, rate_of, shown_rate, words
from engage.store.facade import Storage

__all__ = ["change_key", "keys"]

_WORKSPACE: Final = "The workspace of the key, if there are several."
_COLUMNS: Final = (
    *("WORKSPACE", "ID", "KEY", "STATE", "SOURCE", "CREATED", "NAME"),
    *("KIND", "ORIGINS", "OPERATIONS", "RATE"),
)
_IN_EFFECT: Final = "The server follows within 2.5 seconds; it need not be restarted."


@click.group(epilog=example("keys add --workspace acme --id ios --name 'iOS app'"))
def keys() -> None:
    """Create, disable and list write keys.

    Keys of the config file can be listed and disabled; keys that are created here are in the store.
    A running server follows within 2.5 seconds.
    """


@keys.command("list", epilog=example("keys list --workspace acme"))
@on_instance("Only the keys of this workspace.", reads_with=("write_keys",))
def list_(instance: Instance) -> None:
    """List all write keys, also those that are disabled.

    Each line has: workspace, id, key (a server key is not known), state (active, disabled or
    archived), source (config or store), time of creation, name, kind (public or server), origins,
    operations, rate.
    """
    chosen = {workspace.id for workspace in instance.workspaces}
    effective = instance.run(list_keys, instance.config.workspaces)
    print_table(_COLUMNS, [_row(key) for key in effective.keys if key.workspace_id in chosen])
    for problem in effective.problems:
        warn(problem)


@keys.command("add", epilog=example("keys add --workspace acme --id ios"))
@on_instance(_WORKSPACE)
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
def add(
    instance: Instance,
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
    options: dict[str, Any] = {
        "kind": kind,
        "origins": words(origins),
        "operations": words(operations),
        "rate": rate_of(rate),
    }
    workspace = instance.workspace.id
    for problem in instance.config.cors.missing(words(origins)):
        raise EngageError(problem)
    key = instance.run(
        changes.create_key,
        *(instance.config.workspaces, workspace, key_id),
        name=name,
        options={option: value for option, value in options.items() if value},
        actor=operator(),
        now=now(),
    )
    click.echo(key.key)


async def change_key(
    store: Storage, config: Config, workspace_id: str, key_id: str, state: changes.KeyState
) -> bool:
    """Change a key as the operator; see :func:`engage.keys.changes.change_key`."""
    given = (config.workspaces, workspace_id, key_id, state)
    notes = erasures_path(config)
    return await changes.change_key(store, *given, actor=operator(), now=now(), notes=notes)


def _changing(name: str, state: changes.KeyState, key: str, text: str) -> None:
    @keys.command(name, help=text, epilog=example(f"keys {name} --workspace acme {key}"))
    @on_instance(_WORKSPACE)
    @click.argument("key_id", metavar="ID")
    def change(instance: Instance, key_id: str) -> None:
        workspace = instance.workspace.id
        changed = instance.run(change_key, instance.config, workspace, key_id, state)
        where = f"the key {safe(key_id)!r} of the workspace {safe(workspace)!r}"
        if not changed:
            warn(f"{where} is {state} already")
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
