# SPDX-License-Identifier: Apache-2.0
"""An erasure that runs in the background of the console."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final

from engage.api import EngageError, EventStore
from engage.config import Config
from engage.erasure.erase import Receipt, erase_user
from engage.upkeep.audit import Actor

__all__ = ["Erasing"]

_log = logging.getLogger(__name__)

#: What is shown of an error that is none of engage.
_UNEXPECTED: Final = "it failed; see the log of the console"


class Erasing:
    """The erasure of one user. If the console ends before it does, it begins again when the
    operator asks for it again."""

    def __init__(
        self, store: EventStore, config: Config, workspace_id: str, user_id: str, actor: Actor
    ) -> None:
        self.workspace_id = workspace_id
        self.user_id = user_id
        #: What is done at the moment, and how many things of it are done.
        self.step = ("beginning", 0)
        self.receipt: Receipt | None = None
        #: Why it failed.
        self.error = ""
        work = erase_user(store, config, workspace_id, user_id, actor=actor, report=self._report)
        self._task = asyncio.create_task(self._run(work), name="erase a user")

    @property
    def running(self) -> bool:
        """Whether it is not done, and did not fail."""
        return not self._task.done()

    def _report(self, step: str, count: int) -> None:
        self.step = (step, count)

    async def _run(self, work: Coroutine[Any, Any, Receipt]) -> None:
        try:
            self.receipt = await work
        except EngageError as error:
            self.error = str(error)
        except Exception:
            _log.exception("an erasure failed")
            self.error = _UNEXPECTED

    async def close(self) -> None:
        """Stop it."""
        self._task.cancel()
        await asyncio.wait([self._task])
