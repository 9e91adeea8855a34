# SPDX-License-Identifier: Apache-2.0
"""TOML → frozen dataclasses; errors by dotted key.

The file is read once, by :func:`load`. ``schemas/config.json`` says which keys there are and what
they may be; the defaults stand here, and a test compares the two. What the options of a plugin may
be (``[storage.<name>]``, ``[workspaces.webhooks.<name>]``, ``[observers.<name>]``, and ``options``
of ``[[transforms]]``) is the plugin's own schema: :mod:`engage.registry` checks it.

Secrets are left out of every ``repr``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from engage.api import ConfigError
from engage.config.interpolation import resolve
from engage.config.schema_check import SettingsError, problems

__all__ = [
    "DEFAULT_LIMITS",
    "Config",
    "Cors",
    "Limits",
    "Logging",
    "Retention",
    "Selected",
    "ServerConfig",
    "StorageConfig",
    "SubscriptionGroup",
    "Workspace",
    "WriteKey",
    "config_schema",
    "load",
]

_KIB: Final = 1024
_MIB: Final = 1024 * 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """``[server]``: where it listens and how patient it is. Times in seconds."""

    host: str = "127.0.0.1"
    #: 0: any free port.
    port: int = 8080
    #: Processes that answer requests.
    workers: int = 1
    #: What providers sign, without a slash at the end; ``None``: not set.
    public_url: str | None = None
    #: A request must have arrived whole after so long.
    request_timeout: float = 30.0
    #: A connection without a request is closed after so long.
    idle_timeout: float = 75.0
    #: Per worker.
    max_connections: int = 2048
    #: From SIGTERM to the end, at most.
    shutdown_grace: float = 25.0
    #: From SIGTERM to no longer accepting connections.
    shutdown_delay: float = 0.0
    metrics_host: str = "127.0.0.1"
    #: ``None``: no metrics. 0: any free port.
    metrics_port: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StorageConfig:
    """``[storage]``: the chosen storage."""

    backend: str = "mongo"
    #: ``[storage.<backend>]`` as in the file, references to the environment resolved.
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    #: Every ``[storage.<name>]`` of the file, the chosen one's too.
    tables: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict, repr=False)
    #: Seconds that a write may take, waiting for its turn included.
    write_timeout: float = 8.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """``[limits]``: sizes in bytes, counts as they are."""

    body_bytes: int = 5 * _MIB
    decompressed_bytes: int = 20 * _MIB
    #: Of the compact JSON of an event as stored.
    event_bytes: int = 64 * _KIB
    webhook_event_bytes: int = 1 * _MIB
    batch_events: int = 2500
    #: The body is 1.
    json_depth: int = 64
    json_values: int = 250_000
    header_bytes: int = 64 * _KIB
    #: Waiting to be written, per worker.
    queue_events: int = 20_000
    queue_bytes: int = 64 * _MIB
    #: Bodies held in memory, per worker.
    inflight_bytes: int = 256 * _MIB
    user_traits: int = 500
    user_trait_bytes: int = 256 * _KIB
    user_links: int = 1000
    user_memberships: int = 1000
    #: Dead letters kept per workspace: refused through the API …
    dead_letter_count: int = 10_000
    dead_letter_bytes: int = 64 * _MIB
    #: … and from verified webhook deliveries.
    webhook_dead_letter_count: int = 10_000
    webhook_dead_letter_bytes: int = 256 * _MIB


#: What holds when the config says nothing.
DEFAULT_LIMITS: Final = Limits()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """``[retention]``: days (by ``receivedAt``); ``None``: for ever."""

    events_days: int | None = None
    dead_letters_days: int | None = 14


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cors:
    """``[cors]``: which web pages may send events."""

    #: ``("*",)``: any.
    origins: tuple[str, ...] = ("*",)
    #: Seconds for which a browser may remember the answer to a preflight.
    max_age: int = 7200


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Logging:
    """``[logging]``."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    #: ``auto``: text on a terminal, JSON lines otherwise.
    format: Literal["auto", "json", "text"] = "auto"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """A transform or an observer that the config switches on."""

    name: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionGroup:
    """``[[workspaces.subscription_groups]]``."""

    id: str
    name: str
    #: A word of the owner's, such as ``email``, ``sms``, ``push``.
    channel: str
    #: ``opt_in``: subscribed only after a yes; ``opt_out``: subscribed until a no.
    type: Literal["opt_in", "opt_out"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WriteKey:
    """``[[workspaces.write_keys]]``."""

    id: str
    key: str = dataclasses.field(repr=False)
    disabled: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """``[[workspaces]]``."""

    id: str
    name: str
    #: The first signs, all verify; empty: subscriptions cannot be changed from outside.
    subscription_secrets: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    #: Traits by which a subscription link may name its user.
    subscription_identifiers: tuple[str, ...] = ("email", "phone")
    subscription_groups: tuple[SubscriptionGroup, ...] = ()
    write_keys: tuple[WriteKey, ...] = ()
    #: Provider → its options; a provider that is there is enabled.
    webhooks: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict, repr=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All that a config file says, with the defaults filled in."""

    #: The file.
    path: Path
    #: Its folder: relative paths in it are relative to this.
    base_dir: Path
    server: ServerConfig = ServerConfig()
    storage: StorageConfig = StorageConfig()
    limits: Limits = DEFAULT_LIMITS
    retention: Retention = Retention()
    cors: Cors = Cors()
    logging: Logging = Logging()
    #: In the order in which they run.
    transforms: tuple[Selected, ...] = ()
    observers: tuple[Selected, ...] = ()
    workspaces: tuple[Workspace, ...] = ()
    #: The document as it was written, references unresolved: what error messages may quote.
    written: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)


# --------------------------------------------------------------------------------------- reading
def config_schema() -> dict[str, Any]:
    """:return: the JSON Schema of the config file."""
    text = resources.files("engage_schemas").joinpath("config.json").read_text("utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def load(path: str | Path, environ: Mapping[str, str] | None = None) -> Config:
    """Read a config file.

    The options of plugins are not checked here, as no plugin is known here: see
    :meth:`engage.registry.Registry.check`.

    :param path: a TOML file.
    :param environ: where ``${NAME}`` is looked up; the process's environment if not given.
    :raises ConfigError: it cannot be read or is wrong. The message names the file, the key and the
        rule, never a secret; a :class:`SettingsError` has all that is wrong.
    """
    path = Path(path)
    base_dir = path.absolute().parent
    written = _read(path)
    document, found = resolve(written, base_dir, os.environ if environ is None else environ)
    found += problems(config_schema(), document, written=written)
    if not found:
        config = _config(path, base_dir, document, written)
        found += _contradictions(config)
    if found:
        raise SettingsError([f"{path}: {problem}" for problem in found])
    return config


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; `engage init` writes one") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (at byte {error.start})") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: not TOML: nested too deep") from error


Section = TypeVar("Section")


def _section(cls: type[Section], table: Mapping[str, Any], **changed: Any) -> Section:
    """Fill a dataclass from the keys of a table that have its fields' names."""
    given: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name in table:
            value = table[field.name]
            # To a JSON Schema 8080.0 is an integer.
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
    storage = document.get("storage", {})
    tables = {name: table for name, table in storage.items() if isinstance(table, Mapping)}
    cors = document.get("cors", {})
    if "origins" in cors:
        cors = {**cors, "origins": _tuple(cors["origins"])}
    retention = _section(Retention, document.get("retention", {}))
    return Config(
        path=path,
        base_dir=base_dir,
        server=_section(ServerConfig, server),
        storage=_section(
            StorageConfig,
            storage,
            options=tables.get(storage.get("backend", StorageConfig().backend), {}),
            tables=tables,
        ),
        limits=_section(Limits, document.get("limits", {})),
        # 0 is "never" in the file.
        retention=Retention(
            events_days=retention.events_days or None,
            dead_letters_days=retention.dead_letters_days or None,
        ),
        cors=_section(Cors, cors),
        logging=_section(Logging, document.get("logging", {})),
        transforms=tuple(_section(Selected, item) for item in document.get("transforms", ())),
        observers=tuple(
            Selected(name=name, options=options)
            for name, options in document.get("observers", {}).items()
        ),
        workspaces=tuple(_workspace(table) for table in document["workspaces"]),
        written=written,
    )


def _repeated(values: Iterable[tuple[str, str]], what: str) -> list[str]:
    """:param values: (dotted key, value); the value is never said."""
    first: dict[str, str] = {}
    found = []
    for key, value in values:
        if value in first:
            found.append(f"{key}: the same {what} as {first[value]}")
        else:
            first[value] = key
    return found


def _contradictions(config: Config) -> list[str]:
    """What a JSON Schema cannot say."""
    found = _repeated(
        ((f"workspaces[{w}].id", workspace.id) for w, workspace in enumerate(config.workspaces)),
        "workspace id",
    )
    found += _repeated(
        (
            (f"workspaces[{w}].write_keys[{k}].key", key.key)
            for w, workspace in enumerate(config.workspaces)
            for k, key in enumerate(workspace.write_keys)
        ),
        "write key",
    )
    for w, workspace in enumerate(config.workspaces):
        keys = enumerate(workspace.write_keys)
        found += _repeated(
            ((f"workspaces[{w}].write_keys[{k}].id", key.id) for k, key in keys), "id"
        )
        groups = enumerate(workspace.subscription_groups)
        found += _repeated(
            ((f"workspaces[{w}].subscription_groups[{g}].id", group.id) for g, group in groups),
            "id",
        )
        secrets = enumerate(workspace.subscription_secrets)
        found += _repeated(
            ((f"workspaces[{w}].subscription_secret[{s}]", secret) for s, secret in secrets),
            "secret",
        )
    server = config.server
    if server.shutdown_delay >= server.shutdown_grace:
        found.append(
            "server.shutdown_delay: must be less than server.shutdown_grace, which includes it"
            f" ({server.shutdown_delay:g} >= {server.shutdown_grace:g})"
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
                f"limits.{small}: must not be more than limits.{large}"
                f" ({getattr(limits, small)} > {getattr(limits, large)})"
            )
    return found
