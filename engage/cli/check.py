# SPDX-License-Identifier: Apache-2.0
"""``engage check``."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import click

from engage.cli.common import config_option, opened, registry_of, safe
from engage.config import Config, load
from engage.registry import Registry


@click.command(epilog="\b\nExample:\n  engage check --config /etc/engage.toml")
@config_option
@click.pass_context
def check(ctx: click.Context, config_path: Path) -> None:
    """Check the config, the plugins and the storage."""
    config = load(config_path)
    _print("config", f"{config_path}, {_count(len(config.workspaces), 'workspace')}")
    for workspace in config.workspaces:
        keys = sum(not key.disabled for key in workspace.write_keys)
        parts = [_count(keys, "write key")]
        if disabled := len(workspace.write_keys) - keys:
            parts.append(f"{disabled} disabled")
        if workspace.subscription_groups:
            parts.append(_count(len(workspace.subscription_groups), "subscription group"))
        if workspace.webhooks:
            parts.append("webhooks " + ", ".join(sorted(workspace.webhooks)))
        _print("workspace", f"{workspace.id}: {', '.join(parts)}")
    registry = registry_of(ctx)
    registry.check(config)
    registry.make_webhooks(config)
    registry.make_transforms(config)
    registry.make_observers(config)
    _print("plugins", f"{_count(len(registry.plugins), 'plugin')} installed")
    asyncio.run(_storage(registry, config))
    _print("storage", f"{config.storage.backend}: open, accepts events")
    if sys.stdout.isatty():
        click.secho("Everything is fine.", fg="green")


async def _storage(registry: Registry, config: Config) -> None:
    async with opened(registry, config) as store:
        await store.check()


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _print(what: str, text: str) -> None:
    if sys.stdout.isatty():
        click.echo(click.style(f"{what:<10}", bold=True) + safe(text))
    else:
        click.echo(f"{what}\t{safe(text)}")
