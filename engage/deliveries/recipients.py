# SPDX-License-Identifier: Apache-2.0
"""Whose event it is when a webhook provider names only the recipient.

The one user who has that e-mail address or phone number; with none, or several, the address itself
as an anonymous id. Nothing is remembered: a user may be identified a moment later, by another
process, and the next delivery is theirs.
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

__all__ = ["Recipients", "of_nobody"]

#: Addresses in one question to the storage.
LOOKUP: Final = 1000

#: Trait (``email``, ``phone``) and the value in the form in which users are looked up.
Key = tuple[str, str]


class Recipients:
    """Gives events to users.

    :param store: asked only if it keeps profiles.
    :param timeout: seconds that a call of it may take.
    """

    def __init__(self, store: EventStore, timeout: float) -> None:
        self._store = store if isinstance(store, ProfileStore) else None
        self._timeout = timeout

    async def identify(
        self, workspace_id: str, events: Sequence[TranslatedEvent]
    ) -> list[dict[str, Any]]:
        """Add ``userId`` or ``anonymousId`` where there is neither; all are looked up at once.

        :return: the documents, in their order; those given are not changed.
        :raises StorageUnavailable: they could not be looked up.
        """
        keys = [_key(event) for event in events]
        users = await self._users(workspace_id, {key for key in keys if key is not None})
        return [_given(event, key, users) for event, key in zip(events, keys, strict=True)]

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
                users.update(
                    ((trait, value), ids[0]) for value, ids in found.items() if len(ids) == 1
                )
        return users


def of_nobody(event: TranslatedEvent) -> dict[str, Any]:
    """:return: the document of an event whose recipient is the address of no user."""
    return _given(event, _key(event), {})


def _given(event: TranslatedEvent, key: Key | None, users: Mapping[Key, str]) -> dict[str, Any]:
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
