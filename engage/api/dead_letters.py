# SPDX-License-Identifier: Apache-2.0
"""Dead letters, and their budgets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import orjson

from engage.api.events import API_ORIGIN

__all__ = [
    "CONFLICT",
    "BudgetName",
    "BudgetUse",
    "DeadLetter",
    "DeadLetterBudget",
]

#: The reason of a dead letter whose event is valid, but another event has its message id.
CONFLICT: Final = "message_id_conflict"

#: The budgets of a workspace, see :attr:`DeadLetter.budget`.
BudgetName = Literal["api", "webhook", "conflict"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A refused event, or a webhook delivery that could not be translated."""

    #: A hash of workspace, origin and item, so that a retry does not make a second letter. That of
    #: a conflict has the message id in it too, and is never that of another letter.
    id: str
    workspace_id: str
    #: ``api``, or the provider's name.
    origin: str
    write_key_id: str | None
    user_id: str | None
    anonymous_id: str | None
    message_id: str | None
    #: An error code such as ``invalid_payload`` or ``message_id_conflict``.
    reason: str
    message: str
    #: Objects of the form ``{"pointer": …, "message": …}``.
    errors: Sequence[Mapping[str, str]]
    #: The raw item as received; for a delivery, the raw body; for a conflict, the event as it would
    #: be stored, without the times that differ in a retry.
    item: bytes
    #: Whether ``item`` was cut.
    truncated: bool
    #: For a delivery: [name, value] pairs, with secrets redacted.
    headers: Sequence[tuple[str, str]]
    #: Milliseconds since 1970 UTC.
    received_at: int
    #: The facts that are needed to process the item again. The type that the route gave it, such as
    #: ``track``; ``batch``: the item has its ``type``. ``None`` for a delivery.
    operation: str | None = None
    #: Compact JSON of an object with what applied to the item and is not in it: the ``context``,
    #: ``integrations`` and ``sentAt`` of its batch, the ``messageId`` from an ``Idempotency-Key``.
    #: ``None`` beside an ``operation``: it was too large to keep. It counts towards the budget.
    envelope: bytes | None = None

    @property
    def budget(self) -> BudgetName:
        """The budget that the letter counts against.

        Anyone who has a write key can fill the budget of refused items, and must not prevent a
        conflict or a delivery from being kept: these have separate ones.
        """
        if self.origin != API_ORIGIN:
            return "webhook"
        return "conflict" if self.reason == CONFLICT else "api"

    @property
    def size(self) -> int:
        """What it takes of its budget: the bytes of its item, its envelope, and its errors and
        headers as JSON."""
        described = orjson.dumps(list(self.errors)), orjson.dumps(list(self.headers))
        return len(self.item) + len(self.envelope or b"") + sum(map(len, described))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BudgetUse:
    """How much of a budget the dead letters of a workspace use."""

    workspace_id: str
    budget: BudgetName
    #: Number of letters.
    count: int
    #: The sum of their :attr:`DeadLetter.size`.
    size: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterBudget:
    """Budgets per workspace; letters of one budget never displace those of another."""

    #: Items of the API that were refused.
    api_count: int = 10_000
    api_bytes: int = 64 * 1024 * 1024
    #: Verified deliveries, and conflicts of their events.
    webhook_count: int = 10_000
    webhook_bytes: int = 256 * 1024 * 1024
    #: Events of the API whose message id another event has.
    conflict_count: int = 10_000
    conflict_bytes: int = 64 * 1024 * 1024

    def of(self, budget: BudgetName) -> tuple[int, int]:
        """Return the maximum number of letters and of bytes of a budget."""
        if budget == "conflict":
            return self.conflict_count, self.conflict_bytes
        if budget == "webhook":
            return self.webhook_count, self.webhook_bytes
        return self.api_count, self.api_bytes
