# SPDX-License-Identifier: Apache-2.0
"""The interfaces of transforms, which can change an event, and of observers, which receive it."""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Literal

from engage.api.events import Event

__all__ = [
    "DROP",
    "Observer",
    "ObserverFactory",
    "Transform",
    "TransformFactory",
]


class _Drop(enum.Enum):
    DROP = "drop"


#: A transform returns this to drop an event, which then counts as accepted.
DROP: Final = _Drop.DROP

#: Takes an event as a document and returns it, a changed one, or :data:`DROP`. Synchronous, pure.
Transform = Callable[[dict[str, Any]], dict[str, Any] | Literal[_Drop.DROP]]
#: Makes a transform from its validated options.
TransformFactory = Callable[[Mapping[str, Any]], Transform]

#: Receives events after they became durable.
Observer = Callable[[Sequence[Event]], Awaitable[None]]
#: Makes an observer from its validated options.
ObserverFactory = Callable[[Mapping[str, Any]], Observer]
