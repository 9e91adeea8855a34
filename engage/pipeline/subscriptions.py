# SPDX-License-Identifier: Apache-2.0
"""Changes a user's subscription choices, authorised by a hash instead of a write key.

A write key is public, so it must not permit changing a user's choices. The hash proves that the
workspace's owner made the link. Its form is Dittofeed's: the hex HMAC-SHA256 of the compact JSON of
user id, workspace id, identifier and identifier key, keyed with the workspace's
``subscription_secret``.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import orjson

from engage.api import (
    EventStore,
    Page,
    ProfileStore,
    SubscriptionChange,
    SubscriptionStore,
    identifier_value,
)
from engage.errors import ApiError, Problem, from_problems, overloaded, pointer
from engage.pipeline.ids import uuid7
from engage.pipeline.shared_search import SharedSearch
from engage.storage.time_limit import within

if TYPE_CHECKING:
    from engage.config import Workspace

__all__ = ["Subscriptions", "subscription_hash"]

#: Users with the same identifier value whose hashes every request computes at once.
FIRST_HOLDERS: Final = 100
#: Users that are read at once beyond these, in the search that requests share.
HOLDERS_STEP: Final = 500
#: Seconds after which a request that has not found its user is refused with 503.
SEARCH_SECONDS: Final = 60.0

#: Namespace of the ids of changes.
_CHANGE_NAMESPACE: Final = uuid.UUID("2f7a1c55-94c1-5c6e-8f0a-6f4b4a1f9e02")


def subscription_hash(
    secret: str, *, user_id: str, workspace_id: str, identifier: str, identifier_key: str
) -> str:
    """Return the hash that a link to the preferences page must contain.

    :param secret: a ``subscription_secret`` of the workspace.
    :param identifier: the value that identifies the user, such as an e-mail address.
    :param identifier_key: ``id``, or the trait that has the value, such as ``email``.
    """
    message = orjson.dumps({"u": user_id, "w": workspace_id, "i": identifier, "k": identifier_key})
    return hmac.new(secret.encode(), message, hashlib.sha256).hexdigest()


class Subscriptions:
    """Verifies and applies changes.

    :param store: must be a :class:`SubscriptionStore` if a workspace has a ``subscription_secret``
        (checked when the server starts), and a :class:`ProfileStore` to find users by their traits.
    :param clock: returns milliseconds since 1970 UTC.
    :param timeout: seconds that a call of the storage may take.
    :param catch_up: with a log, waits until everything is stored that is in it now: see
        :class:`engage.pipeline.catch_up.CatchUp`.
    """

    def __init__(
        self,
        workspaces: Iterable[Workspace],
        store: EventStore,
        *,
        clock: Callable[[], int],
        timeout: float,
        catch_up: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._workspaces = {workspace.id: workspace for workspace in workspaces}
        self._store = store
        self._clock = clock
        self._timeout = timeout
        self._catch_up = catch_up
        #: Held for a turn of the event loop by each request that has read the first users.
        self._first = asyncio.Lock()
        #: Searches beyond the first users with an identifier.
        self._shared = SharedSearch()

    async def change(self, body: Mapping[str, Any]) -> Mapping[str, bool]:
        """Apply a change and return once it is durable.

        :param body: a body that is valid by the schema ``subscriptions``.
        :return: for every group of the workspace, whether the user is subscribed after the change.
        :raises ApiError: 401 ``invalid_user_hash`` if any of the credentials is wrong; 400
            ``unknown_subscription_group``; 503 ``overloaded`` if the hash could not be compared
            with all users in time, or if the user may still be in the log.
        :raises StorageUnavailable: if the change may not be durable.
        """
        if type(body.get("userId")) is float:  # JSON Schema accepts 1.0 as an integer
            raise from_problems([Problem("/userId", "must be a string or an integer")])
        workspace = self._workspaces.get(body["workspaceId"])
        user_id = await self._verify(workspace, body)
        if user_id is None and self._catch_up is not None and _is_looked_up(workspace, body):
            await self._catch_up()
            user_id = await self._verify(workspace, body)
        if workspace is None or user_id is None or not isinstance(self._store, SubscriptionStore):
            raise ApiError("invalid_user_hash", "the hash belongs to no known user")
        changes: Mapping[str, bool] = body["changes"]
        known = {group.id for group in workspace.subscription_groups}
        unknown = [group for group in changes if group not in known]
        if unknown:
            raise from_problems(
                [
                    Problem(
                        "/changes" + pointer(group),
                        "is not a subscription group of the workspace",
                    )
                    for group in unknown
                ],
                "unknown_subscription_group",
            )
        async with within(self._timeout):
            if changes:
                choices = await self._store.apply(
                    SubscriptionChange(
                        id=_change_id(body.get("messageId"), user_id, changes, self._clock()),
                        workspace_id=workspace.id,
                        user_id=user_id,
                        choices=dict(changes),
                        at=self._clock(),
                        how="api",
                    )
                )
            else:
                choices = await self._store.state(workspace.id, user_id)
        return {
            group.id: choices.get(group.id, group.type == "opt_out")
            for group in workspace.subscription_groups
        }

    async def _verify(self, workspace: Workspace | None, body: Mapping[str, Any]) -> str | None:
        """Return the user that the hash belongs to, if there is one.

        At least one HMAC is computed in any case, to reveal less by timing.

        Anyone who has a write key can give any number of users the address of another person. So a
        link must work however many users have the address, and requests with wrong hashes, which
        are compared with all of them, must not stop others.
        """
        given = body["hash"].encode()
        secrets = () if workspace is None else workspace.subscription_secrets
        if workspace is None or not secrets:
            _is_hash_of("", body, secrets or ("-",), given)
            return None
        page = await self._first_candidates(workspace, body)
        # All of a page, so that the time does not tell which one it is.
        equal = [user for user in page.items or ("",) if _is_hash_of(user, body, secrets, given)]
        if equal:
            return equal[0] if page.items else None
        return None if page.cursor is None else await self._search(workspace, body, given)

    async def _first_candidates(self, workspace: Workspace, body: Mapping[str, Any]) -> Page[str]:
        """Return the users whom the request may mean, or the first of them with a cursor."""
        key, identifier = body["identifierKey"], body["identifier"]
        nobody: Page[str] = Page((), None)
        if key != "id" and key not in workspace.subscription_identifiers:
            return nobody  # not indexed: a request must not cause a scan
        user_id = body.get("userId")
        if user_id is not None and user_id != "":
            return Page((str(user_id),), None)
        if key == "id":
            return Page((identifier,), None)
        value = identifier_value(key, identifier)
        if value is None or not isinstance(self._store, ProfileStore):
            return nobody
        page = await self._holders(workspace.id, key, value, None, FIRST_HOLDERS)
        # The hashes of many requests, computed without a pause, would hold the event loop.
        async with self._first:
            await asyncio.sleep(0)
        return page

    async def _search(
        self, workspace: Workspace, body: Mapping[str, Any], given: bytes
    ) -> str | None:
        """Return the user that the hash belongs to, among all users with the identifier."""
        key, identifier = body["identifierKey"], body["identifier"]
        value = identifier_value(key, identifier)
        assert value is not None

        async def read(after: str | None) -> Page[str]:
            return await self._holders(workspace.id, key, value, after, HOLDERS_STEP)

        def hashes(user_id: str) -> list[bytes]:
            return _hashes(user_id, body, workspace.subscription_secrets)

        try:
            async with asyncio.timeout(SEARCH_SECONDS):
                # The identifier as it was sent, because the hash contains it in that form.
                form = (workspace.id, key, identifier)
                return await self._shared.find(form, given, read, hashes, odd=identifier != value)
        except TimeoutError as error:
            raise overloaded(
                "the hash could not be compared with all users of the identifier in time;"
                " send the same request again later"
            ) from error

    async def _holders(
        self, workspace_id: str, trait: str, value: str, after: str | None, limit: int
    ) -> Page[str]:
        assert isinstance(self._store, ProfileStore)
        async with within(self._timeout):
            return await self._store.holders(workspace_id, trait, value, after=after, limit=limit)


def _is_looked_up(workspace: Workspace | None, body: Mapping[str, Any]) -> bool:
    """Return whether the user of a request is found by a trait, which the store must have."""
    key = body["identifierKey"]
    return (
        workspace is not None
        and bool(workspace.subscription_secrets)
        and key != "id"
        and key in workspace.subscription_identifiers
        and body.get("userId") in (None, "")
        and identifier_value(key, body["identifier"]) is not None
    )


def _hashes(user_id: str, body: Mapping[str, Any], secrets: Iterable[str]) -> list[bytes]:
    """Return the hashes that are right if the request means a user, one for each secret."""
    return [
        subscription_hash(
            secret,
            user_id=user_id,
            workspace_id=body["workspaceId"],
            identifier=body["identifier"],
            identifier_key=body["identifierKey"],
        ).encode()
        for secret in secrets
    ]


def _is_hash_of(
    user_id: str, body: Mapping[str, Any], secrets: Iterable[str], given: bytes
) -> bool:
    found = False
    for expected in _hashes(user_id, body, secrets):
        found |= hmac.compare_digest(expected, given)
    return found


def _change_id(message_id: str | None, user_id: str, changes: Mapping[str, bool], now: int) -> str:
    """Return the id that makes a change idempotent.

    It depends on the whole change and not only on the message id, because that is not signed: a
    user could block the changes of another by sending their message ids first.
    """
    if not message_id:
        return uuid7(now)
    name = orjson.dumps([message_id, user_id, changes], option=orjson.OPT_SORT_KEYS)
    return str(uuid.uuid5(_CHANGE_NAMESPACE, name.decode()))
