# SPDX-License-Identifier: Apache-2.0
"""Makes the dead letters of the records that a loader cannot store. Pure functions.

These events are acknowledged, so their letters are whole, and no budget drops them: they are
appended to the log of dead letters. Their ids do not depend on when the event was received, so a
second attempt makes the same letter.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from engage.api import API_ORIGIN, MAX_TIME, DeadLetter, Event, LogRecord, ReadRecord, record_of
from engage.errors import ApiError, Limit
from engage.pipeline.dead_letters import Conflict, letter_id, letter_of_conflict
from engage.pipeline.normalise import Arrival

__all__ = ["DAMAGED", "letter_of_damage", "letter_of_event", "shortened_record"]

#: The reason of a letter whose record cannot be read.
DAMAGED: Final = "damaged_record"
#: Maximum number of characters that are kept of a header and of the workspace of a record.
_HEADER: Final = 4096
#: Not used: the letters of a loader are not limited.
_LIMIT: Final = Limit(0, "")


def letter_of_event(event: Event, problem: Conflict | ApiError) -> DeadLetter:
    """Return the letter of an event that the storage refuses, or that is a conflict.

    Like that of a conflict in a server without a log, it has the event as it would be stored,
    without the times that differ in a retry.
    """
    document = event.document()
    arrival = Arrival(
        workspace_id=event.workspace_id,
        write_key_id=document.get("writeKeyId"),
        received_at=event.received_at,
        event_limit=_LIMIT,
        origin=event.origin,
    )
    # The time as the client sent it is in the event.
    received = {"originalTimestamp": document.get("originalTimestamp")}
    conflict = problem if isinstance(problem, Conflict) else Conflict(())
    letter = letter_of_conflict(received, event, conflict, arrival)
    if isinstance(problem, Conflict):
        return letter
    return dataclasses.replace(
        letter,
        id=letter_id(event.workspace_id, event.origin, b"refused", letter.id.encode()),
        reason=problem.code,
        message=problem.message,
        errors=[error.as_dict() for error in problem.errors],
    )


def letter_of_damage(read: ReadRecord, error: Exception) -> DeadLetter:
    """Return the letter of a record that cannot be read: its value, with its headers."""
    record = read.record
    workspace_id = record.key.partition(b":")[0].decode(errors="replace")[:_HEADER]
    headers = [
        (name[:_HEADER], value.decode(errors="replace")[:_HEADER])
        for name, value in record.headers.items()
    ]
    parts = (part for header in sorted(record.headers.items()) for part in header)
    return DeadLetter(
        id=letter_id(
            workspace_id,
            API_ORIGIN,
            b"damaged",
            record.key,
            record.value,
            *(part.encode() if isinstance(part, str) else part for part in parts),
        ),
        workspace_id=workspace_id,
        origin=API_ORIGIN,
        write_key_id=None,
        user_id=None,
        anonymous_id=None,
        message_id=None,
        reason=DAMAGED,
        message=f"the record in the log cannot be read: {str(error)[:500]}",
        errors=(),
        item=record.value,
        truncated=False,
        headers=headers,
        # With Kafka, the program that appends the record can choose this time.
        received_at=min(max(read.appended_at, 0), MAX_TIME),
    )


def shortened_record(letter: DeadLetter, read: ReadRecord, limit: int) -> LogRecord:
    """Return the record of a letter that is too large for the log of dead letters.

    Its message names the record that the letter is about, which has all of it.

    :param limit: the largest value of a record, in bytes. One that is larger is the smallest.
    """
    whole = (
        f"cut off: it is too large for the log of dead letters; partition {read.partition} of the"
        f" log has all of it at offset {read.offset}"
    )
    message = f"{letter.message} ({whole})"
    record = record_of(dataclasses.replace(letter, truncated=True, message=message))
    # The item is in Base64, 4 bytes for 3.
    kept = len(letter.item) - (len(record.value) - limit + 3) // 4 * 3 - 3
    cut = dataclasses.replace(
        letter, truncated=True, message=message, item=letter.item[: max(kept, 0)]
    )
    record = record_of(cut)
    if len(record.value) > limit:
        record = record_of(dataclasses.replace(cut, errors=(), headers=(), envelope=None))
    return record
