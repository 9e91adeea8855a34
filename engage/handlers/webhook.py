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
    #: Its body comes after :meth:`check`.
    delivery: Delivery
    #: The fields of the log.
    _fields: dict[str, str]

    def check(self) -> None:
        """Refuse by the provider's name, then encoding, then length, then workspace."""
        deliveries, request = self.services.deliveries, self.request
        name = self._segments["provider"]
        if name not in deliveries.body_limits:
            raise deliveries.unknown_provider()
        self.body_limit = deliveries.body_limits[name]
        self.log_fields = self._fields = {"provider": name}
        if request.method == "HEAD":
            return
        self.check_body()
        self.exchange.max_body = self.body_limit.bytes
        target = request.target if request.query else request.path
        pairs = request.headers.get_all() if request.headers.repeated else request.fields.items()
        self.delivery = Delivery(target=target, headers=[*pairs], encoding=self.encoding)
        self.destination = deliveries.destination(name, target, self.delivery.headers)

    def answer_error(self, error: ApiError, headers: Mapping[str, str]) -> None:
        self.log_fields = {**self.log_fields, "outcome": error.code}
        super().answer_error(error, headers)

    def not_allowed(self) -> ApiError:
        """Return 404 for an unknown provider: no method is allowed there."""
        deliveries = self.services.deliveries
        exists = self._segments["provider"] in deliveries.body_limits
        return super().not_allowed() if exists else deliveries.unknown_provider()

    def head(self, provider: str) -> None:
        """Answer 200: Mandrill checks the URL with HEAD before it creates a webhook."""
        self.answer(b"")

    async def post(self, provider: str) -> None:
        """Verify, translate and store the delivery, then answer."""
        self.delivery.body = self.body
        deliveries = self.services.deliveries
        reply = await deliveries.receive(self.destination, self.delivery, self._fields)
        self.answer(reply.body, content_type=reply.content_type)
