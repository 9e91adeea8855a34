# SPDX-License-Identifier: Apache-2.0
"""The type of ``register``, the argument of a hook."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

__all__ = ["OptionsSchema", "Register"]

Factory = TypeVar("Factory", contravariant=True)

#: A JSON Schema (draft 2020-12) of a plugin's options, as a decoded object.
OptionsSchema = Mapping[str, Any]


class Register(Protocol[Factory]):
    """The argument ``register`` of a hook.

    It is generic in the factory, such as ``Register[ProviderFactory]``.
    """

    def __call__(
        self, name: str, factory: Factory, options_schema: OptionsSchema | None = None
    ) -> None:
        """Register something under a name.

        :param options_schema: without it, a config must not give any options.
        """
