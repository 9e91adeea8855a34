# SPDX-License-Identifier: Apache-2.0
"""``engage plugins``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from engage.api import ConfigError
from engage.cli.common import CommandFailed, config_option, registry_of, safe
from engage.config import Config, load
from engage.registry import Registry


@click.command(epilog="\b\nExample:\n  engage plugins")
@config_option
@click.pass_context
def plugins(ctx: click.Context, config_path: Path) -> None:
    """List the installed plugins and what they provide.

    Shows the distribution of each plugin, and which ones the config uses.
    """
    registry = registry_of(ctx)
    config = None
    try:
        config = load(config_path)
    except ConfigError as error:
        # The list helps most while the config is wrong.
        CommandFailed(error).show()
    rows = _rows(registry, config)
    if not sys.stdout.isatty():
        for row in rows:
            click.echo("\t".join(map(safe, row)))
        return
    table = [("KIND", "NAME", "PLUGIN", "DISTRIBUTION", "USED"), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(4)]
    for number, row in enumerate(table):
        cells = [cell.ljust(width) for cell, width in zip(row[:4], widths, strict=True)]
        click.secho(safe("  ".join([*cells, row[4]]).rstrip()), bold=number == 0)


def _rows(registry: Registry, config: Config | None) -> list[tuple[str, str, str, str, str]]:
    used: dict[str, set[str]] = {}
    if config is not None:
        used = {
            "storage": {config.storage.backend},
            "log": set() if config.log is None else {config.log.backend},
            "webhook": {name for workspace in config.workspaces for name in workspace.webhooks},
            "transform": {selected.name for selected in config.transforms},
            "observer": {selected.name for selected in config.observers},
        }
    rows = []
    for kind, table in registry.tables.items():
        for name, registered in table.items():
            mark = "used" if name in used.get(kind, ()) else "-"
            rows.append((kind, name, registered.plugin, registered.distribution, mark))
    for name, plugin in registry.command_plugins.items():
        rows.append(("command", name, plugin.name, plugin.distribution, "-"))
    return rows
