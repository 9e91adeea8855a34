# SPDX-License-Identifier: Apache-2.0
"""The table of write keys that a process accepts, which follows the keys in the store.

Operators change keys in the store while servers run (:mod:`engage.keys.effective`). So a process
reads the version of these records every :data:`POLL_SECONDS`, two look-ups, and the records
themselves only after a change, and at least every :data:`LIST_SECONDS`. Then it replaces the keys
of its :class:`~engage.keys.auth.Authenticator`: a request costs what it would cost without all
this.

- **A disabled key** is refused by every process within :data:`POLL_SECONDS` and the time of a read.
- **A new key** works at its first use: a request with an unknown key waits for a refresh that began
  after it arrived. Such requests share a refresh, one begins at most every :data:`GAP_SECONDS`, and
  at most :data:`MAX_WAITING` wait, which hold at most twice :data:`MAX_HELD` bytes. So clients with
  wrong keys cannot cost the store more than one refresh a second, nor the process more memory.
- **A store that does not answer** changes nothing: the last table stays. Until the records were
  first read, every request with a key gets a 503. A 401 would make SDKs discard events, and the
  keys of the config alone could include one that an operator has disabled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Sequence
from typing import Final

from engage.api import Record, StorageError, StorageUnavailable
from engage.config import Workspace
from engage.errors import overloaded, storage_unavailable
from engage.keys.auth import Authenticator, UnknownKeyError
from engage.keys.effective import (
    KEY,
    OVERRIDE,
    EffectiveKeys,
    Key,
    effective_keys,
    read_key_records,
)
from engage.keys.limits import Rules
from engage.monitoring import logs
from engage.reading.time_limit import within
from engage.store.facade import Storage

__all__ = ["KeyTable"]

_log = logging.getLogger(__name__)

#: Seconds between the beginnings of two reads of the version.
POLL_SECONDS: Final = 2.0
#: Seconds after which the records are read even if the version is the same: a process may have been
#: killed between the write of a record and that of the version.
LIST_SECONDS: Final = 30.0
#: Seconds between the beginnings of two refreshes that unknown keys have caused.
GAP_SECONDS: Final = 1.0
#: Requests with an unknown key that may wait in this process: less than half of the default of
#: ``server.max_connections``, so that the requests with known keys have the rest.
MAX_WAITING: Final = 1000
#: Bytes of complete bodies that these requests may hold in memory. A body that is not complete is
#: left unread, and its connection is one that can give way. A body within its share, 4 KiB, always
#: has room, so that large bodies cannot keep out an event with a new key.
MAX_HELD: Final = 4 * 1024 * 1024
#: Requests that go on in one turn of the event loop after a refresh, each in about 0.1 ms.
AT_ONCE: Final = 100
#: Seconds that one waits at most: for the refresh to begin, and for the store.
WAIT_SECONDS: Final = 2 * GAP_SECONDS


class KeyTable:
    """Keeps the keys of an authenticator up to date.

    :param workspaces: the workspaces of the config, with its keys.
    :param store: where the other keys are; :meth:`start` it when it is open.
    :param timeout: seconds that a refresh may take.
    """

    def __init__(
        self,
        workspaces: Sequence[Workspace],
        authenticator: Authenticator,
        store: Storage,
        *,
        timeout: float,
    ) -> None:
        self._workspaces = workspaces
        self._authenticator = authenticator
        self._store = store
        self._timeout = timeout
        self._records: Sequence[Record] | None = None
        self._versions: tuple[int, ...] = ()
        #: When a refresh last began, and when the records were last read.
        self._began = self._listed = -math.inf
        self._waiting = self._held = 0
        self._wanted = asyncio.Event()
        #: Done when the next refresh to begin has ended: whether it succeeded.
        self._next: asyncio.Future[bool] | None = None
        self._failing = False
        self._task: asyncio.Task[None] | None = None
        self._effective = effective_keys(workspaces, ())
        authenticator.replace(None)

    @property
    def loaded(self) -> bool:
        """Whether the keys are known: the records were read."""
        return self._records is not None

    @property
    def keys(self) -> Sequence[Key]:
        """All keys as this process knows them; those of the config alone before the first read."""
        return self._effective.keys

    def of(self, workspace_id: str) -> list[Key]:
        """Return the keys of one workspace, as this process knows them."""
        return [key for key in self.keys if key.workspace_id == workspace_id]

    def replay_rules(self, workspace_id: str, key_id: str | None) -> Rules | None:
        """Return the rules that a replay of an event obeys: those about its traits and its user.

        :param key_id: the key that it came with; one that is gone counts as public.
        """
        server = any(key.kind == "server" for key in self.of(workspace_id) if key.id == key_id)
        here = (workspace for workspace in self._workspaces if workspace.id == workspace_id)
        return next(map(Rules.of_trusted if server else Rules.of_public, here), None)

    @property
    def problems(self) -> Sequence[str]:
        """See :attr:`engage.keys.effective.EffectiveKeys.problems`."""
        return self._effective.problems

    def check(self) -> None:
        """Check that the keys are known.

        :raises StorageUnavailable: if they are not.
        """
        if not self.loaded:
            raise StorageUnavailable("the write keys in the store were not read yet")

    async def start(self) -> None:
        """Follow the keys in the background until :meth:`close`.

        It returns when they were read for the first time, or could not be read soon.
        """
        if self._task is not None:
            return
        self._next = first = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._follow(self._store), name="write keys")
        await asyncio.wait([first], timeout=WAIT_SECONDS)

    async def close(self) -> None:
        """Stop following the keys. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        if self._next is not None and not self._next.done():
            self._next.set_result(False)

    async def wait(self, unknown: UnknownKeyError, *, held: int = 0) -> None:
        """Wait for a refresh that begins after this call, because a key is unknown.

        :param unknown: the error that a request is answered with if there cannot be a refresh.
        :param held: bytes of the request's body that are in memory.
        :raises UnknownKeyError: at once, if the keys are only in the config.
        :raises ApiError: 503 if the store does not answer, or if too many requests wait.
        """
        # The frames of the traceback have the decoded body.
        unknown.with_traceback(None)
        if self._task is None:
            raise unknown
        large = held > MAX_HELD // MAX_WAITING
        if self._waiting >= MAX_WAITING or (large and self._held + held > MAX_HELD):
            raise overloaded(
                "too many requests with an unknown write key are waiting; send the same request"
                " again later"
            )
        turns = self._waiting // AT_ONCE
        self._waiting += 1
        self._held += held
        try:
            if self._next is None:
                self._next = asyncio.get_running_loop().create_future()
            self._wanted.set()
            async with asyncio.timeout(WAIT_SECONDS):
                refreshed = await asyncio.shield(self._next)
            for _ in range(turns):
                await asyncio.sleep(0)
        except TimeoutError:
            refreshed = False
        finally:
            self._waiting -= 1
            self._held -= held
        if not refreshed:
            raise storage_unavailable()

    # ---------------------------------------------------------------------------------- internals
    async def _follow(self, store: Storage) -> None:
        time = asyncio.get_running_loop().time
        while True:
            await self._refresh(store)
            with contextlib.suppress(TimeoutError):
                # A table that was never read is wanted more urgently.
                pause = POLL_SECONDS if self.loaded else GAP_SECONDS
                async with asyncio.timeout_at(max(self._began + pause, time())):
                    await self._wanted.wait()
            await asyncio.sleep(max(0.0, self._began + GAP_SECONDS - time()))

    async def _refresh(self, store: Storage) -> None:
        """Read the changes. Every failure is logged once, and the last table stays."""
        self._wanted.clear()
        waited, self._next = self._next, None
        self._began = asyncio.get_running_loop().time()
        succeeded = False
        try:
            async with within(self._timeout):
                await self._read(store)
            succeeded = True
        except Exception as error:
            if not self._failing:
                expected = isinstance(error, StorageError)
                _log.warning(
                    "the write keys in the store cannot be read: %s", error, exc_info=not expected
                )
        finally:
            if waited is not None and not waited.done():
                waited.set_result(succeeded)
        if succeeded and self._failing:
            _log.warning("the write keys in the store can be read again")
        self._failing = not succeeded

    async def _read(self, store: Storage) -> None:
        # Before the records: a change in between is seen next time.
        versions = tuple([await store.records_version(kind) for kind in (KEY, OVERRIDE)])
        old = self._began - self._listed >= LIST_SECONDS
        if self._records is not None and versions == self._versions and not old:
            return
        records = await read_key_records(store)
        if records != self._records:
            # In a thread: ten thousand keys take 90 ms.
            self._take(await asyncio.to_thread(effective_keys, self._workspaces, records))
        self._records = records
        self._versions = versions
        self._listed = self._began

    def _take(self, effective: EffectiveKeys) -> None:
        logs.mask(effective.secrets)
        for problem in set(effective.problems).difference(self._effective.problems):
            _log.warning("%s", problem)
        workspaces = {workspace.id: workspace for workspace in self._workspaces}
        self._authenticator.replace((workspaces[key.workspace_id], key) for key in effective.keys)
        self._effective = effective
