# SPDX-License-Identifier: Apache-2.0
"""Answers that no handler gives, to what never becomes a request; the connection then closes."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from engage.errors import ApiError, error_body, overloaded

if TYPE_CHECKING:
    from engage.http1.shared import Bounds

__all__ = [
    "BARE_400",
    "crowded",
    "headers_too_large",
    "refusal",
    "request_timeout",
    "slow_head",
    "too_many_bytes",
]

#: The answer to bytes that are not HTTP.
BARE_400: Final = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def refusal(error: ApiError, identity: str, cors: Mapping[str, str]) -> bytes:
    """Return a whole answer, head and body.

    :param identity: the request's id.
    :param cors: headers that let a page's script read the answer.
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
    """Return the 431 for a head over ``limits.header_bytes``.

    :param limit: in bytes.
    """
    return ApiError(
        "headers_too_large",
        f"the request line and headers are too large;"
        f" the limit is {limit} bytes (limits.header_bytes)",
    )


def slow_head(bounds: Bounds) -> ApiError:
    """Return the 408 for a request whose head did not arrive completely in time."""
    if bounds.request_timeout < bounds.head_timeout:
        return request_timeout(bounds.request_timeout)
    return ApiError(
        "request_timeout",
        "the request line and headers did not arrive completely"
        f" within {bounds.head_timeout:g} seconds (server.head_timeout)",
    )


def request_timeout(seconds: float) -> ApiError:
    """Return the 408 for a request that did not arrive completely in time."""
    return ApiError(
        "request_timeout",
        "the request did not arrive completely"
        f" within {seconds:g} seconds (server.request_timeout)",
    )


def crowded() -> ApiError:
    """Return the 503 for a connection beyond ``server.max_connections``."""
    return overloaded("there are too many connections; send the same request again later")


def too_many_bytes() -> ApiError:
    """Return the 503 for a request that would exceed ``limits.inflight_bytes``."""
    return overloaded("too much data is being received; send the same request again later")
