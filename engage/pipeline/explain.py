# SPDX-License-Identifier: Apache-2.0
"""Explains the outcome of an event: the steps of the pipeline, with nothing stored.

The composed server has one :class:`Explainer` (``app.explainer``)::

    submission = Submission(workspace_id="acme", write_key_id="website", operation="track")
    explained = await explainer.check(b'{"userId": "u", "event": "Signed up"}', submission)
    explained.outcome   # "stored", "duplicate", "conflict", "dropped" or "refused"
    explained.errors    # problems with JSON pointers, if it is refused or a conflict
    explained.event     # the event as it would be stored
    explained.changes   # its changes of profiles; see describe_change

A text stays a text: it is decoded only by the pipeline's decoder, so that no integer changes. To
check or replay a dead letter, use :mod:`engage.pipeline.replay`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import orjson

from engage.api import (
    API_ORIGIN,
    EVENT_TYPES,
    TRUSTED,
    Change,
    Event,
    Link,
    LinkDecision,
    Membership,
    RemovedTraits,
    Seen,
    Traits,
    changes_of,
    engage_mark,
    render_time,
)
from engage.errors import ApiError, Limit, Problem
from engage.monitoring.metrics import Metrics
from engage.pipeline.admission import LARGE_BODY
from engage.pipeline.conflicts import Conflicts
from engage.pipeline.dead_letters import find_conflict
from engage.pipeline.decode import decode_items, decode_json, decode_json_in_slices, decompress
from engage.pipeline.items import Items
from engage.pipeline.normalise import Arrival, Envelope
from engage.pipeline.transforms import Transforms

if TYPE_CHECKING:
    from engage.config import Limits
    from engage.keys.limits import Rules
    from engage.pipeline.ingest import Ingest
    from engage.pipeline.validate import Schemas

__all__ = ["OPERATIONS", "STAMP", "Explained", "Explainer", "Submission", "describe_change"]

#: The operations that a text can be checked for; ``batch``: the item has its ``type``.
OPERATIONS: Final = (*EVENT_TYPES, "batch")
#: Bytes that the id of a letter adds to its event at most, beyond the limit of events.
STAMP: Final = 128


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What applies to an item and is not in its text."""

    workspace_id: str
    #: The id of the write key, not the key.
    write_key_id: str | None = None
    #: One of :data:`OPERATIONS`: the type of the route. ``None`` is the same as ``batch``.
    operation: str | None = None
    #: See :attr:`engage.api.DeadLetter.envelope`.
    envelope: bytes = b"{}"
    #: When the item arrived first: milliseconds since 1970 UTC. Its times are corrected by this
    #: time. ``None``: now.
    received_at: int | None = None
    #: ``api``, or the provider's name.
    origin: str = API_ORIGIN
    #: The message id of an item that has none; ``None``: one is made.
    message_id: str | None = None
    #: Whether ``message_id`` replaces the message id of the item.
    new_id: bool = False
    #: Whether the user id counts without its hash.
    unverified: bool = False
    #: Whether the transforms were applied already.
    transformed: bool = False
    #: The id of the dead letter that is replayed; stored as ``context.engage.replayOf``.
    replay_of: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """What would become of an item."""

    #: ``dropped``: by a transform.
    outcome: Literal["stored", "duplicate", "conflict", "dropped", "refused"]
    #: The code and the reason of a refusal or a conflict.
    code: str | None = None
    message: str | None = None
    #: Their pointers are relative to the item.
    errors: Sequence[Problem] = ()
    #: As it would be stored; ``None`` if it is refused. For ``dropped``, before the transforms.
    event: Event | None = None
    #: The event that is stored with the message id, for a duplicate or a conflict.
    stored: Event | None = None
    #: The changes of profiles by the event. A storage can leave out changes beyond its limits.
    changes: Sequence[Change] = ()

    @property
    def accepted(self) -> bool:
        """Whether the event would be stored, or is stored already."""
        return self.outcome in ("stored", "duplicate")


