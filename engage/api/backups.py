# SPDX-License-Identifier: Apache-2.0
"""The interface of a storage that ``engage backup`` and ``engage restore`` work with."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any

__all__ = ["Backup", "BackupStore", "OnBytes"]

#: Called with the bytes that are copied, and with all bytes; often. What it raises ends the work.
OnBytes = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """A backup of a whole store."""

    #: Milliseconds since 1970 UTC. It has everything that was acknowledged before.
    made_at: int
    #: The number of events in it.
    events: int
    #: The size of its file in bytes.
    size: int


class BackupStore(abc.ABC):
    """A storage that writes all of its store into one file, and makes a store of such a file.

    The storage need not be opened. A command calls these methods, and does nothing else meanwhile:
    they return when the work is done. A killed process leaves at most unfinished files, which the
    next call deletes.
    """

    @abc.abstractmethod
    def back_up(self, target: Path, *, without: Collection[str], on_bytes: OnBytes) -> Backup:
        """Write one state of the store into a new file, while other processes use the store.

        The file has mode 0600 and needs no other one. It appears when it is complete: synced, and
        compared with the store by the number of its events.

        :param without: kinds of records that are left out, also of the free space in the file.
        :return: what is in the file.
        :raises StorageMissing: if there is no store.
        :raises StorageIncompatible: if this version cannot read the store.
        :raises StorageUnavailable: if there is something at ``target``, another call writes to it,
            the file cannot be written, or the store cannot be read.
        """

    @abc.abstractmethod
    def restore(
        self,
        source: Path,
        *,
        prepare: Callable[[Any, Backup], Awaitable[None]],
        on_bytes: OnBytes,
    ) -> Backup:
        """Make the store, which must not exist, of a file that :meth:`back_up` wrote.

        A file of an earlier version is brought up to date. The store exists when the method
        returns, and not before.

        :param prepare: changes the new store, which it gets opened, before others can open it. If
            it raises, there is no store.
        :return: what is in the file.
        :raises StorageIncompatible: if the file is damaged or not a backup, or if a newer version
            made it.
        :raises StorageUnavailable: if there is a store, a process waits for one, the store cannot
            be written, or the file cannot be read.
        """
