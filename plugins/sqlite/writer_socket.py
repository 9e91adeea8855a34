# SPDX-License-Identifier: Apache-2.0
"""The socket of a writer process: beside the store or, if that is impossible, in a temporary
folder. Only the process that holds the lock binds or deletes it."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import tempfile
from typing import Final

from .lock import WriterLock, read_note

#: Length of a socket's path in bytes, without the zero at its end. Linux takes 107, macOS 103.
MAX_PATH: Final = 103
#: Connections that wait to be accepted.
_BACKLOG: Final = 128
#: The name of a temporary folder begins with this.
_PREFIX: Final = "engage-writer-"


class WriterSocket:
    """The listening socket."""

    def __init__(self, lock: WriterLock) -> None:
        self._lock = lock
        self.address = ""
        #: Made by :meth:`listen`.
        self.sock: socket.socket
        self._identity: tuple[int, int] | None = None

    def listen(self) -> socket.socket:
        """Bind the socket, and accept connections from now on.

        :raises OSError: if that is impossible in the temporary folder, too.
        """
        self._remove_left_over()
        beside = socket_path(self._lock.store)
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        if len(os.fsencode(beside)) > MAX_PATH or not self._bind(beside):
            # mkdtemp makes a folder that only this user can enter.
            self._bind_in(tempfile.mkdtemp(prefix=_PREFIX))
        self.sock.listen(_BACKLOG)
        self.sock.setblocking(False)
        found = os.stat(self.address)
        self._identity = (found.st_dev, found.st_ino)
        return self.sock

    def is_current(self) -> bool:
        """Return whether the socket can be found at its address."""
        try:
            found = os.stat(self.address)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._identity

    def remove(self) -> None:
        """Delete the socket's file, if it is still this socket's."""
        if self.is_current():
            _remove(self.address)

    @property
    def is_private(self) -> bool:
        """Whether it is in a folder that only this process uses."""
        return _is_private(self.address)

    def close(self) -> None:
        """Accept no further connection."""
        self.sock.close()

    def _bind(self, path: str) -> bool:
        with contextlib.suppress(OSError):
            os.unlink(path)
        # The mode of a socket's file comes from the umask: 0600 here.
        before = os.umask(0o177)
        try:
            self.sock.bind(path)
        except OSError:
            # A shared folder of a virtual machine takes no sockets.
            return False
        finally:
            os.umask(before)
        self.address = path
        return True

    def _bind_in(self, folder: str) -> None:
        path = os.path.join(folder, "sock")
        if not self._bind(path):
            os.rmdir(folder)
            raise OSError(f"{folder}: no socket can be made there; set storage.sqlite.writer")

    def _remove_left_over(self) -> None:
        """Delete the temporary folder of an earlier process that was killed."""
        note = read_note(self._lock.store)
        if note is not None and _is_private(note.address):
            _remove(note.address)


def socket_path(store: str) -> str:
    """Return where the socket usually is."""
    return store + "-writer.sock"


def local_address(store: str, address: str) -> str:
    """Return where a process finds the socket that the writer calls ``address``.

    In a container, the folder of the store may have another path than it has for the writer.
    """
    beside = socket_path(store)
    return beside if os.path.basename(address) == os.path.basename(beside) else address


def _remove(address: str) -> None:
    folder = os.path.dirname(address)
    with contextlib.suppress(OSError):
        if not stat.S_ISSOCK(os.lstat(address).st_mode):
            return
        os.unlink(address)
        if _is_private(address):
            os.rmdir(folder)


def _is_private(address: str) -> bool:
    return os.path.basename(os.path.dirname(address)).startswith(_PREFIX)
