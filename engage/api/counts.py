# SPDX-License-Identifier: Apache-2.0
"""Counters per minute and hour for the history of the console, and per day for quotas."""

from __future__ import annotations

import dataclasses

__all__ = ["Count", "CountSum"]


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
