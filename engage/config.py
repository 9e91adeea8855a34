# SPDX-License-Identifier: Apache-2.0
"""TOML → frozen dataclasses; errors by dotted key.

The file is read once. ``schemas/config.json`` says which keys there are and what they may be; the
defaults stand here, and a test compares the two. What is said of a plugin's options (the tables
``[storage.<name>]``, ``[workspaces.webhooks.<name>]``, ``[observers.<name>]``, and ``options`` of
``[[transforms]]``) is the plugin's own schema: :mod:`engage.registry` checks it.

Secrets are left out of every ``repr``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

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
