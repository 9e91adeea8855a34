# SPDX-License-Identifier: Apache-2.0
"""Deliveries of webhook providers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engage.deliveries.delivery import Incoming
from engage.errors import ApiError
from engage.handlers.ingestion import IngestionHandler
from engage.pipeline.decode import check_encoding

if TYPE_CHECKING:
    from engage.pipeline.decode import Encoding

__all__ = ["WebhookHandler"]


class WebhookHandler(IngestionHandler):
    """One delivery; ``HEAD`` only asks whether the URL is there."""

    encoding: Encoding

    def check(self) -> None:
        """Refuse by name, then encoding, then length, then workspace."""
        deliveries = self.services.deliveries
        deliveries.check_provider(self.provider)
        if self.request.method == "HEAD":
            return
        headers = self.request.headers
        self.encoding = check_encoding(headers.get("Content-Encoding"))
        self.check_length()
        deliveries.workspace(self.provider, self.target, list(headers.get_all()))

    def not_allowed(self) -> ApiError:
        """See :meth:`Handler.not_allowed`: where nothing is, no method is the right one."""
        try:
            self.services.deliveries.check_provider(self.provider)
        except ApiError as error:
            return error
        return super().not_allowed()

    @property
    def provider(self) -> str:
        """The name in the path; needed also before Tornado has taken that apart."""
        return self.request.path.rpartition("/")[2]

    @property
    def target(self) -> str:
        """Path and query as they were sent."""
        query = self.request.query
        return f"{self.request.path}?{query}" if query else self.request.path

    def head(self, provider: str) -> None:
        """Mandrill asks before it makes a webhook."""
        self.answer(b"")

    async def post(self, provider: str) -> None:
        """Verify, translate and store it, then answer."""
        reply = await self.services.deliveries.receive(
            Incoming(
                provider=provider,
                method="POST",
                target=self.target,
                headers=list(self.request.headers.get_all()),
                body=self.body,
                encoding=self.encoding,
            )
        )
        self.answer(reply.body, content_type=reply.content_type)
