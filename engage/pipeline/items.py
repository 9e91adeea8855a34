# SPDX-License-Identifier: Apache-2.0
"""What happens to an item before and after its write, the same for one event and for many."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from engage.api import CONFLICT, EVENT_TYPES, DeadLetter, Event, Outcome, Status
from engage.errors import ApiError, Limit
from engage.pipeline.dead_letters import Conflict, envelope_of, letter_of
from engage.pipeline.decode import Faulty
from engage.pipeline.normalise import Arrival, dropped_traits, normalise
from engage.pipeline.results import BatchState, not_strict, outcome_of
from engage.subscriptions.choices import CHANGE_EVENT

if TYPE_CHECKING:
    from engage.monitoring.metrics import Metrics
    from engage.pipeline.conflicts import Conflicts
    from engage.pipeline.transforms import Transforms
    from engage.pipeline.validate import Schemas

__all__ = ["NOTICES", "Failed", "Items"]

#: The type and the outcome as which an event is counted in addition to its own, if it was to change
#: a subscription, and if protected traits were removed from it.
IGNORED: Final = ("subscription", "ignored")
DROPPED: Final = ("traits", "dropped")
#: The same → a line for the operator, for a count and a period such as "in 24 hours".
NOTICES: Final[Mapping[tuple[str, ...], str]] = {
    IGNORED: f"Events {CHANGE_EVENT} change no subscription ({{}} {{}}): send"
    " PUT /api/public/subscription-management/user-subscriptions instead",
    DROPPED: "Events with a public key, or of a provider that is not trusted, had protected_traits,"
    " which were removed ({} {}): set them with a server key",
}

#: Seconds that the items of one request may keep the event loop before other requests get a turn.
TURN_SECONDS: Final = 0.005
#: Valid items between two looks at the clock, which is a system call. It is also looked at after
#: each item that is transformed or refused: describing its problems takes about a millisecond.
CLOCK_EVERY: Final = 64
#: Maximum number of bytes of the envelopes in the dead letters of one write. A small batch could
#: otherwise make letters that are a thousand times as large.
ENVELOPES: Final = 2 * 1024 * 1024

#: In Python 3.11, looking up a member of an enumeration takes as long as a call.
_STORED: Final = Status.STORED

#: The index of an item, its event, and why the event was not stored.
Failed = tuple[int, Event, ApiError | Conflict]


class Items:
    """Prepares items for a write, and adds up their outcomes.

    :param conflicts: finds out why an event was not stored, and keeps conflicts.
    """

    def __init__(
        self,
        *,
        schemas: Schemas,
        transforms: Transforms,
        conflicts: Conflicts,
        metrics: Metrics,
    ) -> None:
        self._schemas = schemas
        self._validators = {kind: schemas.validator(kind) for kind in (*EVENT_TYPES, "item")}
        # ``None`` if there are no transforms, so that an event costs no call.
        self._transforms = transforms if transforms else None
        self._conflicts = conflicts
        self._metrics = metrics

    def prepare(
        self, item: Any, kind: str | None, arrival: Arrival, index: int
    ) -> tuple[Event, bool]:
        """Validate, normalise and transform an item.

        :param kind: the route's type; ``None`` if the item has its ``type``.
        :param index: the item's index in its batch.
        :return: the event, and whether a transform dropped it.
        :raises ApiError: if the item is invalid, too large, its user is not verified, or a
            transform failed.
        """
        rules, asked = arrival.rules, item
        if rules is not None:
            # Before the fault of an item counts: no letter is kept of what its key refuses.
            asked = item.value if type(item) is Faulty else item
            if rules.identity:
                envelope = arrival.envelope
                rules.check_user(asked, None if envelope is None else envelope.user_hash)
        if kind is None:
            kind = asked.get("type") if type(asked) is dict else None
            if type(kind) is not str or kind not in self._validators:
                kind = "item"
            elif rules is not None:
                rules.check_operation(kind)
        if not self._validators[kind](item):
            if type(item) is Faulty:
                raise item.error
            item = self._schemas.read(kind, item)
        event = normalise(item, kind, arrival, index)
        if event.name == CHANGE_EVENT and kind == "track":
            self._metrics.event(*IGNORED, 1, arrival.workspace_id, arrival.write_key_id)
        # A client can have that word in its event, so it is not enough.
        marked = rules is not None and b'"droppedTraits"' in event.body
        if marked and dropped_traits(event.document()):
            self._metrics.event(*DROPPED, 1, arrival.workspace_id, arrival.write_key_id)
        if self._transforms is None:
            return event, False
        transformed = self._transforms.apply(event, arrival.event_limit)
        return (event, True) if transformed is None else (transformed, False)

    async def prepare_all(
        self,
        items: Sequence[Any],
        arrival: Arrival,
        *,
        pause: Callable[[], Awaitable[None]],
        strict: bool = False,
        total: Limit | None = None,
    ) -> BatchState:
        """Prepare all items.

        :param pause: called whenever the items have taken long; it lets other requests run.
        :param strict: refuse all items if one is refused.
        :param total: the maximum size of all events together when stored.
        :return: the events to store, and the items that were refused or dropped. The caller stores
            the events and keeps the dead letters.
        :raises ApiError: if the events are too large in total, or ``strict`` and an item is
            refused.
        """
        state = BatchState()
        size = 0
        # The time of this thread: another process that has the processor does not count.
        turn_ends = time.thread_time() + TURN_SECONDS
        step = 1 if self._transforms is None else CLOCK_EVERY
        since = 0
        for index, item in enumerate(items):
            if since >= CLOCK_EVERY:
                since = 0
                if time.thread_time() > turn_ends:
                    await pause()
                    turn_ends = time.thread_time() + TURN_SECONDS
            since += step
            try:
                event, dropped = self.prepare(item, None, arrival, index)
            except ApiError as error:
                state.refuse(index, item, error)
                since = CLOCK_EVERY
                continue
            if dropped:
                state.accepted += 1
                state.counts[event.type, "dropped"] += 1
                continue
            size += len(event.body)
            if total is not None and size > total.bytes:
                raise ApiError(
                    "batch_too_large",
                    "the events of the batch are too large when stored;"
                    f" the limit is {total.bytes} bytes in total ({total.key})",
                )
            state.events.append(event)
            state.indexes.append(index)
        if time.thread_time() > turn_ends:
            await asyncio.sleep(0)  # Making the dead letter of a large item takes as long again.
        if strict and state.rejected:
            self.count(state, arrival)
            raise not_strict(state.rejected, len(items))
        return state

    async def add_outcomes(
        self, state: BatchState, outcomes: Sequence[Outcome], *, restated: Collection[int] = ()
    ) -> list[Failed]:
        """Add to ``state`` the events that are stored now or were stored before.

        :param outcomes: one for each event in ``state``.
        :param restated: the indexes of events that are duplicates although they differ from the
            stored ones.
        :return: the other events, for :meth:`add_failed`.
        """
        failed: list[Failed] = []
        counts = state.counts
        for event, index, outcome in zip(state.events, state.indexes, outcomes, strict=True):
            if outcome.status is _STORED:
                state.accepted += 1
                state.stored_bytes += len(event.body)
                counts[event.type, "stored"] += 1
                continue
            problem = await self._conflicts.problem(event, outcome)
            if problem is None or (index in restated and isinstance(problem, Conflict)):
                state.duplicates += 1
                counts[event.type, "duplicate"] += 1
            else:
                failed.append((index, event, problem))
        return failed

    async def add_failed(
        self,
        failed: Sequence[Failed],
        items: Sequence[Any],
        arrival: Arrival,
        state: BatchState,
    ) -> None:
        """Keep the events that are conflicts, refuse the others, and add both to ``state``.

        :param failed: the result of :meth:`add_outcomes`.
        :raises ApiError: 503, if a conflict of a delivery cannot be kept.
        """
        conflicts: list[tuple[int, Event, Conflict]] = []
        for index, event, problem in failed:
            if isinstance(problem, ApiError):
                state.refuse(index, items[index], problem)
            else:
                conflicts.append((index, event, problem))
        refusals = await self._conflicts.keep(
            [(items[index], event, conflict) for index, event, conflict in conflicts], arrival
        )
        for (index, event, conflict), refusal in zip(conflicts, refusals, strict=True):
            if refusal is not None:
                state.refuse(index, items[index], refusal)
            else:
                state.duplicates += 1
                state.counts[event.type, outcome_of(conflict)] += 1

    def letters(self, items: list[Any], arrival: Arrival, state: BatchState) -> list[DeadLetter]:
        """Return the dead letters of items that were refused since the last call.

        The items are removed from the list: they may be large, and the write takes long.
        """
        letters = []
        envelope = envelope_of(arrival) if state.unkept else None
        room = ENVELOPES
        for index, error in state.unkept:
            if error.code != CONFLICT:  # one that was not kept would not fit now either
                if envelope is not None and (room := room - len(envelope)) < 0:
                    envelope = None
                letters.append(letter_of(items[index], error, arrival, "batch", envelope, index))
            items[index] = None
        state.unkept.clear()
        return letters

    def count(self, state: BatchState, arrival: Arrival) -> None:
        """Count the outcomes of the items."""
        key = arrival.workspace_id, arrival.write_key_id
        stored = 0
        for (kind, outcome), count in state.counts.items():
            self._metrics.event(kind, outcome, count, *key)
            stored += count if outcome == "stored" else 0
        self._metrics.stored(stored, state.stored_bytes, *key)
