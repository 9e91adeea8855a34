# SPDX-License-Identifier: Apache-2.0
"""identify, track, page, screen, group, alias and batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from engage.errors import MAX_ERRORS
from engage.handlers.base import Handler
from engage.keys.auth import KEYLESS_BODY, UnknownKeyError
from engage.keys.limits import WITHOUT_LETTER, Rules

if TYPE_CHECKING:
    from engage.keys.auth import Principal
    from engage.pipeline.results import BatchResult

__all__ = ["BatchHandler", "EventHandler", "batch_answer"]


class _WritingHandler(Handler):
    """Accepts a body from a client with a write key."""

    @property
    def kind(self) -> str | None:
        """The type of its events; ``None`` if each names its own."""
        return None

    def check(self) -> None:
        """Refuse by encoding, then length, then key, all before the body is decoded."""
        self.check_body()
        self.principal = self.principal_of_head()
        if self.principal is None:
            if self.body_limit.bytes > KEYLESS_BODY.bytes:
                self.body_limit = KEYLESS_BODY
                self.exchange.set_max_body_size(KEYLESS_BODY.bytes)
                self.check_length()
            return
        if self.principal.rules is not None:
            self.check_rules(self.principal.rules)
        guard = self.principal.guard
        if guard is not None and not (self._complete and self.encoding == "identity"):
            guard.check()  # Neither reads a body that has not arrived nor decompresses one.

    def check_rules(self, rules: Rules) -> None:
        """Refuse a request that its key may not make.

        :raises ApiError: 403.
        """
        request = self.request
        in_query = bool(request.query) and any(request.query_arguments.get("writeKey", ()))
        rules.check_request(request.fields.get("Origin"), self.kind, in_query=in_query)

    def named(self, principal: Principal) -> None:
        """Take the principal that the body names.

        :raises ApiError: as :meth:`check_rules`.
        """
        self.principal = principal
        if principal.rules is not None:
            self.check_rules(principal.rules)

    async def key_created(self, unknown: UnknownKeyError) -> None:
        """Return if the unknown key of a body has been created just now.

        :raises ApiError: otherwise.
        """
        await self.wait_for_key(unknown)
        self.services.authenticator.body(unknown.key)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the pipeline in addition to the body."""
        return {
            "encoding": self.encoding,
            "principal": self.principal,
            "named": self.named,
            "idempotency_key": self.request.fields.get("Idempotency-Key"),
            "strict": self.request.fields.get("X-Strict-Mode") == "1",
        }


class EventHandler(_WritingHandler):
    """Accepts one event; its type is the route's name."""

    @property
    def kind(self) -> str:
        return self.route.name

    async def post(self) -> None:
        """Store the event, then answer."""
        pipeline, name = self.services.pipeline, self.route.name
        try:
            result = await pipeline.event(name, self.body, **self.arguments)
        except UnknownKeyError as unknown:
            await self.key_created(unknown)
            result = await pipeline.event(name, self.body, **self.arguments)
        self.answer(b'{"success":true,"messageId":' + orjson.dumps(result.message_id) + b"}")


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
        self.event_count = result.accepted + result.duplicates + len(result.rejected)
        for item in result.rejected:
            if item.error.code in WITHOUT_LETTER:
                self.partial = item.error
        self.answer(batch_answer(result))


def batch_answer(result: BatchResult) -> bytes:
    """Return the JSON answer to a batch, with at most :data:`MAX_ERRORS` details in total."""
    rejected: list[dict[str, Any]] = []
    room = MAX_ERRORS
    for item in result.rejected:
        entry: dict[str, Any] = {
            "index": item.index,
            "messageId": item.message_id,
            "code": item.error.code,
            "message": item.error.message,
        }
        if room > 0:
            problems = item.error.errors[:room]
            room -= max(len(problems), 1)
            entry["errors"] = [problem.as_dict() for problem in problems]
        rejected.append(entry)
    return orjson.dumps(
        {
            "success": True,
            "accepted": result.accepted,
            "duplicates": result.duplicates,
            "rejected": rejected,
        }
    )
