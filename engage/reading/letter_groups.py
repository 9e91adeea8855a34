# SPDX-License-Identifier: Apache-2.0
"""Group dead letters by their cause, and find the letters of a group.

Thousands of letters usually have few causes. A group is: a reason, the JSON pointer and the rule of
the first error, and the write key (or the provider) that the events came with.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, Final

from engage.api import DeadLetter, Page
from engage.reading.scans import PAGE
from engage.store.facade import Storage

__all__ = [
    "MAX_LETTERS",
    "Group",
    "Grouped",
    "LetterFilter",
    "delete_letters",
    "group_letters",
    "newest_letters",
    "pointer_of",
    "rule_of",
]

#: What differs in the messages of one rule: numbers and quoted text.
_VALUES: Final = re.compile(r"""\d+|"[^"]*"|'[^']*'""")

#: Maximum number of letters that are read to group them.
MAX_LETTERS: Final = 20_000
#: Seconds after which grouping stops with the letters read so far.
MAX_SECONDS: Final = 5.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LetterFilter:
    """Which letters are wanted; ``None`` means any."""

    reason: str | None = None
    #: The JSON pointer of the first error; ``""`` is the whole item.
    pointer: str | None = None
    #: See :func:`rule_of`.
    rule: str | None = None
    #: The id of the write key.
    key: str | None = None
    #: ``api``, or the name of a provider.
    origin: str | None = None
    #: The end of ``received_at``: milliseconds since 1970 UTC, exclusive.
    until: int | None = None

    def matches(self, letter: DeadLetter) -> bool:
        """Return whether a letter is wanted."""
        return (
            (self.reason is None or letter.reason == self.reason)
            and (self.pointer is None or pointer_of(letter) == self.pointer)
            and (self.rule is None or rule_of(letter) == self.rule)
            and (self.key is None or letter.write_key_id == self.key)
            and (self.origin is None or letter.origin == self.origin)
            and (self.until is None or letter.received_at < self.until)
        )


@dataclasses.dataclass(slots=True, kw_only=True)
class Group:
    """Letters that have the same cause."""

    reason: str
    #: The JSON pointer of the first error; ``""`` is the whole item.
    pointer: str
    #: The id of the write key; ``None`` for letters of webhooks.
    key: str | None
    #: ``api``, or the name of a provider.
    origin: str
    #: The newest letter.
    example: DeadLetter
    count: int = 0
    #: ``received_at`` of the oldest and the newest letter.
    first: int
    last: int

    @property
    def filter(self) -> LetterFilter:
        """The filter that finds the letters of this group."""
        return LetterFilter(
            reason=self.reason,
            pointer=self.pointer,
            rule=rule_of(self.example),
            key=self.key,
            origin=self.origin,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grouped:
    """The groups of the letters that were read."""

    #: The largest group first; of groups with the same size, the one with the newest letter.
    groups: Sequence[Group]
    #: How many letters were read, and whether these are all of the workspace.
    letters: int
    complete: bool


def pointer_of(letter: DeadLetter) -> str:
    """Return the JSON pointer of the first error of a letter; ``""`` if it has none."""
    return letter.errors[0].get("pointer", "") if letter.errors else ""


def rule_of(letter: DeadLetter) -> str:
    """Return the message of the first error of a letter, without the values in it.

    :return: such as ``is too long (… characters; the limit is …)``; ``""`` if it has no error.
    """
    return _VALUES.sub("…", letter.errors[0].get("message", "")) if letter.errors else ""


async def group_letters(
    store: Storage,
    workspace_id: str | None,
    *,
    limit: int = MAX_LETTERS,
    seconds: float = MAX_SECONDS,
) -> Grouped:
    """Read the newest letters and group them.

    A storage that cannot read letters newest first is read from the oldest one.

    :param workspace_id: ``None``: all workspaces.
    :param limit: the maximum number of letters to read.
    :param seconds: the time limit for reading pages.
    :raises StorageUnavailable: if the store does not answer.
    """
    groups: dict[tuple[str, str, str, str | None, str], Group] = {}
    ends = time.monotonic() + seconds
    count = 0
    complete = True
    async for page in _newest(store, workspace_id):
        letters = page.items[: limit - count]
        for letter in letters:
            count += 1
            cause = letter.reason, pointer_of(letter), rule_of(letter)
            key = (*cause, letter.write_key_id, letter.origin)
            group = groups.get(key)
            if group is None:
                group = groups[key] = _group_of(letter)
            group.count += 1
            if letter.received_at > group.last:
                group.last, group.example = letter.received_at, letter
            group.first = min(group.first, letter.received_at)
        if count >= limit or time.monotonic() > ends:
            complete = page.cursor is None and len(letters) == len(page.items)
            break
        await asyncio.sleep(0)
    ordered = sorted(groups.values(), key=lambda group: (-group.count, -group.last))
    return Grouped(groups=ordered, letters=count, complete=complete)


async def newest_letters(
    store: Storage, workspace_id: str, letter_filter: LetterFilter, *, limit: int
) -> Sequence[DeadLetter]:
    """Return the newest letters that match, newest first.

    A storage that cannot read letters newest first is read from the oldest one.

    :param limit: the maximum number of letters to return; at most :data:`MAX_LETTERS` are read.
    :raises StorageUnavailable: if the store does not answer.
    """
    letters: list[DeadLetter] = []
    read = 0
    async for page in _newest(store, workspace_id):
        letters += [letter for letter in page.items if letter_filter.matches(letter)]
        read += len(page.items)
        if len(letters) >= limit or read >= MAX_LETTERS:
            break
    return letters[:limit]


async def _call(call: Awaitable[Any]) -> Any:
    return await call


async def delete_letters(
    store: Storage,
    workspace_id: str,
    letter_filter: LetterFilter,
    *,
    call: Callable[[Awaitable[Any]], Awaitable[Any]] = _call,
    seconds: float = math.inf,
) -> int:
    """Delete the letters that match; return how many there were.

    :param call: makes each call of the store.
    :param seconds: after which no more letters are deleted.
    :raises StorageUnavailable: if the store does not answer; some letters may be deleted already.
    """
    deleted = 0
    cursor: str | None = None
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        page = await call(store.scan_dead_letters(workspace_id, after=cursor, limit=PAGE))
        ids = [letter.id for letter in page.items if letter_filter.matches(letter)]
        if ids:
            deleted += await call(store.remove(workspace_id, ids))
        cursor = page.cursor
        if cursor is None:
            break
        await asyncio.sleep(0)
    return deleted


def _group_of(letter: DeadLetter) -> Group:
    return Group(
        reason=letter.reason,
        pointer=pointer_of(letter),
        key=letter.write_key_id,
        origin=letter.origin,
        example=letter,
        first=letter.received_at,
        last=letter.received_at,
    )


async def _newest(
    store: Storage, workspace_id: str | None
) -> AsyncGenerator[Page[DeadLetter], None]:
    cursor: str | None = None
    recent = await store.recent_dead_letters(workspace_id, limit=PAGE)
    while True:
        page = recent or await store.scan_dead_letters(workspace_id, after=cursor, limit=PAGE)
        yield page
        if page.cursor is None or (page.cursor == cursor and not page.items):
            return
        cursor = page.cursor
        if recent is not None:
            recent = await store.recent_dead_letters(workspace_id, before=cursor, limit=PAGE)
