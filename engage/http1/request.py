# SPDX-License-Identifier: Apache-2.0
"""The head of a request, parsed with httptools (llhttp), as handlers see it.

It is strict where this server and a proxy in front of it could read a head differently (request
smuggling): two lengths, a length and chunks, white space before a colon, a bare LF, a folded
header. llhttp rejects most of these itself; the others are checked here.

Tornado's ``HTTPServerRequest`` and ``HTTPHeaders`` took longer than storing a small event: they
parse every query, split the host and normalise a name at each look-up.
"""

from __future__ import annotations

import functools
import random
import re
import time
from collections.abc import Iterator
from typing import Final

import httptools
from tornado.escape import parse_qs_bytes
from tornado.httputil import HTTPHeaders

from engage.errors import ApiError

__all__ = [
    "MAX_ARGUMENTS",
    "MAX_HEADERS",
    "TCHAR",
    "BadRequestError",
    "Request",
    "RequestHeaders",
    "check_beginning",
    "new_request_id",
    "peek",
]

#: Each header costs a call of a Python function, however short it is.
MAX_HEADERS: Final = 100
#: Of the query; Tornado accepts no more.
MAX_ARGUMENTS: Final = 1000

#: One character of a token, such as a method or the name of a header (RFC 9110, section 5.6.2);
#: for regular expressions.
TCHAR: Final = r"[!#$%&'*+.^_`|~0-9A-Za-z-]"
#: Of a ``Content-Length``. ``int()`` raises for thousands of digits, leading zeros included.
_LENGTH_DIGITS: Final = 19
#: A longer name or host is looked at each time, so that the caches remain small.
_CACHED_LENGTH: Final = 64

#: A request id from a client is used only if it is harmless in a log.
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{8,64}")
_VERSIONS: Final = {b" HTTP/1.1": "HTTP/1.1", b" HTTP/1.0": "HTTP/1.0"}
_ORIGIN: Final = re.compile(rb"\r\norigin:[ \t]*([^\r\n]*)(?=\r\n)", re.IGNORECASE)
_METHOD: Final = re.compile(TCHAR.encode() + b"{1,32}")
#: What Tornado accepts: RFC 3986, with brackets and colons at any place. A comma means several.
_HOST: Final = re.compile(r"(?:[\[\]:A-Za-z0-9\-._~!$&'()*+;=]|%[0-9A-Fa-f]{2})*")


class BadRequestError(Exception):
    """The input is not HTTP, or can be read in more than one way."""


class RequestHeaders(HTTPHeaders):
    """Headers that were parsed: names and values are valid, and are not checked again."""

    def __init__(self) -> None:
        # Without the base class: all that it does is to prepare its two dictionaries.
        #: Name as in ``Content-Length`` → value; several values are joined by commas.
        self.fields: dict[str, str] = {}
        #: Name → values, for the names that occur several times.
        self.repeated: dict[str, list[str]] = {}

    def add(self, name: str, value: str, *, _chars_are_bytes: bool = True) -> None:
        """Add a value; there may be others of the same name."""
        name = _normalised(name)
        fields = self.fields
        if name in fields:
            self.repeated.setdefault(name, [fields[name]]).append(value)
            fields[name] = f"{fields[name]},{value}"
        else:
            fields[name] = value

    def get_list(self, name: str) -> list[str]:
        name = _normalised(name)
        if name in self.repeated:
            return self.repeated[name]
        return [self.fields[name]] if name in self.fields else []

    def get_all(self) -> Iterator[tuple[str, str]]:
        for name, value in self.fields.items():
            for text in self.repeated.get(name, (value,)):
                yield name, text

    def __getitem__(self, name: str) -> str:
        return self.fields[_normalised(name)]

    def __setitem__(self, name: str, value: str) -> None:
        name = _normalised(name)
        self.fields[name] = value
        self.repeated.pop(name, None)

    def __delitem__(self, name: str) -> None:
        name = _normalised(name)
        del self.fields[name]
        self.repeated.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and _normalised(name) in self.fields

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)


