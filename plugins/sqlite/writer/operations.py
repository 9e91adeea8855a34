# SPDX-License-Identifier: Apache-2.0
"""The operations of a writer, with the types of their arguments and results.

Each is a plan of :mod:`engage.store`, or a method of :class:`~..engine.Engine`. Between processes,
arguments and results are MessagePack. An operation keeps its name and types: a change needs another
name, or another :data:`~.protocol.PROTOCOL`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec

from engage.api import Outcome
from engage.store import events
from engage.store.facade import PLANS
from engage.store.tables import Plan

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Operation(Generic[Result]):
    """An operation. ``Result`` is the type of its result."""

    name: str
    #: Whether doing it twice has the same effect as doing it once. If the writer ends before it
    #: answers, such a request is sent again to the next one.
    repeatable: bool
    #: Decode the arguments and the result from MessagePack.
    arguments: msgspec.msgpack.Decoder[Any]
    result: msgspec.msgpack.Decoder[Result]
    #: What it runs; ``None``: the method of the engine with its name.
    plan: Plan[..., Result] | None = None


#: Name → operation.
OPERATIONS: Final[dict[str, Operation[Any]]] = {}


def _operation(
    name: str,
    arguments: Any,
    result: Any,
    *,
    repeatable: bool = True,
    plan: Plan[..., Any] | None = None,
) -> Operation[Any]:
    decoders = msgspec.msgpack.Decoder(arguments), msgspec.msgpack.Decoder(result)
    OPERATIONS[name] = operation = Operation(name, repeatable, *decoders, plan)
    return operation


def of(plan: Plan[..., Result]) -> Operation[Result]:
    """Return the operation that runs a plan."""
    if plan.name not in OPERATIONS:
        arguments, result = plan.types
        _operation(plan.name, arguments, result, repeatable=plan.repeatable, plan=plan)
    return OPERATIONS[plan.name]


def find(name: str) -> Operation[Any] | None:
    """Return the operation of a name. A module that is imported later may register a plan."""
    return of(PLANS[name]) if name in PLANS else OPERATIONS.get(name)


OPEN: Final[Operation[None]] = _operation("open", tuple[bool], None)
CHECK: Final[Operation[None]] = _operation("check", tuple[()], None)
MISSED: Final[Operation[Sequence[int]]] = _operation(
    "missed", tuple[list[tuple[int, bytes]]], list[int]
)
EMPTY_LOG: Final[Operation[bool]] = _operation("empty_log", tuple[()], bool)

#: The values of an event in their order, and its key: the sender computes it.
_Row = tuple[
    str, str, str, str, str | None, str | None, str | None, int, int, bytes, bytes
]  # fmt: skip
WRITE: Final[Operation[tuple[dict[int, Outcome], int]]] = _operation(
    events.write.name, tuple[list[_Row]], events.write.types[1], plan=events.write
)
