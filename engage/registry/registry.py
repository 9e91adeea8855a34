# SPDX-License-Identifier: Apache-2.0
"""What is installed, and what a config makes of it.

:func:`load_plugins` finds the plugins (:mod:`engage.registry.discovery` has the rules),
    :class:`Registry`
checks their options and makes storages, providers, transforms and observers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from engage.api import (
    ConfigError,
    DeadLetterBudget,
    EngageError,
    EventStore,
    Observer,
    ObserverFactory,
    ProfileLimits,
    ProfileStore,
    Provider,
    ProviderContext,
    ProviderFactory,
    StorageContext,
    StorageFactory,
    SubscriptionStore,
    Transform,
    TransformFactory,
)
from engage.config.schema_check import Path, SettingsError, dotted, nearest, problems, secret_values
from engage.registry.discovery import Found, Plugin, PluginError, Registered, discover

if TYPE_CHECKING:
    import click

    from engage.config import Config

__all__ = ["Plugin", "PluginError", "Registered", "Registry", "load_plugins", "shared_credentials"]

Made = TypeVar("Made")


def load_plugins(
    *, reserved_commands: Iterable[str] = (), entry_points: Iterable[Any] | None = None
) -> Registry:
    """Import every installed plugin.

    :param reserved_commands: names that no plugin's command may have.
    :param entry_points: instead of those installed.
    :raises PluginError: one of them is broken, or two do not go together.
    """
    return Registry(discover(reserved_commands=reserved_commands, entry_points=entry_points))


@dataclasses.dataclass(frozen=True, slots=True)
class _Use:
    """One place of a config that names something installed."""

    kind: str
    name: str
    options: Mapping[str, Any]
    #: Where its options stand in the file.
    at: Path
    #: Where its name stands.
    named_at: str


class Registry:
    """The installed plugins, as tables from name to what was registered."""

    def __init__(self, found: Found) -> None:
        self.plugins: Sequence[Plugin] = found.plugins
        self.commands: Mapping[str, click.Command] = found.commands
        self.command_plugins: Mapping[str, Plugin] = found.command_plugins
        self.storages: Mapping[str, Registered[StorageFactory]] = found.tables["storage"]
        self.webhooks: Mapping[str, Registered[ProviderFactory]] = found.tables["webhook"]
        self.transforms: Mapping[str, Registered[TransformFactory]] = found.tables["transform"]
        self.observers: Mapping[str, Registered[ObserverFactory]] = found.tables["observer"]
        self._tables = found.tables

    def check(self, config: Config) -> None:
        """Check all that a config says of plugins: their names and their options.

        :raises SettingsError: with all that is wrong.
        """
        found = [problem for use in _uses(config) for problem in self._problems(config, use)]
        found += self._shared_secrets(config)
        if found:
            raise SettingsError([f"{config.path}: {problem}" for problem in found])

    def make_storage(self, config: Config, *, had_store: bool = False) -> EventStore:
        """Make the chosen storage; it is not opened yet.

        :param had_store: see :attr:`StorageContext.had_store`.
        :raises ConfigError: it is unknown, its options are wrong, or it cannot do what the config
            asks for.
        """
        limits = config.limits
        context = StorageContext(
            base_dir=config.base_dir,
            identifiers={
                # Recipients of webhooks are looked up by e-mail and phone whatever is declared, and
                # a profile is indexed when it is written: before a provider is switched on.
                workspace.id: tuple(
                    dict.fromkeys((*workspace.subscription_identifiers, "email", "phone"))
                )
                for workspace in config.workspaces
            },
            profile_limits=ProfileLimits(
                traits=limits.user_traits,
                trait_bytes=limits.user_trait_bytes,
                links=limits.user_links,
                memberships=limits.user_memberships,
            ),
            dead_letter_budget=DeadLetterBudget(
                api_count=limits.dead_letter_count,
                api_bytes=limits.dead_letter_bytes,
                webhook_count=limits.webhook_dead_letter_count,
                webhook_bytes=limits.webhook_dead_letter_bytes,
            ),
            write_timeout=config.storage.write_timeout,
            had_store=had_store,
            events_days=config.retention.events_days,
            dead_letters_days=config.retention.dead_letters_days,
        )
        use = _storage_use(config)
        store: EventStore = self._make(config, use, context)
        for missing in _missing(config, store):
            raise ConfigError(f"{config.path}: the storage {use.name!r} {missing}")
        return store

    def make_webhooks(self, config: Config) -> Mapping[str, Mapping[str, Provider]]:
        """Make every enabled provider.

        :return: provider → workspace id → the provider for that workspace.
        :raises ConfigError: one is unknown, its options are wrong, or a secret is shared.
        """
        made: dict[str, dict[str, Provider]] = {}
        for workspace, use in _webhook_uses(config):
            context = ProviderContext(workspace_id=workspace, public_url=config.server.public_url)
            made.setdefault(use.name, {})[workspace] = self._make(config, use, context)
        for problem in (*self._shared_secrets(config), *shared_credentials(made)):
            raise ConfigError(f"{config.path}: {problem}")
        return made

    def make_transforms(self, config: Config) -> Sequence[tuple[str, Transform]]:
        """:return: (name, transform) in the order of the config."""
        return [(use.name, self._make(config, use)) for use in _transform_uses(config)]

    def make_observers(self, config: Config) -> Sequence[tuple[str, Observer]]:
        """:return: (name, observer)."""
        return [(use.name, self._make(config, use)) for use in _observer_uses(config)]

    def secrets(self, config: Config) -> Iterator[tuple[str, str]]:
        """:return: (kind of plugin, value) of each option in use that its schema marks
        ``writeOnly``."""
        for use in _uses(config):
            registered = self._tables[use.kind].get(use.name)
            if registered is not None:
                for _, value in secret_values(registered.schema, use.options):
                    yield use.kind, value

    # --------------------------------------------------------------------------------- internals
    def _make(self, config: Config, use: _Use, *context: Any) -> Any:
        for problem in self._problems(config, use):
            raise ConfigError(f"{config.path}: {problem}")
        registered = self._tables[use.kind][use.name]
        try:
            return registered.factory(use.options, *context)
        except ConfigError as error:
            where, said = dotted(use.at), str(error)
            option, colon, rule = said.partition(": ")
            if colon and option in registered.schema.get("properties", {}):
                where, said = dotted((*use.at, option)), rule
            raise ConfigError(f"{config.path}: {where}: {said}") from error
        except EngageError:
            raise
        except Exception as error:
            said = " ".join(f"{type(error).__name__}: {error}".split())
            for _, secret in secret_values(registered.schema, use.options):
                said = said.replace(secret, "***")
            raise PluginError(
                f'plugin "{registered.plugin}" (distribution {registered.distribution}): cannot'
                f" make the {use.kind} {use.name!r}: {said}"
            ) from error

    def _problems(self, config: Config, use: _Use) -> Iterator[str]:
        table = self._tables[use.kind]
        if use.name not in table:
            yield f"{use.named_at}: {self._unknown(use.kind, use.name)}"
            return
        written: Any = config.written
        try:
            for part in use.at:
                written = written[part]
        except (KeyError, IndexError, TypeError):
            written = {}
        yield from problems(table[use.name].schema, use.options, written=written, at=use.at)

    def _unknown(self, kind: str, name: str) -> str:
        names = list(self._tables[kind])
        meant = nearest(name, names)
        if meant is not None:
            return f"no {kind} {name!r} is installed; did you mean {meant!r}?"
        if not self.plugins:
            return (
                f"no {kind} {name!r}: no plugin is installed at all, as happens when engage runs"
                " from a folder without being installed; run pip install -e ."
            )
        listed = ", ".join(names) or "none"
        return f"no {kind} {name!r} is installed; there is: {listed}. Install its plugin with pip"

    def _shared_secrets(self, config: Config) -> list[str]:
        """A delivery must not verify in two workspaces."""
        seen: dict[str, tuple[str, str]] = {}
        found = []
        for workspace, use in _webhook_uses(config):
            registered = self.webhooks.get(use.name)
            if registered is None:
                continue
            for key, value in secret_values(registered.schema, use.options):
                where = f"{use.named_at}.{key}"
                other, first = seen.setdefault(value, (workspace, where))
                if other != workspace:
                    found.append(f"{where}: the same secret as {first}, of another workspace")
        return found


def shared_credentials(providers: Mapping[str, Mapping[str, Provider]]) -> list[str]:
    """:return: for each credential of one workspace that another has too, a sentence that names
    both. A delivery to one of them would verify in the other."""
    seen: dict[bytes, tuple[str, str]] = {}
    problems = []
    for name, enabled in providers.items():
        for workspace, provider in enabled.items():
            for credential in provider.credentials():
                other, where = seen.setdefault(credential, (workspace, name))
                if other != workspace:
                    problems.append(
                        f"workspaces {other!r} ({where}) and {workspace!r} ({name}) have the same"
                        " webhook secret: a delivery to one would verify in the other"
                    )
    return problems


def _uses(config: Config) -> Iterator[_Use]:
    yield _storage_use(config)
    for name, options in config.storage.tables.items():
        if name != config.storage.backend:
            yield _Use("storage", name, options, ("storage", name), f"storage.{name}")
    yield from _transform_uses(config)
    yield from _observer_uses(config)
    for _, use in _webhook_uses(config):
        yield use


def _storage_use(config: Config) -> _Use:
    storage = config.storage
    return _Use(
        "storage", storage.backend, storage.options, ("storage", storage.backend), "storage.backend"
    )


def _transform_uses(config: Config) -> Iterator[_Use]:
    for index, selected in enumerate(config.transforms):
        at = ("transforms", index, "options")
        yield _Use("transform", selected.name, selected.options, at, f"transforms[{index}].name")


def _observer_uses(config: Config) -> Iterator[_Use]:
    for selected in config.observers:
        at = ("observers", selected.name)
        yield _Use("observer", selected.name, selected.options, at, f"observers.{selected.name}")


def _webhook_uses(config: Config) -> Iterator[tuple[str, _Use]]:
    """:return: (workspace id, use)."""
    for index, workspace in enumerate(config.workspaces):
        for name, options in workspace.webhooks.items():
            at = ("workspaces", index, "webhooks", name)
            yield (
                workspace.id,
                _Use("webhook", name, options, at, f"workspaces[{index}].webhooks.{name}"),
            )


def _missing(config: Config, store: EventStore) -> Iterator[str]:
    """What the config asks for and the storage cannot do."""
    groups = any(workspace.subscription_groups for workspace in config.workspaces)
    secrets = any(workspace.subscription_secrets for workspace in config.workspaces)
    if groups and not isinstance(store, SubscriptionStore):
        yield "cannot keep subscriptions, and workspaces.subscription_groups is set"
    if secrets and not isinstance(store, ProfileStore):
        yield "keeps no profiles, and workspaces.subscription_secret is set: users are looked up"
