# SPDX-License-Identifier: Apache-2.0
"""Signed links: finds the person for whom one was signed.

A write key is public, so it must not permit changing a user's choices. The hash in a link proves
that the workspace's owner made the link. Its form is Dittofeed's: the hex HMAC-SHA256 of the
compact JSON of user id, workspace id, identifier and identifier key, keyed with the workspace's
``subscription_secret``. A link that expires also signs when, and one by an address that names a
visitor signs that.

Earlier versions also signed anonymous ids as user ids. Such a link cannot be told from that of the
user with this id, so it is one; but what it unsubscribes is also unsubscribed for the visitor.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import hmac
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import orjson

from engage.api import Kind, Page, Subject, identifier_value
from engage.errors import Problem, from_problems, invalid_link, overloaded
from engage.reading.time_limit import within
from engage.store.facade import Storage
from engage.store.keys import fingerprint

if TYPE_CHECKING:
    from engage.config import Workspace

__all__ = ["BY_ID", "SEARCH_SECONDS", "STEP", "Links", "Person", "subscription_hash"]

#: The identifier keys of links by an id, with whose id it is.
BY_ID: Final[Mapping[str, Kind]] = {"id": Kind.USER, "anonymousId": Kind.VISITOR}

#: Users with the same identifier value that are read and compared at once, between other work of
#: the event loop (about 3 ms for each secret).
STEP: Final = 500
#: Seconds after which a search that has not compared all users ends with 503.
SEARCH_SECONDS: Final = 60.0

#: Workspace, identifier key, identifier, expiry and whether a visitor is named, as they were sent.
_Form = tuple[str, str, str, int | None, bool]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """The person for whom a link was signed."""

    workspace: Workspace
    #: The user or visitor in the signature.
    subject: Subject
    #: See :attr:`engage.api.SubscriptionChange.secret`.
    secret: str
    #: Whether the link only unsubscribes any more.
    expired: bool
    #: The identifier in the signature, and its kind.
    identifier: str
    identifier_key: str


def subscription_hash(
    secret: str,
    *,
    subject: Subject,
    workspace_id: str,
    identifier: str,
    identifier_key: str,
    expires: int | None = None,
) -> str:
    """Return the hash that a link to the preferences page must contain.

    :param secret: a ``subscription_secret`` of the workspace.
    :param subject: the user or visitor for whom the link is.
    :param identifier: its id, or the value that identifies it, such as an e-mail address.
    :param identifier_key: ``id`` or ``anonymousId``, or the trait that has the value, such as
        ``email``.
    :param expires: when the link expires, in seconds since 1970 UTC; ``None``: never.
    """
    members: dict[str, str | int] = {
        "u": subject.id,
        "w": workspace_id,
        "i": identifier,
        "k": identifier_key,
    }
    if expires is not None:
        members["e"] = expires
    if subject.kind is Kind.VISITOR and identifier_key not in BY_ID:
        members["v"] = True
    return hmac.new(secret.encode(), orjson.dumps(members), hashlib.sha256).hexdigest()


class Links:
    """Verifies links.

    :param clock: returns milliseconds since 1970 UTC.
    :param timeout: seconds that a call of the storage may take.
    :param catch_up: with a log, waits until everything is stored that is in it now: see
        :class:`engage.log.catch_up.CatchUp`.
    """

    def __init__(
        self,
        workspaces: Mapping[str, Workspace],
        store: Storage,
        *,
        clock: Callable[[], int],
        timeout: float,
        catch_up: Callable[[], Awaitable[None]] | None,
    ) -> None:
        self._workspaces = workspaces
        self._store = store
        self._clock = clock
        self._timeout = timeout
        self._catch_up = catch_up
        #: The last search for each identifier, in the form in which it was sent.
        self._searches: dict[_Form, _Search] = {}
        #: Held by the search that reads and compares a page: one for identifiers in the form in
        #: which users are looked up, and one for all others and for those with an expiry, of which
        #: anyone can send any number.
        self._turns = (asyncio.Lock(), asyncio.Lock())

    async def person(self, body: Mapping[str, Any]) -> Person:
        """Verify a link.

        :param body: as for :meth:`change`; ``changes`` and ``messageId`` are not looked at.
        :raises ApiError: 400 ``invalid_payload`` if an id is wrong; 401 ``invalid_user_hash`` if
            any of the credentials is wrong; 503 ``overloaded`` if the hash could not be compared
            with all users in time, or if the user may still be in the log.
        :raises StorageUnavailable: if the user could not be looked up.
        """
        for name in ("userId", "anonymousId"):
            if type(body.get(name)) is float:  # JSON Schema accepts 1.0 as an integer
                raise from_problems([Problem(f"/{name}", "must be a string or an integer")])
        workspace = self._workspaces.get(body["workspaceId"])
        subject = await self._verify(workspace, body)
        if (
            subject is None
            and self._catch_up is not None
            and _named(workspace, body)[1] is not None
        ):
            await self._catch_up()
            subject = await self._verify(workspace, body)
        if workspace is None or subject is None:
            raise invalid_link()
        expires, signed = body.get("expires"), _signed(subject, body)
        return Person(
            workspace=workspace,
            subject=subject,
            secret=_secret_of(workspace, signed, body),
            # A link of an earlier version that fits a visitor only unsubscribes, too.
            expired=signed != subject or (expires is not None and expires * 1000 <= self._clock()),
            identifier=body["identifier"],
            identifier_key=body["identifierKey"],
        )

    async def _verify(self, workspace: Workspace | None, body: Mapping[str, Any]) -> Subject | None:
        """Return the user or visitor that the hash belongs to, if there is one.

        At least one HMAC is computed in any case, to reveal less by timing.
        """
        given = body["hash"].encode()
        secrets = () if workspace is None else workspace.subscription_secrets
        subject, value = _named(workspace, body)
        right = _hashes(subject or Subject(Kind.USER, ""), body, secrets or ("-",))
        equal = [hmac.compare_digest(digest, given) for digest in right]
        if workspace is None or value is None:
            return subject if any(equal) else None
        form = (
            *(workspace.id, body["identifierKey"], body["identifier"], body.get("expires")),
            bool(body.get("v")),
        )
        last = self._searches.get(form)
        if last is None or last.begun:
            self._searches[form] = last = _Search(after=last)
            last.task = asyncio.create_task(self._run(last, form, value, body))
        last.hashes.add(given)
        last.requests += 1
        try:
            # A look-up takes as long for a wrong hash of which the first bytes are right.
            return (await asyncio.shield(last.task)).get(given)
        finally:
            last.requests -= 1
            if not last.requests:
                # A search ends with its requests: their clients may have disconnected.
                self._end(last, form)
                last.task.cancel()

    async def _run(
        self, search: _Search, form: _Form, value: str, body: Mapping[str, Any]
    ) -> dict[bytes, Subject]:
        """Compare the hashes that requests sent with all users who have an identifier.

        Anyone who has a write key can give any number of users the address of another person. So a
        link must work however many users have the address, and requests with wrong hashes must not
        stop others: those for one identifier share a search, in which each user's hash is computed
        once, and the searches take turns, a page each.

        :return: those of ``search.hashes`` that are right, with whom they name.
        """
        workspace = self._workspaces[form[0]]
        try:
            if search.after is not None:
                await asyncio.wait([search.after.task])
                search.after = None
            search.begun = True
            verified: dict[bytes, Subject] = {}
            cursor = None
            async with asyncio.timeout(SEARCH_SECONDS):
                while not verified.keys() >= search.hashes:
                    async with self._turns[form[2:4] != (value, None)]:
                        page = await self._holders(form, value, cursor)
                        # All of a page, so that the time does not tell which user it is.
                        for subject in page.items:
                            signed = _signed(subject, body)
                            for digest in _hashes(signed, body, workspace.subscription_secrets):
                                if digest in search.hashes:
                                    verified.setdefault(digest, subject)
                        await asyncio.sleep(0)
                    cursor = page.cursor
                    if cursor is None:
                        break
            return verified
        except TimeoutError as error:
            raise overloaded(
                "the hash could not be compared with all users of the identifier in time;"
                " send the same request again later"
            ) from error
        finally:
            self._end(search, form)

    def _end(self, search: _Search, form: _Form) -> None:
        """Let no other request join a search."""
        if self._searches.get(form) is search:
            del self._searches[form]

    async def _holders(self, form: _Form, value: str, after: str | None) -> Page[Subject]:
        """Return a page of the users and visitors who have a value, and after the last one a page
        of the users who have it by a visitor."""
        workspace, trait, *_, names_visitor = form
        async with within(self._timeout):
            if after == "":
                users = await self._store.find_users(workspace, trait, [value])
                return Page([Subject(Kind.USER, user) for user in users.get(value, ())], None)
            page = await self._store.holders(workspace, trait, value, after=after, limit=STEP)
        items = [who for who in page.items if who.kind is Kind.VISITOR or not names_visitor]
        return Page(items, page.cursor or (None if names_visitor else ""))


class _Search:
    """A search for the users that hashes belong to.

    :param after: an earlier search for the same identifier, which must end first.
    """

    task: asyncio.Task[dict[bytes, Subject]]

    def __init__(self, after: _Search | None) -> None:
        self.after = after
        #: The hashes that requests sent.
        self.hashes: set[bytes] = set()
        #: How many requests wait for the result.
        self.requests = 0
        #: Whether it is too late to add a hash.
        self.begun = False


def _named(
    workspace: Workspace | None, body: Mapping[str, Any]
) -> tuple[Subject | None, str | None]:
    """Return the user or visitor that a request names, or else the value by which it is looked up;
    neither if the credentials are wrong anyway."""
    key = body["identifierKey"]
    if workspace is None or not workspace.subscription_secrets:
        return None, None
    if key not in BY_ID and key not in workspace.subscription_identifiers:
        return None, None  # not indexed: a request must not cause a scan
    for name, kind in (("userId", Kind.USER), ("anonymousId", Kind.VISITOR)):
        if body.get(name) not in (None, ""):
            return (Subject(kind, str(body[name])) if BY_ID.get(key, kind) is kind else None), None
    if key in BY_ID:
        return Subject(BY_ID[key], body["identifier"]), None
    return None, identifier_value(key, body["identifier"])


def _signed(subject: Subject, body: Mapping[str, Any]) -> Subject:
    """Return whom the hash of a request has if it means a user or visitor: a link by an address
    that does not say that it names a visitor has a user."""
    names_visitor = body.get("v") or body.get("anonymousId") or body["identifierKey"] in BY_ID
    return subject if names_visitor else Subject(Kind.USER, subject.id)


def _hashes(subject: Subject, body: Mapping[str, Any], secrets: Iterable[str]) -> list[bytes]:
    """Return the hashes that are right for a user or visitor, one for each secret."""
    return [
        subscription_hash(
            secret,
            subject=subject,
            workspace_id=body["workspaceId"],
            identifier=body["identifier"],
            identifier_key=body["identifierKey"],
            expires=body.get("expires"),
        ).encode()
        for secret in secrets
    ]


def _secret_of(workspace: Workspace, subject: Subject, body: Mapping[str, Any]) -> str:
    """Return which secret verified a hash, as :attr:`engage.api.SubscriptionChange.secret`."""
    secrets = workspace.subscription_secrets
    right = zip(_hashes(subject, body, secrets), secrets, strict=True)
    secret = next(secret for digest, secret in right if digest == body["hash"].encode())
    return fingerprint(secret)
