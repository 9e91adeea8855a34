# SPDX-License-Identifier: Apache-2.0
"""``engage check``."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import click

from engage.api import (
    BudgetName,
    BudgetUse,
    DeadLetterStore,
    EngageError,
    StorageMissing,
    StorageUnavailable,
)
from engage.cli.common import config_option, opened, registry_of, safe
from engage.config import Config, load
from engage.registry import Registry
from engage.storage.budgets import use_ratio
from engage.storage.keys import EffectiveKeys, list_keys
from engage.storage.log_progress import Progress, past_gaps, read_progress

#: The budgets of dead letters are shown from this ratio on.
SHOWN_RATIO: Final = 0.8
#: What a budget is for.
LETTERS: Final[Mapping[BudgetName, str]] = {
    "api": "refused items (limits.dead_letter_count, limits.dead_letter_bytes)",
    "webhook": "deliveries (limits.webhook_dead_letter_count, limits.webhook_dead_letter_bytes)",
    "conflict": "conflicts (limits.conflict_count, limits.conflict_bytes)",
}


@click.command(epilog="\b\nExample:\n  engage check --config /etc/engage.toml")
@config_option
@click.pass_context
def check(ctx: click.Context, config_path: Path) -> None:
    """Check the config, the plugins, the storage and the log."""
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
    registry.make_log(config)
    registry.make_webhooks(config)
    registry.make_transforms(config)
    registry.make_observers(config)
    _print("plugins", f"{_count(len(registry.plugins), 'plugin')} installed")
    progress = asyncio.run(_log(registry, config))
    if progress is not None:
        _show_progress(config, progress)
    notices, uses, write_keys, gaps = asyncio.run(_storage(registry, config))
    _print("storage", f"{config.storage.backend}: open, accepts events")
    for notice in notices:
        _print("notice", notice)
    for gap in gaps:
        _print("warning", gap)
    _show_keys(config, write_keys)
    budget = config.limits.dead_letter_budget
    for use in uses:
        ratio = use_ratio(use, budget)
        if ratio >= SHOWN_RATIO:
            count, size = budget.of(use.budget)
            _print(
                "budget",
                f"{use.workspace_id}: {LETTERS[use.budget]} use {use.count} of {count} letters and"
                f" {use.size >> 20} of {size >> 20} MiB"
                + ("; no more are kept" if use.count >= count else ""),
            )
    if progress is not None and (progress.error is not None or progress.gaps):
        raise EngageError(progress.alarms[0])
    if sys.stdout.isatty():
        click.secho("Everything is fine.", fg="green")


def _show_progress(config: Config, progress: Progress) -> None:
    """Print how far the loaders are, and what needs attention."""
    assert config.log is not None
    if progress.error is None:
        loaded = "everything is loaded"
        if progress.records:
            oldest = f", the oldest {progress.seconds:.0f} s ago" if progress.seconds else ""
            loaded = f"{_count(progress.records, 'record')} not loaded yet{oldest}"
        _print("log", f"{config.log.backend}: open, accepts events; {loaded}")
    for alarm in progress.alarms:
        _print("warning", alarm)


async def _log(registry: Registry, config: Config) -> Progress | None:
    """Return how far the loaders are; ``None`` if there is no log.

    :raises StorageIncompatible: if a server would not start on this log.
    """
    log = registry.make_log(config)
    if log is None or config.log is None:
        return None
    seconds = config.storage.write_timeout
    try:
        await log.open(create=False)
        await log.check()
        return await read_progress(log, config.log, now=_now(), seconds=seconds)
    except (StorageMissing, StorageUnavailable) as error:
        return Progress(backlog=None, error=str(error))
    finally:
        await log.close()


def _show_keys(config: Config, found: EffectiveKeys) -> None:
    """Print what the store adds to the write keys of the config, and what is wrong with it."""
    for workspace in config.workspaces:
        keys = [key for key in found.keys if key.workspace_id == workspace.id]
        stored = [key for key in keys if key.source == "store"]
        off = sum(key.disabled for key in stored)
        parts = []
        if stored:
            disabled = f", {off} disabled" if off else ""
            parts.append(f"{_count(len(stored), 'write key')} in the store{disabled}")
        configured = [key for key in keys if key.source == "config"]
        overridden = sum(key.disabled and not key.disabled_in_config for key in configured)
        if overridden:
            parts.append(f"{_count(overridden, 'write key')} of the config disabled in the store")
        if parts:
            _print("keys", f"{workspace.id}: {'; '.join(parts)}")
    for problem in found.problems:
        _print("warning", problem)


async def _storage(
    registry: Registry, config: Config
) -> tuple[Sequence[str], Sequence[BudgetUse], EffectiveKeys, Sequence[str]]:
    async with opened(registry, config) as store:
        notices = await store.notices()
        await store.check()
        uses = await store.budget_use() if isinstance(store, DeadLetterStore) else ()
        keys = await list_keys(store, config.workspaces)
        gaps: Sequence[str] = ()
        if config.log is not None:
            gaps = await past_gaps(store, now=_now())
        return notices, uses, keys, gaps


def _now() -> int:
    return time.time_ns() // 1_000_000


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _print(what: str, text: str) -> None:
    if sys.stdout.isatty():
        click.echo(click.style(f"{what:<10}", bold=True) + safe(text))
    else:
        click.echo(f"{what}\t{safe(text)}")
