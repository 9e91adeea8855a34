# SPDX-License-Identifier: Apache-2.0
"""Finds the user of an event for which a webhook provider gives only the recipient.

It is the user with that e-mail address or phone number, or with another trait that the provider
looks users up by (:attr:`engage.api.Provider.identifiers`). If several users have it, it is the one
with the oldest claim (see :meth:`Storage.find_users`): a user that an attacker
makes with a person's address does not get that person's deliveries. If no user has it, it is the
visitor with the oldest claim. Otherwise the address itself becomes the anonymous id, or the
provider names the user id.

Some services report bounces without the ids that were sent with the message. Such an event gets
them from an earlier event about that message, which is found by its message id
(:attr:`engage.api.TranslatedEvent.earlier`).

An event whose user or visitor was found by what anyone can claim says so in
``context.engage.foundBy``: see :func:`engage.people.person.export_person`.

Nothing is cached: a user may be identified a moment later, by another process, and the next
delivery belongs to that user.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Final

from engage.api import TranslatedEvent, engage_mark, identifier_value
from engage.reading.time_limit import within
from engage.store.facade import Storage

__all__ = ["Recipients", "is_looked_up", "without_lookup"]

#: Maximum number of addresses in one storage call.
LOOKUP: Final = 1000

#: Trait, such as ``email``, and the value in the form by which users are looked up.
Key = tuple[str, str]
#: The ids of users or visitors by key, oldest claim first.
Found = dict[Key, Sequence[str]]


class Recipients:
    """Looks up the users of recipients.

    :param store: users are looked up only if it keeps profiles.
    :param timeout: seconds that a storage call may take.
    """

    def __init__(self, store: Storage, timeout: float) -> None:
        #: Where users are looked up.
        self.store = store
        self._timeout = timeout

    async def identify(
        self, workspace_id: str, provider: str, events: Sequence[TranslatedEvent]
    ) -> list[dict[str, Any]]:
        """Add ``userId`` or ``anonymousId`` to each event that has neither.

        All recipients are looked up together.

        :param provider: the name of the provider that made the events.
        :param events: those that :func:`engage.deliveries.receive.translate` returned.
        :return: the documents, in the order of the events; the events are not changed.
        :raises StorageUnavailable: if the users could not be looked up.
        """
        earlier = await self._earlier(workspace_id, provider, events)
        if earlier:
            events = [_completed(event, earlier) for event in events]
        keys = [_keys(event) for event in events]
        distinct = {key for several in keys for key in several}
        users = await self._find(self.store.find_users, workspace_id, distinct)
        others = distinct - users.keys()
        visitors = await self._find(self.store.find_visitors, workspace_id, others)
        return [
            _identified(event, own, users, visitors)
            for event, own in zip(events, keys, strict=True)
        ]

    async def _earlier(
        self, workspace_id: str, provider: str, events: Sequence[TranslatedEvent]
    ) -> Mapping[str, Mapping[str, Any]]:
        """Return the earlier events that events need, by message id, as far as there are any."""
        ids = {
            event.earlier
            for event in events
            if event.earlier is not None and not event.document.get("userId")
        }
        earlier: dict[str, Mapping[str, Any]] = {}
        for event in events if ids else ():
            message_id = event.document.get("messageId")
            if isinstance(message_id, str) and message_id in ids:
                earlier[message_id] = event.document
        for message_id in ids - earlier.keys():
            async with within(self._timeout):
                stored = await self.store.find(workspace_id, provider, message_id)
            if stored is not None:
                earlier[message_id] = stored.document()
        return earlier

    async def _find(
        self,
        find: Callable[[str, str, Sequence[str]], Awaitable[Mapping[str, Sequence[str]]]],
        workspace_id: str,
        keys: Collection[Key],
    ) -> Found:
        """Return the users or visitors of each key: the one with the oldest claim is first."""
        ids = Found()
        for trait in sorted({trait for trait, _ in keys}):
            values = sorted(value for key, value in keys if key == trait)
            for start in range(0, len(values), LOOKUP):
                async with within(self._timeout):
                    matches = await find(workspace_id, trait, values[start : start + LOOKUP])
                ids.update(((trait, value), names) for value, names in matches.items())
        return ids


def is_looked_up(event: TranslatedEvent) -> bool:
    """Return whether a user is looked up for an event."""
    return bool(_keys(event))


def without_lookup(event: TranslatedEvent) -> dict[str, Any]:
    """Return the document of an event as if no look-up found a user."""
    return _identified(event, _keys(event), {}, {})


def _marked(document: Mapping[str, Any], found_by: str) -> dict[str, Any]:
    context = document.get("context") or {}
    if not isinstance(context, dict):  # The event is refused.
        return {**document}
    return {**document, "context": {**context, "engage": {"foundBy": found_by}}}


def _completed(event: TranslatedEvent, earlier: Mapping[str, Mapping[str, Any]]) -> TranslatedEvent:
    """Return an event with what it lacks of its earlier event."""
    before = earlier.get(event.earlier) if event.earlier is not None else None
    if before is None or event.document.get("userId"):
        return event
    document = dict(event.document)
    own, more = document.get("properties", {}), before.get("properties", {})
    if isinstance(own, dict) and isinstance(more, dict):
        document["properties"] = {**more, **own}
    anonymous_id, found_by = before.get("anonymousId"), engage_mark(before).get("foundBy")
    if before.get("userId"):
        document["userId"] = before["userId"]
    # An id that was made of the address is not passed on: there may be a user with it now.
    elif anonymous_id and anonymous_id not in map(":".join, _keys(event)):
        document.setdefault("anonymousId", anonymous_id)
    else:
        found_by = None
    if found_by:
        document = _marked(document, found_by)
    return dataclasses.replace(event, document=document)


def _identified(
    event: TranslatedEvent, keys: Sequence[Key], users: Found, visitors: Found
) -> dict[str, Any]:
    if not keys and event.fallback is None:
        return event.document
    if event.document.get("userId") or event.document.get("anonymousId"):
        return event.document
    for key in keys:
        for user in users.get(key, ()):
            if user != event.fallback:
                return _marked({**event.document, "userId": user}, ":".join(key))
    if event.fallback is not None:
        return {**event.document, "userId": event.fallback}
    for key in keys:
        if visitors.get(key):
            return _marked({**event.document, "anonymousId": visitors[key][0]}, ":".join(key))
    return {**event.document, "anonymousId": ":".join(keys[-1])}


def _keys(event: TranslatedEvent) -> list[Key]:
    """Return the keys by which an event is looked up; empty if it has an id."""
    document = event.document
    if document.get("userId") or document.get("anonymousId"):
        return []
    recipients = [*event.lookups, *([event.recipient] if event.recipient is not None else [])]
    values = ((who.trait, identifier_value(who.trait, who.value)) for who in recipients)
    return [(trait, value) for trait, value in values if value is not None]
