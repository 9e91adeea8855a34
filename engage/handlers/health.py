# SPDX-License-Identifier: Apache-2.0
"""For load balancers and supervisors."""

from __future__ import annotations

from typing import Final

from engage.errors import shutting_down, storage_unavailable
from engage.handlers.ingestion import IngestionHandler

__all__ = ["AliveHandler", "ReadyHandler"]

_OK: Final = b'{"success":true}'
_UNCACHED: Final = {"Cache-Control": "no-store"}


class AliveHandler(IngestionHandler):
    """``/healthz``: this process answers. Asks nobody else, so that a storage that is down does not
    make a supervisor restart what is healthy."""

    def get(self) -> None:
        """Say so."""
        self.answer(_OK, headers=_UNCACHED)

    head = get


class ReadyHandler(IngestionHandler):
    """``/readyz``: requests can be sent here. See :mod:`engage.storage.readiness`."""

    async def get(self) -> None:
        """Say so, or 503."""
        if self.services.draining():
            raise shutting_down()
        if not await self.services.readiness.ready():
            raise storage_unavailable()
        self.answer(_OK, headers=_UNCACHED)

    head = get
