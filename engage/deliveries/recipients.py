# SPDX-License-Identifier: Apache-2.0
"""Finds the user of an event for which a webhook provider gives only the recipient.

It is the user with that e-mail address or phone number. If several users have it, it is the one
with the oldest claim (see :meth:`ProfileStore.find_users`): a user that somebody else makes with
the address of a person does not take deliveries away from that person. If no user has it, the
address itself becomes the anonymous id. Nothing is cached: a user may be identified a moment
later, by another process, and the next delivery belongs to that user.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from engage.api import (
    EventStore,
    ProfileStore,
    TranslatedEvent,
    identifier_value,
)
from engage.storage.time_limit import within

__all__ = ["Recipients", "with_anonymous_id"]

#: Maximum number of addresses in one storage call.
LOOKUP: Final = 1000

#: Trait (``email``, ``phone``) and the value in the form by which users are looked up.
Key = tuple[str, str]


class Recipients:
    """Looks up the users of recipients.

    :param store: used only if it keeps profiles.
    :param timeout: seconds that a storage call may take.
    """

    def __init__(self, store: EventStore, timeout: float) -> None:
        self._store = store if isinstance(store, ProfileStore) else None
        self._timeout = timeout

    async def identify(
        self, workspace_id: str, events: Sequence[TranslatedEvent]
    ) -> list[dict[str, Any]]:
        """Add ``userId`` or ``anonymousId`` to each event that has neither.

        All recipients are looked up together.

        :return: the documents, in the order of the events; the events are not changed.
        :raises StorageUnavailable: if the users could not be looked up.
        """
        keys = [_key(event) for event in events]
        users = await self._users(workspace_id, {key for key in keys if key is not None})
        return [_identified(event, key, users) for event, key in zip(events, keys, strict=True)]

    async def _users(self, workspace_id: str, keys: Collection[Key]) -> Mapping[Key, str]:
        users: dict[Key, str] = {}
        if self._store is None:
            return users
        for trait in ("email", "phone"):
            values = sorted(value for key, value in keys if key == trait)
            for start in range(0, len(values), LOOKUP):
                part = values[start : start + LOOKUP]
                async with within(self._timeout):
                    found = await self._store.find_users(workspace_id, trait, part)
                users.update(((trait, value), ids[0]) for value, ids in found.items())
        return users


def with_anonymous_id(event: TranslatedEvent) -> dict[str, Any]:
    """Return the document of an event, with the recipient's address as anonymous id if it has
    neither user id nor anonymous id."""
    return _identified(event, _key(event), {})


def _identified(
    event: TranslatedEvent, key: Key | None, users: Mapping[Key, str]
) -> dict[str, Any]:
    if key is None:
        return event.document
    user = users.get(key)
    field, value = ("userId", user) if user else ("anonymousId", ":".join(key))
    return {**event.document, field: value}


def _key(event: TranslatedEvent) -> Key | None:
    document = event.document
    if event.recipient is None or document.get("userId") or document.get("anonymousId"):
        return None
    trait = event.recipient.trait
    value = identifier_value(trait, event.recipient.value)
    return None if value is None else (trait, value)
