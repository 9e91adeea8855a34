# SPDX-License-Identifier: Apache-2.0
"""The lock that makes one process the writer of a store, and the note in its file.

The lock is a file beside the store, locked by ``flock``: the system releases it when the process
that holds it ends, however it ends. The file itself stays. The note in it is for messages. No
process waits for the lock: a client that does not get it connects to the process that has it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Final

import msgspec

from engage.api import StorageUnavailable

from ..connection import unavailable

#: Size of the note in bytes. It is always written as a whole: a shorter note replaces a longer one.
_NOTE_BYTES: Final = 1024


class Note(msgspec.Struct):
    """What the holder of the lock writes into its file, as JSON."""

    #: The process that holds the lock, for messages.
    pid: int
    #: The writer is a thread of the process, so no other process can write.
    thread: bool = False
    #: The unexpected error because of which the writer ended.
    failure: str = ""


class WriterLock:
    """The lock, held by this process."""

    def __init__(self, store: str, descriptor: int) -> None:
        """
        :param store: the real path of the store.
        :param descriptor: of the locked file.
        """
        self.store = store
        self.descriptor = descriptor

    @classmethod
    def acquire(cls, store: str) -> WriterLock | None:
        """Return the lock, or ``None`` if another process (or another part of this one) has it.

        :raises StorageUnavailable: if the file of the lock cannot be opened or locked.
        """
        path = lock_path(store)
        require_owner(store)
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
        try:
            descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise unavailable(path, error) from error
        lock = cls(store, descriptor)
        try:
            # Another process may have deleted the file between the two calls.
            if _lock(descriptor) and lock.is_current():
                return lock
        except OSError as error:
            lock.release()
            raise unavailable(path, error) from error
        lock.release()
        return None

    def is_current(self) -> bool:
        """Return whether the locked file is the one at the path. If it was deleted, another process
        can be the writer."""
        if self.descriptor < 0:
            return False
        try:
            at_path = os.stat(lock_path(self.store))
        except OSError:
            return False
        held = os.fstat(self.descriptor)
        return (held.st_dev, held.st_ino) == (at_path.st_dev, at_path.st_ino)

    def write(self, note: Note) -> None:
        """Replace the note."""
        os.lseek(self.descriptor, 0, os.SEEK_SET)
        os.write(self.descriptor, msgspec.json.encode(note).ljust(_NOTE_BYTES))

    def release(self) -> None:
        """Close the file. The lock is released when all processes that share it have done so."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def lock_path(store: str) -> str:
    """Return the path of the lock's file."""
    return store + "-writer.lock"


def read_note(store: str) -> Note | None:
    """Return the note of the process that holds the lock, or of the last that held it.

    :raises StorageUnavailable: if the file cannot be read.
    """
    path = lock_path(store)
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            data = os.read(descriptor, _NOTE_BYTES)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unavailable(path, error) from error
    # It is empty at first, and may be read while it is written.
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(data, type=Note)
    return None


def require_owner(store: str) -> None:
    """Check that this process may write to a store: its user must own the file, because what it
    creates beside the file must belong to the same user.

    :raises StorageUnavailable: if another user owns the file, or if there is no folder for it.
    """
    try:
        owner = os.stat(store).st_uid
    except FileNotFoundError:
        folder = os.path.dirname(store) or "."
        if not os.path.isdir(folder):
            raise StorageUnavailable(
                f"{store}: the folder {folder} does not exist; create it"
            ) from None
        return
    except OSError as error:
        raise unavailable(store, error) from error
    if sys.platform == "win32" or owner == os.geteuid():
        return
    import pwd

    try:
        user = pwd.getpwuid(owner).pw_name
    except KeyError:
        user = f"'#{owner}'"
    raise StorageUnavailable(f"{store}: only its owner may write to it: sudo -u {user} engage …")


def _lock(descriptor: int) -> bool:
    if sys.platform == "win32":
        import msvcrt

        # After the note, so that others can read the note.
        os.lseek(descriptor, _NOTE_BYTES, os.SEEK_SET)
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
