# SPDX-License-Identifier: Apache-2.0
"""What a user wants to receive."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from engage.handlers.ingestion import IngestionHandler
from engage.pipeline.decode import check_encoding

if TYPE_CHECKING:
    from engage.pipeline.decode import Encoding

__all__ = ["SubscriptionsHandler"]


class SubscriptionsHandler(IngestionHandler):
    """Changes a user's subscriptions; the hash in the body allows it, no write key."""

    encoding: Encoding

    def check(self) -> None:
        """Refuse by encoding, then length."""
        self.encoding = check_encoding(self.header("Content-Encoding"))
        self.check_length()

    async def put(self) -> None:
        """Change them, then answer with all of them."""
        state = await self.services.pipeline.subscriptions(self.body, self.encoding)
        self.answer(orjson.dumps({"success": True, "subscriptions": state}))
