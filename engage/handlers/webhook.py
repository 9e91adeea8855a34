# SPDX-License-Identifier: Apache-2.0
"""Webhook deliveries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from engage.deliveries.delivery import Delivery
from engage.errors import ApiError
from engage.handlers.base import Handler

if TYPE_CHECKING:
    from engage.deliveries.delivery import Destination

__all__ = ["WebhookHandler"]


class WebhookHandler(Handler):
    """Receives a delivery with ``POST``; answers ``HEAD`` if the provider is installed."""

    destination: Destination

    def check(self) -> None:
        """Refuse by the provider's name, then encoding, then length, then workspace."""
        deliveries = self.services.deliveries
        deliveries.check_provider(self.provider)
        self.log_fields = {"provider": self.provider}
        self.body_limit = deliveries.body_limit(self.provider)
        if self.request.method == "HEAD":
            return
        self.check_body()
        self.exchange.set_max_body_size(self.body_limit.bytes)
        self.destination = deliveries.destination(
            self.provider, self.target, list(self.request.headers.get_all())
        )

    def answer_error(self, error: ApiError, headers: Mapping[str, str]) -> None:
        self.log_fields = {**self.log_fields, "outcome": error.code}
        super().answer_error(error, headers)

    def not_allowed(self) -> ApiError:
        """Return 404 for an unknown provider: no method is allowed there."""
        try:
            self.services.deliveries.check_provider(self.provider)
        except ApiError as error:
            return error
        return super().not_allowed()

    @property
    def provider(self) -> str:
        """The provider's name, from the path; needed before the path is decoded."""
        return self.request.path.rpartition("/")[2]

    @property
    def target(self) -> str:
        """Path and query, as sent."""
        query = self.request.query
        return f"{self.request.path}?{query}" if query else self.request.path

    def head(self, provider: str) -> None:
        """Answer 200: Mandrill checks the URL with HEAD before it creates a webhook."""
        self.answer(b"")

    async def post(self, provider: str) -> None:
        """Verify, translate and store the delivery, then answer."""
        self.log_fields = fields = {**self.log_fields}
        reply = await self.services.deliveries.receive(
            self.destination,
            Delivery(
                target=self.target,
                headers=list(self.request.headers.get_all()),
                body=self.body,
                encoding=self.encoding,
                arrived_at=self.services.deliveries.clock() / 1000,
            ),
            fields,
        )
        self.answer(reply.body, content_type=reply.content_type)
