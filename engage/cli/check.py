# SPDX-License-Identifier: Apache-2.0
"""``engage check`` and ``engage plugins``: what a server would be made of."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import click

from engage.api import (
    DAY_MS,
    MAX_TIME,
    BudgetName,
    ConfigError,
    EngageError,
    StorageMissing,
    StorageOutdated,
)
from engage.cli.instance import DEFAULT_CONFIG, Instance, example, now, on_instance, registry_of
from engage.cli.output import CommandFailed, plural, print_table, safe
from engage.config import Config
from engage.keys.effective import EffectiveKeys, list_keys
from engage.monitoring.history import EVENTS, HOUR
from engage.people.erase import obstacle
from engage.pipeline.items import NOTICES
from engage.reading.scans import all_pages
from engage.registry import Registry
from engage.store.facade import Storage
from engage.upkeep.budgets import use_ratio

if TYPE_CHECKING:
    from engage.log.lag import Lag

#: The budgets of dead letters are shown from this ratio on.
SHOWN_RATIO: Final = 0.8
#: The purpose of a budget.
LETTERS: Final[Mapping[BudgetName, str]] = {
    "api": "refused items",
    "webhook": "deliveries",
    "conflict": "conflicts",
}


@click.command(epilog=example("check --config /etc/engage.toml"))
@on_instance()
def check(instance: Instance) -> None:
    """Check the config, the plugins, the storage and the log.

    It changes nothing, and works before the first start as well as while the server runs. The exit
    status is 1 if the server would not start.
    """
    config = instance.config
    _print("config", f"{instance.path}, {plural(len(config.workspaces), 'workspace')}")
    for workspace in config.workspaces:
        keys = sum(not key.disabled for key in workspace.write_keys)
        parts = [plural(keys, "write key")]
        if disabled := len(workspace.write_keys) - keys:
            parts.append(f"{disabled} disabled")
        if workspace.subscription_groups:
            parts.append(plural(len(workspace.subscription_groups), "subscription group"))
        if workspace.webhooks:
            parts.append("webhooks " + ", ".join(sorted(workspace.webhooks)))
        _print("workspace", f"{workspace.id}: {', '.join(parts)}")
    # Imported here, because no other command needs the sockets and the pages.
    from engage.handlers.preferences.looks import Looks
    from engage.server.serve import check_ports

    for warning in (*check_ports(config), *_exposures(config)):
        _print("warning", warning)

    Looks(config)
    registry = instance.registry
    registry.check(config)
    for warning in registry.warnings(config):
        _print("warning", warning)
    registry.make_storage(config)
    registry.make_log(config)
    registry.make_webhooks(config)
    registry.make_transforms(config)
    registry.make_observers(config)
    if problem := obstacle(config):
        _print("erasures", problem)
    files = [plugin.name for plugin in registry.plugins if plugin.project is None]
    installed = plural(len(registry.plugins) - len(files), "plugin")
    _print("plugins", ", ".join([f"{installed} installed", *files]))
    lag = instance.lag()
    if lag is not None:
        _show_lag(config, lag)
    try:
        instance.run(_show_storage, config)
    except (StorageMissing, StorageOutdated) as error:
        # Not a failure: a config can be checked before the first start, also of a new version.
        _print("storage", f"{config.storage.backend}: {error}")
    if lag is not None and (lag.error is not None or lag.gaps):
        raise EngageError(lag.alarms[0])
    if sys.stdout.isatty():
        click.secho("Everything is fine.", fg="green")


def _exposures(config: Config) -> Iterator[str]:
    """Yield a line for each secret that can be read on its way over the network."""
    from engage.http1.addresses import parsed_address

    def is_loopback(host: str) -> bool:
        address = parsed_address(host)
        return host == "localhost" if address is None else address.is_loopback

    console, public = config.console, urlsplit(config.server.public_url or "")
    tls = console is not None and urlsplit(console.public_url or "").scheme == "https"
    if console is not None and not tls and not is_loopback(console.host):
        yield (
            f"console.host: {console.host} serves the console without TLS beyond this machine:"
            " anyone who can read the traffic can take over a session; set console.public_url"
            " to its https URL, behind a reverse proxy"
        )
    signs = any(workspace.subscription_secrets for workspace in config.workspaces)
    if signs and public.scheme == "http" and not is_loopback(public.hostname or ""):
        yield "server.public_url: links to the preferences page can be read on the way; use https"


async def _show_storage(store: Storage, config: Config) -> None:
    """Print what an open store has, when all of it is read."""
    await store.check()
    uses = await store.budget_use()
    write_keys = await list_keys(store, config.workspaces)
    notices = await _notices(store)
    if config.log is not None:
        from engage.log.gaps import past_gaps

        notices += await past_gaps(store, now=now())
    software = "".join(f"; {name} {version}" for name, version in store.versions().items())
    _print("storage", f"{config.storage.backend}: open, accepts events{software}")
    for notice in notices:
        _print("warning", notice)
    _show_keys(config, write_keys)
    budget = config.limits.dead_letter_budget
    for use in uses:
        ratio = use_ratio(use, budget)
        if ratio >= SHOWN_RATIO:
            count, size = budget.of(use.budget)
            _print(
                "budget",
                f"{use.workspace_id}: {LETTERS[use.budget]} (limits.dead_letter_count,"
                f" limits.dead_letter_bytes) use {use.count} of {count} letters and"
                f" {use.size >> 20} of {size >> 20} MiB"
                + ("; no more are kept" if use.count >= count else ""),
            )


def _show_lag(config: Config, lag: Lag) -> None:
    """Print how far the storage is behind the log, and the alarms."""
    assert config.log is not None
    if lag.error is None:
        loaded = "everything is loaded"
        if lag.records:
            oldest = f", the oldest {lag.seconds:.0f} s ago" if lag.seconds else ""
            loaded = f"{plural(lag.records, 'record')} not loaded yet{oldest}"
        _print("log", f"{config.log.backend}: open, accepts events; {loaded}")
    for alarm in lag.alarms:
        _print("warning", alarm)


def _show_keys(config: Config, effective: EffectiveKeys) -> None:
    """Print the write keys that the store adds to those of the config, and their problems."""
    for workspace in config.workspaces:
        keys = [key for key in effective.keys if key.workspace_id == workspace.id]
        stored = [key for key in keys if key.source == "store"]
        off = sum(key.disabled for key in stored)
        parts = []
        if stored:
            disabled = f", {off} disabled" if off else ""
            parts.append(f"{plural(len(stored), 'write key')} in the store{disabled}")
        configured = [key for key in keys if key.source == "config"]
        overridden = sum(key.disabled and not key.disabled_in_config for key in configured)
        if overridden:
            parts.append(f"{plural(overridden, 'write key')} of the config disabled in the store")
        if parts:
            _print("keys", f"{workspace.id}: {'; '.join(parts)}")
    for problem in effective.problems:
        _print("warning", problem)


async def _notices(store: Storage) -> list[str]:
    """Return a line for each workspace with events that did not change all they should."""
    since = now() - DAY_MS
    read = functools.partial(store.counts, HOUR, since=since, until=MAX_TIME, names=(EVENTS,))
    notices: Counter[tuple[str, str]] = Counter()
    async for count in all_pages(read, attempts=1):
        if count.labels[1:] in NOTICES:
            notices[count.workspace_id, NOTICES[count.labels[1:]]] += count.total
    return [f"{key[0]}: {key[1].format(notices[key], 'in 24 hours')}" for key in sorted(notices)]


def _print(what: str, text: str) -> None:
    if sys.stdout.isatty():
        click.echo(click.style(f"{what:<10}", bold=True) + safe(text))
    else:
        click.echo(f"{what}\t{safe(text)}")


@click.command(epilog=example("plugins"))
@on_instance()
def plugins(instance: Instance) -> None:
    """List the installed plugins and what they provide.

    Shows the distribution of each plugin, and which ones the config uses.
    """
    config = None
    try:
        config = instance.config
    except ConfigError as error:
        # The list helps most while the config is wrong. The author of a plugin may have none.
        if instance.path.exists() or str(instance.path) != DEFAULT_CONFIG:
            CommandFailed(error).show()
    registry = registry_of(instance.ctx, config)
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
