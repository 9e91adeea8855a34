# SPDX-License-Identifier: Apache-2.0
"""Preparing a store before its first use, for all calls that wait for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from engage.api import StorageError, StorageUnavailable

from .connection import Connection
from .schema import Schema

_log = logging.getLogger("engage.storage.mongo")

#: The part of a call's time for which a call waits until the store is prepared. The core waits for
#: the opening of a store as long as for one call.
_WAIT: Final = 3 / 4


class Preparation:
    """Finds or creates the store, and completes what a crash cut off.

    :param complete: completes it.
    :param later: called if that cannot be done now.
    :param index: indexes identifiers that were declared since the last start.
    """

    def __init__(
        self,
        connection: Connection,
        schema: Schema,
        *,
        complete: Callable[[], Awaitable[None]],
        later: Callable[[], None],
        index: Callable[[], Awaitable[None]],
    ) -> None:
        self._connection = connection
        self._schema = schema
        self._complete = complete
        self._later = later
        self._index = index
        #: Whether the store is prepared.
        self.done = False
        #: Whether the collections, the indexes and the version are.
        self._created = False
        self._task: asyncio.Task[None] | None = None

    async def wait(self) -> None:
        """Wait until the store is prepared; create it if there is none.

        The preparation continues when the time of the call is over: an overloaded server would
        never be done if each call began again.

        :raises StorageError: if it fails, or takes longer.
        """
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self.prepare(create=True))
            self._task.add_done_callback(_retrieve_exception)
        task = self._task
        done, _ = await asyncio.wait([task], timeout=_WAIT * self._connection.timeout)
        if not done:
            raise StorageUnavailable(f"{self._connection.name}: the store is still being prepared")
        task.result()

    async def prepare(self, *, create: bool) -> None:
        """Prepare the store now, however long it takes.

        :param create: whether to create what is missing.
        """
        self._connection.connect()
        if not self._created:
            await self._schema.prepare(create=create)
            self._created = create
        try:
            await self._complete()
        except StorageError:
            # The server may be too busy for it; a command that only reads may run with credentials
            # that only allow reading. Nothing of it was acknowledged: it can be done later.
            _log.info("what a crash may have cut off was not completed", exc_info=True)
            if create:
                self._later()
        try:
            await self._index()
        except StorageError:
            if create:
                raise
            _log.info("the identifiers were not indexed", exc_info=True)
        self.done = True

    async def stop(self) -> None:
        """Stop preparing. The server continues to build indexes."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._schema.close()

    def forget(self) -> None:
        """Prepare the store again before the next call: it was closed."""
        self.done = self._created = False


def _retrieve_exception(task: asyncio.Task[None]) -> None:
    """Retrieve the exception, so that asyncio does not log it if no call waits any more."""
    if not task.cancelled():
        task.exception()
