# SPDX-License-Identifier: Apache-2.0
"""The interface of a storage that lets ``engage verify`` look at what only the storage knows."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import AsyncIterator, Collection
from typing import Literal

from engage.api.pages import Page
from engage.api.people import Version

__all__ = ["StoreProblem", "StoredLink", "VerifiableStore"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoreProblem:
    """Something that a storage found wrong in itself."""

    #: Where, in the words of the storage's documentation, such as ``keys``.
    what: str
    #: One line; it may have ids of users and events.
    message: str
    #: Why it may be right nevertheless. ``expired``: if events expire.
    #: ``unfinished``: a crash cut something off, and the next start of a server completes it.
    #: ``unknown``: the storage could not look.
    doubt: Literal["", "expired", "unfinished", "unknown"] = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredLink:
    """A link of an anonymous id to a user, or an operator's decision about one."""

    workspace_id: str
    user_id: str
    anonymous_id: str
    #: The least time of receipt, message id and origin of the events that made it; ``None``: there
    #: was none, but an operator's decision. An empty message id: an earlier version of engage did
    #: not keep them.
    first: Version | None
    #: Whether it counts; see :class:`~engage.api.LinkDecision`.
    counts: bool


class VerifiableStore(abc.ABC):
    """A storage that finds damage which the other interfaces do not show.

    Every method works while a server writes to the store, changes nothing, and may raise
    :class:`StorageUnavailable`.
    """

    @abc.abstractmethod
    def problems(self) -> AsyncIterator[StoreProblem | int]:
        """Look for problems: documents or rows that cannot be read, keys that are missing or lead
        to another event, counters and look-up tables that differ from what they are made of.

        It takes as long as it needs, and reads the store in steps.

        :return: the problems; and after each step, how many documents or rows it looked at.
        """

    @abc.abstractmethod
    async def scan_links(self, *, after: str | None, limit: int) -> Page[StoredLink]:
        """Return one page of all links and decisions, in any order; each once."""

    async def unfinished(self) -> Collection[tuple[str, str]]:
        """Return the workspace and the id of each user and visitor whose changes a write may not
        have applied yet, because it is running now or a crash cut it off. By default none.
        """
        return ()
