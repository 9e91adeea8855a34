# SPDX-License-Identifier: Apache-2.0
"""Counters per minute and hour for the history of the console, and per day for quotas."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence

from engage.api.pages import Page

__all__ = ["Count", "CountStore", "CountSum"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """The value of one counter of one process in one step of time.

    It is a register: of several values written for the same (``step``, ``at``, ``process``,
    ``name``, ``workspace_id``, ``labels``), the greatest wins, so that a write can be repeated.
    """

    #: Length of the step in seconds: 60, 3600 or 86400.
    step: int
    #: When the step began: milliseconds since 1970 UTC, a multiple of the step.
    at: int
    #: The process that counted: a random id, new for each start of a process.
    process: str
    #: The counter, such as ``events``: at most 32 characters.
    name: str
    #: ``""``: the whole server.
    workspace_id: str
    #: Such as the id of the write key, the type and the outcome; the core defines them by ``name``.
    labels: tuple[str, ...]
    #: At least 0.
    value: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CountSum:
    """The values of all processes for one counter in one step."""

    at: int
    name: str
    workspace_id: str
    labels: tuple[str, ...]
    #: The sum of the values of all processes.
    total: int
    #: The greatest value of one process.
    greatest: int
    #: The number of processes.
    processes: int


class CountStore(abc.ABC):
    """A storage that also keeps counters. Every method may raise :class:`StorageUnavailable`."""

    @abc.abstractmethod
    async def put_counts(self, counts: Sequence[Count]) -> None:
        """Write registers in one durable step; see :class:`Count`. Idempotent."""

    @abc.abstractmethod
    async def counts(
        self,
        step: int,
        *,
        since: int,
        until: int,
        names: Sequence[str] | None = None,
        workspace_id: str | None = None,
        after: str | None = None,
        limit: int,
    ) -> Page[CountSum]:
        """Return one page of sums, in order of time.

        :param step: 60, 3600 or 86400.
        :param since: the earliest ``at``, inclusive: milliseconds.
        :param until: the end, exclusive.
        :param names: only these counters; ``None``: all.
        :param workspace_id: only this workspace; ``None``: all.
        :param after: the cursor of the previous page; ``None`` for the first page.
        :param limit: the maximum number of items.
        """

    @abc.abstractmethod
    async def scan_counts(self, *, after: str | None, limit: int) -> Page[Count]:
        """Return one page of all registers, in a constant order, for a copy of the store."""

    @abc.abstractmethod
    async def expire_counts(self, step: int, before: int, *, limit: int) -> int:
        """Delete at most ``limit`` registers of a step with ``at`` below ``before`` (milliseconds).

        :return: how many were deleted.
        """
