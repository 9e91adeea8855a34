# SPDX-License-Identifier: Apache-2.0
"""Checks that every error answer has the same shape and that nothing was stored."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import jsonschema

from support.http_client import Answer
from support.server_inprocess import Serving

TRACK = "/api/public/apps/track"
BATCH = "/api/public/apps/batch"

ERROR = jsonschema.Draft202012Validator(
    json.loads(resources.files("engage_schemas").joinpath("error.json").read_bytes())
)


def check_error(answer: Answer, status: int, code: str) -> None:
    """Check the status, the code and the shape of an error answer."""
    assert (answer.status, answer.json.get("code")) == (status, code), answer.body
    assert list(ERROR.iter_errors(answer.json)) == []
    assert answer.json["status"] == status
    assert answer.json["requestId"] == answer.headers["x-request-id"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-type"].startswith("application/json")
    assert len(answer.json["message"]) < 400


async def refused(
    server: Serving, path: str, body: Any, status: int, code: str, **arguments: Any
) -> Answer:
    """Send a body; check the error, that nothing is stored, and that the connection stays."""
    async with await server.connect() as client:
        answer = await server.send(path, body, client=client, **arguments)
        check_error(answer, status, code)
        assert await server.events() == []
        if answer.headers.get("connection") != "close":
            assert (await server.send("/healthz", method="GET", client=client)).status == 200
    assert (await server.send("/healthz", method="GET")).status == 200
    return answer


def event(field: str, text: str) -> bytes:
    """Return a valid track event except for one field, which is given as JSON text."""
    fields = {"userId": '"u"', "event": '"E"', "messageId": '"m"'} | {field: text}
    return ("{" + ",".join(f"{json.dumps(k)}:{v}" for k, v in fields.items()) + "}").encode()
