# SPDX-License-Identifier: Apache-2.0
"""The errors that clients see: status, code, message and JSON body.

Every step raises :class:`ApiError`, directly or through a function of this module. A handler
converts any exception with :func:`from_exception` and sends :func:`error_body`. The codes are in
:data:`STATUS`; ``schemas/error.json`` describes the body.

A message is for the client. It names the key and the rule, as in
``userId: is too long (513 characters; the limit is 512)``, and the config key of a limit.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from engage.api import CONFLICT, EngageError, StorageUnavailable

__all__ = [
    "MAX_ERRORS",
    "QUOTED",
    "STATUS",
    "ApiError",
    "Limit",
    "LogUnavailable",
    "Problem",
    "body_too_large",
    "conflict_not_kept",
    "error_body",
    "event_too_large",
    "far_behind",
    "from_exception",
    "from_problems",
    "internal_error",
    "invalid_link",
    "key_refused",
    "link_expired",
    "located",
    "log_unavailable",
    "overloaded",
    "pointer",
    "quote",
    "shutting_down",
    "storage_unavailable",
]

#: The HTTP status of each code: every error that engage can answer with.
STATUS: Final[Mapping[str, int]] = {
    "invalid_json": 400,
    "invalid_encoding": 400,
    "invalid_payload": 400,
    "invalid_request": 400,
    "event_refused": 400,
    "message_id_conflict": 400,
    "transform_failed": 400,
    "workspace_required": 400,
    "unknown_subscription_group": 400,
    "missing_write_key": 401,
    "invalid_write_key": 401,
    "invalid_user_hash": 401,
    "invalid_signature": 401,
    "write_key_disabled": 403,
    "origin_not_allowed": 403,
    "operation_not_allowed": 403,
    "identity_not_verified": 403,
    "server_key_exposed": 403,
    "link_expired": 403,
    "not_found": 404,
    "unknown_provider": 404,
    "method_not_allowed": 405,
    "request_timeout": 408,
    "length_required": 411,
    "body_too_large": 413,
    "event_too_large": 413,
    "batch_too_large": 413,
    "unsupported_encoding": 415,
    "rate_limited": 429,
    "quota_exceeded": 429,
    "headers_too_large": 431,
    "internal_error": 500,
    "storage_unavailable": 503,
    "overloaded": 503,
    "shutting_down": 503,
}

#: Maximum number of entries in ``errors`` of one answer.
MAX_ERRORS: Final = 20

#: Maximum number of characters of a client's value in a message.
QUOTED: Final = 80

#: The codes for a missing or unknown write key: only these answers ask for credentials.
_CHALLENGED: Final = frozenset({"missing_write_key", "invalid_write_key"})
_CHALLENGE: Final[Mapping[str, str]] = {"WWW-Authenticate": 'Basic realm="engage", charset="UTF-8"'}


class LogUnavailable(StorageUnavailable):
    """The log in front of the storage cannot answer now.

    Only the core raises it, so that the answer names the log. A log itself raises
    :class:`~engage.api.StorageUnavailable`.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a payload."""

    #: JSON pointer (RFC 6901) to the value; ``""`` is the whole payload.
    pointer: str
    #: The rule that is broken, for the client; quotes at most :data:`QUOTED` characters of a value.
    message: str

    def as_dict(self) -> dict[str, str]:
        """Return the problem as an entry of ``errors`` in an answer or a dead letter."""
        return {"pointer": self.pointer, "message": self.message}

    def under(self, prefix: str) -> Problem:
        """Return the same problem with a prefix before its pointer, such as ``/batch/3``."""
        return Problem(prefix + self.pointer, self.message)

    def __str__(self) -> str:
        # ``/context/page`` reads better as ``context/page`` in a sentence.
        name = self.pointer.removeprefix("/")
        return f"{quote(name)}: {self.message}" if name else self.message


@dataclasses.dataclass(frozen=True, slots=True)
class Limit:
    """A maximum size and the config key that sets it."""

    #: The maximum size, in bytes.
    bytes: int
    #: The config key that sets the limit, or a condition; named in the error.
    key: str


class ApiError(EngageError):
    """An answer that is not a success.

    :param code: a key of :data:`STATUS`.
    :param message: for the client: names the key and the rule. Must not contain an exception's
        text.
    :param errors: the details; at most :data:`MAX_ERRORS` are kept.
    :param retry_after: seconds after which the client can retry (header ``Retry-After``).
    :param status: the status, if it differs from that of the code.
    :param headers: additional headers of the answer, such as ``Allow``. A 401 about a write key
        also gets ``WWW-Authenticate``; the handler removes it for browsers, which would open a
        dialog.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        errors: Sequence[Problem] = (),
        retry_after: int | None = None,
        status: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status: int = STATUS[code] if status is None else status
        self.code: str = code
        self.message: str = message
        self.errors: tuple[Problem, ...] = tuple(errors[:MAX_ERRORS])
        self.retry_after: int | None = retry_after
        self.headers: dict[str, str] = dict(headers or {})
        if code in _CHALLENGED:
            self.headers.update(_CHALLENGE)
        if retry_after is not None:
            self.headers["Retry-After"] = str(retry_after)


