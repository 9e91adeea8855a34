# SPDX-License-Identifier: Apache-2.0
"""PUBLIC: the base class of a storage, with everything that the rest of engage calls, as plans."""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from typing import Any, ClassVar, Final

from engage.api import Helper, StorageContext, StoreProblem
from engage.store.choices import CHANGES, HISTORY, Choices
from engage.store.counts import COUNTS, SERIES, Counts
from engage.store.events import EVENTS, STORE, Events
from engage.store.identifiers import Identifiers
from engage.store.letters import LETTERS, TOTALS, Letters
from engage.store.people import People
from engage.store.profiles import (
    CHOICES,
    CLAIMS,
    IDENTIFIERS,
    LINKS,
    MEMBERSHIPS,
    PROFILES,
    TRAITS,
    VISITOR_TOTALS,
)
from engage.store.records import RECORDS, VERSIONS, Records
from engage.store.suppressions import SUPPRESSIONS, Suppressions
from engage.store.tables import PLANS, Table

#: The names that a storage imports.
__all__ = ["PLANS", "TABLES", "Storage", "StorageFactory"]

#: Name → table, of all that a storage keeps.
TABLES: Final[Mapping[str, Table]] = {
    table.name: table
    for table in (
        *(STORE, EVENTS, LETTERS, TOTALS),
        *(PROFILES, TRAITS, MEMBERSHIPS, LINKS, IDENTIFIERS, CLAIMS, VISITOR_TOTALS),
        *(CHOICES, CHANGES, HISTORY, SUPPRESSIONS, RECORDS, VERSIONS, SERIES, COUNTS),
    )
}


class Storage(
    Events, People, Identifiers, Choices, Suppressions, Letters, Records, Counts, abc.ABC
):
    """A storage. It has five methods of its own: :meth:`open`, :meth:`close`, :meth:`check`,
    :meth:`~engage.store.tables.Executor.run` and :meth:`~engage.store.tables.Executor.read`.

    It may have its own way for any other. Every method may raise
    :class:`~engage.api.StorageUnavailable`.
    """

    #: The maximum number of calls of :meth:`write` that the core makes at the same time; it is read
    #: once. With one, the events of all requests that arrive during a call share the next one. More
    #: is worth it for a storage that waits for another process or machine, which can store the
    #: events of one call while this process prepares those of the next. The calls may end in
    #: another order than they began, and may have events of one identity or of one user.
    concurrent_writes: int = 1

    #: Whether :func:`engage.store.events.write` and all other plans are isolated, over all
    #: processes: an erasure then waits for no request, and people can be repaired. See
    #: :mod:`engage.store.erasures`.
    isolated: bool = False

    @abc.abstractmethod
    async def open(self, *, create: bool) -> None:
        """Open the store, and create it if ``create`` is true and there is none. Idempotent.

        Only ``create`` migrates a store of an earlier version. Otherwise it is read as it is, and
        writes that it cannot hold raise :class:`StorageUnavailable`.

        With ``create``, a store on another machine that cannot be reached *now* is not an error:
        the server starts, ``check`` raises until the store can be reached, and then it is created.

        A new store, and one that is restored, gets the row ``incarnation`` of
        :data:`~engage.store.events.STORE`, with a random value.

        :raises StorageMissing: if there is no store, and ``create`` is false.
        :raises StorageIncompatible: if a newer version made the store, or if it is not a store.
        :raises StorageUnavailable: if the store cannot be opened.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Release all resources. Idempotent.

        Until the next ``open``, every other method raises :class:`StorageUnavailable`.
        """

    @abc.abstractmethod
    async def check(self) -> None:
        """Check that an event could be written now.

        :raises StorageUnavailable: if it could not.
        """

    async def settle(self) -> bool:
        """Return when no process uses what it remembered of profiles that were erased before, and
        overwrite what was erased in the files of the store, if it is a part of this process.

        :return: whether nothing of it can be left in a file of the store; false if it is not known.
        """
        await self.check()
        return False

    async def problems(self) -> AsyncIterator[StoreProblem | int]:
        """Look for problems: documents or rows that cannot be read, keys that are missing or lead
        to another event, counters and look-up tables that differ from what they are made of.

        It takes as long as it needs, and reads the store in steps.

        :return: the problems; and after each step, how many documents or rows it looked at.
        """
        yield 0

    async def unfinished(self) -> Collection[tuple[str, str]]:
        """Return the workspace and the id of each user and visitor whose changes a write may not
        have applied yet, because it is running now or a crash cut it off. By default none.
        """
        return ()

    def helper(self) -> Helper | None:
        """Return what a separate process is to run beside the processes of a server, if anything.

        The parent of the workers (or loaders) calls this once, without opening the store. It starts
        a process for the function before the first worker, and another one when that dies. The
        storages of the other processes have :attr:`StorageContext.supervised`.
        """
        return None

    def backup_commands(self) -> tuple[str, str] | None:
        """Return the lines to type to back up the store and to restore it; never with a secret.

        For a storage that is no :class:`BackupStore`, because its database has its own commands.
        """
        return None

    def versions(self) -> Mapping[str, str]:
        """Return the software that the storage uses; cheap, never raises.

        ``engage check`` and the console show it.

        :return: name → version, such as ``{"SQLite": "3.51.3"}``; a recommendation may follow.
        """
        return {}

    #: Name of a gauge → what it is, for those who read the metrics.
    gauge_texts: ClassVar[Mapping[str, str]] = {}

    def gauges(self) -> Mapping[str, float]:
        """Return the storage's own numbers for the metrics; called often, cheap, never raises.

        The console also shows them. A storage with its own process can report that process's use:
        ``writer_memory_bytes``, ``writer_cpu_seconds``, ``writer_process_pid``.

        :return: name → value, such as ``{"wal_bytes": 4096, "free_bytes": 1e9}``. Names are few and
            constant, have the form ``[a-z_]+`` and end in their unit (``bytes``, ``seconds``,
            ``pid`` …); ``engage_storage_`` is prepended.
        """
        return {}


#: Makes a storage from its validated options. Import the driver here, not at the module's top.
StorageFactory = Callable[[Mapping[str, Any], StorageContext], Storage]
