# SPDX-License-Identifier: Apache-2.0
"""Who is signed in.

A session is a signed cookie: nothing is stored for it. The secret that signs is a record, the same
for all consoles of a store; a new secret ends all sessions. A session that someone ended by signing
out is remembered until it would have expired, so that a copy of its cookie is useless.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import orjson
from tornado.web import create_signed_value, decode_signed_value

from engage.api import Record, StorageUnavailable
from engage.console.data.reader import SharedRead
from engage.reading.scans import all_pages

if TYPE_CHECKING:
    from engage.console.data.reader import Reader
    from engage.store.facade import Storage

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
#: A request is checked with records whose reading began at most this time before it.
REFRESH_SECONDS: Final = 2.0
#: If they cannot be read, pages open with those that were read in this time; nothing is changed.
OUTAGE_SECONDS: Final = 60.0


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

    :param store: has the secret, and the sessions that were ended.
    :param password: ``console.password``: another one ends all sessions.
    :param clock: the time in seconds since 1970.
    """

    def __init__(
        self,
        store: Storage,
        reader: Reader,
        *,
        password: str | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._reader = reader
        self._password = password or ""
        self._clock = clock
        self._secret: str | None = None
        self._ended: set[str] = set()
        self._versions: tuple[int, int] | None = None
        self._reading = SharedRead(reader, self._read)

    async def issue(self, name: str, how: str) -> tuple[Session, str]:
        """Begin a session.

        :param name: see :func:`~engage.console.sign_in.addresses.session_name`.
        :param how: ``link`` or ``password``.
        :return: the session, and the value of its cookie.
        :raises StorageUnavailable: if the secret cannot be read.
        """
        await self.read_secret()
        now = int(self._clock())
        session = Session(secrets.token_urlsafe(16), now, now, how)
        return session, self._signed(name, session)

    async def check(
        self, name: str, cookie: str | None, *, within: float | None = None
    ) -> Session | None:
        """Return the session of a cookie, or ``None`` if there is none or it has ended.

        :param within: seconds for reading the records, if they are fewer than those of all calls.
        :raises StorageUnavailable: if the records cannot be read, so that it may have ended.
        """
        if not cookie:
            return None
        await self.read_secret(within)
        return self.find(name, cookie)

    def recall(self, name: str, cookie: str | None) -> Session | None:
        """Return the session of a cookie while the records cannot be read: it may have ended.

        :raises StorageUnavailable: if they were not read lately.
        """
        if time.monotonic() - self._reading.began > OUTAGE_SECONDS:
            raise StorageUnavailable(self._reader.error or "the sessions could not be read")
        return self.find(name, cookie)

    def find(self, name: str, cookie: str | None) -> Session | None:
        """Return the session of a cookie as this console knows it, without asking the store."""
        if not cookie or self._secret is None:
            return None
        days = IDLE_SECONDS / (24 * 3600)
        value = decode_signed_value(
            self._secret, name, cookie, max_age_days=days, clock=self._clock
        )
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

    async def read_secret(self, within: float | None = None) -> None:
        """Read the records, unless a reading that began less than two seconds ago succeeded.

        :raises StorageUnavailable: if the storage does not answer.
        """
        await self._reading.since(time.monotonic() - REFRESH_SECONDS, seconds=within)

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
        now = round(self._clock() * 1000)
        record = Record(kind=ENDED_KIND, workspace_id="", id=session.id, body=b"{}", at=now)
        await self._reader.read(self._store.put_record(record))

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

    async def _read(self) -> None:
        store = self._store
        secret, ended = await asyncio.gather(
            store.records_version(SECRET_KIND), store.records_version(ENDED_KIND)
        )
        versions = secret, ended
        if versions == self._versions:
            return
        record = await store.get_record(SECRET_KIND, "", SECRET_ID)
        if record is None:
            # Of several consoles that start together, one writes it.
            created = new_secret(round(self._clock() * 1000))
            await store.put_record(created, expected_version=0)
            record = await store.get_record(SECRET_KIND, "", SECRET_ID)
        pages = functools.partial(store.list_records, ENDED_KIND, "")
        self._ended |= {record.id async for record in all_pages(pages, attempts=1)}
        if record is not None:
            self._secret = orjson.loads(record.body)["secret"]
        self._versions = versions
