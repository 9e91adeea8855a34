# SPDX-License-Identifier: Apache-2.0
"""The socket of a writer process, beside the store. Only the process that holds the lock binds or
deletes it."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from typing import Final

from .lock import WriterLock

#: Length of a socket's path in bytes, without the zero at its end. Linux takes 107, macOS 103.
MAX_PATH: Final = 103
#: Connections that wait to be accepted.
_BACKLOG: Final = 128
#: Errors of file systems without sockets, such as the shared folder of a virtual machine. Python
#: itself refuses a long path, without a number.
_NO_SOCKETS: Final = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, None}


class WriterSocket:
    """The listening socket."""

    def __init__(self, lock: WriterLock) -> None:
        self._address = socket_path(lock.store)
        #: Made by :meth:`listen`.
        self.sock: socket.socket
        self._identity: tuple[int, int] | None = None

    def listen(self) -> socket.socket:
        """Bind the socket, and accept connections from now on.

        :raises OSError: if that is impossible.
        """
        with contextlib.suppress(OSError):
            os.unlink(self._address)
        self.sock = _bound(self._address)
        self.sock.listen(_BACKLOG)
        self.sock.setblocking(False)
        found = os.stat(self._address)
        self._identity = (found.st_dev, found.st_ino)
        return self.sock

    def is_current(self) -> bool:
        """Return whether the socket can be found at its address."""
        try:
            found = os.stat(self._address)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._identity

    def remove(self) -> None:
        """Delete the socket's file, if it is still this socket's."""
        if self.is_current():
            with contextlib.suppress(OSError):
                os.unlink(self._address)

    def close(self) -> None:
        """Accept no further connection."""
        self.sock.close()


def socket_path(store: str) -> str:
    """Return where the writer of a store listens."""
    return store + "-writer.sock"


def takes_sockets(store: str) -> bool:
    """Return whether a socket can be made beside a store.

    An error that may pass, such as that of a full disk, does not count.
    """
    probe = f"{socket_path(store)}.{os.getpid()}"
    try:
        _bound(probe).close()
    except OSError as error:
        return error.errno not in _NO_SOCKETS
    os.unlink(probe)
    return True


@contextlib.contextmanager
def short(path: str) -> Iterator[str]:
    """Give a path that is short enough for a socket and leads to the same place.

    Linux shows the folder under its descriptor, however long its path is. Elsewhere, a long path
    stays as it is.

    :raises OSError: if the folder cannot be opened.
    """
    if len(os.fsencode(path)) <= MAX_PATH or not os.path.isdir("/proc/self/fd"):
        yield path
        return
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{folder}/{os.path.basename(path)}"
    finally:
        os.close(folder)


def _bound(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # The mode of a socket's file comes from the umask: 0600 here.
    before = os.umask(0o177)
    try:
        with short(path) as address:
            sock.bind(address)
    except OSError:
        sock.close()
        raise
    finally:
        os.umask(before)
    return sock
