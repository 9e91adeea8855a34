# SPDX-License-Identifier: Apache-2.0
"""What a handler calls: the steps in their order, for one event, a batch, a delivery.

It knows no HTTP: raw bytes and a principal come in, a result or an :class:`ApiError` goes out. A
result is returned only when everything in it is durable, the dead letters too.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import orjson

from engage.api import EVENT_TYPES, Event, EventStore, Outcome, Status
from engage.errors import ApiError, Limit, from_problems
from engage.pipeline.auth import KEYLESS, Authenticator, Principal
from engage.pipeline.dead_letters import conflict_error, differences, letter_of
from engage.pipeline.decode import Encoding, decode_json, decompress
from engage.pipeline.normalise import Arrival, Clock, Envelope, normalise, parse_time
from engage.pipeline.results import (
    BatchResult,
    Delivered,
    RejectedItem,
    Result,
    all_invalid,
    not_strict,
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

#: ``context`` and ``integrations`` of an envelope together: they go under every item.
ENVELOPE_BYTES: Final = 32 * 1024
#: Events of one write of a delivery.
DELIVERY_EVENTS: Final = 500
#: After so many invalid items others get their turn: a report takes a thousand times as long as
#: the look that finds an item valid.
_BREATH: Final = 50


class Pipeline:
    """The steps, composed.

    :param store: the one that ``ingest`` writes to; read for duplicates and subscriptions.
    :param clock: milliseconds since 1970 UTC, never decreasing.
    :param timeout: seconds that a call of the storage may take (``storage.write_timeout``).
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
        self._keyless = Limit(min(KEYLESS.bytes, limits.decompressed_bytes), KEYLESS.key)
        self._authenticator = authenticator
        self._schemas = schemas
        self._validators = {kind: schemas.validator(kind) for kind in EVENT_TYPES}
        self._valid_envelope = schemas.validator("batch")
        self._valid_fields = schemas.validator("common")
        # ``None``: the usual path does not even ask.
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
        """Take one event.

        :param operation: the route's type.
        :param principal: from header or query; ``None``: the body must name the key.
        :param strict: no dead letter for an invalid event.
        :raises ApiError: it is refused.
        :raises StorageUnavailable: it may not be durable.
        """
        item = self._decode(raw, encoding, principal)
        principal = principal or self._principal(item)
        arrival = self._arrival(principal, idempotency_key)
        try:
            event = self._event(item, operation, arrival, 0)
        except ApiError as error:
            self._metrics.event(operation, error.code)
            if not strict:
                await self._ingest.put_dead_letters([letter_of(item, error, arrival)])
            raise
        if self._transforms is not None:
            message_id = event.message_id
            try:
                transformed = self._transforms.apply(event, arrival.event_limit)
            except ApiError as error:
                self._metrics.event(operation, error.code)
                await self._ingest.put_dead_letters([letter_of(item, error, arrival)])
                raise
            if transformed is None:
                self._metrics.event(operation, "dropped")
                return Result(message_id, principal)
            event = transformed
        outcome = (await self._ingest.write((event,)))[0]
        if outcome.status is Status.STORED:
            self._metrics.event(operation, "stored")
        elif outcome.status is Status.DUPLICATE:
            conflict = await self._conflict(event, outcome)
            self._metrics.event(operation, "duplicate" if conflict is None else "conflict")
            if conflict is not None:
                await self._ingest.put_dead_letters([letter_of(item, conflict, arrival)])
        else:
            self._metrics.event(operation, "event_refused")
            refusal = _refused(outcome)
            await self._ingest.put_dead_letters([letter_of(item, refusal, arrival)])
            raise refusal
        return Result(event.message_id, principal)

    async def batch(
        self,
        raw: bytes,
        encoding: Encoding = "identity",
        principal: Principal | None = None,
        idempotency_key: str | None = None,
        strict: bool = False,
    ) -> BatchResult:
        """Take a batch: the valid items are stored, the others reported and kept.

        :param strict: one invalid item, and nothing is written.
        :raises ApiError: nothing was stored (but dead letters, unless strict).
        :raises StorageUnavailable: not everything is durable.
        """
        body = self._decode(raw, encoding, principal)
        principal = principal or self._principal(body)
        if not self._valid_envelope(body):
            raise from_problems(self._schemas.problems("batch", body))
        items: list[Any] = body["batch"]
        if len(items) > self._limits.batch_events:
            raise ApiError(
                "batch_too_large",
                f"the batch has {len(items)} events,"
                f" at most {self._limits.batch_events} (limits.batch_events)",
            )
        arrival = self._arrival(principal, idempotency_key, self._envelope(body, len(raw)))
        return await self._take(items, arrival, principal, strict=strict)

    async def subscriptions(
        self, raw: bytes, encoding: Encoding = "identity"
    ) -> Mapping[str, bool]:
        """Change a user's subscription choices.

        :return: every group of the workspace → whether the user is subscribed, after the change.
        :raises ApiError: nothing changed.
        :raises StorageUnavailable: the change may not be durable.
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
        """Take the events of a verified webhook delivery; several writes if they are many.

        They are validated, normalised and transformed as everybody's, with the provider as origin,
        limits of their own, and no correction of the clock.

        :param documents: as ``translate`` made them: with ``type`` and ``messageId``.
        :return: what was refused is in ``rejected``; the caller keeps the delivery.
        :raises ApiError: 503 ``overloaded`` or ``shutting_down``.
        :raises StorageUnavailable: not everything is durable; the provider may deliver it again.
        """
        arrival = Arrival.of_delivery(
            workspace_id, provider, received_at=self._clock(), limits=self._limits
        )
        accepted = duplicates = 0
        rejected: list[RejectedItem] = []
        for start in range(0, len(documents), DELIVERY_EVENTS):
            part = documents[start : start + DELIVERY_EVENTS]
            taken = await self._store_items(part, arrival, offset=start)
            accepted += taken.accepted
            duplicates += taken.duplicates
            # A conflict is no refusal: the caller does not hear of it.
            await self._ingest.put_dead_letters(
                [
                    letter_of(item, error, arrival, max_item=None)
                    for item, error in taken.letters
                    if error.status == 200
                ]
            )
            rejected += taken.rejected
        return Delivered(accepted, duplicates, rejected)

    # ------------------------------------------------------------------------------------ steps
    def _decode(self, raw: bytes, encoding: Encoding, principal: Principal | None) -> Any:
        limit = self._keyless if principal is None else self._decompressed
        if encoding != "identity" or len(raw) > limit.bytes:
            raw = decompress(raw, encoding, limit)
        return decode_json(raw, self._limits)

    def _principal(self, body: Any) -> Principal:
        """:raises ApiError: the body names no key, or a wrong one."""
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
            # Under load many requests of one key arrive in one millisecond.
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

    def _envelope(self, body: Mapping[str, Any], size: int) -> Envelope:
        context = body.get("context") or {}
        integrations = body.get("integrations") or {}
        if context or integrations:
            size = len(orjson.dumps(context)) + len(orjson.dumps(integrations))
            if size > ENVELOPE_BYTES:
                raise ApiError(
                    "batch_too_large",
                    f"context and integrations of the batch have {size} bytes,"
                    f" at most {ENVELOPE_BYTES}",
                )
        sent_at = body.get("sentAt")
        if sent_at is not None and (
            not self._valid_fields({"userId": "-", "sentAt": sent_at})
            or parse_time(sent_at) is None
        ):
            sent_at = None  # an item's own would be refused; an envelope's costs nobody an event
        return Envelope(sent_at=sent_at, context=context, integrations=integrations)

    def _event(self, item: Any, kind: str | None, arrival: Arrival, index: int) -> Event:
        """:param kind: the route's type; ``None``: the item says it itself."""
        if kind is None:
            kind = item.get("type") if type(item) is dict else None
            if type(kind) is not str or kind not in self._validators:
                raise from_problems(self._schemas.problems("item", item))
        if not self._validators[kind](item):
            raise from_problems(self._schemas.problems(kind, item))
        return normalise(item, kind, arrival, index)

    async def _take(
        self, items: Sequence[Any], arrival: Arrival, principal: Principal, *, strict: bool
    ) -> BatchResult:
        taken = await self._store_items(
            items, arrival, strict=strict, total_bytes=self._limits.decompressed_bytes
        )
        await self._ingest.put_dead_letters(
            [letter_of(item, error, arrival) for item, error in taken.letters]
        )
        if taken.rejected and len(taken.rejected) == len(items):
            raise all_invalid(taken.rejected)
        return BatchResult(taken.accepted, taken.duplicates, taken.rejected, principal)

    async def _store_items(
        self,
        items: Sequence[Any],
        arrival: Arrival,
        *,
        strict: bool = False,
        total_bytes: int | None = None,
        offset: int = 0,
    ) -> _Taken:
        """Store what is valid.

        :param total_bytes: of all events as stored, at most.
        :param offset: index of the first item.
        """
        taken = _Taken()
        counts: collections.Counter[tuple[str, str]] = collections.Counter()
        events: list[Event] = []
        indexes: list[int] = []
        size = 0
        transforms = self._transforms
        for index, item in enumerate(items, offset):
            try:
                event: Event | None = self._event(item, None, arrival, index)
                if transforms is not None and event is not None:
                    kind = event.type
                    event = transforms.apply(event, arrival.event_limit)
                    if event is None:
                        taken.accepted += 1
                        counts[kind, "dropped"] += 1
                        continue
            except ApiError as error:
                taken.reject(index, item, error, counts)
                if len(taken.rejected) % _BREATH == 0:
                    await asyncio.sleep(0)
                continue
            assert event is not None
            size += len(event.body)
            if total_bytes is not None and size > total_bytes:
                raise ApiError(
                    "batch_too_large",
                    f"the events of the batch have more than {total_bytes} bytes as stored"
                    " (limits.decompressed_bytes)",
                )
            events.append(event)
            indexes.append(index)
        if strict and taken.rejected:
            self._count(counts)
            raise not_strict(taken.rejected, len(items))
        outcomes = await self._ingest.write(events) if events else ()
        for event, index, outcome in zip(events, indexes, outcomes, strict=True):
            if outcome.status is Status.STORED:
                taken.accepted += 1
                counts[event.type, "stored"] += 1
            elif outcome.status is Status.DUPLICATE:
                taken.duplicates += 1
                conflict = await self._conflict(event, outcome)
                counts[event.type, "duplicate" if conflict is None else "conflict"] += 1
                if conflict is not None:
                    taken.letters.append((items[index - offset], conflict))
            else:
                taken.reject(index, items[index - offset], _refused(outcome), counts)
        taken.rejected.sort(key=lambda rejected: rejected.index)
        self._count(counts)
        return taken

    async def _conflict(self, event: Event, outcome: Outcome) -> ApiError | None:
        """:return: why this duplicate is another event than the stored one; ``None``: it is not."""
        stored = outcome.stored
        if stored is None:
            async with within(self._timeout):
                found = await self._store.find(*event.identity)
            if found is None:  # expired meanwhile
                return None
            stored = found.body
        fields = differences(event, stored)
        return conflict_error(fields) if fields else None

    def _count(self, counts: Mapping[tuple[str, str], int]) -> None:
        for (kind, outcome), count in counts.items():
            self._metrics.event(kind, outcome, count)


class _Taken:
    """What became of some items."""

    __slots__ = ("accepted", "duplicates", "letters", "rejected")

    def __init__(self) -> None:
        self.accepted = 0
        self.duplicates = 0
        self.rejected: list[RejectedItem] = []
        #: Item and error of each dead letter.
        self.letters: list[tuple[Any, ApiError]] = []

    def reject(
        self,
        index: int,
        item: Any,
        error: ApiError,
        counts: collections.Counter[tuple[str, str]],
    ) -> None:
        fields = item if type(item) is dict else {}
        kind, message_id = fields.get("type"), fields.get("messageId")
        self.rejected.append(
            RejectedItem(index, message_id[:256] if type(message_id) is str else None, error)
        )
        self.letters.append((item, error))
        # The client's word becomes no key: there are as many of those as clients want.
        label = kind if type(kind) is str and kind in EVENT_TYPES else "other"
        counts[label, error.code] += 1


def _refused(outcome: Outcome) -> ApiError:
    return ApiError("event_refused", outcome.reason or "the storage can never take this event")
