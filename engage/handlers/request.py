# SPDX-License-Identifier: Apache-2.0
"""The head of a request, as handlers see it.

Tornado's ``HTTPServerRequest`` parses the query of every request, copies the result, and splits the
host, which took as long as parsing the JSON of a small event. Only a few handlers need the query,
and none the host.
"""

from __future__ import annotations

import functools
import re
import time
from typing import Final

from tornado.escape import parse_qs_bytes
from tornado.httputil import HTTPHeaders, HTTPInputError, RequestStartLine

from engage.http1.exchange import Exchange

__all__ = ["Request"]

#: What Tornado accepts: RFC 3986, with brackets and colons at any place. A comma means several.
_HOST: Final = re.compile(r"(?:[\[\]:A-Za-z0-9\-._~!$&'()*+;=]|%[0-9A-Fa-f]{2})*")
#: A host of this length is checked each time, so that the cache remains small.
_LONG_HOST: Final = 256


class Request:
    """The head of a request, and where its answer goes.

    :raises HTTPInputError: if the header ``Host`` is missing or not valid.
    """

    __slots__ = ("_began", "connection", "headers", "method", "path", "query")

    def __init__(
        self, start_line: RequestStartLine, headers: HTTPHeaders, connection: Exchange
    ) -> None:
        self.method, target, version = start_line
        self.headers = headers
        #: Where the answer goes.
        self.connection = connection
        self._began = time.monotonic()
        #: Path and query, as they were sent.
        self.path, _, self.query = target.partition("?")
        host = headers.get("Host")
        if host is not None:
            if not (_is_known_host(host) if len(host) < _LONG_HOST else _is_host(host)):
                raise HTTPInputError("the header Host is not valid")
        elif version != "HTTP/1.0":
            raise HTTPInputError("the header Host is missing")

    @property
    def query_arguments(self) -> dict[str, list[bytes]]:
        """The arguments of the query; each can occur several times."""
        return parse_qs_bytes(self.query, keep_blank_values=True) if self.query else {}

    def seconds(self) -> float:
        """Return how long ago the head had arrived."""
        return time.monotonic() - self._began


def _is_host(value: str) -> bool:
    return _HOST.fullmatch(value) is not None


#: Nearly all requests name one of a few hosts.
_is_known_host: Final = functools.lru_cache(maxsize=64)(_is_host)
