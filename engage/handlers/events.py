# SPDX-License-Identifier: Apache-2.0
"""identify, track, page, screen, group, alias and batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engage.handlers.base import Handler
from engage.keys.auth import KEYLESS_BODY, UnknownKeyError
from engage.pipeline.decode import check_encoding

if TYPE_CHECKING:
    from engage.pipeline.decode import Encoding

__all__ = ["BatchHandler", "EventHandler"]


class _WritingHandler(Handler):
    """Accepts a body from a client with a write key."""

    encoding: Encoding

    def check(self) -> None:
        """Refuse by encoding, then length, then key, all before the body is decoded."""
        self.encoding = check_encoding(self.request.fields.get("Content-Encoding"))
        self.check_length()
        self.principal = self.principal_of_head()
        if self.principal is None and self.body_limit.bytes > KEYLESS_BODY.bytes:
            self.body_limit = KEYLESS_BODY
            self.exchange.set_max_body_size(KEYLESS_BODY.bytes)
            self.check_length()

    async def key_created(self, unknown: UnknownKeyError) -> None:
        """Return if the unknown key of a body has been created just now.

        :raises ApiError: otherwise.
        """
        await self.services.keys.wait(unknown, held=len(self.body))
        self.services.authenticator.body(unknown.key)

    @property
    def arguments(self) -> dict[str, Any]:
        """What the pipeline needs in addition to the body."""
        return {
            "encoding": self.encoding,
            "principal": self.principal,
            "idempotency_key": self.request.fields.get("Idempotency-Key"),
            "strict": self.request.fields.get("X-Strict-Mode") == "1",
        }


class EventHandler(_WritingHandler):
    """Accepts one event; its type is the route's name."""

    async def post(self) -> None:
        """Store the event, then answer."""
        pipeline, name = self.services.pipeline, self.route.name
        try:
            result = await pipeline.event(name, self.body, **self.arguments)
        except UnknownKeyError as unknown:
            await self.key_created(unknown)
            result = await pipeline.event(name, self.body, **self.arguments)
        self.principal = result.principal
        self.answer(result.body())


class BatchHandler(_WritingHandler):
    """Accepts many events, each with its type."""

    async def post(self) -> None:
        """Store the valid ones, then answer."""
        pipeline = self.services.pipeline
        try:
            result = await pipeline.batch(self.body, **self.arguments)
        except UnknownKeyError as unknown:
            await self.key_created(unknown)
            result = await pipeline.batch(self.body, **self.arguments)
        self.principal = result.principal
        self.event_count = result.accepted + result.duplicates + len(result.rejected)
        self.answer(result.body())
