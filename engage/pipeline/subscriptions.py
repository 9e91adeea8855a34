# SPDX-License-Identifier: Apache-2.0
"""Changes a user's subscription choices, authorised by a hash instead of a write key.

A write key is public, so it must not permit changing a user's choices. The hash proves that the
workspace's owner made the link. Its form is Dittofeed's: the hex HMAC-SHA256 of the compact JSON of
user id, workspace id, identifier and identifier key, keyed with the workspace's
``subscription_secret``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import orjson

from engage.api import (
    EventStore,
    Page,
    ProfileStore,
    StorageUnavailable,
    SubscriptionChange,
    SubscriptionStore,
    identifier_value,
)
from engage.errors import ApiError, Problem, from_problems, pointer
from engage.pipeline.ids import uuid7
from engage.storage.time_limit import within

if TYPE_CHECKING:
    from engage.config import Workspace

__all__ = ["Subscriptions", "subscription_hash"]

#: Users with the same identifier value whose hashes every request computes at once.
FIRST_HOLDERS: Final = 100
#: Of users beyond these, how many are read and computed before other work of the event loop runs
#: (about 3 ms), and how many before another request that is past the first users gets its turn.
HOLDERS_STEP: Final = 500
HOLDERS_TURN: Final = 5000
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
    """

    def __init__(
        self,
        workspaces: Iterable[Workspace],
        store: EventStore,
        *,
        clock: Callable[[], int],
        timeout: float,
    ) -> None:
        self._workspaces = {workspace.id: workspace for workspace in workspaces}
        self._store = store
        self._clock = clock
        self._timeout = timeout
        #: Held by the request that searches beyond the first users with an identifier.
        self._searching = asyncio.Lock()

    async def change(self, body: Mapping[str, Any]) -> Mapping[str, bool]:
        """Apply a change and return once it is durable.

        :param body: a body that is valid by the schema ``subscriptions``.
        :return: for every group of the workspace, whether the user is subscribed after the change.
        :raises ApiError: 401 ``invalid_user_hash`` if any of the credentials is wrong; 400
            ``unknown_subscription_group``.
        :raises StorageUnavailable: if the change may not be durable.
        """
        if type(body.get("userId")) is float:  # JSON Schema accepts 1.0 as an integer
            raise from_problems([Problem("/userId", "must be a string or an integer")])
        workspace = self._workspaces.get(body["workspaceId"])
        user_id = await self._verify(workspace, body)
        if workspace is None or user_id is None or not isinstance(self._store, SubscriptionStore):
            raise ApiError("invalid_user_hash", "the hash is not that of a known user")
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
        """
        given = body["hash"].encode()
        secrets = () if workspace is None else workspace.subscription_secrets
        computed = False
        if workspace is not None and secrets:
            async with contextlib.aclosing(self._candidates(workspace, body)) as pages:
                async for users in pages:
                    computed = True
                    # All of a page, so that the time does not tell which one it is.
                    equal = [user for user in users if _is_hash_of(user, body, secrets, given)]
                    if equal:
                        return equal[0]
        if not computed:
            _is_hash_of("", body, secrets or ("-",), given)
        return None

    async def _candidates(
        self, workspace: Workspace, body: Mapping[str, Any]
    ) -> AsyncGenerator[Sequence[str], None]:
        """Return the users whom the request may mean, page by page.

        Anyone who has a write key can give any number of users the address of another person. So a
        link must work however many users have the address, and a request with a wrong hash, which
        is compared with all of them, must not stop others.
        """
        key, identifier = body["identifierKey"], body["identifier"]
        if key != "id" and key not in workspace.subscription_identifiers:
            return  # not indexed: a request must not cause a scan
        user_id = body.get("userId")
        if user_id is not None and user_id != "":
            yield (str(user_id),)
            return
        if key == "id":
            yield (identifier,)
            return
        value = identifier_value(key, identifier)
        if value is None or not isinstance(self._store, ProfileStore):
            return
        page = await self._holders(workspace.id, key, value, None, FIRST_HOLDERS)
        if page.items:
            yield page.items
        deadline = time.monotonic() + SEARCH_SECONDS
        while page.cursor is not None:
            # One request at a time, and they take turns.
            async with self._searching:
                for _ in range(HOLDERS_TURN // HOLDERS_STEP):
                    if page.cursor is None:
                        break
                    await asyncio.sleep(0)
                    page = await self._holders(workspace.id, key, value, page.cursor, HOLDERS_STEP)
                    if page.items:
                        yield page.items
            if time.monotonic() > deadline:
                raise StorageUnavailable("too many users have the same identifier")

    async def _holders(
        self, workspace_id: str, trait: str, value: str, after: str | None, limit: int
    ) -> Page[str]:
        assert isinstance(self._store, ProfileStore)
        async with within(self._timeout):
            return await self._store.holders(workspace_id, trait, value, after=after, limit=limit)


def _is_hash_of(
    user_id: str, body: Mapping[str, Any], secrets: Iterable[str], given: bytes
) -> bool:
    found = False
    for secret in secrets:
        expected = subscription_hash(
            secret,
            user_id=user_id,
            workspace_id=body["workspaceId"],
            identifier=body["identifier"],
            identifier_key=body["identifierKey"],
        )
        found |= hmac.compare_digest(expected.encode(), given)
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
