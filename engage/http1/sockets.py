# SPDX-License-Identifier: Apache-2.0
"""The listening socket, and the file descriptors that connections need."""

from __future__ import annotations

import errno
import os
import socket
import sys
from typing import Any, Final

from engage.api import EngageError

__all__ = ["BACKLOG", "can_open_files", "listen", "open_file_limit", "own_address", "url_of"]

_NOT_OURS: Final = "{}: {!r} is not an address of this machine"

#: How many connections the kernel completes before one of them is accepted.
BACKLOG: Final = 4096


def listen(host: str, port: int, *, keys: str = "server.host, server.port") -> socket.socket:
    """Open a listening socket.

    :param host: a name or an address; of several addresses the first is used, IPv4 before IPv6.
        Empty means every address.
    :param port: 0 means any free port.
    :param keys: the config keys that the error message names.
    :return: a socket that does not block.
    :raises EngageError: if it cannot be opened; the message has the reason and what to change.
    """
    sock, address = _socket_for(host, port, keys)
    try:
        if os.name == "posix":
            # Allows a restart while old connections of the port still linger.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        reason = (error.strerror or str(error)).lower()
        raise EngageError(
            f"cannot listen on {host or '*'}:{port}: {reason} (change {keys})"
        ) from error
    return sock


def own_address(host: str, *, keys: str) -> str:
    """Return the address that :func:`listen` would listen on, without taking a port that is known.

    :param host: as for :func:`listen`; so is ``keys``.
    :raises EngageError: if it is no address of this machine.
    """
    sock, address = _socket_for(host, 0, keys)
    with sock:
        try:
            sock.bind(address)
        except OSError as error:
            raise EngageError(_NOT_OURS.format(keys, host)) from error
    return str(address[0])


def _socket_for(host: str, port: int, keys: str) -> tuple[socket.socket, tuple[Any, ...]]:
    """Return a new socket and the address to bind it to."""
    try:
        addresses = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise EngageError(_NOT_OURS.format(keys, host)) from error
    family, kind, protocol, _, address = min(addresses, key=lambda info: info[0] != socket.AF_INET)
    return socket.socket(family, kind, protocol), address


def url_of(sock: socket.socket) -> str:
    """Return ``http://host:port`` of a listening socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def open_file_limit() -> int | None:
    """Return how many files this process may have open; ``None`` if there is no limit."""
    if sys.platform == "win32":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def can_open_files() -> bool:
    """Return whether this process can open another file, such as a connection."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno not in (errno.EMFILE, errno.ENFILE)
    return True
