# SPDX-License-Identifier: Apache-2.0
"""The lock that makes one server the writer of a store.

The lock is a file beside the store, locked by ``flock``: the system releases it when the process
that holds it ends, however it ends. The file itself stays. It names the holder, for messages.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Final, NamedTuple

from engage.api import StorageUnavailable

from ..connection import denied, may, missing_folder, unavailable

#: Size of the content in bytes. It is always written as a whole: a shorter one replaces a longer.
_CONTENT_BYTES: Final = 64


class Holder(NamedTuple):
    """The holder of a lock, or the last one."""

    pid: int
    #: Whether it writes in a thread that no other process can reach.
    alone: bool


class WriterLock:
    """The lock, held by this process."""

    def __init__(self, store: str, descriptor: int) -> None:
        """
        :param store: the real path of the store.
        :param descriptor: of the locked file.
        """
        self._path = lock_path(store)
        self._descriptor = descriptor

    @classmethod
    def acquire(cls, store: str, *, alone: bool = False) -> WriterLock | None:
        """Return the lock, or ``None`` if another process (or another part of this one) has it.

        :param alone: whether no other process can reach the writer.
        :raises StorageUnavailable: if the file of the lock cannot be opened or locked.
        """
        path = lock_path(store)
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
        try:
            descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise unavailable(path, error) from error
        lock = cls(store, descriptor)
        try:
            # Another process may have deleted the file between the two calls.
            if _lock(descriptor) and lock.is_current():
                content = f"{os.getpid()}{' alone' if alone else ''}\n"
                os.lseek(descriptor, 0, os.SEEK_SET)
                os.write(descriptor, content.encode().ljust(_CONTENT_BYTES))
                return lock
        except OSError as error:
            lock.release()
            raise unavailable(path, error) from error
        lock.release()
        return None

    def is_current(self) -> bool:
        """Return whether the locked file is the one at the path. If it was deleted, another process
        can be the writer."""
        try:
            at_path = os.stat(self._path)
        except OSError:
            return False
        held = os.fstat(self._descriptor)
        return (held.st_dev, held.st_ino) == (at_path.st_dev, at_path.st_ino)

    def release(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            os.close(self._descriptor)


def lock_path(store: str) -> str:
    """Return the path of the lock's file."""
    return store + "-writer.lock"


def holder(store: str) -> Holder | None:
    """Return which process holds the lock, or held it last; ``None`` if it is not known."""
    try:
        with open(lock_path(store), "rb") as file:
            pid, *words = file.read(_CONTENT_BYTES).split()
        return Holder(int(pid), words == [b"alone"])
    except (OSError, ValueError):
        # It is empty at first.
        return None


def alone_message(store: str, other: Holder) -> str:
    """Return why this process cannot write: a thread of another one does."""
    return (
        f"{store}: process {other.pid} writes in a thread, so no other process can write: set "
        'storage.sqlite.writer = "process" there if its folder takes sockets, or stop that process'
    )


def require_writable(store: str) -> None:
    """Check that this process may write to a store: its user must own the file, because what it
    creates beside the file must belong to the same user.

    SQLite notices the mode of the store only after it has made files of the same mode.

    :raises StorageUnavailable: if it may not, or if there is no folder for the file.
    """
    folder = os.path.dirname(store) or "."
    try:
        owner = os.stat(store).st_uid
    except FileNotFoundError:
        if problem := missing_folder(store):
            raise StorageUnavailable(f"{store}: {problem}") from None
        owner = None
    except OSError as error:
        raise unavailable(store, error) from error
    if sys.platform == "win32":
        return
    if owner not in (None, os.geteuid()):
        raise denied(store, "write to")
    for path in (folder, store, store + "-wal", store + "-shm"):
        if os.path.exists(path) and not may(path, os.W_OK):
            raise denied(path, "write to")


def _lock(descriptor: int) -> bool:
    if sys.platform == "win32":
        import msvcrt

        # After the content, so that others can read it.
        os.lseek(descriptor, _CONTENT_BYTES, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
