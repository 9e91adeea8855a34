# SPDX-License-Identifier: Apache-2.0
"""Replays dead letters: refused events go through the pipeline again.

The composed server has one :class:`Replays` (``app.replays``)::

    obstacle_of(letter)   # why it cannot be replayed: a sentence, or None
    is_delivery(letter)                   # a webhook delivery: cannot be edited or checked
    text_of(letter)                       # its item, for a person to edit: str

    explained = await replays.check(letter, text, new_id=False)   # an Explained
    replayed = await replays.replay(letter, text, new_id=False)   # a Replayed
    several = await replays.replay_all(letters, new_id=False, times=("timestamp",))
    audit_details(letter, text, replayed)   # what the audit keeps, action "letter-replayed"

``text`` is UTF-8 JSON as bytes; ``None`` replays the letter as it is.

- Workspace, write key id and origin are those of the letter.
- The message id is that of the item, or that from its ``Idempotency-Key``, or one that is made from
  the letter's id: replaying a letter twice stores one event. A second replay with another text is a
  conflict. ``new_id`` makes the message id from the letter's id and time in any case. A letter with
  the reason ``message_id_conflict`` needs it, and one whose equal was replayed with another text.
- Times are corrected as when the letter arrived; ``receivedAt`` is now. ``context.engage.replayOf``
  is the letter's id.
- The letter is removed when the event is durable. A replay that fails leaves it as it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import orjson

from engage.api import (
    API_ORIGIN,
    CONFLICT,
    ConfigError,
    DeadLetter,
    Event,
    Outcome,
    Status,
    StorageUnavailable,
    WebhookResult,
)
from engage.errors import STATUS, ApiError, Problem
from engage.keys.limits import UNVERIFIED
from engage.pipeline.dead_letters import MAX_ITEM
from engage.pipeline.decode import read_item
from engage.pipeline.explain import Explained, Explainer, Submission
from engage.reading.time_limit import within

if TYPE_CHECKING:
    from engage.pipeline.conflicts import Conflicts
    from engage.pipeline.ingest import Ingest

__all__ = [
    "MAX_SHOWN",
    "NOT_REPLAYABLE",
    "Replayed",
    "Replays",
    "audit_details",
    "is_delivery",
    "obstacle_of",
    "text_of",
]

#: The code of a letter that cannot be replayed, see :func:`obstacle_of`.
NOT_REPLAYABLE: Final = "not_replayable"

#: Characters of a JSON text that are shown on several lines, and of its indentation, which can be
#: hundreds of times as large as the text.
MAX_SHOWN: Final = 1024 * 1024

#: What to do about a replay that fails, by its code.
_ADVICE: Final = {
    CONFLICT: "; replay it with a new message id",
    UNVERIFIED: "; it arrived before that: `engage dead-letters replay --unverified` stores it",
}
#: Namespace of the message ids that are made from the id of a letter.
_NAMESPACE: Final = uuid.UUID("1b0c6a5e-7a0e-5f0e-9a43-5d2f6d3a9c52")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The outcome of a replay. The letter was removed unless it failed."""

    letter_id: str
    outcome: Literal["stored", "duplicate", "failed"]
    #: The message id of the event; ``None`` for a delivery, and if it has none.
    message_id: str | None = None
    #: Why it failed.
    code: str | None = None
    message: str | None = None
    #: Their pointers are relative to the item.
    errors: Sequence[Problem] = ()


def is_delivery(letter: DeadLetter) -> bool:
    """Return whether a letter holds a whole webhook delivery.

    It is translated again by its provider, and can be neither edited nor checked.
    """
    # A single event of a delivery, which the storage refused behind a log, has an operation.
    return letter.origin != API_ORIGIN and letter.reason != CONFLICT and letter.operation is None


def obstacle_of(letter: DeadLetter) -> str | None:
    """Return why a letter cannot be replayed: one sentence, or ``None`` if it can."""
    if letter.truncated:
        return (
            f"only its first {MAX_ITEM // 1024} KiB were kept, or it is nested too deeply to keep"
            " it whole; send the event again"
        )
    if not is_delivery(letter) and letter.envelope is None:
        return (
            f"the context and integrations of its batch are larger than {MAX_ITEM // 1024} KiB,"
            " or those of all refused items were too large to keep; send the event again"
        )
    return None


