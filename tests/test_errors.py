# SPDX-License-Identifier: Apache-2.0
"""The body and the headers of error answers."""

from __future__ import annotations

import json
from importlib import resources

import jsonschema
import orjson

from engage.api import StorageUnavailable
from engage.errors import (
    MAX_ERRORS,
    STATUS,
    ApiError,
    LogUnavailable,
    Problem,
    error_body,
    from_exception,
    from_problems,
    log_unavailable,
    overloaded,
    quote,
    shutting_down,
    storage_unavailable,
)
from support.each import each

SCHEMA = json.loads(resources.files("engage_schemas").joinpath("error.json").read_bytes())


@each("code", sorted(STATUS))
@each("request_id", ["4b7e1c2a9d", None])
def test_every_error_matches_the_schema(code: str, request_id: str | None) -> None:
    for errors in ((), [Problem("/userId", "is required")] * 100):
        body = orjson.loads(error_body(ApiError(code, "why", errors=errors), request_id))
        jsonschema.validate(body, SCHEMA)
        assert (body["code"], body["status"]) == (code, STATUS[code])
        assert len(body.get("errors", [])) == min(len(errors), MAX_ERRORS)
        assert body.get("requestId") == request_id


def test_only_a_missing_or_wrong_key_is_requested() -> None:
    asking = {code for code in STATUS if "WWW-Authenticate" in ApiError(code, "").headers}
    assert asking == {"missing_write_key", "invalid_write_key"}


def test_the_message_is_that_of_the_first_problem() -> None:
    error = from_problems(
        [
            Problem("/userId", "is too long (513 characters; the limit is 512)"),
            Problem("/event", "x"),
        ]
    )
    assert (error.status, error.code) == (400, "invalid_payload")
    assert error.message == "userId: is too long (513 characters; the limit is 512)"
    assert str(Problem("", "must be an object")) == "must be an object"
    assert str(Problem("/batch/3/type", "is required")) == "batch/3/type: is required"
    assert Problem("/type", "m").under("/batch/3") == Problem("/batch/3/type", "m")


@each(
    "make, least, most",
    [
        *((storage_unavailable, 5, 30), (log_unavailable, 5, 30), (overloaded, 1, 5)),
        (shutting_down, 1, 5),
    ],
)
def test_retry_after_is_random(make: type, least: int, most: int) -> None:
    """Integers, so that clients do not all retry at once."""
    seen = {make().headers["Retry-After"] for _ in range(500)}
    assert seen == {str(seconds) for seconds in range(least, most + 1)}
    assert make().status == 503


def test_an_error_never_shows_the_text_of_an_exception() -> None:
    for secret in (
        *(ValueError("secret"), KeyError("secret")),
        *(StorageUnavailable("secret"), LogUnavailable("secret")),
    ):
        error = from_exception(secret)
        assert "secret" not in error.message
        assert error.status == (503 if isinstance(secret, StorageUnavailable) else 500)
    error = ApiError("not_found", "no such path")
    assert from_exception(error) is error


def test_long_values_are_cut() -> None:
    assert quote("x" * 80) == "x" * 80
    assert quote("x" * 81) == "x" * 79 + "…"
