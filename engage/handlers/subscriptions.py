# SPDX-License-Identifier: Apache-2.0
"""A user's subscriptions: reading and changing them with a signed link."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import orjson

from engage.api import render_time
from engage.errors import invalid_link, link_expired
from engage.handlers.base import Handler
from engage.handlers.operations import FORM
from engage.subscriptions.choices import Source

if TYPE_CHECKING:
    from engage.http1.request import Request

__all__ = ["SubscriptionsHandler", "arguments_of", "link_of", "source_of"]

#: Argument of a link → field of a change; as in Dittofeed's links.
_SIGNED: Final = {"w": "workspaceId", "i": "identifier", "ik": "identifierKey", "h": "hash"}
#: An expiry has only one form, because the number is signed and not its text.
_SECONDS: Final = re.compile(rb"[1-9][0-9]{0,15}")
_AMPERSANDS: Final = re.compile(r"^(?:amp;)+")


def arguments_of(request: Request) -> dict[str, list[bytes]]:
    """Return the arguments of a link, also of one that a program copied out of HTML with its
    ``&amp;``: the signature protects them all the same."""
    arguments: dict[str, list[bytes]] = {}
    for name, values in request.query_arguments.items():
        arguments.setdefault(_AMPERSANDS.sub("", name), []).extend(values)
    return arguments


def link_of(request: Request) -> dict[str, Any]:
    """Return what a link in a query says, as fields of a change.

    :raises ApiError: 401 ``invalid_user_hash`` if an argument is missing, repeated or not valid.
    """
    arguments = arguments_of(request)
    link: dict[str, Any] = {}
    try:
        for name, field in _SIGNED.items():
            (value,) = arguments[name]
            link[field] = value.decode()
        if "e" in arguments:
            (value,) = arguments["e"]
            if _SECONDS.fullmatch(value) is None:
                raise invalid_link()
            link["expires"] = int(value)
        if "v" in arguments:
            (value,) = arguments["v"]
            if value != b"1":
                raise invalid_link()
            link["v"] = True
        if "u" in arguments:
            (value,) = arguments["u"]
            link["anonymousId" if "v" in link else "userId"] = value.decode()
    except (KeyError, ValueError):
        raise invalid_link() from None
    return link


def source_of(handler: Handler, how: str) -> Source:
    """Return how and from where a request changes subscriptions."""
    user_agent = handler.request.fields.get("User-Agent", "")
    return Source(how=how, user_agent=user_agent, address=handler.recorded_address)


class SubscriptionsHandler(Handler):
    """Reads and changes a user's subscriptions. A hash authorizes it, not a write key."""

    def check(self) -> None:
        """Refuse a change by encoding, then length."""
        if self.request.method == "PUT":
            self.check_body()

    async def get(self) -> None:
        """Answer with the subscriptions, and with what is suppressed of the user's addresses."""
        pipeline = self.services.pipeline
        person = await pipeline.person(link_of(self.request))
        if person.expired:
            raise link_expired()
        preferences = await pipeline.preferences(person)
        suppressions = [
            {
                "channel": suppression.channel,
                "groupId": suppression.group_id or None,
                "reason": suppression.reason,
                "at": render_time(suppression.at),
            }
            for suppression in preferences.suppressions
        ]
        body = {"success": True, "subscriptions": preferences.choices, "suppressions": suppressions}
        if preferences.left_out:
            body["addressesLeftOut"] = preferences.left_out
        self.answer(orjson.dumps(body), headers={"Cache-Control": "no-store"})

    head = get

    async def put(self) -> None:
        """Change the subscriptions, then answer with all of the user's."""
        media_type = self.request.fields.get("Content-Type", "").partition(";")[0].strip().lower()
        state = await self.services.pipeline.subscriptions(
            self.body, self.encoding, form=media_type == FORM, source=source_of(self, "api")
        )
        self.answer(orjson.dumps({"success": True, "subscriptions": state}))