def text_of(letter: DeadLetter) -> str:
    """Return the item of a letter for a person to read and edit.

    JSON is indented; all numbers and ids stay. Anything else, such as a cut item or the body of a
    delivery, and JSON that would be longer than :data:`MAX_SHOWN`, is returned as it was kept.
    """
    if not letter.truncated and not is_delivery(letter) and len(letter.item) <= MAX_ITEM:
        with contextlib.suppress(ValueError):
            indented = orjson.dumps(read_item(letter.item)[0], option=orjson.OPT_INDENT_2)
            if len(indented) <= MAX_SHOWN:
                return indented.decode()
    return letter.item.decode(errors="replace")


def audit_details(letter: DeadLetter, text: bytes | None, replayed: Replayed) -> dict[str, Any]:
    """Return the details of a replay for the audit: whether the item was edited, not its
    content."""
    details: dict[str, Any] = {
        "workspace": letter.workspace_id,
        "letter": letter.id,
        "reason": letter.reason,
        "outcome": replayed.outcome if replayed.code is None else replayed.code,
    }
    if replayed.message_id is not None:
        details["messageId"] = replayed.message_id
    if text is not None:
        details["bytesBefore"], details["bytesAfter"] = len(letter.item), len(text)
    return details


class Replays:
    """Checks and replays dead letters.

    :param conflicts: finds out why an event was not stored.
    :param retry: translates a delivery again (:meth:`engage.deliveries.receive.Deliveries.retry`).
    """

    def __init__(
        self,
        *,
        explainer: Explainer,
        ingest: Ingest,
        conflicts: Conflicts,
        retry: Callable[[DeadLetter], Awaitable[WebhookResult]],
    ) -> None:
        self._explainer = explainer
        self._ingest = ingest
        self._conflicts = conflicts
        self._retry = retry

    async def check(
        self,
        letter: DeadLetter,
        text: bytes | None = None,
        *,
        new_id: bool = False,
    ) -> Explained:
        """Return the outcome that a replay would have. Nothing is stored.

        :param text: the edited item; ``None``: as it is.
        :param new_id: whether to make a new message id.
        :raises StorageUnavailable: if the store does not answer.
        """
        obstacle = obstacle_of(letter)
        if obstacle is None and is_delivery(letter):
            obstacle = "it is a webhook delivery; a replay translates it again"
        if obstacle is not None:
            return Explained(outcome="refused", code=NOT_REPLAYABLE, message=obstacle)
        explained = await self._explainer.check(
            letter.item if text is None else text, _submission(letter, new_id)
        )
        if explained.message is None:
            return explained
        return dataclasses.replace(explained, message=_advice(explained.code, explained.message))

    async def replay(
        self,
        letter: DeadLetter,
        text: bytes | None = None,
        *,
        new_id: bool = False,
        unverified: bool = False,
    ) -> Replayed:
        """Replay a letter, and remove it when its event is durable. Idempotent.

        The parameters are those of :meth:`check`.

        :param unverified: replay it also if its user was not verified, but would have to be.
        :raises StorageUnavailable: if the event may not be durable or the letter may not be
            removed; it is safe to replay it again.
        """
        (replayed,) = await self._run([(letter, text)], new_id, unverified)
        return replayed

    async def replay_all(
        self,
        letters: Sequence[DeadLetter],
        *,
        new_id: bool = False,
        unverified: bool = False,
        times: Collection[str] = (),
    ) -> Sequence[Replayed]:
        """Replay letters as :meth:`replay` does, in one write.

        :param letters: letters of one workspace.
        :param times: members to leave out. An event without a time happened when it arrived.
        :return: the outcome of each, in their order.
        :raises StorageUnavailable: as :meth:`replay`.
        """
        texts = [(letter, _without(letter, times) if times else None) for letter in letters]
        return await self._run(texts, new_id, unverified)

    # ------------------------------------------------------------------------------------ steps
    async def _run(
        self,
        texts: Sequence[tuple[DeadLetter, bytes | None]],
        new_id: bool,
        unverified: bool,
    ) -> Sequence[Replayed]:
        made = [await self._prepare(letter, text, new_id, unverified) for letter, text in texts]
        events = [event for event in made if isinstance(event, Event)]
        outcomes = iter(await self._write(events) if events else ())
        results = [
            await self._settle(letter, event, next(outcomes)) if isinstance(event, Event) else event
            for (letter, _), event in zip(texts, made, strict=True)
        ]
        settled = [result.letter_id for result in results if result.outcome != "failed"]
        if settled:
            store = self._ingest.store
            async with within(self._ingest.timeout):
                await store.remove(texts[0][0].workspace_id, settled)
        return results

    async def _prepare(
        self, letter: DeadLetter, text: bytes | None, new_id: bool, unverified: bool
    ) -> Event | Replayed:
        """Return the event of a letter, or why there is none, or the outcome of a delivery."""
        obstacle = obstacle_of(letter)
        if obstacle is None and is_delivery(letter):
            if text is None:
                return await self._deliver(letter)
            obstacle = "a webhook delivery cannot be edited"
        if obstacle is not None:
            return _failed(letter, NOT_REPLAYABLE, obstacle)
        try:
            event, dropped = await self._explainer.prepare(
                letter.item if text is None else text, _submission(letter, new_id, unverified)
            )
        except ApiError as error:
            return _failed(letter, error.code, _advice(error.code, error.message), error.errors)
        if dropped:
            message = "a transform drops this event; delete the letter if that is right"
            return _failed(letter, "dropped", message)
        return event

    async def _deliver(self, letter: DeadLetter) -> Replayed:
        try:
            result = await self._retry(letter)
        except ConfigError as error:
            return _failed(letter, NOT_REPLAYABLE, str(error))
        except ApiError as error:
            if STATUS[error.code] >= 500:
                raise StorageUnavailable(error.message) from error
            return _failed(letter, error.code, error.message, error.errors)
        if result.rejected:
            message = f"{result.rejected} elements of the delivery still cannot be translated"
            return _failed(letter, letter.reason, message)
        stored = result.accepted or not result.duplicates
        return Replayed(letter_id=letter.id, outcome="stored" if stored else "duplicate")

    async def _write(self, events: Sequence[Event]) -> Sequence[Outcome]:
        try:
            return await self._ingest.submit(events, f"replay {events[0].workspace_id}")
        except ApiError as error:  # 503: the server stops, or too much waits to be written
            raise StorageUnavailable(error.message) from error

    async def _settle(self, letter: DeadLetter, event: Event, outcome: Outcome) -> Replayed:
        made = event.message_id
        if outcome.status is Status.STORED:
            return Replayed(letter_id=letter.id, outcome="stored", message_id=made)
        problem = await self._conflicts.problem(event, outcome)
        if problem is None:
            return Replayed(letter_id=letter.id, outcome="duplicate", message_id=made)
        message = _advice(problem.code, problem.message)
        return _failed(letter, problem.code, message, problem.errors, made)


