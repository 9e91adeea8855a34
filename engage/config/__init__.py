# SPDX-License-Identifier: Apache-2.0
"""The config file: TOML in, frozen dataclasses out.

======================  ============================================================
``config.py``           reads the file; the sections and their defaults
``interpolation.py``    ``${VAR}`` and ``${file:PATH}`` in strings
``schema_check.py``     checks values against a JSON Schema; errors by dotted key
======================  ============================================================
"""

from __future__ import annotations

from engage.config.config import (
    DEFAULT_LIMITS,
    Config,
    Cors,
    Limits,
    Logging,
    Retention,
    Selected,
    ServerConfig,
    StorageConfig,
    SubscriptionGroup,
    Workspace,
    WriteKey,
    config_schema,
    load,
)

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
