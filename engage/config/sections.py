# SPDX-License-Identifier: Apache-2.0
"""The sections of the config file as frozen dataclasses, with their defaults.

``schemas/config.json`` defines the same keys and describes them; a test compares the two. No
``repr`` contains a secret.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from engage.api import DeadLetterBudget

__all__ = [
    "DEFAULT_LIMITS",
    "Config",
    "ConsoleConfig",
    "Cors",
    "Limits",
    "LogConfig",
    "Logging",
    "Retention",
    "Selected",
    "ServerConfig",
    "StorageConfig",
    "SubscriptionGroup",
    "Workspace",
    "WriteKey",
]

_KIB: Final = 1024
_MIB: Final = 1024 * 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """``[server]``: the addresses to listen on, the timeouts and the workers. Times in seconds."""

    host: str = "127.0.0.1"
    #: 0: any free port.
    port: int = 8080
    #: Processes that answer requests.
    workers: int = 1
    #: The server's URL as providers sign it, without a slash at the end; ``None``: not set.
    public_url: str | None = None
    #: Maximum time for the head of a request to arrive completely, and for a new connection to
    #: send the first byte.
    head_timeout: float = 10.0
    #: Maximum time for a request to arrive completely.
    request_timeout: float = 30.0
    #: A connection without a request is closed after this time.
    idle_timeout: float = 75.0
    #: Open connections per worker.
    max_connections: int = 2048
    #: Maximum time from SIGTERM to the end of the process.
    shutdown_grace: float = 25.0
    #: Time from SIGTERM until the server stops accepting connections.
    shutdown_delay: float = 0.0
    metrics_host: str = "127.0.0.1"
    #: ``None``: no metrics. 0: any free port.
    metrics_port: int | None = None
    #: Addresses and networks of reverse proxies whose ``X-Forwarded-For`` is believed.
    trusted_proxies: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleConfig:
    """``[console]``: the web pages for the operators of the server."""

    host: str = "127.0.0.1"
    #: 0: any free port.
    port: int = 8081
    #: The URL at which a browser reaches the console, without a slash at the end; ``None``: the
    #: address that the console listens on.
    public_url: str | None = None
    #: ``scrypt$15$8$3$salt$hash``; ``None``: people sign in with a one-time link only.
    password: str | None = dataclasses.field(default=None, repr=False)
    #: Other host names at which the console is reached.
    allowed_hosts: tuple[str, ...] = ()
    #: Whether the console only shows, and changes nothing.
    read_only: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StorageConfig:
    """``[storage]``: the chosen storage."""

    backend: str = "mongo"
    #: ``[storage.<backend>]``, with references to the environment resolved.
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    #: Every ``[storage.<name>]`` of the file, including that of the chosen storage.
    tables: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict, repr=False)
    #: Seconds that a write may take, including the time it waits for its turn.
    write_timeout: float = 8.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """``[log]``: the chosen log in front of the storage, and ``engage load``, which reads it."""

    backend: str = "kafka"
    #: ``[log.<backend>]``, with references to the environment resolved.
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    #: Every ``[log.<name>]`` of the file, including that of the chosen log.
    tables: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict, repr=False)
    #: The group of readers that the loaders are members of.
    group: str = "engage"
    #: Processes of ``engage load``.
    loaders: int = 1
    #: Records that a loader writes to the storage at once.
    portion_records: int = 4000
    #: ``engage serve`` accepts no events while the oldest record that is not loaded is older than
    #: this part of the time for which the log keeps records.
    lag_percent: int = 50
    #: Seconds that a subscription change waits until the loaders have loaded its user.
    subscription_wait: float = 2.0
    #: The address at which ``engage load`` serves ``/readyz`` and ``/metrics``.
    load_host: str = "127.0.0.1"
    #: ``None``: it does not listen. 0: any free port.
    load_port: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """``[limits]``: sizes are in bytes."""

    body_bytes: int = 5 * _MIB
    decompressed_bytes: int = 20 * _MIB
    #: Compact JSON of an event as stored.
    event_bytes: int = 64 * _KIB
    webhook_event_bytes: int = 1 * _MIB
    #: Body of a webhook delivery, before it is verified; compressed and decompressed.
    webhook_body_bytes: int = 5 * _MIB
    batch_events: int = 2500
    #: Levels of nesting; the body itself is level 1.
    json_depth: int = 64
    json_values: int = 250_000
    header_bytes: int = 64 * _KIB
    #: Read ahead of the request that is being handled, per connection.
    pipelined_bytes: int = 64 * _KIB
    #: Events and the traits they set, waiting to be written, per worker.
    queue_events: int = 20_000
    queue_bytes: int = 64 * _MIB
    #: The part of the queue that one write key may use.
    queue_percent_per_key: int = 50
    #: Seconds that a request waits for room in the queue.
    queue_wait: float = 3.0
    #: Held in memory for requests without an answer, per worker.
    inflight_bytes: int = 256 * _MIB
    user_traits: int = 500
    user_trait_bytes: int = 256 * _KIB
    identifier_bytes: int = 4 * _KIB
    user_links: int = 1000
    user_memberships: int = 1000
    #: Dead letters kept per workspace: refused items of API requests …
    dead_letter_count: int = 10_000
    dead_letter_bytes: int = 64 * _MIB
    #: … events whose message id another event has …
    conflict_count: int = 10_000
    conflict_bytes: int = 64 * _MIB
    #: … and from verified webhook deliveries.
    webhook_dead_letter_count: int = 10_000
    webhook_dead_letter_bytes: int = 256 * _MIB

    @property
    def dead_letter_budget(self) -> DeadLetterBudget:
        """The budgets of dead letters."""
        return DeadLetterBudget(
            api_count=self.dead_letter_count,
            api_bytes=self.dead_letter_bytes,
            webhook_count=self.webhook_dead_letter_count,
            webhook_bytes=self.webhook_dead_letter_bytes,
            conflict_count=self.conflict_count,
            conflict_bytes=self.conflict_bytes,
        )


#: The limits of a config without ``[limits]``.
DEFAULT_LIMITS: Final = Limits()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """``[retention]``: days to keep records, by ``receivedAt``; ``None``: indefinitely."""

    events_days: int | None = None
    dead_letters_days: int | None = 14


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cors:
    """``[cors]``: which web pages may send events."""

    #: ``("*",)``: any.
    origins: tuple[str, ...] = ("*",)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Logging:
    """``[logging]``."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    #: ``auto``: text on a terminal, JSON lines otherwise.
    format: Literal["auto", "json", "text"] = "auto"


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
    #: The first signs links, all are accepted; empty: no subscription link is accepted.
    subscription_secrets: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    #: Traits by which a subscription link may identify its user.
    subscription_identifiers: tuple[str, ...] = ("email", "phone")
    subscription_groups: tuple[SubscriptionGroup, ...] = ()
    write_keys: tuple[WriteKey, ...] = ()
    #: Enabled provider → its options.
    webhooks: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict, repr=False)


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
    cors: Cors = Cors()
    logging: Logging = Logging()
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
