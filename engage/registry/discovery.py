# SPDX-License-Identifier: Apache-2.0
"""Find the installed plugins and collect what they bring.

pluggy alone would drop a second entry point of the same name in silence, let an import error
through unnamed, and overlook a misspelt hook. Here each is a :class:`PluginError`: one line with
the plugin, the distribution it came with, and the cure.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import click
import jsonschema
import pluggy

from engage import hookspecs
from engage.api import ConfigError
from engage.config.schema_check import nearest

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["GROUP", "Found", "Plugin", "PluginError", "Registered", "discover"]

#: The entry-point group of plugins.
GROUP: Final = "engage"

#: What plugins may bring under a name, and the hook for it.
KINDS: Final = ("storage", "webhook", "transform", "observer")

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,63}", re.ASCII)
#: Keys of ``[storage]`` itself: ``[storage.<name>]`` stands beside them.
_RESERVED: Final = {"storage": frozenset({"backend"})}

Factory = TypeVar("Factory")


class PluginError(ConfigError):
    """A plugin is broken, or two do not go together. One line, with the cure."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """One entry point of the group ``engage``."""

    name: str
    #: What the entry point names: a module.
    target: str
    #: Name and version, such as ``engage-server 0.1.0``.
    distribution: str
    #: Name alone, as pip knows it.
    project: str

    def error(self, problem: str, cure: str) -> PluginError:
        """:return: the error to raise: one line that names this plugin."""
        said = f'plugin "{self.name}" ({self.target}, distribution {self.distribution})'
        return PluginError(f"{said}: {' '.join(problem.split())}; {cure}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Registered(Generic[Factory]):
    """One thing that a plugin brought."""

    name: str
    factory: Factory
    #: JSON Schema of its options.
    schema: Mapping[str, Any]
    #: The entry point's name.
    plugin: str
    #: Name and version.
    distribution: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """All that the installed plugins bring, each table sorted by name."""

    plugins: tuple[Plugin, ...]
    #: Kind (:data:`KINDS`) → name → what was registered.
    tables: Mapping[str, Mapping[str, Registered[Any]]]
    #: Subcommands, and the plugin that brought each.
    commands: Mapping[str, click.Command]
    command_plugins: Mapping[str, Plugin]


def discover(
    *, reserved_commands: Iterable[str] = (), entry_points: Iterable[Any] | None = None
) -> Found:
    """Import every installed plugin and let it register.

    :param reserved_commands: names of the built-in commands.
    :param entry_points: instead of those installed.
    :raises PluginError: something is wrong with one of them.
    """
    if entry_points is None:
        entry_points = metadata.entry_points(group=GROUP)
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hookspecs)
    plugins: dict[str, Plugin] = {}
    for entry_point in sorted(entry_points, key=lambda found: (found.name, found.value)):
        plugin = _plugin(entry_point)
        if (other := plugins.get(plugin.name)) is not None:
            raise plugin.error(
                f"the distribution {other.distribution} has a plugin of the same name",
                f"uninstall one of them: pip uninstall {plugin.project}",
            )
        plugins[plugin.name] = plugin
        _register(manager, plugin, _import(entry_point, plugin))
    tables = {kind: _table(manager, kind, plugins) for kind in KINDS}
    commands, brought_by = _commands(manager, plugins, frozenset(reserved_commands))
    return Found(
        plugins=tuple(plugins.values()),
        tables=tables,
        commands=commands,
        command_plugins=brought_by,
    )


# ------------------------------------------------------------------------------------- internals
def _plugin(entry_point: Any) -> Plugin:
    distribution = getattr(entry_point, "dist", None)
    project = distribution.name if distribution is not None else "unknown"
    version = f" {distribution.version}" if distribution is not None else ""
    return Plugin(
        name=entry_point.name,
        target=entry_point.value,
        distribution=project + version,
        project=project,
    )


def _import(entry_point: Any, plugin: Plugin) -> ModuleType:
    cure = f"install what it needs or remove it: pip uninstall {plugin.project}"
    try:
        module: ModuleType = entry_point.load()
    except Exception as error:
        raise plugin.error(f"cannot be imported: {_said(error)}", cure) from error
    return module


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _register(manager: pluggy.PluginManager, plugin: Plugin, module: ModuleType) -> None:
    known = [name for name in dir(hookspecs) if name.startswith("engage_")]
    implemented = 0
    for name, function in inspect.getmembers(module, inspect.isroutine):
        options = getattr(function, "engage_impl", None)
        hook = (options or {}).get("specname") or name
        if options is None:
            # An imported helper of that name is not what this looks for.
            if hook.startswith("engage_") and function.__module__ == module.__name__:
                raise plugin.error(
                    f"{hook} is not marked as a hook", "put @engage.api.hookimpl above it"
                )
            continue
        implemented += 1
        if hook not in known:
            meant = nearest(hook, known)
            hint = f"did you mean {meant}?" if meant else f"the hooks are {', '.join(known)}"
            raise plugin.error(f"there is no hook {hook}", hint)
        expected = list(inspect.signature(getattr(hookspecs, hook)).parameters)
        for argument in inspect.signature(function).parameters:
            if argument not in expected:
                raise plugin.error(
                    f"{hook} has an argument {argument!r} that the hook has not",
                    f"call it {' or '.join(map(repr, expected))}",
                )
    if not implemented:
        raise plugin.error(
            "it implements no hook", f"the hooks are {', '.join(known)}; mark each with hookimpl"
        )
    try:
        manager.register(module, name=plugin.name)
        manager.check_pending()
    except (pluggy.PluginValidationError, ValueError) as error:
        raise plugin.error(_said(error), f"pip uninstall {plugin.project} removes it") from error


def _call(plugin: Plugin, hook: str, function: Callable[..., Any], **arguments: Any) -> None:
    wanted = inspect.signature(function).parameters
    try:
        function(**{name: value for name, value in arguments.items() if name in wanted})
    except PluginError:
        raise
    except Exception as error:
        raise plugin.error(
            f"{hook} failed: {_said(error)}", f"pip uninstall {plugin.project} removes it"
        ) from error


def _table(
    manager: pluggy.PluginManager, kind: str, plugins: Mapping[str, Plugin]
) -> Mapping[str, Registered[Any]]:
    hook = f"engage_register_{kind}"
    table: dict[str, Registered[Any]] = {}

    def registering(plugin: Plugin) -> Callable[[str, Any, Mapping[str, Any]], None]:
        def register(name: str, factory: Any, options_schema: Mapping[str, Any]) -> None:
            _check(plugin, kind, name, factory, options_schema)
            if (other := table.get(name)) is not None:
                raise plugin.error(
                    f"there is a {kind} {name!r} already, from the plugin {other.plugin!r}"
                    f" of {other.distribution}",
                    "uninstall one of them, or give it another name",
                )
            table[name] = Registered(
                name=name,
                factory=factory,
                schema=options_schema,
                plugin=plugin.name,
                distribution=plugin.distribution,
            )

        return register

    for implementation in getattr(manager.hook, hook).get_hookimpls():
        plugin = plugins[implementation.plugin_name]
        _call(plugin, hook, implementation.function, register=registering(plugin))
    return dict(sorted(table.items()))


def _check(plugin: Plugin, kind: str, name: Any, factory: Any, schema: Any) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise plugin.error(
            f"{name!r} cannot be the name of a {kind}",
            "use 1 to 64 lower-case letters, digits and -, and begin with a letter or digit",
        )
    if name in _RESERVED.get(kind, ()):
        raise plugin.error(f"{name!r} is a key of [{kind}] itself", "use another name")
    if not callable(factory):
        raise plugin.error(f"the factory of {name!r} is not callable", "give a function or a class")
    if not isinstance(schema, Mapping):
        raise plugin.error(f"the options schema of {name!r} is not an object", "give a JSON Schema")
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise plugin.error(
            f"the options schema of {name!r} is no JSON Schema: {error.message[:200]}",
            "it is draft 2020-12",
        ) from error


class _Commands(click.Group):
    """Takes a plugin's commands and refuses names that are taken."""

    def __init__(self, reserved: frozenset[str]) -> None:
        super().__init__(name="engage")
        self.reserved = reserved
        self.adding: Plugin | None = None
        self.brought_by: dict[str, Plugin] = {}

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        name = name or cmd.name
        if self.adding is None or name is None:
            raise TypeError("a command needs a name")
        other = self.brought_by.get(name)
        if other is not None or name in self.reserved:
            owner = f"of the plugin {other.name!r}" if other else "of engage itself"
            raise self.adding.error(
                f"there is a command {name!r} {owner} already", "give it another name"
            )
        self.brought_by[name] = self.adding
        super().add_command(cmd, name)


def _commands(
    manager: pluggy.PluginManager, plugins: Mapping[str, Plugin], reserved: frozenset[str]
) -> tuple[Mapping[str, click.Command], Mapping[str, Plugin]]:
    group = _Commands(reserved)
    hook = "engage_register_commands"
    for implementation in getattr(manager.hook, hook).get_hookimpls():
        group.adding = plugins[implementation.plugin_name]
        _call(group.adding, hook, implementation.function, cli=group)
    return dict(sorted(group.commands.items())), group.brought_by
