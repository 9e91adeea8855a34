# SPDX-License-Identifier: Apache-2.0
"""The results of the pipeline, and the errors for a batch of which nothing was stored."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

from engage.api import EVENT_TYPES, Event
from engage.errors import MAX_ERRORS, STATUS, ApiError, Problem, located
from engage.keys.limits import WITHOUT_LETTER
from engage.pipeline.dead_letters import Conflict
from engage.pipeline.decode import Faulty

__all__ = [
    "BatchResult",
    "BatchState",
    "Delivered",
    "RejectedItem",
    "Result",
    "all_invalid",
    "not_strict",
    "outcome_of",
]


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """The result of a single event: the event is stored, or a transform dropped it."""

    message_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class RejectedItem:
    """An item that was refused."""

    index: int
    message_id: str | None
    #: The pointers of its problems are relative to the item.
    error: ApiError


@dataclasses.dataclass(frozen=True, slots=True)
class BatchResult:
    """The result of a batch."""

    #: The number of events that were newly stored, or dropped by a transform.
    accepted: int
    duplicates: int
    rejected: Sequence[RejectedItem] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Delivered:
    """The result of a webhook delivery's events."""

    accepted: int
    duplicates: int
    rejected: Sequence[RejectedItem] = ()


@dataclasses.dataclass(slots=True)
class BatchState:
    """The outcome of the items of one write, by the index of each item."""

    #: The events to store, and the index of the item of each.
    events: list[Event] = dataclasses.field(default_factory=list)
    indexes: list[int] = dataclasses.field(default_factory=list)
    accepted: int = 0
    duplicates: int = 0
    #: The size of the events that are stored now.
    stored_bytes: int = 0
    rejected: list[RejectedItem] = dataclasses.field(default_factory=list)
    #: Of the rejected items, the indexes of those whose dead letters are still to be made.
    unkept: list[tuple[int, ApiError]] = dataclasses.field(default_factory=list)
    #: Numbers by type and outcome, for :meth:`engage.monitoring.metrics.Metrics.event`.
    counts: collections.Counter[tuple[str, str]] = dataclasses.field(
        default_factory=collections.Counter
    )

    def refuse(self, index: int, item: Any, error: ApiError) -> None:
        """Record an item that is not stored."""
        # Its frames hold the item, which may be large, for as long as the answer takes.
        error.__traceback__ = None
        kind = message_id = None
        if type(item) is Faulty:
            item = item.value
        if type(item) is dict:
            kind, message_id = item.get("type"), item.get("messageId")
        shown = message_id[:256] if type(message_id) is str else None
        self.rejected.append(RejectedItem(index, shown, error))
        if error.code not in WITHOUT_LETTER:
            self.unkept.append((index, error))
        # A type that the client made up must not become a label: their number has no limit.
        label = kind if type(kind) is str and kind in EVENT_TYPES else "other"
        self.counts[label, error.code] += 1

    def sorted_rejected(self, offset: int = 0) -> list[RejectedItem]:
        """Return the rejected items in the order of their indexes.

        :param offset: a number to add to each index.
        """
        items = sorted(self.rejected, key=lambda item: item.index)
        if offset:
            items = [dataclasses.replace(item, index=item.index + offset) for item in items]
        return items


def outcome_of(problem: ApiError | Conflict | None) -> str:
    """Return the outcome to count in the metrics for an event that was not newly stored.

    :param problem: the refusal or the conflict; ``None`` for a duplicate.
    """
    if problem is None:
        return "duplicate"
    return "conflict" if isinstance(problem, Conflict) else problem.code


def not_strict(rejected: Sequence[RejectedItem], items: int) -> ApiError:
    """Return the error for a strict batch with invalid items."""
    return ApiError(
        "invalid_payload",
        f"nothing was stored: {len(rejected)} of {items} items are invalid; {_first(rejected)}",
        errors=_details(rejected),
    )


def all_invalid(rejected: Sequence[RejectedItem]) -> ApiError:
    """Return the error for a strict batch whose items were all refused."""
    codes = {item.error.code for item in rejected}
    code = codes.pop()
    if codes or STATUS[code] != 400:
        code = "invalid_payload"
    return ApiError(
        code,
        f"every item of the batch was refused; {_first(rejected)}",
        errors=_details(rejected),
    )


def _first(rejected: Sequence[RejectedItem]) -> str:
    return f"the first is batch/{rejected[0].index}: {rejected[0].error.message}"


def _details(rejected: Sequence[RejectedItem]) -> list[Problem]:
    """Return the problems of the first items, with pointers into the body."""
    problems: list[Problem] = []
    for item in rejected:
        if len(problems) >= MAX_ERRORS:
            break
        problems += located(item.error, f"/batch/{item.index}")
    return problems
