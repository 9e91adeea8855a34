# SPDX-License-Identifier: Apache-2.0
"""Changes that only an operator can make to users and visitors.

Profiles are the merge of the stored events, so nothing is changed in a profile: an event with the
origin ``operator`` is stored, and the storage applies it as any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from engage.api import (
    OPERATOR_ORIGIN,
    EngageError,
    Event,
    Kind,
    ProfileLimits,
    Status,
    StorageUnavailable,
    UserProfile,
    VisitorProfile,
    render_time,
)
from engage.ids import uuid7
from engage.store.facade import Storage

__all__ = ["decide_link", "remove_traits"]


async def remove_traits(
    store: Storage, workspace_id: str, kind: Kind, name: str, traits: Sequence[str], *, now: int
) -> Sequence[str]:
    """Remove traits of a user or a visitor, and return those that it had.

    :param name: the user id or the anonymous id.
    :param now: milliseconds since 1970 UTC.
    :raises EngageError: if there is no such user or visitor.
    :raises StorageUnavailable: if the traits may not be removed.
    """
    before = await _profile(store, workspace_id, kind, name)
    present = [trait for trait in dict.fromkeys(traits) if trait in before.traits]
    left, timestamp = present, now
    for _ in range(2):
        if left:
            await _write(
                store,
                workspace_id,
                {
                    "type": "identify",
                    "userId" if kind is Kind.USER else "anonymousId": name,
                    "removedTraits": left,
                },
                now,
                timestamp,
            )
            profile = await _profile(store, workspace_id, kind, name)
            left = [trait for trait in left if trait in profile.traits]
            # A server whose clock was ahead set the others: the removal must be later. It is not
            # later for all of them, because no client could set such a trait again until then.
            timestamp = max(now, profile.updated_at) + 1
    if left:
        raise StorageUnavailable(f"traits are being set at this moment: {', '.join(left)}")
    return present


async def decide_link(
    store: Storage,
    workspace_id: str,
    user_id: str,
    anonymous_id: str,
    *,
    linked: bool,
    now: int,
) -> None:
    """Undo the link of an anonymous id to a user for good, or restore it.

    :param now: milliseconds since 1970 UTC.
    :raises EngageError: if there is no such user, the id is not
        linked to it, or it cannot be.
    :raises StorageUnavailable: if the decision may not be stored.
    """
    profile = await _profile(store, workspace_id, Kind.USER, user_id)
    assert isinstance(profile, UserProfile)
    if not linked and anonymous_id not in profile.anonymous_ids:
        raise EngageError(f"{anonymous_id!r} is not an anonymous id of the user {user_id!r}")
    refused = f"{anonymous_id!r} cannot be linked to the user {user_id!r}"
    if linked and (not anonymous_id.strip() or anonymous_id == user_id):
        raise EngageError(refused)
    document = {"type": "alias", "userId": user_id, "previousId": anonymous_id, "linked": linked}
    await _write(store, workspace_id, document, now, now)
    if linked:
        profile = await _profile(store, workspace_id, Kind.USER, user_id)
        assert isinstance(profile, UserProfile)
        if anonymous_id not in profile.anonymous_ids:
            raise EngageError(
                f"{refused}: it is the id of a user or no anonymous id, or the user has"
                f" {ProfileLimits().links} of them"
            )


async def _profile(
    store: Storage, workspace_id: str, kind: Kind, name: str
) -> UserProfile | VisitorProfile:
    profile = await (store.profile if kind is Kind.USER else store.visitor)(workspace_id, name)
    if profile is None:
        raise EngageError(f"the workspace {workspace_id!r} has no {kind} {name!r}")
    return profile


async def _write(
    store: Storage, workspace_id: str, fields: Mapping[str, Any], now: int, timestamp: int
) -> None:
    message_id = uuid7(now)
    document = {
        **fields,
        "messageId": message_id,
        "timestamp": render_time(timestamp),
        "receivedAt": render_time(now),
        "workspaceId": workspace_id,
        "source": OPERATOR_ORIGIN,
    }
    event = Event(
        workspace_id=workspace_id,
        origin=OPERATOR_ORIGIN,
        message_id=message_id,
        type=document["type"],
        user_id=fields.get("userId"),
        anonymous_id=fields.get("anonymousId"),
        name=None,
        received_at=now,
        timestamp=timestamp,
        body=orjson.dumps(document),
    )
    (outcome,) = await store.write([event])
    if outcome.status is not Status.STORED:
        raise EngageError(f"the storage refused the change: {outcome.reason}")
