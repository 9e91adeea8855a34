# SPDX-License-Identifier: Apache-2.0
"""Answers to what never becomes a request: made without a handler, the connection closes after."""

from __future__ import annotations

import random
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

from engage.errors import ApiError, error_body, overloaded

__all__ = [
    "BARE_400",
    "crowded",
    "headers_too_large",
    "refusal",
    "request_id",
    "request_timeout",
    "too_many_arguments",
    "too_many_headers",
]

#: For what is not HTTP.
BARE_400: Final = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def request_id() -> str:
    """:return: a new id for a request that has none; to be found in a log, not to be a secret."""
    return f"{random.getrandbits(96):024x}"


def refusal(error: ApiError, identity: str, cors: Mapping[str, str]) -> bytes:
    """:return: a whole answer, head and body.

    :param identity: the request's id.
    :param cors: headers that let a page's script read it.
    """
    body = error_body(error, identity)
    headers = {
        "Content-Type": "application/json; charset=utf-8",
        "Content-Length": str(len(body)),
        "X-Content-Type-Options": "nosniff",
        "X-Request-Id": identity,
        **cors,
        **error.headers,
        "Connection": "close",
    }
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def headers_too_large(limit: int) -> ApiError:
    """:return: 431: the head is longer than ``limits.header_bytes``."""
    return ApiError(
        "headers_too_large",
        f"request line and headers are too large, at most {limit} bytes (limits.header_bytes)",
    )


def too_many_headers(limit: int) -> ApiError:
    """:return: 431: there are more headers than any client sends."""
    return ApiError("headers_too_large", f"too many headers, at most {limit}")


def too_many_arguments(limit: int) -> ApiError:
    """:return: 400: the query has more arguments than any client sends."""
    return ApiError("invalid_request", f"the query has too many arguments, at most {limit}")


def request_timeout(seconds: float) -> ApiError:
    """:return: 408: the request did not arrive whole in time."""
    return ApiError(
        "request_timeout",
        f"the request did not arrive within {seconds:g} seconds (server.request_timeout)",
    )


def crowded() -> ApiError:
    """:return: 503: there are ``server.max_connections`` already."""
    return overloaded("too many connections; send the same again later")
