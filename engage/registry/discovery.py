# SPDX-License-Identifier: Apache-2.0
"""Find the plugins, which are installed or single files, and collect their registrations.

pluggy alone would silently drop a second entry point of the same name, raise an import error
without naming the plugin, and ignore a misspelt hook. Here each of these is a :class:`PluginError`:
one line that names the plugin, its distribution and what to do.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import click
import jsonschema
import jsonschema_rs
import pluggy

from engage import hookspecs
from engage.api import API_ORIGIN, OPERATOR_ORIGIN, ConfigError, OptionsSchema, Register
from engage.config.schema_check import nearest

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

__all__ = ["GROUP", "KINDS", "Discovered", "Plugin", "PluginError", "Registered", "discover"]

#: The entry-point group of plugins.
GROUP: Final = "engage"

#: What plugins can register by name; the hook for it is ``engage_register_<kind>``.
KINDS: Final = ("storage", "log", "webhook", "transform", "observer")

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,63}", re.ASCII)
#: Keys of ``[storage]`` and ``[log]``, which a table ``[storage.<name>]`` would collide with. A key
#: with an underscore is not a name of a plugin.
_RESERVED: Final = {
    "storage": frozenset({"backend"}),
    "log": frozenset({"backend", "group", "loaders"}),
}
#: The name of a provider is the origin of its events, and these origins are not of providers.
_ORIGINS: Final = frozenset({API_ORIGIN, OPERATOR_ORIGIN})

#: The draft of every schema of options.
_DRAFT: Final = "https://json-schema.org/draft/2020-12/schema"
#: The schema of options that a plugin registers without a schema.
_NO_OPTIONS: Final = {"type": "object", "additionalProperties": False}

Factory = TypeVar("Factory")


class PluginError(ConfigError):
    """A plugin is broken, or two plugins conflict. The message is one line that says what to do."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """One entry point of the group ``engage``, or one file of ``[plugins] files``."""

    name: str
    #: The module that the entry point names, or the path of the file.
    target: str
    #: Name and version of the distribution, such as ``engage-server 0.1.0``; or the path.
    distribution: str
    #: Name of the distribution, as pip uses it; ``None``: the plugin is a file.
    project: str | None

    @property
    def removal(self) -> str:
        """What to do to remove it."""
        if self.project is None:
            return "remove it from plugins.files"
        return f"remove it with pip uninstall {self.project}"

    def error(self, problem: str, cure: str) -> PluginError:
        """Return the error to raise: one line with this plugin, the problem and what to do."""
        who = f'plugin "{self.name}" ({self.target}, distribution {self.distribution})'
        if self.project is None:
            who = f"plugin file {self.target}"
        return PluginError(f"{who}: {' '.join(problem.split())}; {cure}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Registered(Generic[Factory]):
    """A storage, log, webhook provider, transform or observer that a plugin registered."""

    name: str
    factory: Factory
    #: JSON Schema of its options.
    schema: Mapping[str, Any]
    #: Name of the plugin's entry point.
    plugin: str
    #: Name and version of the plugin's distribution.
    distribution: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Discovered:
    """Everything that the installed plugins register, each table sorted by name."""

    plugins: tuple[Plugin, ...]
    #: Kind (:data:`KINDS`) → name → registration.
    tables: Mapping[str, Mapping[str, Registered[Any]]]
    commands: Mapping[str, click.Command]
    #: Name of a command → the plugin that registered it.
    command_plugins: Mapping[str, Plugin]


def discover(
    *,
    reserved_commands: Iterable[str] = (),
    entry_points: Iterable[Any] | None = None,
    files: Iterable[Path] = (),
) -> Discovered:
    """Import every installed plugin and call its hooks.

    :param reserved_commands: names of the built-in commands, which plugins cannot use.
    :param entry_points: the entry points to use instead of the installed ones.
    :param files: Python files, each of which is a plugin too.
    :raises PluginError: if a plugin is broken, or if two plugins conflict.
    """
    if entry_points is None:
        entry_points = metadata.entry_points(group=GROUP)
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hookspecs)
    plugins: dict[str, Plugin] = {}
    for entry_point in sorted(entry_points, key=lambda point: (point.name, point.value)):
        plugin = _plugin(entry_point)
        if (other := plugins.get(plugin.name)) is not None:
            raise plugin.error(
                f"the distribution {other.distribution} has a plugin with the same name",
                f"uninstall one of them: pip uninstall {plugin.project}",
            )
        plugins[plugin.name] = plugin
        _register(manager, plugin, _import(plugin, entry_point.load, "install what it needs"))
    for path in files:
        plugin = Plugin(name=path.name, target=str(path), distribution=str(path), project=None)
        if (other := plugins.get(plugin.name)) is not None:
            raise plugin.error(f"{other.target} has the same name", "rename one of them")
        plugins[plugin.name] = plugin
        load = functools.partial(_run_file, path)
        _register(manager, plugin, _import(plugin, load, "correct the file"))
    tables = {kind: _table(manager, kind, plugins) for kind in KINDS}
    commands, plugin_of = _commands(manager, plugins, frozenset(reserved_commands))
    return Discovered(
        plugins=tuple(plugins.values()),
        tables=tables,
        commands=commands,
        command_plugins=plugin_of,
    )


# ------------------------------------------------------------------------------------- internals
@functools.cache
def _name_and_version(distribution: metadata.Distribution | None) -> tuple[str, str]:
    # Each of the two parses the metadata, and one distribution has many plugins.
    return ("unknown", "") if distribution is None else (distribution.name, distribution.version)


def _plugin(entry_point: Any) -> Plugin:
    project, version = _name_and_version(getattr(entry_point, "dist", None))
    return Plugin(
        name=entry_point.name,
        target=entry_point.value,
        distribution=f"{project} {version}".rstrip(),
        project=project,
    )


def _import(plugin: Plugin, load: Callable[[], ModuleType], otherwise: str) -> ModuleType:
    try:
        return load()
    except (Exception, SystemExit) as error:  # As at the end of a script.
        raise plugin.error(
            f"cannot be imported: {_describe(error, plugin)}", f"{otherwise}, or {plugin.removal}"
        ) from error


def _run_file(path: Path) -> ModuleType:
    """Run a file as a module. Nothing is written beside it, as an import would do."""
    module = types.ModuleType(f"engage_file_{path.stem}")
    module.__file__ = str(path)
    code = compile(path.read_bytes(), path, "exec", dont_inherit=True)
    sys.modules[module.__name__] = module
    exec(code, module.__dict__)  # noqa: S102 - the operator's own code
    return module


def _describe(error: BaseException, plugin: Plugin) -> str:
    """Return type and message of an error, and the line if a file raised it."""
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == plugin.target]
    return f"{said} (line {lines[-1]})" if lines else said


def _register(manager: pluggy.PluginManager, plugin: Plugin, module: ModuleType) -> None:
    hooks = [name for name in dir(hookspecs) if name.startswith("engage_")]
    implemented = 0
    for name, function in inspect.getmembers(module, inspect.isroutine):
        options = getattr(function, "engage_impl", None)
        hook = (options or {}).get("specname") or name
        if options is None:
            # An imported function with the name of a hook is not a forgotten hook.
            if hook.startswith("engage_") and function.__module__ == module.__name__:
                raise plugin.error(
                    f"{hook} is not marked as a hook", "decorate it with @engage.api.hookimpl"
                )
            continue
        implemented += 1
        if hook not in hooks:
            meant = nearest(hook, hooks)
            hint = f"did you mean {meant}?" if meant else f"the hooks are {', '.join(hooks)}"
            raise plugin.error(f"there is no hook named {hook}", hint)
    if not implemented:
        raise plugin.error(
            "it does not implement a hook",
            f"the hooks are {', '.join(hooks)}; decorate each with hookimpl",
        )
    try:
        manager.register(module, name=plugin.name)
        manager.check_pending()
    except (pluggy.PluginValidationError, ValueError) as error:
        raise plugin.error(_describe(error, plugin), plugin.removal) from error


def _call(plugin: Plugin, hook: str, function: Callable[..., Any], **arguments: Any) -> None:
    parameters = inspect.signature(function).parameters
    try:
        function(**{name: value for name, value in arguments.items() if name in parameters})
    except PluginError:
        raise
    except (Exception, SystemExit) as error:
        raise plugin.error(f"{hook} failed: {_describe(error, plugin)}", plugin.removal) from error


def _table(
    manager: pluggy.PluginManager, kind: str, plugins: Mapping[str, Plugin]
) -> Mapping[str, Registered[Any]]:
    hook = f"engage_register_{kind}"
    table: dict[str, Registered[Any]] = {}

    def registering(plugin: Plugin) -> Register[Any]:
        def register(name: str, factory: Any, options_schema: OptionsSchema | None = None) -> None:
            schema = _NO_OPTIONS if options_schema is None else options_schema
            _check(plugin, kind, name, factory, schema)
            if (other := table.get(name)) is not None:
                raise plugin.error(
                    f"the {kind} {name!r} is already registered by the plugin {other.plugin!r}"
                    f" of {other.distribution}",
                    "uninstall one of them, or use another name",
                )
            table[name] = Registered(
                name=name,
                factory=factory,
                schema=_with_secrets(schema, factory),
                plugin=plugin.name,
                distribution=plugin.distribution,
            )

        return register

    for implementation in getattr(manager.hook, hook).get_hookimpls():
        plugin = plugins[implementation.plugin_name]
        _call(plugin, hook, implementation.function, register=registering(plugin))
    return dict(sorted(table.items()))


def _with_secrets(schema: Mapping[str, Any], factory: Any) -> Mapping[str, Any]:
    """Mark the options that a provider reads as secrets, which its schema may not do."""
    names = {getattr(factory, "secret_option", ""), *getattr(factory, "secret_options", ())}
    options = {
        name: {**rule, "writeOnly": True} if name in names and isinstance(rule, Mapping) else rule
        for name, rule in schema.get("properties", {}).items()
    }
    return {**schema, "properties": options} if options else schema


def _check(plugin: Plugin, kind: str, name: Any, factory: Any, schema: Any) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise plugin.error(
            f"{name!r} is not a valid name of a {kind}",
            "use 1 to 64 lower-case letters, digits and -, and start with a letter or digit",
        )
    if name in _RESERVED.get(kind, ()):
        raise plugin.error(f"{name!r} is a key of the section [{kind}]", "use another name")
    if kind == "webhook" and name in _ORIGINS:
        raise plugin.error(f"{name!r} is the origin of other events", "use another name")
    if not callable(factory):
        raise plugin.error(f"the factory of {name!r} is not callable", "pass a function or a class")
    if not isinstance(schema, Mapping):
        raise plugin.error(f"the options schema of {name!r} is not an object", "pass a JSON Schema")
    try:
        # The fast check spares each process and command 0.2 s; the other one explains the error.
        if not jsonschema_rs.meta.is_valid({**schema, "$schema": _DRAFT}):
            jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise plugin.error(
            f"the options schema of {name!r} is not a valid JSON Schema: {error.message[:200]}",
            "write it for draft 2020-12",
        ) from error


class _Commands(click.Group):
    """Collects the commands of plugins and rejects names that are already used."""

    def __init__(self, reserved: frozenset[str]) -> None:
        super().__init__(name="engage")
        self.reserved = reserved
        self.adding: Plugin | None = None
        self.plugin_of: dict[str, Plugin] = {}

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        name = name or cmd.name
        if self.adding is None or name is None:
            raise TypeError("a command needs a name")
        other = self.plugin_of.get(name)
        if other is not None or name in self.reserved:
            owner = f"the plugin {other.name!r}" if other else "engage itself"
            raise self.adding.error(
                f"the command name {name!r} is already used by {owner}", "use another name"
            )
        self.plugin_of[name] = self.adding
        super().add_command(cmd, name)


def _commands(
    manager: pluggy.PluginManager, plugins: Mapping[str, Plugin], reserved: frozenset[str]
) -> tuple[Mapping[str, click.Command], Mapping[str, Plugin]]:
    group = _Commands(reserved)
    hook = "engage_register_commands"
    for implementation in getattr(manager.hook, hook).get_hookimpls():
        group.adding = plugins[implementation.plugin_name]
        if group.adding.project is None:
            raise group.adding.error("a file cannot add commands", "make a distribution of it")
        _call(group.adding, hook, implementation.function, cli=group)
    return dict(sorted(group.commands.items())), group.plugin_of
