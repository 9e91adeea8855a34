# SPDX-License-Identifier: Apache-2.0
"""Fetches documents that a webhook provider needs: the only outgoing calls that engage makes.

A delivery can cause a call before it is verified, so the calls are bounded: only to hosts that the
provider's code names, without redirects or a proxy, for at most 3 s and 64 KiB, one call at a time
and ten a minute. 16 documents are kept for 24 hours. A failed call, or a document that is not the
expected one, is not repeated for 5 minutes.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from tornado.httpclient import HTTPRequest
from tornado.simple_httpclient import SimpleAsyncHTTPClient

from engage.api import EngageError, Fetch

__all__ = ["FetchError", "FetchRefusedError", "Fetcher"]

_log = logging.getLogger(__name__)

TIMEOUT: Final = 3.0
MAX_BYTES: Final = 64 * 1024
MAX_KEPT: Final = 16
KEPT_SECONDS: Final = 24 * 3600.0
FAILED_SECONDS: Final = 300.0
CALLS: Final = 10
CALLS_SECONDS: Final = 60.0

#: Only scheme, host, path and query; parsers disagree about everything else.
_URL: Final = re.compile(r"https://(?P<host>[a-z0-9.-]{1,253})(?P<rest>/[!-\"$-~]*)", re.ASCII)


class FetchRefusedError(EngageError):
    """The URL is not allowed; no request was sent."""


class FetchError(EngageError):
    """The document cannot be fetched now."""


class Fetcher:
    """Fetches documents within bounds.

    :param client: a Tornado HTTP client; ``None``: one is made at the first call.
    :param clock: returns seconds that never decrease.
    """

    def __init__(self, client: Any = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        #: URL → (when it expires, document), least recently used first.
        self._kept: collections.OrderedDict[str, tuple[float, bytes]] = collections.OrderedDict()
        self._failed: collections.OrderedDict[str, float] = collections.OrderedDict()
        self._calls: collections.deque[float] = collections.deque()
        self._under_way: tuple[str, asyncio.Task[bytes]] | None = None

    async def get(self, fetch: Fetch, hosts: Sequence[str]) -> bytes:
        """Return a document.

        :param hosts: regular expressions; the whole host must match one of them.
        :raises FetchRefusedError: if the URL is not ``https`` to such a host, or if it has a port,
            user information or a fragment.
        :raises FetchError: if the document cannot be fetched now.
        """
        match = _URL.fullmatch(fetch.url)
        if match is None or not any(re.fullmatch(host, match["host"]) for host in hosts):
            raise FetchRefusedError("the URL leads to a host that is not allowed")
        now = self._clock()
        if fetch.cacheable and fetch.url in self._kept:
            until, document = self._kept[fetch.url]
            if now < until:
                self._kept.move_to_end(fetch.url)
                return document
            del self._kept[fetch.url]
        if now < self._failed.get(fetch.url, 0.0):
            raise FetchError("the same call failed a moment ago")
        if self._under_way is not None:
            url, task = self._under_way
            if url != fetch.url:
                raise FetchError("another call is under way")
            return await asyncio.shield(task)
        while self._calls and self._calls[0] <= now - CALLS_SECONDS:
            self._calls.popleft()
        if len(self._calls) >= CALLS:
            raise FetchError(f"{CALLS} calls were made in the last minute")
        self._calls.append(now)
        task = asyncio.get_running_loop().create_task(self._call(fetch))
        # Retrieve the exception even if every caller has gone, or asyncio logs it.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._under_way = (fetch.url, task)
        # Shielded, because others may wait for the same call when this caller is cancelled.
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Cancel the call that is under way and close the client."""
        if self._under_way is not None:
            self._under_way[1].cancel()
            await asyncio.wait([self._under_way[1]])
        if self._client is not None:
            self._client.close()
            self._client = None

    async def _call(self, fetch: Fetch) -> bytes:
        try:
            document = await self._fetch(fetch.url)
            if fetch.check is not None:
                fetch.check(document)
        except Exception as error:
            reason = str(error) if isinstance(error, FetchError) else type(error).__name__
            _log.warning("fetching for a webhook provider failed: %s", reason)
            self._keep(self._failed, fetch.url, self._clock() + FAILED_SECONDS)
            raise FetchError("the call failed") from error
        finally:
            self._under_way = None
        self._failed.pop(fetch.url, None)
        if fetch.cacheable:
            self._keep(self._kept, fetch.url, (self._clock() + KEPT_SECONDS, document))
        return document

    async def _fetch(self, url: str) -> bytes:
        if self._client is None:
            # Not shared: a shared client has the limits of the caller that made it first.
            self._client = SimpleAsyncHTTPClient(
                force_instance=True,
                max_clients=1,
                max_buffer_size=4 * MAX_BYTES,
                max_header_size=MAX_BYTES,
                max_body_size=MAX_BYTES,
            )
        request = HTTPRequest(
            url,
            follow_redirects=False,
            connect_timeout=TIMEOUT,
            request_timeout=TIMEOUT,
            decompress_response=False,
            allow_nonstandard_methods=False,
            user_agent="engage",
        )
        async with asyncio.timeout(TIMEOUT + 0.5):  # includes name resolution
            response = await self._client.fetch(request, False)
        if response.error is not None and response.code == 599:
            raise response.error
        if response.code != 200:
            raise FetchError(f"the answer has status {response.code}")
        if len(response.body) > MAX_BYTES:
            raise FetchError(f"the document is longer than {MAX_BYTES} bytes")
        return bytes(response.body)

    def _keep(self, table: collections.OrderedDict[str, Any], url: str, value: Any) -> None:
        table[url] = value
        table.move_to_end(url)
        while len(table) > MAX_KEPT:
            table.popitem(last=False)
