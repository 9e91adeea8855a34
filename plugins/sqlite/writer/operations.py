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

from engage.api import (
    Event,
    Outcome,
    Status,
)
from engage.store.facade import PLANS
from engage.store.tables import Plan

from ..tables.events import STORED

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


#: One event; see :data:`~..tables.events.Row`.
_Row = tuple[
    bytes, str, str, str, str, str | None, str | None, str | None, int, int, bytes
]  # fmt: skip

OPEN: Final[Operation[None]] = _operation("open", tuple[bool], None)
CHECK: Final[Operation[None]] = _operation("check", tuple[()], None)
#: Its result is what :func:`encode_outcomes` returns.
WRITE: Final[Operation[Any]] = _operation(
    "write", tuple[list[_Row]], tuple[list[tuple[str, str | None, bytes | None] | None] | None, int]
)
FIND: Final[Operation[Event | None]] = _operation("find", tuple[str, str, str], Event | None)
MISSED: Final[Operation[Sequence[int]]] = _operation(
    "missed", tuple[list[tuple[int, bytes]]], list[int]
)
EXPIRE: Final[Operation[int]] = _operation("expire", tuple[int, int, bool], int)
MARK_ERASED: Final[Operation[int]] = _operation("mark_erased", tuple[dict[bytes, bytes]], int)
REAPPLY: Final[Operation[None]] = _operation("reapply", tuple[list[_Row]], None)
EMPTY_LOG: Final[Operation[bool]] = _operation("empty_log", tuple[()], bool)


def encode_outcomes(outcomes: Sequence[Outcome]) -> list[Any] | None:
    """Return outcomes as plain values, for :func:`decode_outcomes`.

    :return: ``None`` for each stored event; a single ``None`` if all events were stored.
    """
    if all(outcome is STORED for outcome in outcomes):
        return None
    return [
        None
        if outcome.status is Status.STORED
        else (outcome.status.value, outcome.reason, outcome.stored)
        for outcome in outcomes
    ]


def decode_outcomes(values: Sequence[Any] | None, count: int) -> list[Outcome]:
    """Return the outcomes of ``count`` events.

    :param values: what :func:`encode_outcomes` returned.
    """
    if values is None:
        return [STORED] * count
    return [
        STORED if value is None else Outcome(Status(value[0]), value[1], value[2])
        for value in values
    ]
