# SPDX-License-Identifier: Apache-2.0
"""The steps of an event in their order, for one event, a batch, or a webhook delivery.

Handlers call a :class:`Pipeline`. It is independent of HTTP: it takes raw bytes and a principal,
and returns a result or raises an :class:`~engage.errors.ApiError`. It returns a result only when
everything in it is durable, including dead letters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import orjson

from engage.api import EVENT_TYPES, Event, EventStore, Outcome, Status
from engage.errors import ApiError, Limit, from_problems
from engage.pipeline.auth import KEYLESS_BODY, Authenticator, Principal
from engage.pipeline.dead_letters import Conflict, find_conflict, letter_of
from engage.pipeline.decode import Encoding, decode_json, decompress
from engage.pipeline.normalise import Arrival, Clock, Envelope, normalise, parse_time
from engage.pipeline.results import (
    BatchResult,
    Delivered,
    RejectedItem,
    Result,
    Taken,
    all_invalid,
    not_strict,
    outcome_of,
)
from engage.pipeline.subscriptions import Subscriptions
from engage.pipeline.validate import Schemas
from engage.storage.time_limit import within

if TYPE_CHECKING:
    from engage.config import Limits, Workspace
    from engage.metrics import Metrics
    from engage.pipeline.ingest import Ingest
    from engage.pipeline.transforms import Transforms

__all__ = ["Pipeline"]

#: Maximum size in bytes of ``context`` and ``integrations`` of a batch together; both are copied
#: into every item.
ENVELOPE_BYTES: Final = 32 * 1024
#: Maximum number of events in one write of a webhook delivery.
DELIVERY_EVENTS: Final = 500
#: Number of invalid items after which other requests get a turn: describing the problems of an
#: invalid item takes a thousand times as long as validating a valid one.
YIELD_EVERY: Final = 50


class Pipeline:
    """Runs the steps.

    :param store: the store that ``ingest`` writes to; used here for conflicts and subscriptions.
    :param timeout: seconds that a call of the store may take (``storage.write_timeout``).
    :param clock: returns milliseconds since 1970 UTC and never goes back.
    """

    def __init__(
        self,
        *,
        workspaces: Iterable[Workspace],
        limits: Limits,
        authenticator: Authenticator,
        schemas: Schemas,
        transforms: Transforms,
        ingest: Ingest,
        store: EventStore,
        metrics: Metrics,
        timeout: float = 8.0,
        clock: Callable[[], int] | None = None,
    ) -> None:
        self._limits = limits
        self._event_limit = Limit(limits.event_bytes, "limits.event_bytes")
        self._decompressed = Limit(limits.decompressed_bytes, "limits.decompressed_bytes")
        self._keyless = Limit(min(KEYLESS_BODY.bytes, limits.decompressed_bytes), KEYLESS_BODY.key)
        self._authenticator = authenticator
        self._schemas = schemas
        self._validators = {kind: schemas.validator(kind) for kind in EVENT_TYPES}
        self._valid_envelope = schemas.validator("batch")
        self._valid_fields = schemas.validator("common")
        # ``None`` without transforms, to save a call per event.
        self._transforms = transforms if transforms else None
        self._ingest = ingest
        self._store = store
        self._timeout = timeout
        self._metrics = metrics
        self._clock = Clock() if clock is None else clock
        self._last_arrival: tuple[Principal | None, Arrival | None] = (None, None)
        self._subscriptions = Subscriptions(workspaces, store, clock=self._clock, timeout=timeout)

    # ------------------------------------------------------------------------------- operations
    async def event(
        self,
        operation: str,
        raw: bytes,
        encoding: Encoding = "identity",
        principal: Principal | None = None,
        idempotency_key: str | None = None,
        strict: bool = False,
    ) -> Result:
        """Store one event.

        :param operation: the event's type, from the route.
        :param raw: the body as received.
        :param principal: from the header or the query; ``None`` if the write key is in the body.
        :param strict: keep no dead letter of an event that is refused before it is written.
        :raises ApiError: if the event is refused.
        :raises StorageUnavailable: if the event may not be durable.
        """
        item = self._decode(raw, encoding, principal)
        principal = principal or self._principal(item)
        arrival = self._arrival(principal, idempotency_key)
        try:
            event, dropped = self._prepare(item, operation, arrival, 0)
        except ApiError as error:
            self._metrics.event(operation, error.code)
            if not strict:
                await self._ingest.put_dead_letters([letter_of(item, error, arrival)])
            raise
        if dropped:
            self._metrics.event(operation, "dropped")
            return Result(event.message_id, principal)
        outcome = (await self._ingest.write((event,)))[0]
        if outcome.status is Status.STORED:
            self._metrics.event(event.type, "stored")
            return Result(event.message_id, principal)
        problem = await self._problem(event, outcome)
        self._metrics.event(event.type, outcome_of(problem))
        if problem is not None:
            await self._ingest.put_dead_letters([letter_of(item, problem, arrival)])
            if isinstance(problem, ApiError):
                raise problem
        return Result(event.message_id, principal)

    async def batch(
        self,
        raw: bytes,
        encoding: Encoding = "identity",
        principal: Principal | None = None,
        idempotency_key: str | None = None,
        strict: bool = False,
    ) -> BatchResult:
        """Store the valid items of a batch; report the others and keep them as dead letters.

        The parameters are those of :meth:`event`, without the type: each item has its own.

        :param strict: if one item is refused before the write, store nothing and keep no dead
            letter.
        :raises ApiError: if no event was stored.
        :raises StorageUnavailable: if not everything is durable.
        """
        body = self._decode(raw, encoding, principal)
        principal = principal or self._principal(body)
        if not self._valid_envelope(body):
            raise from_problems(self._schemas.problems("batch", body))
        items: list[Any] = body["batch"]
        if len(items) > self._limits.batch_events:
            raise ApiError(
                "batch_too_large",
                f"the batch has {len(items)} events;"
                f" the limit is {self._limits.batch_events} (limits.batch_events)",
            )
        arrival = self._arrival(principal, idempotency_key, self._envelope(body))
        taken = await self._take(items, arrival, strict=strict, total=self._decompressed)
        letters = [letter_of(items[index], error, arrival) for index, error in taken.refused]
        letters += [letter_of(items[index], other, arrival) for index, other in taken.conflicts]
        await self._ingest.put_dead_letters(letters)
        rejected = taken.rejected(items)
        if rejected and len(rejected) == len(items):
            raise all_invalid(rejected)
        return BatchResult(taken.accepted, taken.duplicates, rejected, principal)

    async def subscriptions(
        self, raw: bytes, encoding: Encoding = "identity"
    ) -> Mapping[str, bool]:
        """Change a user's subscription choices.

        :return: for every group of the workspace, whether the user is subscribed after the change.
        :raises ApiError: if nothing was changed.
        :raises StorageUnavailable: if the change may not be durable.
        """
        body = self._decode(raw, encoding, None)
        if not self._schemas.is_valid("subscriptions", body):
            raise from_problems(self._schemas.problems("subscriptions", body))
        state = await self._subscriptions.change(body)
        self._metrics.event("subscription", "stored")
        return state

    async def deliver(
        self,
        workspace_id: str,
        provider: str,
        documents: Sequence[Mapping[str, Any]],
    ) -> Delivered:
        """Store the events of a verified webhook delivery, in several writes if there are many.

        The events are validated, normalised and transformed like events of the API. Their origin is
        the provider, the limits are those for webhooks, and the clock is not corrected.

        :param documents: the events that ``translate`` returned, with ``type`` and ``messageId``.
        :return: the outcome. The caller keeps the delivery if an event was rejected.
        :raises ApiError: 503 ``overloaded`` or ``shutting_down``.
        :raises StorageUnavailable: if not everything is durable. It is safe for the provider to
            deliver the events again.
        """
        arrival = Arrival.of_delivery(
            workspace_id, provider, received_at=self._clock(), limits=self._limits
        )
        accepted = duplicates = 0
        rejected: list[RejectedItem] = []
        for start in range(0, len(documents), DELIVERY_EVENTS):
            part = documents[start : start + DELIVERY_EVENTS]
            taken = await self._take(part, arrival)
            accepted += taken.accepted
            duplicates += taken.duplicates
            await self._ingest.put_dead_letters(
                [
                    letter_of(part[index], conflict, arrival, max_item=None)
                    for index, conflict in taken.conflicts
                ]
            )
            rejected += taken.rejected(part, offset=start)
        return Delivered(accepted, duplicates, rejected)

    # ------------------------------------------------------------------------------------ steps
    def _decode(self, raw: bytes, encoding: Encoding, principal: Principal | None) -> Any:
        limit = self._keyless if principal is None else self._decompressed
        if encoding != "identity" or len(raw) > limit.bytes:
            raw = decompress(raw, encoding, limit)
        return decode_json(raw, self._limits)

    def _principal(self, body: Any) -> Principal:
        """Return the principal of the write key in the body.

        :raises ApiError: if there is no key, or it is unknown or disabled.
        """
        return self._authenticator.body(body.get("writeKey") if type(body) is dict else None)

    def _arrival(
        self,
        principal: Principal,
        idempotency_key: str | None,
        envelope: Envelope | None = None,
    ) -> Arrival:
        now = self._clock()
        plain = envelope is None and idempotency_key is None
        if plain:
            # Under load, many requests with the same key arrive within one millisecond.
            last, arrival = self._last_arrival
            if last is principal and arrival is not None and arrival.received_at == now:
                return arrival
        arrival = Arrival(
            workspace_id=principal.workspace.id,
            write_key_id=principal.write_key.id,
            received_at=now,
            event_limit=self._event_limit,
            envelope=envelope,
            idempotency_key=idempotency_key,
        )
        if plain:
            self._last_arrival = principal, arrival
        return arrival

    def _envelope(self, body: Mapping[str, Any]) -> Envelope:
        context = body.get("context") or {}
        integrations = body.get("integrations") or {}
        if context or integrations:
            size = len(orjson.dumps(context)) + len(orjson.dumps(integrations))
            if size > ENVELOPE_BYTES:
                raise ApiError(
                    "batch_too_large",
                    f"the context and integrations of the batch are {size} bytes together;"
                    f" the limit is {ENVELOPE_BYTES}",
                )
        sent_at = body.get("sentAt")
        if sent_at is not None and (
            not self._valid_fields({"userId": "-", "sentAt": sent_at})
            or parse_time(sent_at) is None
        ):
            # In an item this is an error; in the envelope it must not fail all items.
            sent_at = None
        return Envelope(sent_at=sent_at, context=context, integrations=integrations)

    def _prepare(
        self, item: Any, kind: str | None, arrival: Arrival, index: int
    ) -> tuple[Event, bool]:
        """Validate, normalise and transform an item.

        :param kind: the route's type; ``None`` if the item has its ``type``.
        :param index: the item's index in its batch.
        :return: the event, and whether a transform dropped it.
        :raises ApiError: if the item is invalid, too large, or a transform failed.
        """
        if kind is None:
            kind = item.get("type") if type(item) is dict else None
            if type(kind) is not str or kind not in self._validators:
                raise from_problems(self._schemas.problems("item", item))
        if not self._validators[kind](item):
            raise from_problems(self._schemas.problems(kind, item))
        event = normalise(item, kind, arrival, index)
        if self._transforms is None:
            return event, False
        transformed = self._transforms.apply(event, arrival.event_limit)
        return (event, True) if transformed is None else (transformed, False)

    async def _take(
        self,
        items: Sequence[Any],
        arrival: Arrival,
        *,
        strict: bool = False,
        total: Limit | None = None,
    ) -> Taken:
        """Prepare all items and store the events.

        :param strict: store nothing if an item is refused.
        :param total: the maximum size of all events together when stored.
        :return: the outcome of each item; the caller keeps the dead letters.
        :raises ApiError: if the events are too large in total, or ``strict`` and an item is
            refused. Nothing was stored.
        """
        taken = Taken()
        events: list[Event] = []
        indexes: list[int] = []
        size = 0
        for index, item in enumerate(items):
            try:
                event, dropped = self._prepare(item, None, arrival, index)
            except ApiError as error:
                taken.refuse(index, item, error)
                if len(taken.refused) % YIELD_EVERY == 0:
                    await asyncio.sleep(0)
                continue
            if dropped:
                taken.accepted += 1
                taken.counts[event.type, "dropped"] += 1
                continue
            size += len(event.body)
            if total is not None and size > total.bytes:
                raise ApiError(
                    "batch_too_large",
                    "the events of the batch are too large when stored;"
                    f" the limit is {total.bytes} bytes in total ({total.key})",
                )
            events.append(event)
            indexes.append(index)
        if strict and taken.refused:
            self._count(taken)
            raise not_strict(taken.rejected(items), len(items))
        outcomes = await self._ingest.write(events) if events else ()
        for event, index, outcome in zip(events, indexes, outcomes, strict=True):
            if outcome.status is Status.STORED:
                taken.accepted += 1
                taken.counts[event.type, "stored"] += 1
                continue
            problem = await self._problem(event, outcome)
            if isinstance(problem, ApiError):
                taken.refuse(index, items[index], problem)
                continue
            taken.duplicates += 1
            taken.counts[event.type, outcome_of(problem)] += 1
            if problem is not None:
                taken.conflicts.append((index, problem))
        self._count(taken)
        return taken

    async def _problem(self, event: Event, outcome: Outcome) -> ApiError | Conflict | None:
        """Find out why an event was not stored.

        :return: the refusal, or the conflict with the stored event; ``None`` for a duplicate.
        """
        if outcome.status is Status.REFUSED:
            reason = outcome.reason or "the storage cannot store this event"
            return ApiError("event_refused", reason)
        stored = outcome.stored
        if stored is None:
            async with within(self._timeout):
                found = await self._store.find(*event.identity)
            if found is None:  # the stored event has expired meanwhile
                return None
            stored = found.body
        return find_conflict(event, stored)

    def _count(self, taken: Taken) -> None:
        for (kind, outcome), count in taken.counts.items():
            self._metrics.event(kind, outcome, count)
