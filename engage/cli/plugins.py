# SPDX-License-Identifier: Apache-2.0
"""``engage plugins``."""

from __future__ import annotations

from pathlib import Path

import click

from engage.api import ConfigError
from engage.cli.common import (
    DEFAULT_CONFIG,
    CommandFailed,
    config_option,
    print_table,
    registry_of,
)
from engage.config import Config, load
from engage.registry import Registry


@click.command(epilog="\b\nExample:\n  engage plugins")
@config_option
@click.pass_context
def plugins(ctx: click.Context, config_path: Path) -> None:
    """List the installed plugins and what they provide.

    Shows the distribution of each plugin, and which ones the config uses.
    """
    config = None
    try:
        config = load(config_path)
    except ConfigError as error:
        # The list helps most while the config is wrong. The author of a plugin may have none.
        if config_path.exists() or config_path != Path(DEFAULT_CONFIG):
            CommandFailed(error).show()
    registry = registry_of(ctx, config)
    print_table(("KIND", "NAME", "PLUGIN", "DISTRIBUTION", "USED"), _rows(registry, config))


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
