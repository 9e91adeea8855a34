# SPDX-License-Identifier: Apache-2.0
"""One-time links with which people sign in.

The server stores the SHA-256 of the token in a link, never the token, and a link works for
:data:`SECONDS`. Of several requests with one link, on any console of a store, one succeeds.
"""

from __future__ import annotations

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

import orjson

from engage.api import Record, RecordStore, StorageUnavailable

if TYPE_CHECKING:
    from engage.config import Config
    from engage.console.data.reader import Reader

__all__ = [
    "KIND",
    "SECONDS",
    "Links",
    "hash_of",
    "link_command",
    "link_record",
    "new_token",
]

#: The kind of the records.
KIND: Final = "link"
#: For which a link works.
SECONDS: Final = 600

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

    :param records: the storage, if it keeps records. Otherwise the links are in memory.
    :param clock: the time in seconds since 1970.
    """

    def __init__(
        self,
        records: RecordStore | None,
        reader: Reader,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._records = records
        self._reader = reader
        self._clock = clock
        #: The hash of a token → until when it works, in milliseconds.
        self._in_memory: dict[str, int] = {}

    async def add(self, token_hash: str) -> None:
        """Make a link work, even if the storage does not answer now."""
        now = round(self._clock() * 1000)
        if self._records is not None:
            record = link_record(token_hash, now)
            try:
                await self._reader.read(self._records.put_record(record, expected_version=0))
            except StorageUnavailable:
                pass
            else:
                return
        self._in_memory[token_hash] = now + SECONDS * 1000

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
        if self._records is None:
            return False
        records = self._records
        record = await self._reader.read(records.get_record(KIND, "", token_hash))
        if record is None:
            return False
        body = orjson.loads(record.body)
        if body["used"] is not None or now >= body["until"]:
            return False
        used = Record(
            kind=KIND,
            workspace_id="",
            id=token_hash,
            body=orjson.dumps({**body, "used": now}),
            at=now,
        )
        written = records.put_record(used, expected_version=record.version)
        # ``None``: another request was first.
        return await self._reader.read(written) is not None
