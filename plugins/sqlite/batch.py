# SPDX-License-Identifier: Apache-2.0
"""The events of one write: which of them can be stored, and what becomes of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from engage.api import Event, Outcome, Status, changes_of

from .changes import EncodedChange, encode
from .connection import key_of
from .events import STORED, Row, event_of

#: SQLite's own limit for a value is 1 GB; no event comes near this one.
_MAX_BYTES: Final = 256 * 1024 * 1024
_INTEGERS: Final = range(-(2**63), 2**63)


class UnstorableError(Exception):
    """This event can never be stored; the message is the reason, for the client."""


class Batch:
    """The events of one write, ready to be inserted.

    Each event is examined by itself: one that cannot be stored does not affect the others.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        #: For each event its outcome, or what the database decides it by: the event's key, and
        #: whether an earlier event of this write has the same identity.
        self._results: list[Outcome | tuple[bytes, bool]] = []
        #: Key → row, for each identity the first event, in order.
        self.rows: dict[bytes, Row] = {}
        #: The events that may change profiles. ``None``: at most by a link, which is usually known
        #: to be stored, so the changes are computed when they are needed.
        self._changes: dict[bytes, tuple[Event, Sequence[EncodedChange]] | None] = {}
        for row in rows:
            self._add(row)

    def _add(self, row: Row) -> None:
        try:
            key = _checked_key(row)
            repeat = key in self.rows
            if not repeat:
                if row[3] in ("identify", "group", "alias"):
                    self._changes[key] = _changes(row)
                elif row[4] is not None and row[5] is not None:
                    self._changes[key] = None
                self.rows[key] = row
        except UnstorableError as reason:
            self._results.append(Outcome(Status.REFUSED, str(reason)))
            return
        self._results.append((key, repeat))

    def changes(
        self, stored: Iterable[bytes], is_linked: Callable[[str, str, str], bool]
    ) -> list[tuple[Event, Sequence[EncodedChange]]]:
        """Return the events that change profiles, each with its changes, in their order.

        :param stored: the keys of the newly stored events.
        :param is_linked: tells whether a workspace's user is known to be linked to an anonymous id.
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
                if is_linked(row[0], row[4], row[5]):
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


def _checked_key(row: Row) -> bytes:
    """Return the key of an event.

    :raises UnstorableError: if SQLite cannot store one of the values.
    """
    workspace, origin, message_id, kind, user, anonymous, name, received_at, timestamp, body = row
    try:
        key = key_of(workspace, origin, message_id)
        # One call for all four: a lone surrogate in any of them is one in the whole.
        f"{kind}{user}{anonymous}{name}".encode()
    except UnicodeEncodeError:
        raise UnstorableError("a text contains a lone surrogate, not a character") from None
    if received_at not in _INTEGERS or timestamp not in _INTEGERS:
        raise UnstorableError("a time does not fit in 64 bits")
    if len(body) > _MAX_BYTES:
        raise UnstorableError(f"the event is longer than {_MAX_BYTES} bytes")
    return key


def _changes(row: Row) -> tuple[Event, Sequence[EncodedChange]]:
    event = event_of(row)
    try:
        return event, [encode(change) for change in changes_of(event)]
    except Exception:
        # The sender made the body: whatever is wrong with it must not affect the other events.
        raise UnstorableError("the event's body does not fit its type") from None
