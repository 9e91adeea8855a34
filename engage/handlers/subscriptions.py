# SPDX-License-Identifier: Apache-2.0
"""Changes of a user's subscriptions."""

from __future__ import annotations

import orjson

from engage.handlers.base import Handler
from engage.handlers.operations import FORM

from engage.pipeline.subscriptions import Source

__all__ = ["SubscriptionsHandler", "source_of"]


def source_of(handler: Handler, how: str) -> Source:
    """Return how and from where a request changes subscriptions."""
    user_agent = handler.request.fields.get("User-Agent", "")
    return Source(how=how, user_agent=user_agent, address=handler.client_address)


class SubscriptionsHandler(Handler):
    """Changes a user's subscriptions. The hash in the body authorizes it, not a write key."""

    def check(self) -> None:
        """Refuse by encoding, then length."""
        self.check_body()

    async def put(self) -> None:
        """Change the subscriptions, then answer with all of the user's."""
        media_type = self.request.fields.get("Content-Type", "").partition(";")[0].strip().lower()
        state = await self.services.pipeline.subscriptions(
            self.body, self.encoding, form=media_type == FORM, source=source_of(self, "api")
        )
        self.answer(orjson.dumps({"success": True, "subscriptions": state}))
