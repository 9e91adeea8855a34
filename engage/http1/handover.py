# SPDX-License-Identifier: Apache-2.0
"""A queue of open connections, by which workers of a server hand them to each other.

A worker puts a connection there while no request is in progress. The client notices nothing: what
it sends meanwhile waits in the kernel for the worker that takes the connection. Which connections
move is decided in :mod:`engage.http1.balancer`, and who takes them in :mod:`engage.http1.acceptor`.
"""

from __future__ import annotations

import errno
import os
import socket

from engage.http1.sockets import can_open_files

__all__ = ["Handover", "make_handover"]


class Handover:
    """A queue of open connections, from which any worker of a server may take the next.

    The kernel keeps what is in it, even if the worker that put it there dies.

    Both sockets may be closed afterwards.

    :param inlet: the file descriptor of the first socket that :func:`make_handover` returned.
    :param outlet: that of the second.
    """

    def __init__(self, inlet: int, outlet: int) -> None:
        self._inlet = socket.socket(fileno=os.dup(inlet))
        self._outlet = socket.socket(fileno=os.dup(outlet))
        #: At most so many of those in the queue were put there by this worker.
        self.own = 0

    def fileno(self) -> int:
        """Return a file descriptor, readable while there is a connection to take; -1 if closed."""
        return self._outlet.fileno()

    def put(self, descriptor: int) -> bool:
        """Add a connection; the caller closes its own descriptor.

        :return: false if there is no room for it.
        """
        try:
            socket.send_fds(self._inlet, [b"\0"], [descriptor])
        except OSError:  # Usually BlockingIOError: the queue is full.
            return False
        self.own += 1
        return True

    def take(self) -> socket.socket:
        """Take the next connection.

        :raises BlockingIOError: if there is none.
        :raises OSError: if no file can be opened; the connection then stays in the queue.
        """
        # Without a free descriptor, the kernel would close the connection.
        if not can_open_files():
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        try:
            _, descriptors, _, _ = socket.recv_fds(self._outlet, 1, 1)
        except BlockingIOError:
            self.own = 0
            raise
        if not descriptors:
            raise OSError(errno.ECONNABORTED, os.strerror(errno.ECONNABORTED))
        os.set_inheritable(descriptors[0], False)
        return socket.socket(fileno=descriptors[0])

    def close(self) -> None:
        """Neither put nor take any more. Idempotent."""
        self._inlet.close()
        self._outlet.close()


def make_handover() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of an empty queue for all workers of a server."""
    inlet, outlet = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    inlet.setblocking(False)
    outlet.setblocking(False)
    return inlet, outlet
