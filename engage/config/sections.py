# SPDX-License-Identifier: Apache-2.0
"""The sections of the config file as frozen dataclasses.

``schemas/config.json`` defines the same keys, describes them and has their defaults; a test
compares the names. No ``repr`` contains a secret.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Final, Literal

from engage.api import DeadLetterBudget

__all__ = [
    "DEFAULT_LIMITS",
    "Config",
    "ConsoleConfig",
    "Cors",
    "Erasures",
    "Limits",
    "LogConfig",
    "Logging",
    "Plugins",
    "PreferencesPage",
    "Quota",
    "Rate",
    "Retention",
    "Selected",
    "ServerConfig",
    "StorageConfig",
    "SubscriptionGroup",
    "Unsubscribes",
    "Workspace",
    "WriteKey",
    "config_schema",
    "default",
]


@functools.cache
def config_schema() -> dict[str, Any]:
    """Return the JSON Schema of the config file."""
    text = resources.files("engage_schemas").joinpath("config.json").read_text("utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def default(key: str) -> Any:
    """Return the default of a key such as ``server.port``, or ``None`` if it has none."""
    schema = config_schema()
    for name in key.split("."):
        schema = schema["properties"][name]
        if "$ref" in schema:
            schema = config_schema()["$defs"][schema["$ref"].rpartition("/")[2]] | schema
    value = schema.get("default")
    return tuple(value) if isinstance(value, list) else value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """``[server]``: the addresses to listen on, the timeouts and the workers. Times in seconds."""

    host: str = default("server.host")
    #: 0: any free port.
    port: int = default("server.port")
    #: Processes that answer requests.
    workers: int = default("server.workers")
    #: The server's URL as providers sign it, without a slash at the end; ``None``: not set.
    public_url: str | None = default("server.public_url")
    #: Maximum time for the head of a request to arrive completely, and for a new connection to
    #: send the first byte.
    head_timeout: float = default("server.head_timeout")
    #: Maximum time for a request to arrive completely.
    request_timeout: float = default("server.request_timeout")
    #: A connection without a request is closed after this time.
    idle_timeout: float = default("server.idle_timeout")
    #: Open connections per worker.
    max_connections: int = default("server.max_connections")
    #: Maximum time from SIGTERM to the end of the process.
    shutdown_grace: float = default("server.shutdown_grace")
    #: A process whose event loop has not turned for this time is killed and replaced.
    hang_timeout: float = default("server.hang_timeout")
    #: Time from SIGTERM until the server stops accepting connections.
    shutdown_delay: float = default("server.shutdown_delay")
    metrics_host: str = default("server.metrics_host")
    #: ``None``: no metrics. 0: any free port.
    metrics_port: int | None = default("server.metrics_port")
    #: Addresses and networks of reverse proxies whose ``X-Forwarded-For`` is believed.
    trusted_proxies: tuple[str, ...] = default("server.trusted_proxies")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleConfig:
    """``[console]``: the web pages for the operators of the server."""

    host: str = default("console.host")
    #: 0: any free port.
    port: int = default("console.port")
    #: The URL at which a browser reaches the console, without a slash at the end; ``None``: the
    #: address that the console listens on.
    public_url: str | None = default("console.public_url")
    #: ``scrypt$15$8$3$salt$hash``; ``None``: people sign in with a one-time link only.
    password: str | None = dataclasses.field(default=None, repr=False)
    #: Other host names at which the console is reached.
    allowed_hosts: tuple[str, ...] = default("console.allowed_hosts")
    #: Whether the console only shows, and changes nothing.
    read_only: bool = default("console.read_only")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StorageConfig:
    """``[storage]``: the chosen storage."""

    backend: str = default("storage.backend")
    #: ``[storage.<backend>]``, with references to the environment resolved.
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    #: Every ``[storage.<name>]`` of the file, including that of the chosen storage.
    tables: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict, repr=False)
    #: Seconds that a write may take, including the time it waits for its turn.
    write_timeout: float = default("storage.write_timeout")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """``[log]``: the chosen log in front of the storage, and ``engage load``, which reads it."""

    backend: str = default("log.backend")
    #: ``[log.<backend>]``, with references to the environment resolved.
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    #: Every ``[log.<name>]`` of the file, including that of the chosen log.
    tables: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict, repr=False)
    #: The group of readers that the loaders are members of.
    group: str = default("log.group")
    #: Processes of ``engage load``.
    loaders: int = default("log.loaders")
    #: The address at which ``engage load`` serves ``/readyz`` and ``/metrics``.
    load_host: str = default("log.load_host")
    #: ``None``: it does not listen. 0: any free port.
    load_port: int | None = default("log.load_port")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """``[limits.rate]``: what each write key may send to one host; 0: any amount."""

    events_per_second: float = default("limits.rate.events_per_second")
    #: ``None``: as many as in a second.
    burst: int | None = default("limits.rate.burst")
    bytes_per_second: float = default("limits.rate.bytes_per_second")
    #: Requests of one address that are answered 401 or 404.
    unauthenticated_per_second: float = default("limits.rate.unauthenticated_per_second")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """``[limits.quota]`` and ``[workspaces.quota]``: what may be stored in a UTC day; 0: any
    amount."""

    events_per_day: int = default("limits.quota.events_per_day")
    bytes_per_day: int = default("limits.quota.bytes_per_day")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """``[limits]``: sizes are in bytes."""

    body_bytes: int = default("limits.body_bytes")
    decompressed_bytes: int = default("limits.decompressed_bytes")
    #: Compact JSON of an event as stored.
    event_bytes: int = default("limits.event_bytes")
    webhook_event_bytes: int = default("limits.webhook_event_bytes")
    #: Body of a webhook delivery, before it is verified; compressed and decompressed.
    webhook_body_bytes: int = default("limits.webhook_body_bytes")
    batch_events: int = default("limits.batch_events")
    #: Levels of nesting; the body itself is level 1.
    json_depth: int = default("limits.json_depth")
    json_values: int = default("limits.json_values")
    header_bytes: int = default("limits.header_bytes")
    #: Events and the traits they set, waiting to be written, per worker.
    queue_events: int = default("limits.queue_events")
    queue_bytes: int = default("limits.queue_bytes")
    #: Held in memory for requests without an answer, per worker.
    inflight_bytes: int = default("limits.inflight_bytes")
    user_traits: int = default("limits.user_traits")
    user_trait_bytes: int = default("limits.user_trait_bytes")
    visitors: int = default("limits.visitors")
    #: Changes by links in a day that subscribe an id to groups from which it is unsubscribed.
    resubscriptions_per_day: int = default("limits.resubscriptions_per_day")
    #: Dead letters kept per workspace: refused items of API requests, and as many conflicts and
    #: webhook deliveries; :attr:`dead_letter_budget` has their sizes.
    dead_letter_count: int = default("limits.dead_letter_count")
    dead_letter_bytes: int = default("limits.dead_letter_bytes")
    rate: Rate = Rate()
    #: Of each write key.
    quota: Quota = Quota()

    @property
    def dead_letter_budget(self) -> DeadLetterBudget:
        """The budgets of dead letters."""
        return DeadLetterBudget(
            api_count=self.dead_letter_count,
            api_bytes=self.dead_letter_bytes,
            webhook_count=self.dead_letter_count,
            webhook_bytes=4 * self.dead_letter_bytes,
            conflict_count=self.dead_letter_count,
            conflict_bytes=self.dead_letter_bytes,
        )


#: The limits of a config without ``[limits]``.
DEFAULT_LIMITS: Final = Limits()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """``[retention]``: days to keep records, by ``receivedAt``; ``None``: indefinitely."""

    events_days: int | None = default("retention.events_days")
    dead_letters_days: int | None = default("retention.dead_letters_days")
    visitors_days: int | None = default("retention.visitors_days")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Erasures:
    """``[erasures]``."""

    #: Makes the hashes of erased ids; ``None``: nothing can be erased.
    key: str | None = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cors:
    """``[cors]``: which web pages may send events."""

    #: ``("*",)``: any.
    origins: tuple[str, ...] = default("cors.origins")

    def missing(self, origins: Iterable[str]) -> list[str]:
        """Return a line for each origin of a write key that is not among these."""
        shared = {origin.lower() for origin in self.origins}
        return [
            f"origins[{n}]: add it to cors.origins too, or browsers send nothing"
            for n, origin in enumerate(origins)
            if not shared & {"*", origin.lower()}
        ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Logging:
    """``[logging]``."""

    level: Literal["debug", "info", "warning", "error"] = default("logging.level")
    #: ``auto``: text on a terminal, JSON lines otherwise.
    format: Literal["auto", "json", "text"] = default("logging.format")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plugins:
    """``[plugins]``."""

    #: Python files, each of which is a plugin; relative to the folder of the config.
    files: tuple[str, ...] = default("plugins.files")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """A transform or an observer that the config enables."""

    name: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionGroup:
    """``[[workspaces.subscription_groups]]``."""

    id: str
    name: str
    #: Chosen by the operator, such as ``email``, ``sms`` or ``push``.
    channel: str
    #: ``opt_in``: users must subscribe first. ``opt_out``: users are subscribed until they
    #: unsubscribe.
    type: Literal["opt_in", "opt_out"]
    #: Language → name, for those in which it differs from :attr:`name`.
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PreferencesPage:
    """``[workspaces.preferences_page]``."""

    #: ``""``: the name of the workspace.
    name: str = ""
    #: A picture, and the folder of the texts; relative to the folder of the config.
    logo: str | None = None
    texts: str | None = None
    #: ``#rrggbb``.
    color: str = "#1d5bd1"
    #: URLs.
    imprint: str | None = None
    privacy: str | None = None
    #: Whether one click stops the group of a link, or all groups of its channel.
    one_click: Literal["group", "channel"] = "group"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unsubscribes:
    """``[workspaces.unsubscribes.<provider>]``: what the provider's reports change."""

    #: ``channel``: all groups of the channel. ``groups``: those of ``groups``.
    action: Literal["none", "channel", "groups"] = "none"
    #: The provider's group → the id of a subscription group.
    groups: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WriteKey:
    """``[[workspaces.write_keys]]``."""

    id: str
    #: As clients send it; ``""`` for a server key, which is a secret: only its hash is known.
    key: str = dataclasses.field(default="", repr=False)
    #: SHA-256 of the key in lower-case hexadecimal; ``__post_init__`` computes that of a ``key``.
    sha256: str = dataclasses.field(default="", repr=False)
    disabled: bool = False
    #: ``public``: everyone can read it. ``server``: only the operator's servers have it.
    kind: Literal["public", "server"] = "public"
    #: The web pages that may use a public key; empty: all pages, and clients that are none.
    origins: tuple[str, ...] = ()
    #: The types of the events that it may send; empty: all.
    operations: tuple[str, ...] = ()
    #: What it may send, in place of the keys of ``[limits.rate]`` with these names.
    rate: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha256(self.key.encode()).hexdigest() if self.key else self.sha256.lower()
        object.__setattr__(self, "sha256", digest)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """``[[workspaces]]``."""

    id: str
    name: str
    #: The first signs links, all are accepted; empty: no subscription link is accepted.
    subscription_secrets: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    #: Traits by which a subscription link may identify its user.
    subscription_identifiers: tuple[str, ...] = ("email", "phone")
    subscription_groups: tuple[SubscriptionGroup, ...] = ()
    preferences_page: PreferencesPage = PreferencesPage()
    #: Whether the history of subscriptions has the addresses of clients.
    keep_addresses: bool = False
    #: Traits of users and groups that no public key may set.
    protected_traits: tuple[str, ...] = ()
    #: All are accepted.
    identity_secrets: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    #: Whether events of public keys need a hash of their user id.
    verify_identity: Literal["off", "required"] = "off"
    #: Of all its public keys together.
    quota: Quota = Quota()
    write_keys: tuple[WriteKey, ...] = ()
    #: Enabled provider → its options.
    webhooks: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict, repr=False)
    #: Enabled provider → what its reports change.
    unsubscribes: Mapping[str, Unsubscribes] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The settings of a config file, with the defaults filled in."""

    #: The file.
    path: Path
    #: The folder of the file: paths in the file are relative to it.
    base_dir: Path
    server: ServerConfig = ServerConfig()
    storage: StorageConfig = StorageConfig()
    limits: Limits = DEFAULT_LIMITS
    retention: Retention = Retention()
    erasures: Erasures = Erasures()
    cors: Cors = Cors()
    logging: Logging = Logging()
    plugins: Plugins = Plugins()
    #: ``None``: there is no log; events are written to the storage at once.
    log: LogConfig | None = None
    #: ``None``: there is no console.
    console: ConsoleConfig | None = None
    #: The transforms, in the order in which they run.
    transforms: tuple[Selected, ...] = ()
    observers: tuple[Selected, ...] = ()
    workspaces: tuple[Workspace, ...] = ()
    #: The document as written, references unresolved: error messages quote values from here.
    written: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    #: A line for each key that an earlier version had. Those of the options of plugins:
    #: :meth:`engage.registry.Registry.warnings`.
    warnings: tuple[str, ...] = ()

    @property
    def has_quotas(self) -> bool:
        """Whether it limits what is stored in a day."""
        quotas = (self.limits.quota, *(workspace.quota for workspace in self.workspaces))
        return any(quota.events_per_day or quota.bytes_per_day for quota in quotas)
