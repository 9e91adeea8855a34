# SPDX-License-Identifier: Apache-2.0
"""The events of one write: which of them can be stored, and what becomes of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from engage.api import Change, Event, Outcome, Status

from .connection import DUPLICATE
from .documents import Sequencer, UnstorableError, encode_event, event_id


class Batch:
    """The events of one write, encoded one by one: one that cannot be stored does not affect the
    others.

    :param changes: returns the changes of an event.
    :param mark: the mark of the events that have changes.
    """

    def __init__(
        self,
        events: Sequence[Event],
        changes: Callable[[Event], tuple[Change, ...]],
        sequence: Sequencer,
        mark: str,
    ) -> None:
        self.mark = mark
        self._events = events
        #: Position of an event → the reason why it is refused.
        self._refused: dict[int, str] = {}
        #: Position of a document → position of its event.
        self._positions: list[int] = []
        #: ``_id`` → position of its document.
        self._first: dict[str, int] = {}
        #: Events with the identity of an earlier one: position of the event, and of the document.
        self._repeats: list[tuple[int, int]] = []
        self._changes: list[tuple[Change, ...]] = []
        #: Position of a document that was not stored → code of the server.
        self._codes: Mapping[int, int] = {}
        self.documents: list[bytes] = []
        #: The ``_id`` of each document.
        self.ids: list[str] = []
        #: The events that were stored before this write: ``_id`` → event, and its mark if it has
        #: one.
        self.present: dict[str, tuple[Event, str | None]] = {}
        for index, event in enumerate(events):
            key = event_id(*event.identity)
            first = self._first.get(key)
            if first is not None:
                self._repeats.append((index, first))
                continue
            event_changes = changes(event)
            try:
                document = encode_event(event, key, sequence(), mark if event_changes else None)
            except UnstorableError as error:
                self._refused[index] = str(error)
                continue
            self._first[key] = len(self.documents)
            self._positions.append(index)
            self._changes.append(event_changes)
            self.documents.append(document)
            self.ids.append(key)

    def changing(self) -> list[tuple[Event, tuple[Change, ...]]]:
        """Return all events that have changes, each with its changes, stored or not."""
        return [
            (self._events[index], event_changes)
            for index, event_changes in zip(self._positions, self._changes, strict=True)
            if event_changes
        ]

    def settle(self, codes: Mapping[int, int]) -> None:
        """Take in the result of the insert.

        :param codes: what :meth:`Connection.insert` returned.
        """
        self._codes = codes
        for position, code in codes.items():
            if code != DUPLICATE:
                self._refused[self._positions[position]] = (
                    f"the storage cannot store a value, or the size, of this event (code {code})"
                )

    @property
    def duplicates(self) -> list[int]:
        """Positions of the documents whose events were stored before this write."""
        return [position for position, code in self._codes.items() if code == DUPLICATE]

    @property
    def stored(self) -> list[tuple[Event, tuple[Change, ...]]]:
        """The newly stored events that have changes, each with its changes."""
        return [
            (self._events[index], event_changes)
            for position, (index, event_changes) in enumerate(
                zip(self._positions, self._changes, strict=True)
            )
            if event_changes and position not in self._codes
        ]

    def repeats_of_refused(self) -> list[int]:
        """Return the positions of events whose identity a refused event of this write has, too:
        nothing is stored under it yet."""
        return [index for index, first in self._repeats if self._positions[first] in self._refused]

    def outcomes(self) -> list[Outcome]:
        """Return one outcome per event, in their order."""
        outcomes = [Outcome(Status.STORED)] * len(self._events)
        for index, reason in self._refused.items():
            outcomes[index] = Outcome(Status.REFUSED, reason=reason)
        for position in self.duplicates:
            body = self.present[self.ids[position]][0].body
            outcomes[self._positions[position]] = Outcome(Status.DUPLICATE, stored=body)
        for index, first in self._repeats:
            before = outcomes[self._positions[first]]
            body = before.stored or self._events[self._positions[first]].body
            outcomes[index] = Outcome(Status.DUPLICATE, stored=body)
        return outcomes
