# SPDX-License-Identifier: Apache-2.0
"""Dead letters, and their budgets."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import bson
from bson.binary import Binary
from bson.datetime_ms import DatetimeMS
from bson.errors import InvalidDocument
from bson.objectid import ObjectId

from engage.api import BudgetName, BudgetUse, DeadLetter, DeadLetterBudget, Page

from .connection import DUPLICATE, Connection
from .documents import MAX_BYTES, Sequencer, any_of, is_text, scoped_id
from .paging import delete_oldest, read_page
from .schema import DEAD_LETTERS

_log = logging.getLogger("engage.storage.mongo")

#: Seconds after which the totals of a budget are read again; other processes also add to them.
_TOTALS_SECONDS: Final = 5.0


class DeadLetters:
    """Stores, reads and expires dead letters.

    Totals are exact within a process. Several processes together may exceed a budget by the letters
    that they store within a few seconds.
    """

    def __init__(
        self, connection: Connection, budget: DeadLetterBudget, sequence: Sequencer
    ) -> None:
        self._connection = connection
        self._budget = budget
        self._sequence = sequence
        #: (workspace, budget) → the time when it was read, count, bytes.
        self._totals: dict[tuple[str, BudgetName], tuple[float, int, int]] = {}

    async def keep(self, letters: Sequence[DeadLetter]) -> list[bool]:
        """Store dead letters within the budgets, each id once, and return whether each is stored.

        A stored letter that was counted against another budget before keeps that one until it
        expires.
        """
        keys = [scoped_id(letter.workspace_id, letter.id) for letter in letters]
        new: dict[str, tuple[DeadLetter, BudgetName, int]] = {}
        for key, letter in zip(keys, letters, strict=True):
            new.setdefault(key, (letter, letter.budget, letter.size))
        if not new:
            return []
        dropped: set[str] = set()
        with self._connection.calling() as db:
            documents = []
            written = []
            for document in await self._connection.read(DEAD_LETTERS, new, {"_id": 1}):
                # It is written again, because it may not be durable yet.
                letter, budget, size = new.pop(document["_id"])
                again = _encode(document["_id"], letter, budget, size, self._sequence())
                if again is not None:
                    documents.append(again)
                    written.append(document["_id"])
            repeats = len(documents)
            for key, (letter, budget, size) in new.items():
                read_at, count, total = await self._total(db, letter.workspace_id, budget)
                max_count, max_bytes = self._budget.of(budget)
                encoded = None
                if count < max_count and total + size <= max_bytes:
                    encoded = _encode(key, letter, budget, size, self._sequence())
                if encoded is None:
                    dropped.add(key)
                    continue
                self._totals[letter.workspace_id, budget] = (read_at, count + 1, total + size)
                documents.append(encoded)
                written.append(key)
            try:
                codes = await self._connection.insert(DEAD_LETTERS, documents)
            except BaseException:
                self._totals.clear()
                raise
        refused = {written[index] for index, code in codes.items() if code != DUPLICATE}
        if any(index >= repeats for index in codes):
            self._totals.clear()
        if refused:
            _log.error("%d dead letters can never be stored", len(refused))
        dropped |= refused
        return [key not in dropped for key in keys]

    async def use(self) -> list[BudgetUse]:
        """Return how much of each budget is used."""
        with self._connection.calling() as db:
            fields = {"_id": 0, "workspaceId": 1, "budget": 1, "size": 1}
            found: dict[tuple[str, BudgetName], tuple[int, int]] = {}
            # With this condition the server answers from the index alone.
            async for one in db[DEAD_LETTERS].find({"workspaceId": {"$gte": ""}}, fields):
                key = one["workspaceId"], one["budget"]
                count, size = found.get(key, (0, 0))
                found[key] = count + 1, size + one["size"]
        return [
            BudgetUse(workspace_id=workspace, budget=budget, count=count, size=size)
            for (workspace, budget), (count, size) in sorted(found.items())
        ]

    async def _total(
        self, db: Any, workspace_id: str, budget: BudgetName
    ) -> tuple[float, int, int]:
        known = self._totals.get((workspace_id, budget))
        now = time.monotonic()
        if known is not None and known[0] > now - _TOTALS_SECONDS:
            return known
        query = {"workspaceId": workspace_id, "budget": budget}
        # The server answers this from the index alone.
        fields = {"_id": 0, "workspaceId": 1, "budget": 1, "size": 1}
        sizes = [one["size"] for one in await db[DEAD_LETTERS].find(query, fields).to_list(None)]
        total = self._totals[workspace_id, budget] = (now, len(sizes), sum(sizes))
        return total

    async def scan(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[DeadLetter]:
        """Return a page of dead letters in order of arrival."""
        query: dict[str, Any] = {} if workspace_id is None else {"workspaceId": workspace_id}
        if after is not None:
            query["_seq"] = {"$gt": _place(after)}
        with self._connection.calling(scan=True) as db:
            cursor = db[DEAD_LETTERS].find(query).sort([("_seq", 1)])
            items, last = await read_page(cursor, limit, _sized)
        return Page(items, None if last is None else str(last["_seq"]))

    async def recent(
        self, workspace_id: str | None, *, before: str | None = None, limit: int
    ) -> Page[DeadLetter]:
        """Return a page of dead letters, newest first."""
        query: dict[str, Any] = {} if workspace_id is None else {"workspaceId": workspace_id}
        if before is not None:
            query["_seq"] = {"$lt": _place(before)}
        with self._connection.calling() as db:
            cursor = db[DEAD_LETTERS].find(query).sort([("_seq", -1)])
            items, last = await read_page(cursor, limit, _sized)
        return Page(items, None if last is None else str(last["_seq"]))

    async def find(self, workspace_id: str, letter_id: str) -> DeadLetter | None:
        """Return the dead letter with this id, or ``None``."""
        key = scoped_id(workspace_id, letter_id)
        if not is_text(key):
            return None
        with self._connection.calling() as db:
            found = await db[DEAD_LETTERS].find_one({"_id": key})
        return None if found is None else _decode(found)

    async def remove(self, workspace_id: str, ids: Sequence[str]) -> int:
        """Delete dead letters, and return how many existed."""
        if not ids:
            return 0
        keys = sorted({scoped_id(workspace_id, one) for one in ids})
        self._totals.clear()
        with self._connection.calling() as db:
            done = await db[DEAD_LETTERS].delete_many({"_id": any_of(keys)})
        return int(done.deleted_count)

    async def expire(self, before: int, *, limit: int) -> int:
        """Delete the oldest dead letters received before ``before``, and return how many."""
        self._totals.clear()
        return await delete_oldest(self._connection, DEAD_LETTERS, before, limit)


def _encode(key: str, letter: DeadLetter, budget: BudgetName, size: int, seq: Any) -> bytes | None:
    document = {
        "_id": key,
        "_seq": seq,
        "workspaceId": letter.workspace_id,
        "id": letter.id,
        "origin": letter.origin,
        "budget": budget,
        "size": size,
        "writeKeyId": letter.write_key_id,
        "userId": letter.user_id,
        "anonymousId": letter.anonymous_id,
        "messageId": letter.message_id,
        "reason": letter.reason,
        "message": letter.message,
        "errors": [dict(error) for error in letter.errors],
        "item": Binary(letter.item),
        "truncated": letter.truncated,
        # Not pairs: some servers do not store an array within an array.
        "headers": [{"name": name, "value": value} for name, value in letter.headers],
        "receivedAt": DatetimeMS(letter.received_at),
        "operation": letter.operation,
        "envelope": None if letter.envelope is None else Binary(letter.envelope),
    }
    try:
        encoded = bson.encode(document)
    except (InvalidDocument, OverflowError, UnicodeError):
        _log.error("a dead letter cannot be stored: a text contains a lone surrogate")
        return None
    return encoded if len(encoded) <= MAX_BYTES else None


def _decode(document: Mapping[str, Any]) -> DeadLetter:
    envelope = document["envelope"]
    return DeadLetter(
        id=document["id"],
        workspace_id=document["workspaceId"],
        origin=document["origin"],
        write_key_id=document["writeKeyId"],
        user_id=document["userId"],
        anonymous_id=document["anonymousId"],
        message_id=document["messageId"],
        reason=document["reason"],
        message=document["message"],
        errors=[dict(error) for error in document["errors"]],
        item=bytes(document["item"]),
        truncated=document["truncated"],
        headers=[(header["name"], header["value"]) for header in document["headers"]],
        received_at=int(document["receivedAt"]),
        operation=document["operation"],
        envelope=None if envelope is None else bytes(envelope),
    )


def _sized(document: Mapping[str, Any]) -> tuple[DeadLetter, int]:
    letter = _decode(document)
    return letter, len(letter.item) + len(letter.envelope or b"")


def _place(cursor: str) -> ObjectId:
    """Return the place in the order of arrival that a cursor names.

    :raises ValueError: if it is not a cursor of dead letters.
    """
    if not ObjectId.is_valid(cursor):
        raise ValueError("not a cursor of this storage")
    return ObjectId(cursor)
