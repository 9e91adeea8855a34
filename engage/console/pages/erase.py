# SPDX-License-Identifier: Apache-2.0
"""``/erase``: erases a user, with its progress and the receipt. ``/user.ndjson``: everything about
a user as a file."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from engage.api import EngageError, StorageUnavailable
from engage.config.erasures_file import key_of
from engage.console.base import ConsoleHandler
from engage.console.data.erasing import Erasing
from engage.console.data.reader import InTurn
from engage.console.display.formats import ROWS
from engage.people.addresses import named_addresses
from engage.people.erase import erase_user
from engage.people.own_events import own_events
from engage.people.person import (
    OtherVisitor,
    export_person,
    other_addresses,
    other_visitors,
    person_of,
)
from engage.people.requests import Request, erasure_requests

__all__ = ["EraseHandler", "PersonHandler"]


class _Others(NamedTuple):
    """What may be a user's, and anyone can claim."""

    #: The addresses that surely are the user's.
    certain: Sequence[str] = ()
    #: See :func:`~engage.people.person.other_addresses`.
    addresses: Mapping[str, bool] = {}
    visitors: Sequence[OtherVisitor] = ()
    #: Address → number of the deliveries whose user was found by it.
    found_by: Mapping[str, int] = {}


class _PersonHandler(ConsoleHandler):
    """A page with a field for the addresses of a person."""

    def visitors(self, box: str) -> list[str]:
        """Return the anonymous ids whose boxes of a name were ticked, exactly."""
        return [self.decode_argument(value, box) for value in self.request.arguments.get(box, ())]

    def named_addresses(self) -> set[str]:
        """Return the addresses that were typed, one on each line.

        :raises EngageError: if one is not an address.
        """
        return named_addresses(filter(None, map(str.strip, self.exact("address").splitlines())))


class EraseHandler(_PersonHandler):
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
            named = self.named_addresses()
        except EngageError as error:
            self.set_status(400)
            await self._show(str(error))
            return
        user = (self.workspace.id, user_id)
        whom: Any = {"addresses": named, "visitors": self.visitors("visitor")}
        work = functools.partial(erase_user, console.store, console.config, *user, actor=self.actor)
        console.erasing = Erasing(*user, functools.partial(work, **whom))
        self.go("erase", id=user_id)

    async def _show(self, error: str = "") -> None:
        erasing, user_id = self.console.erasing, self.exact("id")
        if erasing is not None and erasing.workspace_id != self.workspace.id:
            erasing = None
        if erasing is not None and not erasing.running and erasing.user_id != user_id:
            erasing = None
        requests: list[Request] = []
        others = _Others()
        if not user_id:
            requests = await self.read(self._requests()) or []
        else:
            others = await self.read(self._others(user_id)) or others
        ticked = {x.anonymous_id for x in others.visitors if x.linked and not x.shared}
        if self.request.method == "POST":
            ticked = set(self.visitors("visitor"))
        self.page(
            "erase.html",
            title="Erase",
            nav="users",
            own_id=user_id,
            erasing=erasing,
            error=error,
            requests=requests,
            others=others,
            ticked=ticked,
            typed=self.exact("address"),
            user_page=self.link("user", id=user_id),
        )

    async def _others(self, user_id: str) -> _Others:
        # The page is shown without these numbers if counting takes the time of a read.
        store, seconds = self.console.store, self.console.reader.timeout / 2
        person = await person_of(store, self.workspace, user_id)
        return _Others(
            [name.partition(":")[2] for name in person.addresses],
            await other_addresses(store, self.workspace, person),
            await other_visitors(store, self.workspace, person, seconds=seconds),
            (await own_events(store, self.workspace, user_id)).found_by,
        )

    async def _requests(self) -> list[Request]:
        """Return the first requests that are left."""
        console, requests = self.console, list[Request]()
        names = console.registry.erasure_requests(console.config, self.workspace.id)
        async for request in erasure_requests(console.store, self.workspace.id, names):
            requests.append(request)
            if len(requests) == ROWS:
                break
        return requests


class PersonHandler(_PersonHandler):
    """Everything about the user ``id`` as NDJSON."""

    async def get(self) -> None:
        """Send it line by line."""
        if self.unverified is not None:
            raise StorageUnavailable(self.unverified)
        store: Any = InTurn(self.console.store, self.console.reader)
        # A form that is sent by GET replaces the query of its page.
        workspace, user_id = self.workspace, self.exact("user") or self.exact("id")
        sent = 0
        try:
            named = self.named_addresses()
            self.set_header("Content-Type", "application/x-ndjson")
            self.set_header("Content-Disposition", 'attachment; filename="user.ndjson"')
            visitors = self.visitors("download")
            async for line in export_person(store, workspace, user_id, named, visitors):
                if not sent:
                    about: Any = {"workspace": workspace.id, "user": user_id}
                    about |= {"addresses": len(named), "visitors": len(visitors)}
                    await self.record_audit("user-downloaded", **about)
                self.write(line + b"\n")
                sent += 1
                if sent % ROWS == 0:
                    await self.flush()
        except StorageUnavailable:
            raise
        except EngageError as error:
            self.set_header("Content-Type", "text/plain; charset=utf-8")
            self.set_status(400)
            self.finish(f"{error}\n")

    def send_error(self, *arguments: Any, **kwargs: Any) -> None:
        """Answer with an error, or cut off what is sent: a browser must not take it for whole."""
        if self._headers_written:
            self.detach().close()
        else:
            super().send_error(*arguments, **kwargs)
