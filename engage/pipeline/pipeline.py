# SPDX-License-Identifier: Apache-2.0
"""The steps of an event in their order, for one event, a batch, or a webhook delivery.

Handlers call a :class:`Pipeline`. It is independent of HTTP: it takes raw bytes and a principal,
and returns a result or raises an :class:`~engage.errors.ApiError`. It returns a result only when
everything in it is durable, including dead letters.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import orjson

from engage.api import Preferences, Status
from engage.errors import ApiError, Limit, invalid_link, overloaded
from engage.keys.auth import KEYLESS_BODY, Authenticator, Principal
from engage.keys.limits import WITHOUT_LETTER
from engage.pipeline.admission import BRIEF_BODY, LARGE_BODY, SUBSCRIPTIONS_SHARE, Admitted
from engage.pipeline.clock import Clock
from engage.pipeline.dead_letters import Conflict, envelope_of, letter_of
from engage.pipeline.decode import (
    Encoding,
    Faulty,
    decode_items,
    decode_json,
    decode_json_in_slices,
    decompress_in_slices,
)
from engage.pipeline.items import Items
from engage.pipeline.normalise import Arrival, Envelope, without_hash
from engage.pipeline.results import (
    BatchResult,
    Delivered,
    RejectedItem,
    Result,
    all_invalid,
    outcome_of,
)
from engage.pipeline.validate import Schemas
from engage.subscriptions.choices import API, Source, Subscriptions, body_of_form
from engage.subscriptions.links import Person
from engage.times import rfc3339

if TYPE_CHECKING:
    from engage.config import Limits, Workspace
    from engage.monitoring.metrics import Metrics
    from engage.pipeline.conflicts import Conflicts
    from engage.pipeline.ingest import Ingest
    from engage.pipeline.transforms import Transforms

__all__ = ["Pipeline"]

#: Maximum size in bytes of ``context`` and ``integrations`` of a batch together; both are copied
#: into every item.
ENVELOPE_BYTES: Final = 32 * 1024
#: Maximum number of events in one write of a webhook delivery.
DELIVERY_EVENTS: Final = 500
#: The share of the queue that bodies have which name their key.
_KEYLESS_SHARE: Final = ""


class Pipeline:
    """Runs the steps.

    :param ingest: writes events; subscriptions are changed in its store.
    :param clock: returns milliseconds since 1970 UTC.
    :param catch_up: see :class:`engage.subscriptions.choices.Subscriptions`.
    :param erasures_key: see the same.
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
        conflicts: Conflicts,
        metrics: Metrics,
        clock: Callable[[], int] | None = None,
        catch_up: Callable[[], Awaitable[None]] | None = None,
        erasures_key: str | None = None,
    ) -> None:
        self._limits = limits
        self._event_limit = Limit(limits.event_bytes, "limits.event_bytes")
        self._decompressed = Limit(limits.decompressed_bytes, "limits.decompressed_bytes")
        self._keyless = Limit(min(KEYLESS_BODY.bytes, limits.decompressed_bytes), KEYLESS_BODY.key)
        self._authenticator = authenticator
        self._schemas = schemas
        self._conflicts = conflicts
        self._items = Items(
            schemas=schemas, transforms=transforms, conflicts=conflicts, metrics=metrics
        )
        self._ingest = ingest
        self._decoding_again = asyncio.Lock()
        self._keeping_large = asyncio.Lock()
        self._metrics = metrics
        self._clock = Clock() if clock is None else clock
        self._last_arrival: tuple[Principal | None, Arrival | None] = (None, None)
        self._subscriptions = Subscriptions(
            workspaces,
            ingest.store,
            clock=self._clock,
            timeout=ingest.timeout,
            resubscriptions=limits.resubscriptions_per_day,
            catch_up=catch_up,
            erasures_key=erasures_key,
        )

    # ------------------------------------------------------------------------------- operations
    async def event(
        self,
        operation: str,
        raw: bytes,
        encoding: Encoding = "identity",
        principal: Principal | None = None,
        idempotency_key: str | None = None,
        strict: bool = False,
        named: Callable[[Principal], None] | None = None,
    ) -> Result:
        """Store one event.

        :param operation: the event's type, from the route.
        :param raw: the body as received.
        :param principal: from the header or the query; ``None`` if the write key is in the body.
        :param strict: keep no dead letter of an event that is refused before it is written.
        :param named: called with the principal of a write key in the body; it may refuse it.
        :raises ApiError: if the event is refused.
        :raises StorageUnavailable: if the event may not be durable.
        """
        brief = len(raw) <= BRIEF_BODY
        with await self._admit(raw, encoding, _share_of(principal), brief=brief):
            item, size = await self._decode(raw, encoding, principal, batch=False)
            principal = principal or self._principal(item, named)
            if principal.guard is not None:
                principal.guard.take(1, size)
            arrival = self._arrival(principal, idempotency_key)
            refusal: ApiError | None = None
            try:
                event, dropped = self._items.prepare(item, operation, arrival, 0)
                if not dropped:
                    written = self._ingest.submit((event,), principal.write_key.sha256)
            except ApiError as error:
                refusal = error
        if refusal is not None:
            self._count(operation, refusal.code, arrival)
            if not strict and refusal.code not in WITHOUT_LETTER:
                if len(raw) > LARGE_BODY or encoding != "identity":
                    await asyncio.sleep(0)  # Refusing a large item took a turn of the event loop.
                letter = letter_of(item, refusal, arrival, operation, envelope_of(arrival))
                await self._ingest.keep([letter])
            raise refusal
        if dropped:
            self._count(operation, "dropped", arrival)
            return Result(event.message_id)
        outcome = (await written)[0]
        if outcome.status is Status.STORED:
            self._count(event.type, "stored", arrival)
            self._metrics.stored(1, len(event.body), arrival.workspace_id, arrival.write_key_id)
            return Result(event.message_id)
        problem = await self._conflicts.problem(event, outcome)
        if isinstance(problem, Conflict):
            kept = await self._conflicts.keep([(item, event, problem)], arrival)
            problem = kept[0] or problem
        elif problem is not None:
            letter = letter_of(item, problem, arrival, operation, envelope_of(arrival))
            await self._ingest.keep([letter])
        self._count(event.type, outcome_of(problem), arrival)
        if isinstance(problem, ApiError):
            raise problem
        return Result(event.message_id)

    async def batch(
        self,
        raw: bytes,
        encoding: Encoding = "identity",
        principal: Principal | None = None,
        idempotency_key: str | None = None,
        strict: bool = False,
        named: Callable[[Principal], None] | None = None,
    ) -> BatchResult:
        """Store the valid items of a batch; report the others and keep them as dead letters.

        The parameters are those of :meth:`event`, without the type: each item has its own.

        A batch without a valid item is a success too: some mobile SDKs send a batch again and again
        after a 400, and no other event of theirs arrives.

        :param strict: if one item is refused before the write, store nothing and keep no dead
            letter. If all items are refused, that is an error.
        :raises ApiError: if nothing could be read from the body, or as ``strict`` says.
        :raises StorageUnavailable: if not everything is durable.
        """
        with await self._admit(raw, encoding, _share_of(principal)) as admitted:
            if principal is not None and principal.guard is not None:
                principal.guard.check()
            body, size = await self._decode(raw, encoding, principal, batch=True)
            principal = principal or self._principal(body, named)
            items: list[Any] = []
            try:
                body = self._schemas.read("batch", body)
                items = body["batch"]
            finally:
                if principal.guard is not None:
                    principal.guard.take(max(len(items), 1), size)
            if len(items) > self._limits.batch_events:
                raise ApiError(
                    "batch_too_large",
                    f"the batch has {len(items)} events;"
                    f" the limit is {self._limits.batch_events} (limits.batch_events)",
                )
            arrival = self._arrival(principal, idempotency_key, self._envelope(body))
            state = await self._items.prepare_all(
                items, arrival, pause=admitted.pause, strict=strict, total=self._decompressed
            )
            letters = self._items.letters(items, arrival, state)
            key = principal.write_key.sha256
            written = self._ingest.submit(state.events, key) if state.events else None
        # While the events are written, their decoded items are freed: ten containers for each
        # event, which the garbage collector would visit again and again. On 32 connections that
        # took 2 to 8 µs an event.
        count = len(items)
        del body, items
        if written is not None:
            failed = await self._items.add_outcomes(state, await written)
            if failed:
                # Until their letters are kept, the items of a large body need much memory again.
                small = _is_small(raw, encoding)
                async with contextlib.nullcontext() if small else self._keeping_large:
                    items = await self._decode_again(raw, encoding, principal)
                    await self._items.add_failed(failed, items, arrival, state)
                    letters += self._items.letters(items, arrival, state)
                    del items
        self._items.count(state, arrival)
        await self._ingest.keep(letters)
        rejected = state.sorted_rejected()
        if strict and rejected and len(rejected) == count:
            raise all_invalid(rejected)
        return BatchResult(state.accepted, state.duplicates, rejected)

    async def subscriptions(
        self,
        raw: bytes,
        encoding: Encoding = "identity",
        *,
        form: bool = False,
        source: Source = API,
    ) -> Mapping[str, bool]:
        """Change a user's subscription choices.

        :param form: the body is ``application/x-www-form-urlencoded``, unless it is a JSON object:
            curl gives any body that type.
        :return: for every group of the workspace, whether the user is subscribed after the change.
        :raises ApiError: if nothing was changed.
        :raises StorageUnavailable: if the change may not be durable.
        """
        with await self._admit(raw, encoding, SUBSCRIPTIONS_SHARE):
            body, _ = await self._decode(raw, encoding, None, form=form)
            body = self._schemas.read("subscriptions", body)
        state = await self._subscriptions.change(body, source)
        self._metrics.event("subscription", "stored")
        return state

    async def person(self, link: Mapping[str, Any]) -> Person:
        """Verify a signed link.

        :param link: the fields of a change that are signed.
        :raises ApiError: as :meth:`engage.subscriptions.links.Links.person`.
        """
        body = {**link, "changes": {}}
        if not self._schemas.is_valid("subscriptions", body):
            raise invalid_link()
        return await self._subscriptions.links.person(body)

    async def choose(self, person: Person, changes: Mapping[str, bool], source: Source) -> None:
        """Change the choices of a person.

        :raises ApiError: as :meth:`engage.subscriptions.choices.Subscriptions.apply`.
        """
        await self._subscriptions.apply(person, changes, source)
        self._metrics.event("subscription", "stored")

    async def preferences(self, person: Person) -> Preferences:
        """See :meth:`engage.subscriptions.choices.Subscriptions.preferences`."""
        return await self._subscriptions.preferences(person)

    async def deliver(
        self,
        arrival: Arrival,
        documents: Sequence[Mapping[str, Any]],
        admitted: Admitted,
        *,
        restated: Collection[int] = (),
    ) -> Delivered:
        """Store the events of a verified webhook delivery, in several writes if there are many.

        The events are validated, normalised and transformed like events of the API.

        :param arrival: that of the delivery, see :meth:`Arrival.of_delivery`.
        :param documents: the events that ``translate`` returned, with ``type`` and ``messageId``;
            at least one.
        :param admitted: the context of the delivery; it has left when this returns.
        :param restated: the indexes of events that are never conflicts: see
            :attr:`engage.api.TranslatedEvent.restated`.
        :return: the outcome. The caller keeps the delivery if an event was rejected.
        :raises ApiError: 503 ``overloaded`` or ``shutting_down``.
        :raises StorageUnavailable: if not everything is durable. It is safe for the provider to
            deliver the events again.
        """
        accepted = duplicates = 0
        rejected: list[RejectedItem] = []
        for start in range(0, len(documents), DELIVERY_EVENTS):
            part = documents[start : start + DELIVERY_EVENTS]
            if start:
                await admitted.enter_again(small=True)
            state = await self._items.prepare_all(part, arrival, pause=admitted.pause)
            again = {index - start for index in restated}
            ids = {
                event.message_id
                for event, index in zip(state.events, state.indexes, strict=True)
                if index in again
            }
            written = None
            if state.events:
                written = self._ingest.submit(state.events, admitted.key, restated=ids)
            admitted.leave()
            if written is not None:
                failed = await self._items.add_outcomes(state, await written, restated=again)
                if failed:
                    await self._items.add_failed(failed, part, arrival, state)
            self._items.count(state, arrival)
            accepted += state.accepted
            duplicates += state.duplicates
            if state.rejected:
                rejected += state.sorted_rejected(start)
        return Delivered(accepted, duplicates, rejected)

    # ------------------------------------------------------------------------------------ steps
    async def _admit(
        self, raw: bytes, encoding: Encoding, key: str, *, brief: bool = False
    ) -> Admitted:
        """Wait until a body may be decoded: see :meth:`Admission.enter`."""
        small = _is_small(raw, encoding)
        return await self._ingest.admission.enter(key, small=small, brief=brief)

    async def _decode(
        self,
        raw: bytes,
        encoding: Encoding,
        principal: Principal | None,
        *,
        form: bool = False,
        batch: bool | None = None,
    ) -> tuple[Any, int]:
        """Return a decoded body, and its size when it is decompressed.

        For the limits of the key, a body that cannot be decoded counts as an event.

        :param batch: whether the body has many items; ``None``: it has none, and is not an item.
        """
        limit = self._keyless if principal is None else self._decompressed
        try:
            if encoding != "identity" or len(raw) > limit.bytes:
                raw = await decompress_in_slices(raw, encoding, limit)
            if form and not raw.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
                return body_of_form(raw), len(raw)
            large = len(raw) > LARGE_BODY
            try:
                if large:
                    return await decode_json_in_slices(raw, self._limits), len(raw)
                return decode_json(raw, self._limits), len(raw)
            except ApiError as refusal:
                if batch is None:
                    raise
                decode = functools.partial(decode_items, raw, self._limits, refusal, batch=batch)
                return await asyncio.to_thread(decode) if large else decode(), len(raw)
        except ApiError:
            if principal is not None and principal.guard is not None:
                principal.guard.take(1, len(raw))
            raise

    async def _decode_again(
        self, raw: bytes, encoding: Encoding, principal: Principal
    ) -> list[Any]:
        """Return the items of a batch that was accepted.

        One body at a time: many requests get the outcome of their events in the same turn of the
        event loop.
        """
        async with self._decoding_again:
            body, _ = await self._decode(raw, encoding, principal, batch=True)
            items: list[Any] = body["batch"]
            return items

    def _principal(self, body: Any, named: Callable[[Principal], None] | None) -> Principal:
        """Return the principal of the write key in the body.

        :raises ApiError: if there is no key, it is unknown, disabled or refused, or the queue has
            no room for it (503 ``overloaded``).
        """
        if type(body) is Faulty:
            body = body.value
        principal = self._authenticator.body(body.get("writeKey") if type(body) is dict else None)
        if named is not None:
            named(principal)
        # The body was decoded in the share of all bodies that name their key.
        if not self._ingest.admission.has_room(principal.write_key.sha256):
            raise overloaded()
        return principal

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
            rules=principal.rules,
            received_at=now,
            event_limit=self._event_limit,
            envelope=envelope,
            idempotency_key=idempotency_key,
        )
        if plain:
            self._last_arrival = principal, arrival
        return arrival

    def _count(self, kind: str, outcome: str, arrival: Arrival) -> None:
        self._metrics.event(kind, outcome, 1, arrival.workspace_id, arrival.write_key_id)

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
        if sent_at is not None:
            # In an item a wrong one is an error; in the envelope it must not fail all items.
            sent_at = rfc3339(sent_at)
        user_hash = context.get("userHash")
        without_hash(common := {"context": context})
        return Envelope(sent_at=sent_at, integrations=integrations, user_hash=user_hash, **common)


def _is_small(raw: bytes, encoding: Encoding) -> bool:
    return encoding == "identity" and len(raw) <= LARGE_BODY


def _share_of(principal: Principal | None) -> str:
    """Return the name under which a request has its share of the queue."""
    return _KEYLESS_SHARE if principal is None else principal.write_key.sha256
