# SPDX-License-Identifier: Apache-2.0
"""Checks for load balancers and supervisors."""

from __future__ import annotations

from typing import Final

import orjson

from engage.errors import log_unavailable, shutting_down, storage_unavailable
from engage.handlers.base import Handler

__all__ = ["AliveHandler", "ReadyHandler"]

_OK: Final = b'{"success":true}'
_UNCACHED: Final = {"Cache-Control": "no-store"}


class AliveHandler(Handler):
    """``/healthz``: this process answers.

    It checks nothing else: a storage that is down must not make a supervisor restart a healthy
    process.
    """

    def get(self) -> None:
        """Answer 200."""
        self.answer(_OK, headers=_UNCACHED)

    head = get


class ReadyHandler(Handler):
    """``/readyz``: this process can store events. See :mod:`engage.upkeep.readiness`.

    With a log, it is ready if an event can be appended to the log. The state of the storage, and
    whether it is too far behind the log, are shown in the answer.
    """

    async def get(self) -> None:
        """Answer 200, or 503 if it cannot."""
        if self.services.draining():
            raise shutting_down()
        state = self.services.log_state
        if not await self.services.readiness.ready():
            # A server with a log needs the storage as well until it knows the write keys.
            needs_storage = state is None or not self.services.keys.loaded
            raise storage_unavailable() if needs_storage else log_unavailable()
        self.answer(_OK if state is None else orjson.dumps(state()), headers=_UNCACHED)

    head = get
