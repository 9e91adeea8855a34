# SPDX-License-Identifier: Apache-2.0
"""What may change an event on its way, or be told of it afterwards."""

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


#: What a transform returns to drop an event (it is counted as accepted).
DROP: Final = _Drop.DROP

#: Gets an event as a document and returns it, a changed one, or :data:`DROP`. Synchronous and pure.
Transform = Callable[[dict[str, Any]], dict[str, Any] | Literal[_Drop.DROP]]
#: Makes a transform from its validated options.
TransformFactory = Callable[[Mapping[str, Any]], Transform]

#: Told what became durable.
Observer = Callable[[Sequence[Event]], Awaitable[None]]
#: Makes an observer from its validated options.
ObserverFactory = Callable[[Mapping[str, Any]], Observer]
