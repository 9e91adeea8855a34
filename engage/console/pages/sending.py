# SPDX-License-Identifier: Apache-2.0
"""The button *Send a test event*, beside the lines that send one."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

import orjson
from tornado.httpclient import AsyncHTTPClient, HTTPError, HTTPRequest

from engage.console.display.snippets import CALLS

if TYPE_CHECKING:
    from engage.console.base import ConsoleHandler

__all__ = ["send_test_event"]

#: Seconds for the answer. The server may wait for its storage for most of them.
ANSWER_SECONDS: Final = 10.0

_EVENT: Final = {
    "anonymousId": "engage-console",
    "event": "Test Event",
    "properties": {"sentBy": "the console of engage"},
}


async def send_test_event(handler: ConsoleHandler) -> tuple[str, str]:
    """Send an event to the server as a client would, with the write key in the form.

    :return: the message id of the event; if it was not accepted, ``""`` and the reason.
    """
    url = handler.console.events_url + CALLS
    write_key = handler.exact("write_key")
    headers = {"Content-Type": "application/json"}
    for key in handler.console.keys.of(handler.workspace.id):
        if key.key == write_key and key.origins:
            headers["Origin"] = key.origins[0]
    request = HTTPRequest(
        f"{url}track",
        method="POST",
        headers=headers,
        auth_username=write_key,
        auth_password="",
        body=orjson.dumps(_EVENT),
        request_timeout=ANSWER_SECONDS,
        follow_redirects=False,
    )
    try:
        response = await AsyncHTTPClient().fetch(request, raise_error=False)
    except (HTTPError, OSError) as error:
        return "", f"There was no answer from {url}: {error}"
    answer: dict[str, Any] = {}
    with contextlib.suppress(TypeError, ValueError):  # It is not engage that answers.
        answer = dict(orjson.loads(response.body))
    if "messageId" in answer:  # Only a success has one.
        message_id = str(answer["messageId"])
        await handler.record_audit("test-event-sent", messageId=message_id)
        return message_id, ""
    return "", f"The answer was {response.code}: {answer.get('message') or response.reason}"
