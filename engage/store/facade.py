# SPDX-License-Identifier: Apache-2.0
"""The interfaces that the rest of engage calls, on an executor of plans.

A storage has each as a base class, beside its own ``run`` and ``read``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from engage.api import (
    BudgetUse,
    Count,
    CountStore,
    CountSum,
    DeadLetter,
    DeadLetterStore,
    Page,
    Record,
    RecordStore,
    Suppression,
    SuppressionStore,
)
from engage.store import counts as counting
from engage.store import letters as keeping
from engage.store import records
from engage.store import suppressions as suppressing
from engage.store.tables import PLANS, Executor

#: The names that a storage imports.
__all__ = [
    "PLANS",
    "PlannedCounts",
    "PlannedLetters",
    "PlannedRecords",
    "PlannedSuppressions",
    "is_text",
]


def is_text(*values: str) -> bool:
    """Return whether strings can be stored: one with a lone surrogate cannot."""
    try:
        "".join(values).encode()
    except UnicodeEncodeError:
        return False
    return True


class PlannedRecords(Executor, RecordStore):
    """Records, by plans."""

    async def put_record(
        self, record: Record, *, expected_version: int | None = None
    ) -> int | None:
        record.check()
        return await self.run(records.put, record, expected_version)

    async def get_record(self, kind: str, workspace_id: str, record_id: str) -> Record | None:
        if not is_text(kind, workspace_id, record_id):
            return None
        return await self.read(records.get, kind, workspace_id, record_id)

    async def list_records(
        self,
        kind: str | None,
        workspace_id: str | None = None,
        *,
        after: str | None = None,
        limit: int,
        reverse: bool = False,
    ) -> Page[Record]:
        return await self.read(records.scan, kind, workspace_id, after, limit, reverse)

    async def records_version(self, kind: str) -> int:
        return await self.read(records.version, kind)

    async def delete_record(self, kind: str, workspace_id: str, record_id: str) -> bool:
        if not is_text(kind, workspace_id, record_id):
            return False
        return await self.run(records.delete, kind, workspace_id, record_id)

    async def expire_records(self, kind: str, before: int, *, limit: int) -> int:
        return await self.run(records.expire, kind, before, limit)


class PlannedCounts(Executor, CountStore):
    """Counters, by plans."""

    async def put_counts(self, counts: Sequence[Count]) -> None:
        if counts:
            await self.run(counting.put, counts)

    async def counts(
        self,
        step: int,
        *,
        since: int,
        until: int,
        names: Sequence[str] | None = None,
        workspace_id: str | None = None,
        after: str | None = None,
        limit: int,
    ) -> Page[CountSum]:
        return await self.read(counting.sums, step, since, until, names, workspace_id, after, limit)

    async def scan_counts(self, *, after: str | None, limit: int) -> Page[Count]:
        return await self.read(counting.scan, after, limit)

    async def expire_counts(self, step: int, before: int, *, limit: int) -> int:
        return await self.run(counting.expire, step, before, limit)


class PlannedSuppressions(Executor, SuppressionStore):
    """Suppressed addresses, by plans."""

    async def suppress(self, suppressions: Sequence[Suppression]) -> None:
        if suppressions:
            await self.run(suppressing.suppress, suppressions)

    async def suppressions(
        self, workspace_id: str, addresses: Collection[tuple[str, str]]
    ) -> Sequence[Suppression]:
        return await self.read(suppressing.find, workspace_id, [*addresses])

    async def scan_suppressions(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[Suppression]:
        return await self.read(suppressing.scan, workspace_id, after, limit)

    async def erase_suppressions(
        self, workspace_id: str, addresses: Collection[tuple[str, str]]
    ) -> int:
        """See :meth:`~engage.api.ErasureStore.erase_suppressions`."""
        return await self.run(suppressing.erase, workspace_id, [*addresses])


class PlannedLetters(Executor, DeadLetterStore):
    """Dead letters, by plans."""

    async def put(self, letters: Sequence[DeadLetter]) -> int:
        return sum(not kept for kept in await self.keep(letters))

    async def keep(self, letters: Sequence[DeadLetter]) -> Sequence[bool]:
        return await self.run(keeping.keep, [*map(keeping.storable, letters)])

    async def budget_use(self) -> Sequence[BudgetUse]:
        return await self.read(keeping.use)

    async def scan_dead_letters(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[DeadLetter]:
        return await self.read(keeping.scan, workspace_id, after, limit, False)

    async def recent_dead_letters(
        self, workspace_id: str | None, *, before: str | None = None, limit: int
    ) -> Page[DeadLetter]:
        return await self.read(keeping.scan, workspace_id, before, limit, True)

    async def dead_letter(self, workspace_id: str, letter_id: str) -> DeadLetter | None:
        if not is_text(workspace_id, letter_id):
            return None
        return await self.read(keeping.get, workspace_id, letter_id)

    async def remove(self, workspace_id: str, ids: Sequence[str]) -> int:
        return await self.run(keeping.remove, workspace_id, [*ids])

    async def expire_dead_letters(self, before: int, *, limit: int) -> int:
        return await self.run(keeping.expire, before, limit)
