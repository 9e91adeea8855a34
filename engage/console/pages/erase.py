# SPDX-License-Identifier: Apache-2.0
"""``/erase``: erases a user, with its progress and the receipt. ``/user.ndjson``: everything about
a user as a file."""

from __future__ import annotations

from typing import Any

from engage.api import EngageError, StorageUnavailable
from engage.console.base import ConsoleHandler
from engage.console.data.erasing import Erasing
from engage.console.display.formats import ROWS
from engage.erasure.person import erasable, export_person
from engage.erasure.requests import Request, erasure_requests
from engage.upkeep.audit import Actor
from engage.upkeep.erasures import key_of

__all__ = ["EraseHandler", "PersonHandler"]


class EraseHandler(ConsoleHandler):
    """The erasure that runs, or the last one of this process; or a form; or the requests."""

    async def get(self) -> None:
        """Show the form for the user ``id``; without one, the requests that providers passed on."""
        await self._show()

    async def post(self) -> None:
        """Erase the user, if its id was typed again."""
        user_id, console = self.exact("id"), self.console
        if not user_id or self.get_body_argument("confirm", "", strip=False) != user_id:
            self.set_status(400)
            await self._show("Type the user id to confirm that this user is to be erased.")
            return
        if console.erasing is not None and console.erasing.running:
            self.set_status(409)
            await self._show("A user is being erased; wait until that is done.")
            return
        try:
            key_of(console.config)
            erasable(console.store)
        except EngageError as error:
            self.set_status(400)
            await self._show(str(error))
            return
        actor = Actor(who=self.person or "", origin=self.address)
        console.erasing = Erasing(console.store, console.config, self.workspace.id, user_id, actor)
        self.go("erase", workspace=self.workspace.id, id=user_id)

    async def _show(self, error: str = "") -> None:
        erasing, user_id = self.console.erasing, self.exact("id")
        if erasing is not None and erasing.workspace_id != self.workspace.id:
            erasing = None
        if erasing is not None and not erasing.running and erasing.user_id != user_id:
            erasing = None
        requests: list[Request] = []
        if not user_id:
            requests = await self.read(self._requests()) or []
        self.page(
            "erase.html",
            title="Erase",
            nav="users",
            own_id=user_id,
            erasing=erasing,
            error=error,
            requests=requests,
            user_page=self.link("user", workspace=self.workspace.id, id=user_id),
        )

    async def _requests(self) -> list[Request]:
        """Return the first requests that are left."""
        console, found = self.console, list[Request]()
        names = console.registry.erasure_requests(console.config, self.workspace.id)
        async for one in erasure_requests(console.store, self.workspace.id, names):
            found.append(one)
            if len(found) == ROWS:
                break
        return found


class PersonHandler(ConsoleHandler):
    """Everything about the user ``id`` as NDJSON."""

    async def get(self) -> None:
        """Send it line by line."""
        self.set_header("Content-Type", "application/x-ndjson")
        self.set_header("Content-Disposition", 'attachment; filename="user.ndjson"')
        sent = 0
        try:
            async for line in export_person(self.console.store, self.workspace, self.exact("id")):
                self.write(line + b"\n")
                sent += 1
                if sent % ROWS == 0:
                    await self.flush()
        except StorageUnavailable:
            raise
        except EngageError as error:
            self.clear_header("Content-Disposition")
            self.set_header("Content-Type", "text/plain; charset=utf-8")
            self.set_status(400)
            self.finish(f"{error}\n")

    def send_error(self, *arguments: Any, **kwargs: Any) -> None:
        """Answer with an error, or cut off what is sent: a browser must not take it for whole."""
        if self._headers_written:
            self.detach().close()
        else:
            super().send_error(*arguments, **kwargs)
