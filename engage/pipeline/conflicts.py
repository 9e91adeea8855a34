# SPDX-License-Identifier: Apache-2.0
"""Finds out why an event was not stored, and keeps it if another event has its message id.

Nothing is acknowledged that is kept nowhere: a conflict that cannot be kept is refused.

An erased event leaves a mark, by which a late retry of it is told from another's event: that one is
a conflict, or anyone could make message ids useless by having their own events erased.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engage.api import API_ORIGIN, ERASED, Event, Outcome, Status, StorageUnavailable
from engage.errors import ApiError, conflict_not_kept, overloaded
from engage.pipeline.dead_letters import Conflict, find_conflict, letter_of_conflict
from engage.store.erasures import mark_of

if TYPE_CHECKING:
    from engage.pipeline.ingest import Ingest
    from engage.pipeline.normalise import Arrival

__all__ = ["Conflicts"]


class Conflicts:
    """Finds and keeps conflicts.

    :param ingest: writes the dead letters, and finds stored events.
    :param erasures_key: ``[erasures] key``. What another key marked is not compared.
    """

    def __init__(self, ingest: Ingest, erasures_key: str | None) -> None:
        self._ingest = ingest
        self._erasures_key = erasures_key

    async def problem(self, event: Event, outcome: Outcome) -> ApiError | Conflict | None:
        """Find out why an event was not stored.

        :return: the refusal, or the conflict with the stored event; ``None`` for a duplicate.
        """
        if outcome.status is Status.REFUSED:
            reason = outcome.reason or "the storage cannot store this event"
            return ApiError("event_refused", reason)
        stored = outcome.stored
        if stored is None:
            earlier = await self._ingest.find(event)
            if earlier is None:  # it has just expired, so the next attempt stores this one
                raise StorageUnavailable("the event with this message id has just expired")
            stored = earlier.body
        if stored and not stored.startswith(ERASED):
            return find_conflict(event, stored)
        key = self._erasures_key
        return Conflict(()) if key is not None and _is_another(event, stored, key) else None

    async def keep(
        self, conflicts: Sequence[tuple[Mapping[str, Any], Event, Conflict]], arrival: Arrival
    ) -> Sequence[ApiError | None]:
        """Keep events that conflict with stored ones as dead letters, whole.

        :param conflicts: items as received, each with its event and its conflict.
        :return: for each, the refusal if it cannot be kept: nothing is acknowledged that is kept
            nowhere.
        :raises ApiError: 503, if an event of a delivery cannot be kept; the provider sends it again
            and stops after some days.
        """
        kept = await self._ingest.keep(
            [
                letter_of_conflict(item, event, conflict, arrival)
                for item, event, conflict in conflicts
            ]
        )
        if arrival.origin != API_ORIGIN and not all(kept):
            raise overloaded("a conflict of this delivery cannot be kept; send it again later")
        return [
            None if stored else conflict_not_kept(conflict.message, conflict.errors)
            for (_, _, conflict), stored in zip(conflicts, kept, strict=True)
        ]


def _is_another(event: Event, mark: bytes, key: str) -> bool:
    """Return whether an event is surely not the erased one that left a mark."""
    if event.origin != API_ORIGIN and event.user_id is None and ":" in (event.anonymous_id or ""):
        return False  # The id may be the address of somebody who was found before the erasure.
    own = mark_of(event, key)
    return own != mark and own.rpartition(b":")[0] == mark.rpartition(b":")[0]
