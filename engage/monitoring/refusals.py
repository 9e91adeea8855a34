# SPDX-License-Identifier: Apache-2.0
"""Requests that were refused as a whole, the latest of this process.

No dead letter exists of them, so the console could not show otherwise why events do not arrive: a
wrong write key, a web page of another origin, a body that is not JSON. Equal refusals are counted
in one entry; nothing is stored for each. An entry never has a body, nor a whole write key.
"""

from __future__ import annotations

import base64
import binascii
import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, Final

__all__ = ["MAX_ENTRIES", "SCHEMES", "Refusal", "Refusals", "key_prefix"]

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


@dataclasses.dataclass(slots=True)
class _Entry:
    latest: Refusal
    first: int
    last: int
    count: int = 1


#: Reason, route, key, write key id.
_Name = tuple[str, str, str, str]


def _name(refusal: Refusal) -> _Name:
    return (refusal.reason, refusal.route, refusal.key, refusal.write_key_id)


class Refusals:
    """The latest refusals of a process."""

    def __init__(self) -> None:
        # The entry that was counted last is at the end.
        self._entries: collections.OrderedDict[_Name, _Entry] = collections.OrderedDict()
        #: Increases with every refusal.
        self.changes = 0

    def add(self, refusal: Refusal, now: int) -> None:
        """Count a refusal.

        :param now: milliseconds since 1970 UTC.
        """
        self.changes += 1
        name = _name(refusal)
        entry = self._entries.get(name)
        if entry is None and not refusal.write_key_id:
            alike = sum(one[:2] == name[:2] and not one[3] for one in self._entries)
            if alike >= MAX_KEYS:
                refusal = dataclasses.replace(refusal, key=OTHER_KEYS)
                name = _name(refusal)
                entry = self._entries.get(name)
        if entry is None:
            if len(self._entries) == MAX_ENTRIES:
                self._entries.popitem(last=False)
            self._entries[name] = _Entry(refusal, now, now)
            return
        entry.latest = refusal
        entry.last = now
        entry.count += 1
        self._entries.move_to_end(name)

    def entries(self) -> list[dict[str, Any]]:
        """Return the entries, the latest first, as JSON objects of at most a kilobyte each."""
        return [
            {
                "at": entry.last,
                "first": entry.first,
                "count": entry.count,
                "status": entry.latest.status,
                "code": entry.latest.reason,
                "message": entry.latest.message[:_MAX_TEXT],
                "route": entry.latest.route,
                "key": entry.latest.key,
                "workspace": entry.latest.workspace_id,
                "writeKeyId": entry.latest.write_key_id,
            }
            for entry in reversed(self._entries.values())
        ]


def key_prefix(authorizations: Sequence[str], keys: Sequence[str]) -> str:
    """Return the first characters of the write key of a request; ``""`` if it sent none.

    :param authorizations: the values of the header ``Authorization``.
    :param keys: the values of ``writeKey`` in the query.
    """
    for value in authorizations:
        scheme, _, credential = value.strip().partition(" ")
        if scheme.lower() not in SCHEMES or not credential:
            continue
        try:
            key = base64.b64decode(credential.strip()[:64].encode(), validate=True).decode()
        except (binascii.Error, UnicodeError):
            key = credential.strip()
        return _beginning(key)
    for key in keys:
        if key:
            return _beginning(key)
    return ""


def _beginning(key: str) -> str:
    """Return the first characters of a key, never more than half of it."""
    return f"{key[: min(_PREFIX, len(key) // 2)]}…"
