# SPDX-License-Identifier: Apache-2.0
"""One call of ``write``: which event becomes which document, and what became of it.

A write is one ``insertMany`` for its events; beside it, if they change profiles, the reads that the
limits need; then one update command for each collection that changes (users; for groups and for new
links and memberships theirs), all at once. An event with changes is inserted with a mark. The mark
goes within a second of the acknowledgement, for many writes at once; what is found marked when a
store is opened, or when such an event is sent again, was perhaps cut off by a crash, and its
changes are applied (again: they are idempotent) before anything is acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from engage.api import Change, Event, Outcome, Status

from .changes import Known
from .client import DUPLICATE
from .documents import Sequencer, UnstorableError, encode_event, event_id


class Write:
    """One call of ``write``: which event becomes which document, and what became of it.

    :param mark: for the events that have changes.
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
        self._refused: dict[int, str] = {}
        #: Position of a document → event; the same by ``_id``.
        self._positions: list[int] = []
        self._first: dict[str, int] = {}
        self._repeats: list[tuple[int, int]] = []
        self._changes: list[tuple[Change, ...]] = []
        self._codes: Mapping[int, int] = {}
        self.documents: list[bytes] = []
        self.ids: list[str] = []
        self.known: Known | None = None
        #: Of the duplicates: ``_id`` → the stored event, and its mark if it has one.
        self.present: dict[str, tuple[Event, str | None]] = {}
        for index, event in enumerate(events):
            key = event_id(*event.identity)
            first = self._first.get(key)
            if first is not None:
                self._repeats.append((index, first))
                continue
            ones = changes(event)
            try:
                document = encode_event(event, key, sequence(), mark if ones else None)
            except UnstorableError as error:
                self._refused[index] = str(error)
                continue
            self._first[key] = len(self.documents)
            self._positions.append(index)
            self._changes.append(ones)
            self.documents.append(document)
            self.ids.append(key)

    def changing(self) -> list[tuple[Event, tuple[Change, ...]]]:
        """:return: all events with changes, stored or not."""
        return [
            (self._events[index], ones)
            for index, ones in zip(self._positions, self._changes, strict=True)
            if ones
        ]

    def settle(self, codes: Mapping[int, int]) -> None:
        """:param codes: what :meth:`Connection.insert` returned."""
        self._codes = codes
        for position, code in codes.items():
            if code != DUPLICATE:
                self._refused[self._positions[position]] = (
                    f"the storage refused it (code {code}: a value or a size that it cannot hold)"
                )

    @property
    def duplicates(self) -> list[int]:
        """Positions of documents that were stored before."""
        return [position for position, code in self._codes.items() if code == DUPLICATE]

    @property
    def stored(self) -> list[tuple[Event, tuple[Change, ...]]]:
        """The newly stored events that have changes."""
        return [
            (self._events[index], ones)
            for position, (index, ones) in enumerate(
                zip(self._positions, self._changes, strict=True)
            )
            if ones and position not in self._codes
        ]

    def repeats_of_refused(self) -> list[int]:
        """:return: events whose identity an earlier one has that was refused: they stand alone."""
        return [index for index, first in self._repeats if self._positions[first] in self._refused]

    def outcomes(self) -> list[Outcome]:
        """:return: one outcome per event, in their order."""
        found = [Outcome(Status.STORED)] * len(self._events)
        for index, reason in self._refused.items():
            found[index] = Outcome(Status.REFUSED, reason=reason)
        for position in self.duplicates:
            body = self.present[self.ids[position]][0].body
            found[self._positions[position]] = Outcome(Status.DUPLICATE, stored=body)
        for index, first in self._repeats:
            before = found[self._positions[first]]
            body = before.stored or self._events[self._positions[first]].body
            found[index] = Outcome(Status.DUPLICATE, stored=body)
        return found
