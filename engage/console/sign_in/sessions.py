# SPDX-License-Identifier: Apache-2.0
"""Who is signed in.

A session is a signed cookie: nothing is stored for it. The secret that signs is a record, the same
for all consoles of a store; a new secret ends all sessions. A session that someone ended by signing
out is remembered until it would have expired, so that a copy of its cookie is useless.

In a storage that keeps no records, the secret lives as long as the process.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import orjson
from tornado.web import create_signed_value, decode_signed_value

from engage.api import Record, StorageUnavailable
from engage.upkeep.export import PAGE

if TYPE_CHECKING:
    from engage.api import RecordStore
    from engage.console.data.reader import Reader

__all__ = ["ENDED_KIND", "IDLE_SECONDS", "LONGEST_SECONDS", "Session", "Sessions", "new_secret"]

#: The kinds of the records.
SECRET_KIND: Final = "console-secret"  # noqa: S105
ENDED_KIND: Final = "ended-session"
#: The id of the record with the secret; it belongs to the whole server.
SECRET_ID: Final = "sessions"  # noqa: S105

#: A session ends when no page was opened for this time …
IDLE_SECONDS: Final = 12 * 3600
#: … and at the latest after this time.
LONGEST_SECONDS: Final = 7 * 24 * 3600
#: A cookie is signed again when it is older than this.
RENEW_SECONDS: Final = 300
#: The records are read again after this time, if there is a request.
REFRESH_SECONDS: Final = 2.0
#: Seconds for reading the records. If it takes longer, those that were read before still count.
REFRESH_TIMEOUT: Final = 1.0


class Session(NamedTuple):
    """A person who is signed in."""

    id: str
    #: When it began, and when its cookie was signed: seconds since 1970.
    began: int
    seen: int
    #: ``link`` or ``password``.
    how: str


def new_secret(now: int) -> Record:
    """Return the record with a new secret. Writing it ends all sessions.

    :param now: milliseconds since 1970.
    """
    body = orjson.dumps({"secret": secrets.token_hex(32)})
    return Record(kind=SECRET_KIND, workspace_id="", id=SECRET_ID, body=body, at=now)


class Sessions:
    """Issues and checks the cookies.

    :param records: the storage, if it keeps records.
    :param password: ``console.password``: another one ends all sessions.
    :param clock: the time in seconds since 1970.
    """

    def __init__(
        self,
        records: RecordStore | None,
        reader: Reader,
        *,
        password: str | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._records = records
        self._reader = reader
        self._password = password or ""
        self._clock = clock
        self._secret = secrets.token_hex(32) if records is None else None
        self._ended: set[str] = set()
        self._versions: tuple[int, int] | None = None
        self._refreshed = -REFRESH_SECONDS
        self._refreshing = asyncio.Lock()

    async def issue(self, name: str, how: str) -> tuple[Session, str]:
        """Begin a session.

        :param name: the name of the cookie.
        :param how: ``link`` or ``password``.
        :return: the session, and the value of its cookie.
        :raises StorageUnavailable: if the secret cannot be read.
        """
        await self._refresh()
        now = int(self._clock())
        session = Session(secrets.token_urlsafe(16), now, now, how)
        return session, self._signed(name, session)

    async def check(self, name: str, cookie: str | None) -> Session | None:
        """Return the session of a cookie, or ``None`` if there is none or it has ended.

        :raises StorageUnavailable: if the secret was never read and cannot be read now.
        """
        if not cookie:
            return None
        await self._refresh()
        value = self._decoded(self._known_secret(), name, cookie)
        try:
            identity, began, seen, how, fingerprint = (value or b"").decode().split(" ")
            session = Session(identity, int(began), int(seen), how)
        except ValueError:
            return None
        now = self._clock()
        if not hmac.compare_digest(fingerprint, self._fingerprint()):
            return None
        if now - session.began > LONGEST_SECONDS or session.id in self._ended:
            return None
        return session

    def is_signed(self, name: str, cookie: str | None) -> bool:
        """Return whether this console can tell at once that a cookie has its signature."""
        return bool(cookie and self._secret and self._decoded(self._secret, name, cookie))

    def _decoded(self, secret: str, name: str, cookie: str) -> bytes | None:
        days = IDLE_SECONDS / (24 * 3600)
        return decode_signed_value(secret, name, cookie, max_age_days=days, clock=self._clock)

    async def read_secret(self) -> None:
        """Read the secret before the first request needs it.

        :raises StorageUnavailable: if the storage does not answer.
        """
        await self._refresh()

    def renewed(self, name: str, session: Session) -> str | None:
        """Return a new value for the cookie of a session, or ``None`` if that is not necessary."""
        now = int(self._clock())
        if now - session.seen < RENEW_SECONDS:
            return None
        return self._signed(name, session._replace(seen=now))

    async def end(self, session: Session) -> None:
        """End one session, on every console of this store.

        :raises StorageUnavailable: if that cannot be recorded; it has ended on this console.
        """
        self._ended.add(session.id)
        if self._records is None:
            return
        now = round(self._clock() * 1000)
        record = Record(kind=ENDED_KIND, workspace_id="", id=session.id, body=b"{}", at=now)
        await self._reader.read(self._records.put_record(record))

    def _signed(self, name: str, session: Session) -> str:
        value = " ".join((*map(str, session), self._fingerprint()))
        signed = create_signed_value(self._known_secret(), name, value, clock=self._clock)
        return signed.decode()

    def _fingerprint(self) -> str:
        key = self._known_secret().encode()
        return hmac.new(key, self._password.encode(), hashlib.sha256).hexdigest()[:32]

    def _known_secret(self) -> str:
        if self._secret is None:
            raise StorageUnavailable(self._reader.error or "the sessions could not be read")
        return self._secret

    async def _refresh(self) -> None:
        records = self._records
        if records is None:
            return
        async with self._refreshing:
            if time.monotonic() - self._refreshed < REFRESH_SECONDS:
                return
            try:
                known = self._secret is not None
                await self._reader.read(
                    self._read(records), within=REFRESH_TIMEOUT if known else None
                )
            except StorageUnavailable:
                if self._secret is None:
                    raise
            self._refreshed = time.monotonic()

    async def _read(self, records: RecordStore) -> None:
        versions = (
            await records.records_version(SECRET_KIND),
            await records.records_version(ENDED_KIND),
        )
        if versions == self._versions:
            return
        found = await records.get_record(SECRET_KIND, "", SECRET_ID)
        if found is None:
            # Of several consoles that start together, one writes it.
            created = new_secret(round(self._clock() * 1000))
            await records.put_record(created, expected_version=0)
            found = await records.get_record(SECRET_KIND, "", SECRET_ID)
        after: str | None = None
        while True:
            ended = await records.list_records(ENDED_KIND, "", after=after, limit=PAGE)
            self._ended.update(record.id for record in ended.items)
            after = ended.cursor
            if after is None:
                break
        if found is not None:
            self._secret = orjson.loads(found.body)["secret"]
        self._versions = versions
