# SPDX-License-Identifier: Apache-2.0
"""What the pipeline returns, and how a refused batch is put into words."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import orjson

from engage.errors import MAX_ERRORS, STATUS, ApiError, Problem, located

if TYPE_CHECKING:
    from engage.pipeline.auth import Principal

__all__ = ["BatchResult", "Delivered", "RejectedItem", "Result", "all_invalid", "not_strict"]


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """A single event was stored, was stored before, or was dropped by a transform."""

    message_id: str
    #: Who wrote; for the log.
    principal: Principal | None = None

    def body(self) -> bytes:
        """:return: the JSON answer."""
        return b'{"success":true,"messageId":' + orjson.dumps(self.message_id) + b"}"


@dataclasses.dataclass(frozen=True, slots=True)
class RejectedItem:
    """An item of a batch that was refused."""

    index: int
    message_id: str | None
    #: Its problems have pointers into the item.
    error: ApiError


@dataclasses.dataclass(frozen=True, slots=True)
class BatchResult:
    """What became of a batch."""

    #: Newly stored, or dropped by a transform.
    accepted: int
    duplicates: int
    rejected: Sequence[RejectedItem] = ()
    #: Who wrote; for the log.
    principal: Principal | None = None

    def body(self) -> bytes:
        """:return: the JSON answer; it has at most :data:`MAX_ERRORS` details in all."""
        rejected: list[dict[str, Any]] = []
        room = MAX_ERRORS
        for item in self.rejected:
            entry: dict[str, Any] = {
                "index": item.index,
                "messageId": item.message_id,
                "code": item.error.code,
                "message": item.error.message,
            }
            if room > 0:
                problems = item.error.errors[:room]
                room -= max(len(problems), 1)
                entry["errors"] = [problem.as_dict() for problem in problems]
            rejected.append(entry)
        return orjson.dumps(
            {
                "success": True,
                "accepted": self.accepted,
                "duplicates": self.duplicates,
                "rejected": rejected,
            }
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Delivered:
    """What became of the events of a webhook delivery."""

    accepted: int
    duplicates: int
    rejected: Sequence[RejectedItem] = ()


def not_strict(rejected: Sequence[RejectedItem], items: int) -> ApiError:
    """:return: the answer to a strict batch of which some items cannot be taken."""
    return ApiError(
        "invalid_payload",
        f"nothing was stored, {len(rejected)} of {items} items cannot be taken; {_first(rejected)}",
        errors=_details(rejected),
    )


def all_invalid(rejected: Sequence[RejectedItem]) -> ApiError:
    """:return: the answer to a batch of which no item was taken."""
    codes = {item.error.code for item in rejected}
    code = codes.pop()
    if codes or STATUS[code] != 400:
        code = "invalid_payload"
    return ApiError(
        code, f"no item of the batch can be taken; {_first(rejected)}", errors=_details(rejected)
    )


def _first(rejected: Sequence[RejectedItem]) -> str:
    return f"batch/{rejected[0].index}: {rejected[0].error.message}"


def _details(rejected: Sequence[RejectedItem]) -> list[Problem]:
    """:return: the problems of the first items, with pointers into the body."""
    problems: list[Problem] = []
    for item in rejected:
        if len(problems) >= MAX_ERRORS:
            break
        problems += located(item.error, f"/batch/{item.index}")
    return problems
