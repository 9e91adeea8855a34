# SPDX-License-Identifier: Apache-2.0
"""The type of ``register``, the argument of a hook."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

__all__ = ["OptionsSchema", "Register"]

Factory = TypeVar("Factory")

#: A JSON Schema (draft 2020-12) of a plugin's options, as a decoded object.
OptionsSchema = Mapping[str, Any]

#: The argument ``register`` of a hook: ``register(name, factory, options_schema)``. It is generic
#: in the factory, such as ``Register[ProviderFactory]``.
Register = Callable[[str, Factory, OptionsSchema], None]
