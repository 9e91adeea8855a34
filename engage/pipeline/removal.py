# SPDX-License-Identifier: Apache-2.0
"""Removes traits of a user, by events that only an operator can write.

Profiles are the merge of the stored events, so nothing is changed in a profile: an identify event
with the field ``removedTraits`` is stored, and the storage applies it as any other.
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from engage.api import (
    OPERATOR_ORIGIN,
    EngageError,
    Event,
    EventStore,
    ProfileStore,
    Status,
    StorageUnavailable,
    UserProfile,
    render_time,
)
from engage.pipeline.ids import uuid7

__all__ = ["remove_traits"]


async def remove_traits(
    store: EventStore, workspace_id: str, user_id: str, traits: Sequence[str], *, now: int
) -> Sequence[str]:
    """Remove traits of a user, and return those that the user had.

    :param now: milliseconds since 1970 UTC.
    :raises EngageError: if the store keeps no profiles, or the user does not exist.
    :raises StorageUnavailable: if the traits may not be removed.
    """
    if not isinstance(store, ProfileStore):
        raise EngageError("the storage does not store profiles")
    before = await _profile(store, workspace_id, user_id)
    present = [trait for trait in dict.fromkeys(traits) if trait in before.traits]
    left, timestamp = present, now
    for _ in range(2):
        if left:
            await _write(store, workspace_id, user_id, left, now, timestamp)
            profile = await _profile(store, workspace_id, user_id)
            left = [trait for trait in left if trait in profile.traits]
            # A server whose clock was ahead set the others: the removal must be later. It is not
            # later for all of them, because no client could set such a trait again until then.
            timestamp = max(now, profile.updated_at) + 1
    if left:
        raise StorageUnavailable(f"traits are being set at this moment: {', '.join(left)}")
    return present


async def _profile(store: ProfileStore, workspace_id: str, user_id: str) -> UserProfile:
    profile = await store.profile(workspace_id, user_id)
    if profile is None:
        raise EngageError(f"the workspace {workspace_id!r} has no user {user_id!r}")
    return profile


async def _write(
    store: EventStore,
    workspace_id: str,
    user_id: str,
    traits: Sequence[str],
    now: int,
    timestamp: int,
) -> None:
    message_id = uuid7(now)
    document = {
        "type": "identify",
        "messageId": message_id,
        "userId": user_id,
        "removedTraits": traits,
        "timestamp": render_time(timestamp),
        "receivedAt": render_time(now),
        "workspaceId": workspace_id,
        "source": OPERATOR_ORIGIN,
    }
    event = Event(
        workspace_id=workspace_id,
        origin=OPERATOR_ORIGIN,
        message_id=message_id,
        type="identify",
        user_id=user_id,
        anonymous_id=None,
        name=None,
        received_at=now,
        timestamp=timestamp,
        body=orjson.dumps(document),
    )
    (outcome,) = await store.write([event])
    if outcome.status is not Status.STORED:
        raise EngageError(f"the storage refused the removal: {outcome.reason}")
