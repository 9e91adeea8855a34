# SPDX-License-Identifier: Apache-2.0
"""Changes of a user's subscriptions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from engage.handlers.base import Handler
from engage.pipeline.decode import check_encoding

if TYPE_CHECKING:
    from engage.pipeline.decode import Encoding

__all__ = ["SubscriptionsHandler"]


class SubscriptionsHandler(Handler):
    """Changes a user's subscriptions. The hash in the body authorizes it, not a write key."""

    encoding: Encoding

    def check(self) -> None:
        """Refuse by encoding, then length."""
        self.encoding = check_encoding(self.request.fields.get("Content-Encoding"))
        self.check_length()

    async def put(self) -> None:
        """Change the subscriptions, then answer with all of the user's."""
        state = await self.services.pipeline.subscriptions(self.body, self.encoding)
        self.answer(orjson.dumps({"success": True, "subscriptions": state}))