def error_body(error: ApiError, request_id: str | None) -> bytes:
    """Return the JSON body of an error answer."""
    body: dict[str, Any] = {
        "success": False,
        "status": error.status,
        "code": error.code,
        "message": error.message,
    }
    if error.errors:
        body["errors"] = [problem.as_dict() for problem in error.errors]
    if request_id is not None:
        body["requestId"] = request_id
    return orjson.dumps(body)


def quote(text: str, limit: int = QUOTED) -> str:
    """Return a client's text, cut to ``limit`` characters; if it is cut, it ends with ``…``."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def pointer(name: str) -> str:
    """Return the part of a JSON pointer for a member; a long name is cut."""
    return "/" + quote(name).replace("~", "~0").replace("/", "~1")


def from_problems(problems: Sequence[Problem], code: str = "invalid_payload") -> ApiError:
    """Return the error for a payload with problems; its message is the first of them.

    :param problems: at least one.
    """
    return ApiError(code, str(problems[0]), errors=problems)


def located(error: ApiError, prefix: str) -> list[Problem]:
    """Return the problems of one item of many; at least one.

    :param prefix: the JSON pointer to the item.
    """
    return [problem.under(prefix) for problem in error.errors] or [Problem(prefix, error.message)]


def key_refused(reason: str, code: str = "invalid_write_key") -> ApiError:
    """Return the 401 or 403 for a write key that is not accepted, or is missing.

    Each message has the words "invalid write key": RudderStack's SDKs for Android and iOS stop
    sending only if they find them, and otherwise send the same batch again for ever.

    :param reason: a sentence about the key or the request.
    """
    return ApiError(code, f"invalid write key: {reason}")


def invalid_link() -> ApiError:
    """Return the 401 for a signed link; it does not tell what is wrong."""
    return ApiError("invalid_user_hash", "the hash belongs to no known user")


def link_expired() -> ApiError:
    """Return the 403 for a signed link that only unsubscribes any more."""
    return ApiError("link_expired", "the link has expired; it can only unsubscribe")


def body_too_large(limit: Limit) -> ApiError:
    """Return the 413 for a body over its limit."""
    return ApiError(
        "body_too_large", f"the body is too large; the limit is {limit.bytes} bytes ({limit.key})"
    )


def event_too_large(size: int, limit: Limit, files: int = 0) -> ApiError:
    """Return the 413 for an event over its limit.

    :param size: bytes of the event when stored.
    :param files: how many of them are in ``files``.
    """
    message = f"the event is {size} bytes when stored; the limit is {limit.bytes} ({limit.key})"
    if size - files <= limit.bytes:
        message += f"; files has {files} of them: send the URLs of files instead"
    return ApiError("event_too_large", message)


def conflict_not_kept(message: str, problems: Sequence[Problem]) -> ApiError:
    """Return the 400 for an event whose message id another event has, if it cannot be kept.

    A 400 and not a 503: a retry would also fail, and a client must not retry indefinitely.

    :param message: the difference from the stored event.
    """
    return ApiError(
        CONFLICT, f"{message}; send it with a different messageId to store it", errors=problems
    )


def storage_unavailable() -> ApiError:
    """Return the 503 for an unavailable storage: nothing was acknowledged, a retry is safe."""
    return ApiError(
        "storage_unavailable",
        "the storage is unavailable and nothing was acknowledged;"
        " send the same request again later",
        # Random, so that clients do not all retry in the same second.
        retry_after=random.randint(5, 30),  # noqa: S311 - no secret
    )


def log_unavailable() -> ApiError:
    """Return the 503 for an unavailable log. It has the code of an unavailable storage."""
    return ApiError(
        "storage_unavailable",
        "the event log in front of the storage is unavailable and nothing was acknowledged;"
        " send the same request again later",
        retry_after=random.randint(5, 30),  # noqa: S311
    )


def overloaded(
    message: str = "too much data is waiting to be stored; send the same request again later",
) -> ApiError:
    """Return the 503 for more work than the server can queue."""
    return ApiError("overloaded", message, retry_after=random.randint(1, 5))  # noqa: S311


def far_behind() -> ApiError:
    """Return the 503 for a storage that is too far behind the log in front of it."""
    return ApiError(
        "overloaded",
        "the storage is too far behind the log; send the same request again later",
        retry_after=random.randint(5, 30),  # noqa: S311
    )


def shutting_down() -> ApiError:
    """Return the 503 for a process that is about to end."""
    return ApiError(
        "shutting_down",
        "the server is shutting down; send the same request again",
        retry_after=random.randint(1, 5),  # noqa: S311
    )


def internal_error() -> ApiError:
    """Return the 500 for an unexpected error; the log has its cause under the request id."""
    return ApiError(
        "internal_error", "the server failed to process the request; its log has the cause"
    )


def from_exception(exc: BaseException) -> ApiError:
    """Return the error to send for an exception; it never contains the exception's text."""
    if isinstance(exc, ApiError):
        return exc
    if isinstance(exc, LogUnavailable):
        return log_unavailable()
    if isinstance(exc, StorageUnavailable):
        return storage_unavailable()
    return internal_error()
