# SPDX-License-Identifier: Apache-2.0
"""A group commit whose calls a test records, holds and fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from engage.pipeline.group_commit import GroupCommit, WriteQueue


class Target:
    """The storage call of a group commit, recorded."""

    def __init__(
        self,
        *,
        timeout: float = 30.0,
        refuse: Callable[[Any, Exception], str] | None = None,
        **options: Any,
    ) -> None:
        self.calls: list[list[Any]] = []
        #: Called before a call returns. It may raise, or return something to wait for.
        self.before: Callable[[Sequence[Any]], Any] = lambda items: None
        self.done: list[int] = []
        self.failed = 0
        self.recovered = 0
        #: The recovery ends when it is set.
        self.recovery = asyncio.Event()
        self.recovery.set()
        #: The items for which a call has results.
        self.results: Callable[[Sequence[Any]], Sequence[Any]] = lambda items: items
        values = {"max_weight": 100, "max_bytes": 1000, **options}
        self.group_commit: GroupCommit[Any, str] = GroupCommit(
            self.call,
            WriteQueue(**values),
            timeout=timeout,
            refuse=refuse,
            done=lambda seconds, items, results: self.done.append(len(items)),
            failed=self.fail,
            recover=self.recover,
        )

    async def call(self, items: Sequence[Any]) -> Sequence[str]:
        self.calls.append(list(items))
        waited = self.before(items)
        if waited is not None:
            await waited
        return [f"<{item}>" for item in self.results(items)]

    def fail(self) -> None:
        self.failed += 1

    async def recover(self) -> None:
        self.recovered += 1
        await self.recovery.wait()

    def submit(self, *items: Any, size: int = 1) -> asyncio.Task[Sequence[str]]:
        return asyncio.ensure_future(self.group_commit.submit(items, size))

    def hold_each(self, calls: int) -> list[asyncio.Event]:
        """Return an event for each of the next calls; set it to let that call continue."""
        gates = [asyncio.Event() for _ in range(calls)]
        waiting = iter(gates)
        self.before = lambda items: next(waiting).wait()
        return gates

    def hold(self) -> asyncio.Event:
        """Return an event; set it to let the calls continue."""
        gate = asyncio.Event()
        self.before = lambda items: gate.wait()
        return gate
