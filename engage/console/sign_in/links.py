# SPDX-License-Identifier: Apache-2.0
"""One-time links with which people sign in.

The server stores the SHA-256 of the token in a link, never the token, and a link works for
:data:`SECONDS`. Of several requests with one link, on any console of a store, one succeeds.

A console keeps the hashes of the links that work in memory, so that made-up tokens cost nothing:
all requests with an unknown one share a look at the store, at most twenty times a second.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import re
import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import orjson

from engage.api import Record, StorageUnavailable
from engage.console.data.reader import PATIENCE, SharedRead
from engage.reading.scans import all_pages
from engage.store.facade import Storage

if TYPE_CHECKING:
    from engage.config import Config, ConsoleConfig
    from engage.console.data.reader import Reader

__all__ = [
    "KIND",
    "SECONDS",
    "Links",
    "hash_of",
    "link_command",
    "link_record",
    "link_url",
    "new_token",
]

#: The kind of the records.
KIND: Final = "link"
#: For which a link works.
SECONDS: Final = 600
#: Seconds between the beginnings of two looks at the store.
LOOK_SECONDS: Final = 0.05

_TOKEN: Final = re.compile(r"[A-Za-z0-9_-]{43}", re.ASCII)


def new_token() -> str:
    """Return a new token: 256 random bits."""
    return secrets.token_urlsafe(32)


def hash_of(token: str) -> str:
    """Return the hash of a token, which is stored instead of it."""
    return hashlib.sha256(token.encode()).hexdigest()


def link_record(token_hash: str, now: int) -> Record:
    """Return the record of a new link.

    :param token_hash: see :func:`hash_of`.
    :param now: milliseconds since 1970.
    """
    body = orjson.dumps({"until": now + SECONDS * 1000, "used": None})
    return Record(kind=KIND, workspace_id="", id=token_hash, body=body, at=now)


def link_url(settings: ConsoleConfig, url: str, token: str) -> str:
    """Return the one-time link with a token.

    Browsers send a cookie to all ports of a host. On this machine each link therefore has a host of
    its own, of which no other server knows; browsers find every name below ``localhost`` here.

    :param url: of the console.
    """
    parts = urlsplit(url)
    if settings.public_url is None and parts.hostname in ("127.0.0.1", "::1", "localhost"):
        url = f"{parts.scheme}://{secrets.token_hex(8)}.localhost:{parts.port}"
    return f"{url}/link?t={token}"


def link_command(config: Config) -> str:
    """Return the command that prints a link, as it works in the folder of the server's process.

    Anyone can read it on the page for signing in. It therefore names only paths below that folder.
    """
    program = "engage"
    installed = os.path.relpath(Path(sys.executable).with_name(program))
    if shutil.which(program) is None and _is_below(installed) and Path(installed).exists():
        program = shlex.quote(installed)
    path = str(config.path)
    if path == "engage.toml" or "ENGAGE_CONFIG" in os.environ:
        return f"{program} console-link"
    return f"{program} console-link --config {shlex.quote(path) if _is_below(path) else 'PATH'}"


def _is_below(path: str) -> bool:
    return not os.path.isabs(path) and ".." not in Path(path).parts


class Links:
    """The links of a console.

    :param store: has the links. One that cannot be stored works on this console.
    :param clock: the time in seconds since 1970.
    """

    def __init__(
        self,
        store: Storage,
        reader: Reader,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._reader = reader
        self._clock = clock
        #: The hash of a token that is only here → until when it works, in milliseconds …
        self._in_memory: dict[str, int] = {}
        #: … and of one in the store, at the last look.
        self._stored: dict[str, int] = {}
        self._version: int | None = None
        self._look = SharedRead(reader, self._read, pause=LOOK_SECONDS)

    async def add(self, token_hash: str) -> None:
        """Make a link work, even if the storage does not answer now."""
        now = round(self._clock() * 1000)
        record = link_record(token_hash, now)
        try:
            await self._reader.read(self._store.put_record(record, expected_version=0))
        except StorageUnavailable:
            self._in_memory[token_hash] = now + SECONDS * 1000

    async def exists(self, token: str) -> bool:
        """Return whether a link is known to work; false if the storage does not answer soon."""
        if not _TOKEN.fullmatch(token):
            return False
        token_hash = hash_of(token)
        if not self._works(token_hash):
            with contextlib.suppress(StorageUnavailable):
                await self._look.since(time.monotonic(), seconds=PATIENCE)
        return self._works(token_hash)

    async def redeem(self, token: str) -> bool:
        """Use up a link.

        :return: whether it worked until now.
        :raises StorageUnavailable: if the storage does not answer.
        """
        if not _TOKEN.fullmatch(token):
            return False
        token_hash = hash_of(token)
        now = round(self._clock() * 1000)
        until = self._in_memory.pop(token_hash, None)
        if until is not None:
            return now < until
        record = await self._reader.read(self._store.get_record(KIND, "", token_hash), waits=False)
        if record is None:
            return False
        body = orjson.loads(record.body)
        if body["used"] is not None or now >= body["until"]:
            return False
        used = dataclasses.replace(record, body=orjson.dumps({**body, "used": now}), at=now)
        written = self._store.put_record(used, expected_version=record.version)
        # ``None``: another request was first.
        won = await self._reader.read(written, waits=False) is not None
        self._stored.pop(token_hash, None)
        return won

    def _works(self, token_hash: str) -> bool:
        until = self._in_memory.get(token_hash) or self._stored.get(token_hash, 0)
        return self._clock() * 1000 < until

    async def _read(self) -> None:
        version = await self._store.records_version(KIND)
        if version == self._version:
            return
        pages = functools.partial(self._store.list_records, KIND, "")
        stored = {row.id: orjson.loads(row.body) async for row in all_pages(pages, attempts=1)}
        self._stored = {name: body["until"] for name, body in stored.items() if not body["used"]}
        self._version = version
