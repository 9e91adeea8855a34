# SPDX-License-Identifier: Apache-2.0
"""An erasure that runs in the background of the console."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

from engage.api import EngageError
from engage.people.erase import Receipt, in_words

__all__ = ["Erasing"]

_log = logging.getLogger(__name__)

#: What is shown of an error that is none of engage.
_UNEXPECTED: Final = "the user may be erased in part; see the log of the console"

Work = Coroutine[Any, Any, Receipt]


class Erasing:
    """The erasure of one user. If the console ends before it does, it begins again when the
    operator asks for it again.

    :param work: calls :func:`~engage.people.erase.erase_user` with ``report``.
    """

    def __init__(self, workspace_id: str, user_id: str, work: Callable[..., Work]) -> None:
        self.workspace_id = workspace_id
        self.user_id = user_id
        #: What is done at the moment, and how many things of it are done.
        self.step = ("beginning", 0)
        self.receipt: Receipt | None = None
        #: Why it failed, and what was done.
        self.error = ""
        self._task = asyncio.create_task(self._run(work(report=self._report)), name="erase a user")

    @property
    def running(self) -> bool:
        """Whether it is not done, and did not fail."""
        return not self._task.done()

    def _report(self, step: str, count: int) -> None:
        self.step = (step, count)

    async def _run(self, work: Work) -> None:
        try:
            self.receipt = await work
        except EngageError as error:
            self.error = in_words(error)
        except Exception:
            _log.exception("an erasure failed")
            self.error = _UNEXPECTED

    async def close(self) -> None:
        """Stop it."""
        self._task.cancel()
        await asyncio.wait([self._task])