def _submission(letter: DeadLetter, new_id: bool, unverified: bool = False) -> Submission:
    conflict = letter.reason == CONFLICT
    # An equal item that arrives after a replay makes a letter with the same id.
    arrived = f" {letter.received_at}" if new_id else ""
    return Submission(
        workspace_id=letter.workspace_id,
        write_key_id=letter.write_key_id,
        operation=letter.operation,
        envelope=letter.envelope or b"{}",
        received_at=letter.received_at,
        origin=letter.origin,
        message_id=str(uuid.uuid5(_NAMESPACE, f"{letter.workspace_id} {letter.id}{arrived}")),
        new_id=new_id,
        unverified=unverified,
        # The letter of a conflict has the event as it would be stored.
        transformed=conflict,
        replay_of=letter.id,
    )


def _without(letter: DeadLetter, names: Collection[str]) -> bytes | None:
    """Return the item of a letter without some members; ``None`` if it is no object."""
    with contextlib.suppress(ValueError):
        item, _ = read_item(b"" if is_delivery(letter) else letter.item)
        if type(item) is dict:
            return orjson.dumps({name: item[name] for name in item if name not in names})
    return None


def _advice(code: str | None, message: str) -> str:
    """Return why a replay fails, and advice for the operator if there is any."""
    return f"{message}{_ADVICE.get(code or '', '')}"


def _failed(
    letter: DeadLetter,
    code: str,
    message: str,
    errors: Sequence[Problem] = (),
    message_id: str | None = None,
) -> Replayed:
    return Replayed(
        letter_id=letter.id,
        outcome="failed",
        message_id=message_id,
        code=code,
        message=message,
        errors=errors,
    )
