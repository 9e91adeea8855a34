# SPDX-License-Identifier: Apache-2.0
"""Finds the users that hashes belong to, among any number of users with the same identifier.

Requests that search for the same identifier share the passes over its users: the hashes of a user
are computed once a pass, whatever the number of requests. So the requests that someone forges
cannot delay a right one by more than a pass. Different identifiers take turns, a page each. The
odd forms of identifiers have one turn together: a client can send any number of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from typing import Final

from engage.api import Page

__all__ = ["Hashes", "Read", "SharedSearch"]

#: How many hashes are computed before other work of the event loop runs (about 3 ms).
HASHES_STEP: Final = 500

#: Cursor of the page before → a page of user ids.
Read = Callable[[str | None], Awaitable[Page[str]]]
#: User id → the hashes that are right for the user, one for each secret.
Hashes = Callable[[str], Sequence[bytes]]

#: A hash and the result of the request that sent it.
_Request = tuple[bytes, "asyncio.Future[str | None]"]


class SharedSearch:
    """Runs one search for each identifier that requests are waiting for."""

    def __init__(self) -> None:
        #: Requests that wait for the next pass.
        self._joined: dict[Hashable, list[_Request]] = {}
        self._tasks: dict[Hashable, asyncio.Task[None]] = {}
        #: Held by the search that reads and computes a page.
        self._turn = asyncio.Lock()
        #: Held also, and first, by a search for an odd form of an identifier.
        self._odd = asyncio.Lock()

    async def find(
        self, key: Hashable, given: bytes, read: Read, hashes: Hashes, *, odd: bool
    ) -> str | None:
        """Return the user that a hash belongs to, or ``None`` if it belongs to none of them.

        :param key: requests with the same key share the search. Their ``read`` and ``hashes`` must
            be equivalent.
        :param given: the hash.
        :param odd: the identifier was not sent in the form in which users are looked up.
        :raises Exception: what ``read`` raises.
        """
        result: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._joined.setdefault(key, []).append((given, result))
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(self._run(key, read, hashes, odd))
        return await result

    async def _run(self, key: Hashable, read: Read, hashes: Hashes, odd: bool) -> None:
        """Run passes while requests are waiting."""
        requests: list[_Request] = []
        try:
            while requests := self._joined.pop(key, []):
                try:
                    await self._pass(requests, read, hashes, odd)
                except Exception as error:
                    for result in _waiting(requests):
                        result.set_exception(error)
        finally:
            del self._tasks[key]
            # Only if this task is cancelled are any left.
            for result in _waiting([*requests, *self._joined.pop(key, [])]):
                result.cancel()

    async def _pass(
        self, requests: Sequence[_Request], read: Read, hashes: Hashes, odd: bool
    ) -> None:
        """Compare the hashes of requests with all users."""
        wanted: dict[bytes, list[_Request]] = {}
        for request in requests:
            wanted.setdefault(request[0], []).append(request)
        cursor = None
        # A request may end before its search does: the client disconnects, or the time is over.
        while any(_waiting(requests)):
            async with self._odd if odd else contextlib.nullcontext(), self._turn:
                page = await read(cursor)
                found: dict[bytes, str] = {}
                computed = 0
                for user in page.items:
                    right = hashes(user)
                    # A look-up takes as long for a wrong hash of which the first bytes are right.
                    found.update((one, user) for one in right if one in wanted)
                    computed += len(right)
                    if computed >= HASHES_STEP:
                        computed = 0
                        await asyncio.sleep(0)
            # After all of a page, so that the time does not tell which user it is.
            for given, user in found.items():
                for result in _waiting(wanted[given]):
                    result.set_result(user)
            cursor = page.cursor
            if cursor is None:
                break
            await asyncio.sleep(0)
        for result in _waiting(requests):
            result.set_result(None)


def _waiting(requests: Iterable[_Request]) -> list[asyncio.Future[str | None]]:
    return [result for _, result in requests if not result.done()]
