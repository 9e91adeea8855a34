# SPDX-License-Identifier: Apache-2.0
"""Read the config file into the dataclasses of :mod:`engage.config.sections`.

:func:`load` reads the file once and reports errors by dotted key. ``schemas/config.json`` defines
the keys and their values. The options of plugins (``[storage.<name>]``, ``[log.<name>]``,
``[workspaces.webhooks.<name>]``, ``[observers.<name>]``, and ``options`` of ``[[transforms]]``)
have schemas of the plugins: :mod:`engage.registry` checks them.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import os
import stat
import time
import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Final, TypeVar

from engage.api import ConfigError
from engage.config.interpolation import resolve
from engage.config.removed import without_removed
from engage.config.schema_check import SettingsError, problems
from engage.config.sections import (
    Config,
    ConsoleConfig,
    Cors,
    Limits,
    LogConfig,
    Logging,
    Retention,
    Selected,
    ServerConfig,
    StorageConfig,
    SubscriptionGroup,
    Workspace,
    WriteKey,
)

__all__ = ["config_schema", "load"]

#: Maximum size of a config file.
MAX_BYTES: Final = 1024 * 1024
#: Seconds in which a config that comes from a named pipe must be written.
FIFO_SECONDS = 5.0


def config_schema() -> dict[str, Any]:
    """Return the JSON Schema of the config file."""
    text = resources.files("engage_schemas").joinpath("config.json").read_text("utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def load(path: str | Path, environ: Mapping[str, str] | None = None) -> Config:
    """Read a config file.

    The options of plugins are not checked here, because this module does not know the plugins: see
    :meth:`engage.registry.Registry.check`.

    :param path: a TOML file.
    :param environ: the variables for ``${NAME}``; the environment of the process by default.
    :raises ConfigError: if the file cannot be read, or if a setting is wrong. The message names the
        file, the key and the rule, never a secret. A :class:`SettingsError` lists all problems.
    """
    path = Path(path)
    base_dir = path.absolute().parent
    schema = config_schema()
    written, warnings = without_removed(schema, _read(path))
    document, found = resolve(written, base_dir, os.environ if environ is None else environ)
    found += problems(schema, document, written=written)
    if not found:
        config = dataclasses.replace(
            _config(path, base_dir, document, written), warnings=tuple(warnings)
        )
        found += _contradictions(config)
    if found:
        raise SettingsError([f"{path}: {problem}" for problem in found])
    return config


def _read(path: Path) -> dict[str, Any]:
    try:
        data = _content(path)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_BYTES // 1024} KiB")
        text = data.decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; run `engage init` to create it") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (at byte {error.start})") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is not valid TOML: it is nested too deeply") from error
    except (ValueError, OverflowError) as error:  # a number of thousands of digits
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def _content(path: Path) -> bytes:
    """Return the content of a file, up to one byte more than a config may have.

    The path can name anything, such as a device without an end, or a named pipe to which nothing is
    written.

    :raises OSError: if it cannot be read.
    """
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    # Opening a pipe would wait for a writer, and this flag does nothing to a file.
    with open(os.open(path, flags | getattr(os, "O_NONBLOCK", 0)), "rb", buffering=0) as file:
        if not stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
            found = b""
            while len(found) <= MAX_BYTES and (part := file.read(MAX_BYTES + 1 - len(found))):
                found += part
            return found
        return _from_pipe(file.fileno())


def _from_pipe(pipe: int) -> bytes:
    """Return the bytes that are written to a pipe, such as ``<(command)`` of a shell."""
    found = b""
    deadline = time.monotonic() + FIFO_SECONDS
    while len(found) <= MAX_BYTES:
        try:
            part = os.read(pipe, 65_536)
        except BlockingIOError:
            part = None
        if part:
            found += part
        elif part == b"" and found:
            return found
        elif time.monotonic() > deadline:
            raise OSError(f"no text came through the pipe in {FIFO_SECONDS:g} seconds")
        else:
            time.sleep(0.01)
    return found


Section = TypeVar("Section")


def _section(cls: type[Section], table: Mapping[str, Any], **changed: Any) -> Section:
    """Fill a dataclass from the keys of a table that are named as its fields."""
    given: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name in table:
            value = table[field.name]
            # JSON Schema accepts 8080.0 as an integer.
            whole = isinstance(value, float) and str(field.type).startswith("int")
            given[field.name] = int(value) if whole else value
    return cls(**(given | changed))


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list) else (value,)


def _workspace(table: Mapping[str, Any]) -> Workspace:
    changed: dict[str, Any] = {
        "name": table.get("name", table["id"]),
        "write_keys": tuple(_section(WriteKey, key) for key in table.get("write_keys", ())),
        "subscription_groups": tuple(
            _section(SubscriptionGroup, group, name=group.get("name", group["id"]))
            for group in table.get("subscription_groups", ())
        ),
    }
    if "subscription_secret" in table:
        changed["subscription_secrets"] = _tuple(table["subscription_secret"])
    if "subscription_identifiers" in table:
        changed["subscription_identifiers"] = _tuple(table["subscription_identifiers"])
    return _section(Workspace, table, **changed)


def _config(
    path: Path, base_dir: Path, document: Mapping[str, Any], written: Mapping[str, Any]
) -> Config:
    server = document.get("server", {})
    if "public_url" in server:
        server = {**server, "public_url": server["public_url"].rstrip("/")}
    server = {**server, "trusted_proxies": _tuple(server.get("trusted_proxies", []))}
    cors = document.get("cors", {})
    if "origins" in cors:
        cors = {**cors, "origins": _tuple(cors["origins"])}
    retention = _section(Retention, document.get("retention", {}))
    return Config(
        path=path,
        base_dir=base_dir,
        server=_section(ServerConfig, server),
        storage=_chosen(StorageConfig, document.get("storage", {})),
        limits=_section(Limits, document.get("limits", {})),
        # In the file, 0 means "never".
        retention=Retention(
            events_days=retention.events_days or None,
            dead_letters_days=retention.dead_letters_days or None,
        ),
        cors=_section(Cors, cors),
        logging=_section(Logging, document.get("logging", {})),
        log=_chosen(LogConfig, document["log"]) if "log" in document else None,
        console=_console(document["console"]) if "console" in document else None,
        transforms=tuple(_section(Selected, item) for item in document.get("transforms", ())),
        observers=tuple(
            Selected(name=name, options=options)
            for name, options in document.get("observers", {}).items()
        ),
        workspaces=tuple(_workspace(table) for table in document["workspaces"]),
        written=written,
    )


Chosen = TypeVar("Chosen", StorageConfig, LogConfig)


def _chosen(cls: type[Chosen], table: Mapping[str, Any]) -> Chosen:
    """Fill a section that chooses a plugin and has a table of options for each of its names."""
    tables = {name: options for name, options in table.items() if isinstance(options, Mapping)}
    made = _section(cls, table, tables=tables)
    return dataclasses.replace(made, options=tables.get(made.backend, {}))


def _console(table: Mapping[str, Any]) -> ConsoleConfig:
    changed: dict[str, Any] = {
        "allowed_hosts": tuple(host.lower() for host in table.get("allowed_hosts", ())),
    }
    if "public_url" in table:
        changed["public_url"] = table["public_url"].rstrip("/")
    return _section(ConsoleConfig, table, **changed)


def _duplicates(values: Iterable[tuple[str, str]], what: str) -> list[str]:
    """Return a line for each value that an earlier key has too.

    :param values: (dotted key, value); the lines do not contain the values, which may be secret.
    """
    first: dict[str, str] = {}
    found = []
    for key, value in values:
        if value in first:
            found.append(f"{key}: is the same {what} as {first[value]}; use a different one")
        else:
            first[value] = key
    return found


def _contradictions(config: Config) -> list[str]:
    """Return the problems that a JSON Schema cannot express."""
    found = _duplicates(
        ((f"workspaces[{w}].id", workspace.id) for w, workspace in enumerate(config.workspaces)),
        "workspace id",
    )
    found += _duplicates(
        (
            (f"workspaces[{w}].write_keys[{k}].key", key.key)
            for w, workspace in enumerate(config.workspaces)
            for k, key in enumerate(workspace.write_keys)
        ),
        "write key",
    )
    for w, workspace in enumerate(config.workspaces):
        keys = enumerate(workspace.write_keys)
        found += _duplicates(
            ((f"workspaces[{w}].write_keys[{k}].id", key.id) for k, key in keys), "id"
        )
        groups = enumerate(workspace.subscription_groups)
        found += _duplicates(
            ((f"workspaces[{w}].subscription_groups[{g}].id", group.id) for g, group in groups),
            "id",
        )
        secrets = enumerate(workspace.subscription_secrets)
        found += _duplicates(
            ((f"workspaces[{w}].subscription_secret[{s}]", secret) for s, secret in secrets),
            "secret",
        )
    server = config.server
    if server.shutdown_delay >= server.shutdown_grace:
        found.append(
            "server.shutdown_delay: must be less than server.shutdown_grace, which includes it"
            f" ({server.shutdown_delay:g} >= {server.shutdown_grace:g})"
        )
    for number, network in enumerate(server.trusted_proxies):
        try:
            ipaddress.ip_network(network)
        except ValueError:
            found.append(
                f"server.trusted_proxies[{number}]: must be an IP address or a network, such as"
                " 10.0.0.0/8"
            )
    limits = config.limits
    for small, large in (
        ("event_bytes", "decompressed_bytes"),
        ("event_bytes", "queue_bytes"),
        ("body_bytes", "inflight_bytes"),
        ("batch_events", "queue_events"),
    ):
        if getattr(limits, small) > getattr(limits, large):
            found.append(
                f"limits.{small}: must be at most limits.{large}"
                f" ({getattr(limits, small)} > {getattr(limits, large)})"
            )
    return found
