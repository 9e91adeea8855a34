# SPDX-License-Identifier: Apache-2.0
"""Parses the head of a request, request line and headers, with httptools (llhttp).

It is strict where this server and a proxy in front of it could read a head differently (request
smuggling): two lengths, a length and chunks, white space before a colon, a bare LF, a folded
header. llhttp rejects most of these itself; the others are checked here.
"""

from __future__ import annotations

import re
from typing import Final

import httptools

from engage.http1.grammar import TCHAR
from engage.http1.headers import RequestHeaders

__all__ = [
    "MAX_ARGUMENTS",
    "MAX_HEADERS",
    "BadRequestError",
    "Head",
    "TooManyArgumentsError",
    "TooManyHeadersError",
    "check_beginning",
    "peek",
]

#: Each header costs a call of a Python function, however short it is.
MAX_HEADERS: Final = 100
#: Of the query; Tornado accepts no more.
MAX_ARGUMENTS: Final = 1000

#: Of a ``Content-Length``. ``int()`` raises for thousands of digits, leading zeros included.
_LENGTH_DIGITS: Final = 19

_VERSIONS: Final = {b" HTTP/1.1": "HTTP/1.1", b" HTTP/1.0": "HTTP/1.0"}
_ORIGIN: Final = re.compile(rb"\r\norigin:[ \t]*([^\r\n]*)(?=\r\n)", re.IGNORECASE)
_METHOD: Final = re.compile(TCHAR.encode() + b"{1,32}")


class BadRequestError(Exception):
    """The input is not HTTP, or can be read in more than one way."""


class TooManyHeadersError(Exception):
    """There are more headers than :data:`MAX_HEADERS`."""


class TooManyArgumentsError(Exception):
    """The query has more arguments than :data:`MAX_ARGUMENTS`."""


class Head:
    """A parsed head.

    :param raw: from the request line to the empty line, both included.
    :raises BadRequestError: if it is not a valid head.
    :raises TooManyHeadersError: if it has too many headers.
    :raises TooManyArgumentsError: if its query has too many arguments.
    """

    __slots__ = (
        "_complete",
        "_count",
        "chunked",
        "expects_continue",
        "headers",
        "keep_alive",
        "length",
        "method",
        "target",
        "version",
    )

    def __init__(self, raw: bytes) -> None:
        line = raw.find(b"\r\n")
        version = _VERSIONS.get(raw[line - 9 : line])
        # llhttp skips line ends before a request; the connection decides about those.
        if version is None or raw[0] <= 0x20:
            raise BadRequestError
        self.version: str = version
        self.headers = RequestHeaders()
        self._count = 0
        self._complete = False
        #: Path and query, as they were sent.
        self.target = ""
        self.method = self._parse(raw)
        if not self.target.startswith("/"):
            self.target = _origin_form(self.target)
        self._framing()
        if self.target.partition("?")[2].count("&") >= MAX_ARGUMENTS:
            raise TooManyArgumentsError

    # -------------------------------------------------------------------------- called by httptools
    def on_url(self, url: bytes) -> None:
        """Keep the target. Called by httptools."""
        self.target = url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header. Called by httptools."""
        self._count += 1
        if self._count > MAX_HEADERS:
            raise TooManyHeadersError
        # llhttp has checked the characters.
        self.headers.add(name.decode("latin-1"), value.decode("latin-1").strip(" \t"))

    def on_headers_complete(self) -> None:
        """Note that the head is complete. Called by httptools."""
        self._complete = True

    # ------------------------------------------------------------------------------------ internals
    def _parse(self, raw: bytes) -> str:
        """Parse the head and return its method."""
        method = b""
        parser = httptools.HttpRequestParser(self)
        try:
            try:
                parser.feed_data(raw)
            except httptools.HttpParserInvalidMethodError:
                # llhttp has a list of methods. The routes answer others with 404 or 405.
                method, _, rest = raw.partition(b" ")
                if _METHOD.fullmatch(method) is None:
                    raise
                parser = httptools.HttpRequestParser(self)
                parser.feed_data(b"GET " + rest)
        except httptools.HttpParserUpgrade:
            pass  # A server may ignore an Upgrade and answer the request as it is.
        except httptools.HttpParserError:
            if self._count > MAX_HEADERS:
                raise TooManyHeadersError from None
            raise BadRequestError from None
        if not self._complete:
            raise BadRequestError
        return (method or parser.get_method()).decode("latin-1")

    def _framing(self) -> None:
        """Find the length of the body, and whether another request may follow."""
        headers = self.headers
        modern = self.version == "HTTP/1.1"
        coding = headers.get("Transfer-Encoding")
        #: Whether the body comes in chunks; otherwise it has :attr:`length` bytes.
        self.chunked = coding is not None
        self.length = 0
        if coding is not None:
            if not modern or coding.lower() != "chunked":
                raise BadRequestError
        else:
            length = headers.get("Content-Length", "0")
            # llhttp accepts only digits, but any number of zeros before them.
            if len(length) > _LENGTH_DIGITS:
                raise BadRequestError
            self.length = int(length)
        self.keep_alive = modern
        connection = headers.get("Connection")
        if connection is not None:
            options = {option.strip().lower() for option in connection.split(",")}
            self.keep_alive = "close" not in options and (modern or "keep-alive" in options)
        #: Whether the client sends the body only after a ``100 Continue``.
        self.expects_continue = modern and headers.get("Expect", "").lower() == "100-continue"


def check_beginning(buffer: bytearray, searched: int) -> None:
    """Detect early what will never become a head: a TLS handshake, lines that end with LF only.

    :param buffer: has no end of a head in it.
    :param searched: how many of its bytes have been checked before.
    :raises BadRequestError: if it will never become a head.
    """
    if not searched and _METHOD.match(buffer) is None:
        raise BadRequestError
    at = buffer.find(b"\n", searched)
    while at >= 0:
        if not at or buffer[at - 1] != 0x0D:
            raise BadRequestError
        at = buffer.find(b"\n", at + 1)


def peek(raw: bytes) -> tuple[str, str | None]:
    """Find path and origin in a head that is incomplete or refused.

    :return: the path, empty if it is not there, and the header ``Origin`` if exactly one is there
        and complete.
    """
    line = raw.partition(b"\r\n")[0].split(b" ")
    target = line[1].decode("latin-1") if len(line) == 3 else ""
    origins = _ORIGIN.findall(raw)
    origin = origins[0].decode("latin-1").rstrip(" \t") if len(origins) == 1 else None
    return _origin_form(target).partition("?")[0], origin


def _origin_form(target: str) -> str:
    """Return the path and query of an absolute form, which clients send to proxies."""
    scheme, separator, rest = target.partition("://")
    if not separator or scheme.lower() not in ("http", "https"):
        return target  # ``*``, or something that matches no route.
    slash = rest.find("/")
    query = rest.find("?")
    if query >= 0 and (slash < 0 or query < slash):
        return "/" + rest[query:]
    return rest[slash:] if slash >= 0 else "/"
