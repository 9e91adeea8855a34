# SPDX-License-Identifier: Apache-2.0
"""The head of a request: request line and headers, taken apart by httptools (llhttp).

Strict where a head could be read in two ways, by us and by a proxy before us (request smuggling):
two lengths, a length and chunks, white space before a colon, a bare LF, a folded header. Most of
that is llhttp's own strictness, the rest is checked here.
"""

from __future__ import annotations

import re
from typing import Final

import httptools
from tornado.httputil import HTTPHeaders

__all__ = [
    "MAX_ARGUMENTS",
    "MAX_HEADERS",
    "BadRequestError",
    "Head",
    "TooManyArgumentsError",
    "TooManyHeadersError",
    "check_beginning",
    "glimpse",
]

#: A header costs a call of Python, however short it is.
MAX_HEADERS: Final = 100
#: Of the query: Tornado takes no more.
MAX_ARGUMENTS: Final = 1000

_VERSIONS: Final = {b" HTTP/1.1": "HTTP/1.1", b" HTTP/1.0": "HTTP/1.0"}
_ORIGIN: Final = re.compile(rb"\r\norigin:[ \t]*([^\r\n]*)(?=\r\n)", re.IGNORECASE)
_TOKEN: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}")


class BadRequestError(Exception):
    """Not HTTP, or not only one thing."""


class TooManyHeadersError(Exception):
    """More than :data:`MAX_HEADERS`."""


class TooManyArgumentsError(Exception):
    """More than :data:`MAX_ARGUMENTS`."""


class Head:
    """A head, taken apart.

    :param raw: from the request line to the empty line, both included.
    :raises BadRequestError: it is not one.
    :raises TooManyHeadersError: it has too many headers.
    :raises TooManyArgumentsError: its query has too many arguments.
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
        # llhttp passes over line ends before a request; the connection decides about those.
        if version is None or raw[0] <= 0x20:
            raise BadRequestError
        self.version: str = version
        self.headers = HTTPHeaders()
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
        """See httptools."""
        self.target = url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools."""
        self._count += 1
        if self._count > MAX_HEADERS:
            raise TooManyHeadersError
        key = name.decode("latin-1")
        # llhttp has checked the characters; assigning skips Tornado's check of the same.
        if key in self.headers:
            self.headers.add(key, value.decode("latin-1").strip(" \t"))
        else:
            self.headers[key] = value.decode("latin-1").strip(" \t")

    def on_headers_complete(self) -> None:
        """See httptools."""
        self._complete = True

    # ------------------------------------------------------------------------------------ internals
    def _parse(self, raw: bytes) -> str:
        """:return: the method."""
        method = b""
        parser = httptools.HttpRequestParser(self)
        try:
            try:
                parser.feed_data(raw)
            except httptools.HttpParserInvalidMethodError:
                # llhttp has a list of methods. Others are the business of the routes: 404, or 405.
                method, _, rest = raw.partition(b" ")
                if _TOKEN.fullmatch(method) is None:
                    raise
                parser = httptools.HttpRequestParser(self)
                parser.feed_data(b"GET " + rest)
        except httptools.HttpParserUpgrade:
            pass  # Nobody has to follow an Upgrade; the request stands as it is.
        except httptools.HttpParserError:
            if self._count > MAX_HEADERS:
                raise TooManyHeadersError from None
            raise BadRequestError from None
        if not self._complete:
            raise BadRequestError
        return (method or parser.get_method()).decode("latin-1")

    def _framing(self) -> None:
        """Find out how long the body is, and whether another request may follow."""
        headers = self.headers
        modern = self.version == "HTTP/1.1"
        #: Whether the body comes in chunks; if not, it has :attr:`length` bytes.
        self.chunked = "Transfer-Encoding" in headers
        self.length = 0
        if self.chunked:
            if not modern or headers["Transfer-Encoding"].lower() != "chunked":
                raise BadRequestError
        elif "Content-Length" in headers:
            self.length = int(headers["Content-Length"])  # llhttp let only digits through.
        self.keep_alive = modern
        if "Connection" in headers:
            options = {option.strip().lower() for option in headers["Connection"].split(",")}
            self.keep_alive = "close" not in options and (modern or "keep-alive" in options)
        #: Whether the client waits with the body until it is told to send it.
        self.expects_continue = (
            modern and "Expect" in headers and headers["Expect"].lower() == "100-continue"
        )


def check_beginning(buffer: bytearray, searched: int) -> None:
    """See early that something will never become a head: a TLS handshake, lines ended by LF.

    :param buffer: has no end of a head in it.
    :param searched: so much of it has been checked before.
    :raises BadRequestError: it will not.
    """
    if not searched and _TOKEN.match(buffer) is None:
        raise BadRequestError
    at = buffer.find(b"\n", searched)
    while at >= 0:
        if not at or buffer[at - 1] != 0x0D:
            raise BadRequestError
        at = buffer.find(b"\n", at + 1)


def glimpse(raw: bytes) -> tuple[str, str | None]:
    """See who asks for what in a head that is incomplete or will not be taken apart.

    :return: the path (empty if it is not there) and ``Origin``, if there is one whole.
    """
    line = raw.partition(b"\r\n")[0].split(b" ")
    target = line[1].decode("latin-1") if len(line) == 3 else ""
    origins = _ORIGIN.findall(raw)
    origin = origins[0].decode("latin-1").rstrip(" \t") if len(origins) == 1 else None
    return _origin_form(target).partition("?")[0], origin


def _origin_form(target: str) -> str:
    """:return: path and query of the absolute form, which is sent to proxies."""
    scheme, separator, rest = target.partition("://")
    if not separator or scheme.lower() not in ("http", "https"):
        return target  # ``*``, or what no route is like.
    slash = rest.find("/")
    query = rest.find("?")
    if query >= 0 and (slash < 0 or query < slash):
        return "/" + rest[query:]
    return rest[slash:] if slash >= 0 else "/"
