# SPDX-License-Identifier: Apache-2.0
"""The events of one write: their changes and their outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from engage.api import Event, Outcome, Status, changes_of
from engage.store.changes import EncodedChange, encode

from .tables.events import STORED, Row, UnstorableError, event_of


class Batch:
    """The events of one write, ready to be inserted.

    Each event is examined by itself: one that cannot be stored does not affect the others. Two
    events may have the same key; the first is stored, and the other is a duplicate of it.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        #: For each event its outcome, or the data by which the database decides it: the event's
        #: key, and whether an earlier event of this write has the same identity.
        self._results: list[Outcome | tuple[bytes, bool]] = []
        #: Key → row, for each identity the first event, in order.
        self.rows: dict[bytes, Row] = {}
        #: The events that may change profiles. ``None``: at most by a link, which is usually known
        #: to be stored, so the changes are computed when they are needed.
        self._changes: dict[bytes, tuple[Event, Sequence[EncodedChange]] | None] = {}
        for row in rows:
            self._add(row)

    def _add(self, row: Row) -> None:
        key = row[0]
        repeat = key in self.rows
        if not repeat:
            if row[4] in ("identify", "group", "alias"):
                try:
                    self._changes[key] = _changes(row)
                except UnstorableError as reason:
                    self._results.append(Outcome(Status.REFUSED, str(reason)))
                    return
            elif row[5] is not None and row[6] is not None:
                self._changes[key] = None
            self.rows[key] = row
        self._results.append((key, repeat))

    def changes(
        self, stored: Iterable[bytes], is_linked: Callable[[str, str, str, int], bool]
    ) -> list[tuple[Event, Sequence[EncodedChange]]]:
        """Return the events that change profiles, each with its changes, in their order.

        :param stored: the keys of the newly stored events.
        :param is_linked: tells whether a workspace's user is known to be linked to an anonymous id
            by an event that was received before a time.
        """
        found: list[tuple[Event, Sequence[EncodedChange]]] = []
        if not self._changes:
            return found
        for key in stored:
            if key not in self._changes:
                continue
            changing = self._changes[key]
            if changing is None:
                row = self.rows[key]
                if is_linked(row[1], row[5], row[6], row[8]):
                    continue
                changing = _changes(row)
            found.append(changing)
        return found

    def outcomes(self, duplicates: Mapping[bytes, bytes | None]) -> list[Outcome]:
        """Return one outcome per event, in their order.

        :param duplicates: key → stored body, for the events that were stored before this write.
        """
        if not duplicates and len(self.rows) == len(self._results):
            return [STORED] * len(self._results)
        outcomes = []
        for result in self._results:
            if isinstance(result, Outcome):
                outcomes.append(result)
                continue
            key, repeat = result
            if key in duplicates:
                outcomes.append(Outcome(Status.DUPLICATE, stored=duplicates[key]))
            elif repeat:
                outcomes.append(Outcome(Status.DUPLICATE, stored=self.rows[key][-1]))
            else:
                outcomes.append(STORED)
        return outcomes


def _changes(row: Row) -> tuple[Event, Sequence[EncodedChange]]:
    event = event_of(row)
    try:
        return event, [encode(change) for change in changes_of(event)]
    except Exception:
        # The sender made the body: an error in it must not affect the other events.
        raise UnstorableError("the event's body does not fit its type") from None