class Explainer:
    """Runs the steps of the pipeline for one item.

    :param conflicts: for :class:`Items`; a check does not keep conflicts.
    :param clock: returns milliseconds since 1970 UTC.
    :param ingest: finds the event that is stored with the message id.
    :param rules: see :meth:`engage.keys.table.KeyTable.replay_rules`.
    """

    def __init__(
        self,
        *,
        schemas: Schemas,
        transforms: Transforms,
        limits: Limits,
        conflicts: Conflicts,
        ingest: Ingest,
        rules: Callable[[str, str | None], Rules | None],
        clock: Callable[[], int],
    ) -> None:
        self._limits = limits
        self._rules = rules
        self._size = Limit(limits.decompressed_bytes, "limits.decompressed_bytes")
        self._event_limit = Limit(limits.event_bytes, "limits.event_bytes")
        self._ingest = ingest
        self._clock = clock
        metrics = Metrics()
        self._items = Items(
            schemas=schemas, transforms=transforms, conflicts=conflicts, metrics=metrics
        )
        self._transformed = Items(
            schemas=schemas,
            transforms=Transforms((), schemas, json_depth=limits.json_depth),
            conflicts=conflicts,
            metrics=metrics,
        )

    async def check(
        self, text: bytes, submission: Submission, *, look_up: bool = True
    ) -> Explained:
        """Return what would become of an item. Nothing is stored.

        The storage itself can still refuse the event when it is written.

        :param text: UTF-8 JSON, as a client would send it.
        :param look_up: whether to find out if an event is stored with the message id.
        :raises StorageUnavailable: if the store does not answer.
        """
        try:
            event, dropped = await self.prepare(text, submission)
        except ApiError as error:
            return Explained(
                outcome="refused", code=error.code, message=error.message, errors=error.errors
            )
        if dropped:
            return Explained(outcome="dropped", event=event)
        stored: Event | None = None
        if look_up:
            stored = await self._ingest.find(event)
        if stored is None:
            return Explained(outcome="stored", event=event, changes=changes_of(event))
        conflict = find_conflict(event, stored.body)
        if conflict is None:
            return Explained(outcome="duplicate", event=event, stored=stored)
        return Explained(
            outcome="conflict",
            code=conflict.code,
            message=conflict.message,
            errors=conflict.errors,
            event=event,
            stored=stored,
        )

    async def prepare(self, text: bytes, submission: Submission) -> tuple[Event, bool]:
        """Decode, validate, normalise and transform an item.

        :return: the event as it would be stored, and whether a transform dropped it.
        :raises ApiError: if the item is refused.
        """
        operation = submission.operation
        if operation is not None and operation not in OPERATIONS:
            raise ApiError("invalid_request", f"the type must be one of {', '.join(OPERATIONS)}")
        item = await self._decode(text)
        now = self._clock()
        common = decode_json(submission.envelope, self._limits)
        kinds = (("context", dict), ("integrations", dict), ("sentAt", str))
        if type(common) is not dict or any(type(common.get(n, k())) is not k for n, k in kinds):
            raise ApiError("invalid_payload", "the envelope of the letter cannot be read")
        if type(item) is dict and (submission.new_id or not item.get("messageId")):
            given = None if submission.new_id else common.get("messageId")
            given = given or submission.message_id
            if given is not None:
                item["messageId"] = given
        items = self._transformed if submission.transformed else self._items
        arrival = self._arrival(submission, common, now)
        if arrival.rules is not None and (
            submission.unverified
            or common.get("verified") is True
            or (submission.transformed and type(item) is dict and "verified" in engage_mark(item))
        ):
            arrival = dataclasses.replace(
                arrival, rules=dataclasses.replace(arrival.rules, identity=())
            )
        event, dropped = items.prepare(
            item, None if operation == "batch" else operation, arrival, 0
        )
        return _stamped(event, now, submission.replay_of), dropped

    async def _decode(self, text: bytes) -> Any:
        text = decompress(text, "identity", self._size)
        try:
            if len(text) > LARGE_BODY:
                return await decode_json_in_slices(text, self._limits)
            return decode_json(text, self._limits)
        except ApiError as error:
            return decode_items(text, self._limits, error, batch=False)

    def _arrival(self, submission: Submission, common: dict[str, Any], now: int) -> Arrival:
        first = now if submission.received_at is None else max(min(submission.received_at, now), 0)
        if submission.origin != API_ORIGIN:
            return Arrival.of_delivery(
                submission.workspace_id, submission.origin, received_at=first, limits=self._limits
            )
        envelope = Envelope(
            sent_at=common.get("sentAt"),
            context=common.get("context", {}),
            integrations=common.get("integrations", {}),
        )
        return Arrival(
            workspace_id=submission.workspace_id,
            write_key_id=submission.write_key_id,
            rules=self._rules(submission.workspace_id, submission.write_key_id),
            restored=submission.transformed,
            received_at=first,
            event_limit=self._event_limit,
            envelope=envelope,
        )


def _stamped(event: Event, now: int, replay_of: str | None) -> Event:
    """Return an event that arrives now, with the id of the letter that it was."""
    if replay_of is None and event.received_at == now:
        return event
    document = event.document()
    document["receivedAt"] = render_time(now)
    if replay_of is not None:
        # After the limits and the transforms, so that every event that is accepted can be replayed.
        context = document.get("context") or {}
        own = context.get("engage")
        own = own if isinstance(own, dict) else {}
        document["context"] = {**context, "engage": {**own, "replayOf": replay_of}}
    return dataclasses.replace(event, received_at=now, body=orjson.dumps(document))


def describe_change(change: Change) -> str:
    """Return a change of profiles in one phrase. It has ids and names that clients sent."""
    match change:
        case Seen(kind, name):
            return f"the {kind} {name} would exist"
        case Traits(kind, name, traits) if any(trait.startswith(TRUSTED) for trait in traits):
            named = ", ".join(
                trait.removeprefix(f"{TRUSTED}:") for trait in traits if trait != TRUSTED
            )
            return f"vouches for the {kind} {name}{named and f': {named}'}"
        case Traits(kind, name, traits):
            return f"sets traits of the {kind} {name}: {', '.join(traits)}"
        case RemovedTraits(kind, name, names):
            return f"removes traits of the {kind} {name}: {', '.join(names)}"
        case Membership(kind, name, group, assigned):
            return f"the {kind} {name} {'joins' if assigned else 'leaves'} the group {group}"
        case Link(user, anonymous):
            return f"links the anonymous id {anonymous} to the user {user}"
        case LinkDecision(user, anonymous, counts):
            decided = "restores" if counts else "undoes"
            return f"{decided} the link of the anonymous id {anonymous} to the user {user}"
