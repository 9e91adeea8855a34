# SPDX-License-Identifier: Apache-2.0
"""The Unix socket of a writer, beside the store, and the process at the other end of one."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

#: Whether a writer can listen for other processes.
AVAILABLE: Final = sys.platform != "win32" and hasattr(socket, "AF_UNIX")
#: Length of a socket's path in bytes, without the zero at its end. Linux takes 107, macOS 103.
MAX_PATH: Final = 103
#: Connections that wait to be accepted.
_BACKLOG: Final = 128
#: Errors of file systems without sockets, such as the shared folder of a virtual machine. Python
#: itself refuses a long path, without a number.
_NO_SOCKETS: Final = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, None}
#: Where the fields are in ``/proc/PID/stat``, counted from the one after the name (proc(5)).
_USER, _SYSTEM, _RESIDENT = 11, 12, 21
_UCRED: Final = struct.Struct("3i")


class WriterSocket:
    """A listening socket. Only the process that holds the lock makes or deletes it.

    :param store: the real path of the store.
    :raises OSError: if it cannot be made.
    """

    def __init__(self, store: str) -> None:
        self._address = socket_path(store)
        with contextlib.suppress(OSError):
            os.unlink(self._address)
        self.sock = _bound(self._address)
        self.sock.listen(_BACKLOG)
        self.sock.setblocking(False)
        status = os.stat(self._address)
        self._identity = (status.st_dev, status.st_ino)

    def is_current(self) -> bool:
        """Return whether the socket can be found at its address."""
        try:
            status = os.stat(self._address)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._identity

    def close(self) -> None:
        """Accept no more connections, and delete the file if it is still this socket's."""
        if self.is_current():
            with contextlib.suppress(OSError):
                os.unlink(self._address)
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


def connected_socket(store: str) -> socket.socket | None:
    """Return a socket that is connected to the writer of a store, or ``None``. It does not wait."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        with _short(socket_path(store)) as address:
            sock.connect(address)
    except OSError:
        # There is no writer, or too many clients wait to be accepted.
        sock.close()
        return None
    return sock


@contextlib.contextmanager
def _short(path: str) -> Iterator[str]:
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
        with _short(path) as address:
            sock.bind(address)
    except OSError:
        sock.close()
        raise
    finally:
        os.umask(before)
    return sock


# ---------------------------------------------------------------------------------- the other end
def peer(sock: socket.socket) -> tuple[int, int] | None:
    """Return the process and the user at the other end of a socket.

    :return: ``None`` where this is unknown: there, the mode of the socket's file is the only
        protection. A process of another container may have another id here, or 0.
    """
    option: Any = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return None
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, option, _UCRED.size))
    return pid, uid


def is_foreign(sock: socket.socket) -> bool:
    """Return whether a process of another user is at the other end of a socket."""
    ids = peer(sock)
    return ids is not None and ids[1] != os.geteuid()


def process_gauges(pid: int) -> Mapping[str, float]:
    """Return the gauges of a writer process: its memory, its processor time and its id.

    :param pid: its id as this process sees it.
    :return: nothing if the process has ended, and where there is no ``/proc``.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        ticks = int(fields[_USER]) + int(fields[_SYSTEM])
        return {
            "writer_memory_bytes": int(fields[_RESIDENT]) * os.sysconf("SC_PAGE_SIZE"),
            "writer_cpu_seconds": ticks / os.sysconf("SC_CLK_TCK"),
            "writer_process_pid": pid,
        }
    except (OSError, ValueError, IndexError):
        return {}
