# SPDX-License-Identifier: Apache-2.0
"""An HTTP client that sends any bytes, valid or not, and reads answers strictly."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
from collections.abc import Mapping
from typing import Any, Self

#: Seconds after which a step counts as failed.
DEADLINE = 90.0


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer."""

    status: int
    #: Names in lower case.
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


class RawClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, port: int) -> Self:
        """Connect to a port of this machine."""
        async with asyncio.timeout(DEADLINE):
            return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    async def send(self, data: bytes) -> None:
        """Send bytes; ignore an error, because the reader notices a closed connection."""
        with contextlib.suppress(OSError):
            self.writer.write(data)
            await self.writer.drain()

    def half_close(self) -> None:
        """Close the sending side."""
        self.writer.write_eof()

    async def answer(self, *, method: str = "POST") -> Answer:
        """Read one answer, ``100 Continue`` included.

        :param method: of the request: the answer to HEAD has no body.
        :raises asyncio.IncompleteReadError: if there is none.
        """
        async with asyncio.timeout(DEADLINE):
            head = await self.reader.readuntil(b"\r\n\r\n")
            line, *lines = head.decode("latin-1").split("\r\n")[:-2]
            version, code, _ = line.split(" ", 2)
            assert version == "HTTP/1.1"
            headers: dict[str, str] = {}
            for text in lines:
                name, _, value = text.partition(": ")
                assert name.lower() not in headers, f"{name} twice"
                headers[name.lower()] = value
            status = int(code)
            if status < 200 or status in (204, 304) or method == "HEAD":
                return Answer(status, headers, b"")
            body = await self.reader.readexactly(int(headers["content-length"]))
            return Answer(status, headers, body)

    async def closed(self, *, reset: bool = True) -> bool:
        """Wait for the end of the connection.

        :param reset: what to return for a reset.
        :return: whether the server closed the connection without sending more.
        """
        async with asyncio.timeout(DEADLINE):
            try:
                return await self.reader.read(1) == b""
            except ConnectionError:
                return reset


def request(
    body: bytes | None = b"{}",
    *,
    method: str = "POST",
    target: str = "/echo",
    headers: Mapping[str, str] | None = None,
    length: bool = True,
) -> bytes:
    """Return a request as bytes, with a ``Content-Length`` if it has a body."""
    lines = [f"{method} {target} HTTP/1.1", "Host: localhost"]
    if body is not None and length:
        lines.append(f"Content-Length: {len(body)}")
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + (body or b"")


def listening() -> socket.socket:
    """Return a listening socket on a free port."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen(128)
    sock.setblocking(False)
    return sock
