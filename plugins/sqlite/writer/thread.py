# SPDX-License-Identifier: Apache-2.0
"""Writing in a thread of this process: with ``writer = "thread"``, and where there are no Unix
sockets.

The process that holds the lock is then the only one that can write. All storages of this process
that have the same file share the thread.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import Any, Final, TypeVar

from engage.api import StorageUnavailable

from ..connection import Settings
from ..transactions import SupersededError
from ..worker_thread import WorkerThread
from .client import thread_message
from .host import WriterHost
from .lock import Note, WriterLock, read_note
from .operations import OPEN, WRITE, Operation, encode_outcomes

Result = TypeVar("Result")

#: Seconds that another process has to release the lock, for example because it is just ending.
_LOCK_SECONDS: Final = 2.0
_RETRY: Final = 0.01
#: Maximum number of threads that hang; when it is reached, no more threads are started.
_MAX_ABANDONED: Final = 4


class _Shared:
    """The thread of a store, and the storages that use it."""

    def __init__(self, lock: WriterLock, timeout: float) -> None:
        self.lock = lock
        self.host = WriterHost(lock)
        self.thread = WorkerThread("engage-sqlite-writer", timeout=timeout, after=self._work)
        self.users = 1

    def _work(self) -> None:
        self.host.work()


#: Real path of the store → its thread. Guarded by the lock below: storages may be in several event
#: loops.
_shared: dict[str, _Shared] = {}
_guard = threading.Lock()
#: Threads that are to end, and may hang.
_abandoned: list[WorkerThread] = []


class WriterThread:
    """Makes calls in the thread; see :class:`~.client.WriterClient`, which has the same
    methods."""

    def __init__(self, settings: Settings, store: str) -> None:
        self._settings = settings
        self._store = store
        self._use: _Shared | None = None
        self._acquiring = asyncio.Lock()
        self.serving = False

    @property
    def is_connected(self) -> bool:
        """Whether this storage uses the thread now."""
        return self._use is not None

    async def call(self, operation: Operation[Result], *arguments: Any) -> Result:
        """Run an operation in the thread.

        :raises StorageUnavailable: if there is no result in time, or if another process writes.
        """
        if self._use is None:
            async with self._acquiring:
                if self._use is None:
                    self._use = await self._acquire()
                    await self._adopt(self._use)
        use = self._use
        if operation is OPEN:
            await self._open(use, *arguments)
            return None  # type: ignore[return-value]
        try:
            result: Any = await use.thread.call(
                use.host.call, operation, arguments, seconds=self._settings.timeout
            )
        except SupersededError:
            # The lock's file was deleted, and another process is the writer now. The next call
            # takes the lock again, or reports who has it.
            with _guard:
                if _shared.get(self._store) is use:
                    del _shared[self._store]
            await self.close()
            raise
        if operation is WRITE:
            outcomes, dropped = result
            result = (encode_outcomes(outcomes), dropped)
        return result  # type: ignore[no-any-return]

    async def _adopt(self, use: _Shared) -> None:
        await use.thread.call(lambda: use.host.adopt(self._settings, serving=self.serving))

    async def _open(self, use: _Shared, create: bool) -> None:
        """Open the store. Only while the tables are changed, it may take long."""
        await self._adopt(use)
        call = use.thread.call(use.host.open, create, seconds=float("inf"))
        opening = asyncio.create_task(call)
        timeout = self._settings.timeout
        try:
            while not opening.done():
                done, _ = await asyncio.wait({opening}, timeout=timeout)
                if not done and not use.host.is_preparing:
                    raise StorageUnavailable(f"no answer within {timeout:g} s")
            opening.result()
        finally:
            opening.cancel()

    async def close(self) -> None:
        """Finish the calls that were made; the last storage closes the store."""
        use, self._use = self._use, None
        if use is None:
            return
        with _guard:
            use.users -= 1
            if use.users:
                return
            if _shared.get(self._store) is use:
                del _shared[self._store]
            _abandoned.append(use.thread)
        # If the thread hangs, it keeps its engine; opening the store again uses a new one.
        if await use.thread.stop(use.host.close):
            use.lock.write(Note(pid=os.getpid()))
        use.lock.release()

    async def _acquire(self) -> _Shared:
        end = time.monotonic() + min(_LOCK_SECONDS, self._settings.timeout)
        while True:
            with _guard:
                use = _shared.get(self._store)
                if use is not None:
                    use.users += 1
                    return use
                _abandoned[:] = [thread for thread in _abandoned if thread.alive]
                if len(_abandoned) >= _MAX_ABANDONED:
                    raise StorageUnavailable(f"{self._store}: earlier calls have not ended yet")
                lock = WriterLock.acquire(self._store)
                if lock is not None:
                    use = _shared[self._store] = _Shared(lock, self._settings.timeout)
                    lock.write(Note(pid=os.getpid(), thread=True))
                    return use
            if time.monotonic() > end:
                raise StorageUnavailable(self._refusal())
            await asyncio.sleep(_RETRY)

    def _refusal(self) -> str:
        note = read_note(self._store)
        if note is not None and note.thread:
            return thread_message(self._store, note)
        who = "another process" if note is None else f"the process {note.pid}"
        return (
            f"{self._store}: {who} writes this store, so no thread of this process can: set "
            'storage.sqlite.writer = "process" here, or stop the processes that use the store'
        )
