# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy between engage and a MongoDB server that misbehaves on demand.

It runs in separate threads, and understands just enough of the wire protocol (OP_MSG) to know the
command, to answer in place of the server, and to cut a reply in the middle.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import bson

from support.tcp_proxy import TcpProxy

#: What to do with a command: the name and the command → ``None`` (pass it on), :data:`CUT`,
#: :data:`SILENCE`, :data:`CLOSE` or the reply to give instead.
Rule = Callable[[str, Mapping[str, Any]], "str | Mapping[str, Any] | None"]

#: Pass the command on, and close the connection in the middle of the server's reply.
CUT: Final = "cut"
#: Do not pass the command on, and never answer.
SILENCE: Final = "silence"
#: Close the connection instead of passing it on.
CLOSE: Final = "close"
#: Pass the command on, and close the connection instead of passing the reply on.
LOSE_REPLY: Final = "lose reply"

#: The reply of a server that is not the primary any more.
NOT_PRIMARY: Final = {"ok": 0.0, "errmsg": "not primary", "code": 10107}

_HEADER: Final = struct.Struct("<iiii")
_OP_MSG: Final = 2013
_numbers = itertools.count(1)


class Proxy(TcpProxy):
    """A proxy on a free port of 127.0.0.1, which listens at once. Use it as a context manager.

    :param target: host and port of the server.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        super().__init__(target)
        #: Called for each command; set it to make the proxy misbehave.
        self.rule: Rule | None = None
        #: The names of all commands, in order, without those of the journal of arrivals.
        self.seen: list[str] = []
        #: Changes to what the server announces: ``{"maxBsonObjectSize": …}``.
        self.announced: Mapping[str, Any] = {}
        self.up()

    def url(self, database: str, options: str = "") -> str:
        """Return a connection string for the proxy."""
        # Direct, because members of a replica set give their addresses; polling, so that each
        # message has one reply.
        joined = "&".join(
            filter(None, ("directConnection=true&serverMonitoringMode=poll", options))
        )
        return f"mongodb://127.0.0.1:{self.port}/{database}?{joined}"

    # ------------------------------------------------------------------------------ threads
    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client, socket.create_connection(self.target) as server:
            for connection in (client, server):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._connections |= {client, server}
            try:
                while self._exchange(client, server):
                    pass
            finally:
                with self._lock:
                    self._connections -= {client, server}

    def _exchange(self, client: socket.socket, server: socket.socket) -> bool:
        """Pass one message and its reply on.

        :return: whether the connection stays open.
        """
        message = _read(client)
        if message is None:
            return False
        name, command = _command(message)
        if name and not _is_journal(name, command):
            self.seen.append(name)
        action = self.rule(name, command) if self.rule is not None and name else None
        if action == CLOSE:
            return False
        if action == SILENCE:
            # Until the client closes the connection.
            while client.recv(65536):
                pass
            return False
        if isinstance(action, Mapping):
            client.sendall(_reply(message, action))
            return True
        server.sendall(message)
        if name and _wants_no_reply(message):
            return True
        reply = _read(server)
        if reply is None or action == LOSE_REPLY:
            return False
        if self.announced and b"maxBsonObjectSize" in reply:
            reply = _changed(reply, self.announced)
        if action == CUT:
            client.sendall(reply[: len(reply) // 2])
            return False
        client.sendall(reply)
        return True


def closing_updates(name: str, command: Mapping[str, Any]) -> str | None:
    """A rule: close the connection on which what follows from an event is updated."""
    return CLOSE if name == "update" and command["update"] != "meta" else None


def _is_journal(name: str, command: Mapping[str, Any]) -> bool:
    """Return whether a command belongs to the journal of arrivals, most of which is written in the
    background."""
    collection = command.get(name)
    return collection == "arrivals" or (collection == "meta" and "writer" in str(command))


def _read(connection: socket.socket) -> bytes | None:
    """Return one message of the wire protocol, or ``None`` at the end."""
    header = _exactly(connection, _HEADER.size)
    if header is None:
        return None
    rest = _exactly(connection, _HEADER.unpack(header)[0] - _HEADER.size)
    return None if rest is None else header + rest


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    parts = []
    while count:
        part = connection.recv(min(count, 1 << 20))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _command(message: bytes) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the body of a command; its bulk documents are under their identifier."""
    if _HEADER.unpack_from(message)[3] != _OP_MSG:
        return "", {}
    command: dict[str, Any] = {}
    for kind, section in _sections(message):
        if kind == 0:
            command = {**bson.decode(section), **command}
        else:
            name, _, documents = section[4:].partition(b"\0")
            command[name.decode()] = bson.decode_all(documents)
    return next(iter(command), ""), command


def _sections(message: bytes) -> Iterator[tuple[int, bytes]]:
    place = _HEADER.size + 4
    while place < len(message):
        kind = message[place]
        (size,) = struct.unpack_from("<i", message, place + 1)
        yield kind, message[place + 1 : place + 1 + size]
        place += 1 + size


def _changed(message: bytes, fields: Mapping[str, Any]) -> bytes:
    """Return the reply with other fields. Both forms of a reply end with its only document."""
    _, number, request, code = _HEADER.unpack_from(message)
    start = _HEADER.size + (5 if code == _OP_MSG else 20)
    body = bson.encode({**bson.decode(message[start:]), **fields})
    head = _HEADER.pack(start + len(body), number, request, code)
    return head + message[_HEADER.size : start] + body


def _wants_no_reply(message: bytes) -> bool:
    (flags,) = struct.unpack_from("<I", message, _HEADER.size)
    return bool(flags & 2)


def _reply(message: bytes, document: Mapping[str, Any]) -> bytes:
    request = _HEADER.unpack_from(message)[1]
    body = struct.pack("<I", 0) + b"\0" + bson.encode(document)
    return _HEADER.pack(_HEADER.size + len(body), next(_numbers), request, _OP_MSG) + body
