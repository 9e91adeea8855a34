# SPDX-License-Identifier: Apache-2.0
"""Samples of what may occur many times a second: requests that are refused, and log lines.

No dead letter exists of a request that is refused as a whole, so the console could not show
otherwise why events do not arrive: a wrong write key, a web page of another origin, a body that is
not JSON. Equal refusals are counted in one entry; nothing is stored for each. An entry never has a
body, nor a whole write key.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any, Final

import orjson

from engage.api import MAX_RECORD_BYTES, Record

__all__ = [
    "LINE_SECONDS",
    "MAX_ENTRIES",
    "REFUSED_RECORD",
    "SCHEMES",
    "Refusal",
    "Refusals",
    "Throttle",
    "key_prefix",
]

#: Seconds between two lines about the same trouble: often enough to be seen in any window of a log.
LINE_SECONDS: Final = 60.0

#: The kind of the records with the refused requests, one for each process.
REFUSED_RECORD: Final = "refused"
#: Entries that a process keeps: the latest.
MAX_ENTRIES: Final = 50
#: Entries for one reason and route that differ only by an unknown write key. Others have the key
#: :data:`OTHER_KEYS`: a client that makes up a key for each request must not hide the others.
MAX_KEYS: Final = 10
OTHER_KEYS: Final = "…"
#: Characters of a write key that an entry has.
_PREFIX: Final = 4
#: The schemes of ``Authorization`` with which a write key is sent, in lower case.
SCHEMES: Final = ("basic", "bearer")
#: Characters of a message.
_MAX_TEXT: Final = 200


class Throttle:
    """Lets one line through in a while, and counts the others.

    :param seconds: between two lines.
    """

    def __init__(self, seconds: float = LINE_SECONDS) -> None:
        self._seconds = seconds
        self._next_at = -math.inf
        self._skipped = 0

    def __call__(self) -> str | None:
        """Return the end of the line, which says how many were left out; ``None``: log no line."""
        now = time.monotonic()
        if now < self._next_at:
            self._skipped += 1
            return None
        self._next_at = now + self._seconds
        skipped, self._skipped = self._skipped, 0
        return f"; {skipped} more since the last line" if skipped else ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One request that was refused."""

    #: An error code.
    reason: str
    status: int
    #: The name of the route, never a path.
    route: str
    #: The first characters of the write key that was sent, see :func:`key_prefix`.
    key: str = ""
    workspace_id: str = ""
    write_key_id: str = ""
    #: The message of the error.
    message: str = ""


class Refusals:
    """The latest refusals of a process."""

    def __init__(self) -> None:
        # By reason, route, key and write key id. The entry that was counted last is at the end.
        self._entries: dict[tuple[str, str, str, str], dict[str, Any]] = {}
        #: Increases with every refusal.
        self.changes = 0

    def add(self, refusal: Refusal, now: int) -> None:
        """Count a refusal.

        :param now: milliseconds since 1970 UTC.
        """
        self.changes += 1
        entries = self._entries
        name = (refusal.reason, refusal.route, refusal.key, refusal.write_key_id)
        if name not in entries and not refusal.write_key_id:
            alike = sum(other[:2] == name[:2] and not other[3] for other in entries)
            if alike >= MAX_KEYS:
                name = (refusal.reason, refusal.route, OTHER_KEYS, "")
        before = entries.pop(name, {"first": now, "count": 0})
        if len(entries) == MAX_ENTRIES:
            del entries[next(iter(entries))]
        entries[name] = {
            "at": now,
            "first": before["first"],
            "count": before["count"] + 1,
            "status": refusal.status,
            "code": refusal.reason,
            "message": refusal.message[:_MAX_TEXT],
            "route": refusal.route,
            "key": name[2],
            "workspace": refusal.workspace_id,
            "writeKeyId": refusal.write_key_id,
        }

    def entries(self) -> list[dict[str, Any]]:
        """Return the entries, the latest first, as JSON objects of at most a kilobyte each."""
        return [*reversed(self._entries.values())]

    def record(self, process: str, now: int) -> Record:
        """Return the record of a process, with as many of the latest entries as it can have.

        :param now: milliseconds since 1970 UTC.
        """
        rows = self.entries()
        while len(body := orjson.dumps({"rows": rows})) > MAX_RECORD_BYTES:
            rows.pop()
        return Record(kind=REFUSED_RECORD, workspace_id="", id=process, body=body, at=now)


def key_prefix(authorizations: Sequence[str], keys: Sequence[str]) -> str:
    """Return the first characters of the write key of a request; ``""`` if it sent none.

    They are never more than half of the key.

    :param authorizations: the values of the header ``Authorization``.
    :param keys: the values of ``writeKey`` in the query.
    """
    sent = next(filter(None, keys), None)
    for value in authorizations:
        scheme, _, credential = value.strip().partition(" ")
        if scheme.lower() in SCHEMES and credential:
            sent = credential.strip()
            with contextlib.suppress(binascii.Error, UnicodeError):
                sent = base64.b64decode(sent[:64].encode(), validate=True).decode()
            break
    return "" if sent is None else f"{sent[: min(_PREFIX, len(sent) // 2)]}…"