class Request:
    """The head of a request.

    :param raw: from the request line to the empty line, both included.
    :raises BadRequestError: if it is not a valid head.
    :raises ApiError: if it has more headers (431) or arguments (400) than any client sends.
    """

    __slots__ = (
        "_complete",
        "_count",
        "began",
        "chunked",
        "expects_continue",
        "fields",
        "headers",
        "id",
        "keep_alive",
        "length",
        "method",
        "path",
        "query",
        "target",
        "version",
    )

    def __init__(self, raw: bytes) -> None:
        line = raw.find(b"\r\n")
        version = _VERSIONS.get(raw[line - 9 : line])
        # llhttp skips line ends before a request; the connection decides about those.
        if version is None or raw[0] <= 0x20:
            raise BadRequestError
        #: When the head had arrived, by ``time.monotonic()``.
        self.began = time.monotonic()
        self.version: str = version
        self.headers = RequestHeaders()
        #: Name as in ``Content-Length`` → value, for handlers: the fastest way to a header.
        self.fields = self.headers.fields
        self._count = 0
        self._complete = False
        #: Path and query, as they were sent.
        self.target = ""
        self.method = self._parse(raw)
        if not self.target.startswith("/"):
            self.target = _origin_form(self.target)
        self.path, _, self.query = self.target.partition("?")
        if self.query.count("&") >= MAX_ARGUMENTS:
            message = f"the query has too many arguments; the limit is {MAX_ARGUMENTS}"
            raise ApiError("invalid_request", message)
        sent = self.fields.get("X-Request-Id")
        #: The client's ``X-Request-Id`` if it sent a usable one, otherwise a new one.
        self.id = sent if sent and _REQUEST_ID.fullmatch(sent) else new_request_id()
        self._framing()

    @property
    def query_arguments(self) -> dict[str, list[bytes]]:
        """The arguments of the query; each can occur several times."""
        return parse_qs_bytes(self.query, keep_blank_values=True) if self.query else {}

    # -------------------------------------------------------------------------- called by httptools
    def on_url(self, url: bytes) -> None:
        """Keep the target. Called by httptools."""
        self.target = url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header. Called by httptools."""
        self._count += 1
        if self._count > MAX_HEADERS:
            raise BadRequestError  # Ends the parsing.
        # llhttp has checked the characters.
        text = name.decode("latin-1")
        key = _usual_name(text) if len(text) < _CACHED_LENGTH else _normalise(text)
        if key in self.fields:
            self.headers.add(key, value.decode("latin-1").strip(" \t"))
        else:
            self.fields[key] = value.decode("latin-1").strip(" \t")

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
                message = f"there are too many headers; the limit is {MAX_HEADERS}"
                raise ApiError("headers_too_large", message) from None
            raise BadRequestError from None
        if not self._complete:
            raise BadRequestError
        return (method or parser.get_method()).decode("latin-1")

    def _framing(self) -> None:
        """Check the host; find the length of the body, and whether another request may follow."""
        get = self.fields.get
        modern = self.version == "HTTP/1.1"
        host = get("Host")
        if host is None:
            if modern:
                raise BadRequestError
        elif not (_is_usual_host(host) if len(host) < _CACHED_LENGTH else _is_host(host)):
            raise BadRequestError
        coding = get("Transfer-Encoding")
        #: Whether the body comes in chunks; otherwise it has :attr:`length` bytes.
        self.chunked = coding is not None
        self.length = 0
        if coding is not None:
            if not modern or coding.lower() != "chunked":
                raise BadRequestError
        else:
            length = get("Content-Length", "0")
            # llhttp accepts only digits, but any number of zeros before them.
            if len(length) > _LENGTH_DIGITS:
                raise BadRequestError
            self.length = int(length)
        self.keep_alive = modern
        connection = get("Connection")
        if connection is not None:
            options = {option.strip().lower() for option in connection.split(",")}
            self.keep_alive = "close" not in options and (modern or "keep-alive" in options)
        #: Whether the client sends the body only after a ``100 Continue``.
        self.expects_continue = modern and get("Expect", "").lower() == "100-continue"


def new_request_id() -> str:
    """Return an id for a request that has none. It finds a line in the log; it is not secret."""
    return f"{random.getrandbits(96):024x}"


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


def _is_host(value: str) -> bool:
    return _HOST.fullmatch(value) is not None


def _normalise(name: str) -> str:
    """Return a name with capitals as ``Content-Length`` has them."""
    return "-".join([word.capitalize() for word in name.split("-")])


#: Nearly all requests have the same names, and one of a few hosts.
_usual_name: Final = functools.lru_cache(maxsize=1000)(_normalise)
_is_usual_host: Final = functools.lru_cache(maxsize=64)(_is_host)


def _normalised(name: str) -> str:
    return _usual_name(name) if len(name) < _CACHED_LENGTH else _normalise(name)
