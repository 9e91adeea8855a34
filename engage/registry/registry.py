# SPDX-License-Identifier: Apache-2.0
"""Check the options that a config gives to plugins, and make the selected objects.

:func:`load_plugins` finds the plugins; :mod:`engage.registry.discovery` has the rules. The
:class:`Registry` checks their options and makes storages, logs, providers, transforms and
observers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from engage.api import (
    ConfigError,
    EngageError,
    EventLog,
    LogContext,
    LogFactory,
    Observer,
    ObserverFactory,
    ProfileLimits,
    Provider,
    ProviderContext,
    ProviderFactory,
    StorageContext,
    Transform,
    TransformFactory,
)
from engage.config.removed import without_removed
from engage.config.schema_check import (
    Path,
    SettingsError,
    dotted,
    doubts,
    nearest,
    problems,
    secret_values,
)
from engage.registry.discovery import Discovered, Plugin, PluginError, Registered, discover
from engage.store.facade import Storage, StorageFactory

if TYPE_CHECKING:
    import click

    from engage.config import Config, LogConfig

__all__ = [
    "Plugin",
    "PluginError",
    "Registered",
    "Registry",
    "largest_record",
    "load_plugins",
    "shared_credentials",
]

Made = TypeVar("Made")

#: Bytes of a dead letter beside its item and its headers, at most: errors, ids, an envelope.
_LETTER_EXTRA: Final = 128 * 1024


def load_plugins(
    config: Config | None = None,
    *,
    reserved_commands: Iterable[str] = (),
    entry_points: Iterable[Any] | None = None,
) -> Registry:
    """Import every installed plugin.

    :param config: adds the plugins of its ``[plugins] files``.
    :param reserved_commands: names of the built-in commands, which plugins cannot use.
    :param entry_points: the entry points to use instead of the installed ones.
    :raises PluginError: if a plugin is broken, or if two plugins conflict.
    """
    files = [] if config is None else [config.base_dir / name for name in config.plugins.files]
    return Registry(
        discover(reserved_commands=reserved_commands, entry_points=entry_points, files=files)
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Use:
    """A place in a config that selects something a plugin registered."""

    kind: str
    name: str
    options: Mapping[str, Any]
    #: The path of its options in the file.
    at: Path
    #: The dotted key of its name.
    named_at: str


class Registry:
    """The installed plugins, as tables from a name to a registration."""

    def __init__(self, discovered: Discovered) -> None:
        self.plugins: Sequence[Plugin] = discovered.plugins
        #: Kind → name → registration. The five attributes below are these tables, typed.
        self.tables: Mapping[str, Mapping[str, Registered[Any]]] = discovered.tables
        self.commands: Mapping[str, click.Command] = discovered.commands
        self.command_plugins: Mapping[str, Plugin] = discovered.command_plugins
        self.storages: Mapping[str, Registered[StorageFactory]] = discovered.tables["storage"]
        self.logs: Mapping[str, Registered[LogFactory]] = discovered.tables["log"]
        self.webhooks: Mapping[str, Registered[ProviderFactory]] = discovered.tables["webhook"]
        self.transforms: Mapping[str, Registered[TransformFactory]] = discovered.tables["transform"]
        self.observers: Mapping[str, Registered[ObserverFactory]] = discovered.tables["observer"]

    def check(self, config: Config) -> None:
        """Check the names and options of plugins in a config.

        :raises SettingsError: if any is wrong; it lists all problems.
        """
        wrong = [problem for use in _uses(config) for problem in self._problems(config, use)]
        wrong += self._unsubscribe_problems(config)
        if wrong:
            raise SettingsError([f"{config.path}: {problem}" for problem in wrong])

    def warnings(self, config: Config) -> list[str]:
        """Return a line for each key of a config that has no effect, or less than it says, and for
        each secret that is probably not the one that was meant."""
        warnings = list(config.warnings)
        for use in _uses(config):
            if use.name in self.tables[use.kind]:
                schema = self.tables[use.kind][use.name].schema
                warnings += without_removed(schema, use.options, use.at)[1]
                warnings += doubts(schema, use.options, at=use.at)
        for index, workspace in enumerate(config.workspaces):
            groups = {group.channel for group in workspace.subscription_groups}
            for name, rule in workspace.unsubscribes.items():
                channels = self._channels(name)
                if rule.action == "channel" and not groups.intersection(channels):
                    warnings.append(
                        f"workspaces[{index}].unsubscribes.{name}: no choice of a user changes,"
                        f" because no subscription group has the channel {' or '.join(channels)}"
                    )
        return warnings

    def make_storage(
        self, config: Config, *, had_store: bool = False, supervised: bool = False
    ) -> Storage:
        """Make the chosen storage, without opening it.

        :param had_store: see :attr:`StorageContext.had_store`.
        :param supervised: see :attr:`StorageContext.supervised`.
        :raises ConfigError: if the storage is unknown, or if its options are wrong.
        """
        use = _storage_use(config)
        context = self.storage_context(config, had_store=had_store, supervised=supervised)
        store = self._make(config, use, context)
        if not isinstance(store, Storage):
            raise ConfigError(f"{config.path}: the storage {use.name!r} is not a Storage")
        return store

    def storage_context(
        self, config: Config, *, had_store: bool = False, supervised: bool = False
    ) -> StorageContext:
        """Return what the chosen storage is made with; see :meth:`make_storage`."""
        limits = config.limits
        return StorageContext(
            base_dir=config.base_dir,
            identifiers={
                # Recipients of webhooks are looked up by email and phone, whatever the config
                # declares. A profile is indexed when it is written, which may be before a provider
                # is enabled, so both are always indexed.
                workspace.id: tuple(
                    dict.fromkeys(
                        (
                            *workspace.subscription_identifiers,
                            "email",
                            "phone",
                            *self._identifiers(workspace.webhooks),
                        )
                    )
                )
                for workspace in config.workspaces
            },
            profile_limits=ProfileLimits(
                traits=limits.user_traits,
                trait_bytes=limits.user_trait_bytes,
                visitors=limits.visitors,
            ),
            dead_letter_budget=limits.dead_letter_budget,
            write_timeout=config.storage.write_timeout,
            had_store=had_store,
            supervised=supervised,
            events_days=config.retention.events_days,
            dead_letters_days=config.retention.dead_letters_days,
            erasures_key=config.erasures.key,
        )

    def make_log(self, config: Config) -> EventLog | None:
        """Make the chosen log, without opening it.

        :return: ``None`` if the config has no ``[log]``.
        :raises ConfigError: if the log is unknown, or if its options are wrong.
        """
        if config.log is None:
            return None
        context = LogContext(
            base_dir=config.base_dir,
            write_timeout=config.storage.write_timeout,
            max_value_bytes=largest_record(config),
        )
        log: EventLog = self._make(config, _log_use(config.log), context)
        return log

    def make_webhooks(self, config: Config) -> Mapping[str, Mapping[str, Provider]]:
        """Make every enabled provider.

        :return: name of the provider → workspace id → the provider for that workspace.
        :raises ConfigError: if a provider is unknown, if its options are wrong, or if two
            workspaces share a secret.
        """
        made: dict[str, dict[str, Provider]] = {}
        for workspace, use in _webhook_uses(config):
            context = ProviderContext(workspace_id=workspace, public_url=config.server.public_url)
            made.setdefault(use.name, {})[workspace] = self._make(config, use, context)
        for problem in (*self._unsubscribe_problems(config), *shared_credentials(made)):
            raise ConfigError(f"{config.path}: {problem}")
        return made

    def make_transforms(self, config: Config) -> Sequence[tuple[str, Transform]]:
        """Make the transforms.

        :return: (name, transform) in the order of the config.
        :raises ConfigError: if a transform is unknown or its options are wrong.
        """
        return [(use.name, self._make(config, use)) for use in _transform_uses(config)]

    def make_observers(self, config: Config) -> Sequence[tuple[str, Observer]]:
        """Make the observers.

        :return: (name, observer) in the order of the config.
        :raises ConfigError: if an observer is unknown or its options are wrong.
        """
        return [(use.name, self._make(config, use)) for use in _observer_uses(config)]

    def secrets(self, config: Config) -> Iterator[tuple[str, str]]:
        """Yield (kind, value) for each option in use that its schema marks ``writeOnly``."""
        for use in _uses(config):
            registered = self.tables[use.kind].get(use.name)
            if registered is not None:
                for _, value in secret_values(registered.schema, use.options):
                    yield use.kind, value

    # --------------------------------------------------------------------------------- internals
    def _make(self, config: Config, use: _Use, *context: Any) -> Any:
        for problem in self._problems(config, use):
            raise ConfigError(f"{config.path}: {problem}")
        registered = self.tables[use.kind][use.name]
        options, _ = without_removed(registered.schema, use.options)
        try:
            made = registered.factory(options, *context)
            if made is None:
                raise TypeError("the factory returned None")
            return made
        except ConfigError as error:
            key, message = dotted(use.at), str(error)
            option, colon, rule = message.partition(": ")
            if colon and option in registered.schema.get("properties", {}):
                key, message = dotted((*use.at, option)), rule
            raise ConfigError(f"{config.path}: {key}: {message}") from error
        except EngageError:
            raise
        except Exception as error:
            message = " ".join(f"{type(error).__name__}: {error}".split())
            for _, secret in secret_values(registered.schema, use.options):
                message = message.replace(secret, "***")
            raise PluginError(
                f'plugin "{registered.plugin}" (distribution {registered.distribution}): cannot'
                f" make the {use.kind} {use.name!r}: {message}"
            ) from error

    def erasure_requests(self, config: Config, workspace_id: str) -> list[tuple[str, str]]:
        """Return the events by which the providers of a workspace pass on that a person wants to be
        erased: (origin, name)."""
        providers = {name for x in config.workspaces if x.id == workspace_id for name in x.webhooks}
        return [
            (provider, name)
            for provider in sorted(providers)
            if (registered := self.webhooks.get(provider)) is not None
            for name in getattr(registered.factory, "erasure_requests", ())
        ]

    def _identifiers(self, providers: Iterable[str]) -> Iterator[str]:
        """Yield the traits by which the events of these providers find their users."""
        for name in providers:
            registered = self.webhooks.get(name)
            if registered is not None:
                yield from getattr(registered.factory, "identifiers", ())

    def _channels(self, provider: str) -> Sequence[str]:
        """Return the channels in which a provider reports opt-outs; empty if it is unknown."""
        registered = self.webhooks.get(provider)
        return () if registered is None else getattr(registered.factory, "opt_out_channels", ())

    def _unsubscribe_problems(self, config: Config) -> Iterator[str]:
        """Yield what is wrong with the providers of ``unsubscribes``."""
        for index, workspace in enumerate(config.workspaces):
            for name in workspace.unsubscribes:
                at = f"workspaces[{index}].unsubscribes.{name}"
                if name not in self.webhooks:
                    yield f"{at}: {self._unknown('webhook', name)}"
                elif name not in workspace.webhooks:
                    yield f"{at}: the workspace does not have [workspaces.webhooks.{name}]"
                elif not self._channels(name):
                    yield f"{at}: {name} reports neither unsubscribes nor bounces"

    def _problems(self, config: Config, use: _Use) -> Iterator[str]:
        table = self.tables[use.kind]
        if use.name not in table:
            yield f"{use.named_at}: {self._unknown(use.kind, use.name)}"
            return
        written: Any = config.written
        try:
            for part in use.at:
                written = written[part]
        except (KeyError, IndexError, TypeError):
            written = {}
        schema = table[use.name].schema
        options, _ = without_removed(schema, use.options)
        yield from problems(schema, options, written=written, at=use.at)

    def _unknown(self, kind: str, name: str) -> str:
        thing = "webhook provider" if kind == "webhook" else kind
        names = list(self.tables[kind])
        meant = nearest(name, names)
        if meant is not None:
            return f"no {thing} {name!r} is installed; did you mean {meant!r}?"
        if not self.plugins:
            return (
                f"no {thing} {name!r} is installed, because no plugin is installed at all; if"
                " engage runs from a checkout, run pip install -e . there"
            )
        installed = ", ".join(names) or "none"
        return (
            f"no {thing} {name!r} is installed; install its plugin with pip, or name its file in"
            f" plugins.files (installed: {installed})"
        )


def shared_credentials(providers: Mapping[str, Mapping[str, Provider]]) -> list[str]:
    """Report credentials that two workspaces share: a delivery must not verify in both.

    :param providers: name of a provider → workspace id → the provider for that workspace.
    :return: a sentence for each shared credential, which names both tables of the config.
    """
    seen: dict[bytes, tuple[str, str]] = {}
    problems = []
    for name, enabled in providers.items():
        for workspace, provider in enabled.items():
            for credential in provider.credentials():
                other, where = seen.setdefault(credential, (workspace, name))
                if other != workspace:
                    problems.append(
                        f"[workspaces.webhooks.{name}] of the workspace {workspace!r} has the same"
                        f" secret as [workspaces.webhooks.{where}] of the workspace {other!r}, so a"
                        " delivery to one would verify in the other; use a different secret"
                    )
    return problems


def _uses(config: Config) -> Iterator[_Use]:
    yield _storage_use(config)
    for name, options in config.storage.tables.items():
        if name != config.storage.backend:
            yield _Use("storage", name, options, ("storage", name), f"storage.{name}")
    if config.log is not None:
        yield _log_use(config.log)
        for name, options in config.log.tables.items():
            if name != config.log.backend:
                yield _Use("log", name, options, ("log", name), f"log.{name}")
    yield from _transform_uses(config)
    yield from _observer_uses(config)
    for _, use in _webhook_uses(config):
        yield use


def _storage_use(config: Config) -> _Use:
    storage = config.storage
    return _Use(
        "storage", storage.backend, storage.options, ("storage", storage.backend), "storage.backend"
    )


def _log_use(log: LogConfig) -> _Use:
    return _Use("log", log.backend, log.options, ("log", log.backend), "log.backend")


def _transform_uses(config: Config) -> Iterator[_Use]:
    for index, selected in enumerate(config.transforms):
        at = ("transforms", index, "options")
        yield _Use("transform", selected.name, selected.options, at, f"transforms[{index}].name")


def _observer_uses(config: Config) -> Iterator[_Use]:
    for selected in config.observers:
        at = ("observers", selected.name)
        yield _Use("observer", selected.name, selected.options, at, f"observers.{selected.name}")


def _webhook_uses(config: Config) -> Iterator[tuple[str, _Use]]:
    """Yield (workspace id, use)."""
    for index, workspace in enumerate(config.workspaces):
        for name, options in workspace.webhooks.items():
            at = ("workspaces", index, "webhooks", name)
            options = {option: value for option, value in options.items() if option != "trusted"}
            yield (
                workspace.id,
                _Use("webhook", name, options, at, f"workspaces[{index}].webhooks.{name}"),
            )


def largest_record(config: Config) -> int:
    """Return the size in bytes that the value of a record can have.

    The largest one is a dead letter, whose item is in Base64: a refused item, a conflict, or the
    body of a delivery.
    """
    limits = config.limits
    item = limits.event_bytes
    if any(workspace.webhooks for workspace in config.workspaces):
        item = max(item, limits.webhook_event_bytes, limits.webhook_body_bytes)
    return 4 * -(-item // 3) + 2 * limits.header_bytes + _LETTER_EXTRA
