# SPDX-License-Identifier: Apache-2.0
"""Changes of a user's subscriptions."""

from __future__ import annotations

import orjson

from engage.handlers.base import Handler
from engage.handlers.operations import FORM

__all__ = ["SubscriptionsHandler"]


class SubscriptionsHandler(Handler):
    """Changes a user's subscriptions. The hash in the body authorizes it, not a write key."""

    def check(self) -> None:
        """Refuse by encoding, then length."""
        self.check_body()

    async def put(self) -> None:
        """Change the subscriptions, then answer with all of the user's."""
        media_type = self.request.fields.get("Content-Type", "").partition(";")[0].strip().lower()
        state = await self.services.pipeline.subscriptions(
            self.body, self.encoding, form=media_type == FORM
        )
        self.answer(orjson.dumps({"success": True, "subscriptions": state}))
