# SPDX-License-Identifier: Apache-2.0
"""The requests to erase that providers reported. Only an operator carries them out, because a
delivery does not prove who asks.

Some are events, others are noted as records of kind :data:`REQUEST`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final

import orjson

from engage.api import EventFilter, Record, identifier_value
from engage.reading.scans import all_pages
from engage.store.facade import Storage

__all__ = ["Request", "erasure_requests", "note_requests", "noted_requests", "request_notes"]

#: The kind of the records.
REQUEST: Final = "erasure-request"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request to erase a person that a provider passed on."""

    #: The name of the provider.
    origin: str
    user_id: str | None
    anonymous_id: str | None = None
    #: Milliseconds since 1970 UTC.
    received_at: int


async def note_requests(
    store: Storage, workspace_id: str, provider: str, user_ids: Sequence[str], *, now: int
) -> None:
    """Note that these users are to be erased; a user whom the provider named before is noted once.

    :param now: milliseconds since 1970 UTC.
    :raises StorageUnavailable: if this may not be durable.
    """
    for user_id in user_ids:
        if identifier_value("id", user_id) is None:
            continue  # No user has it.
        body = orjson.dumps({"provider": provider, "userId": user_id})
        name = hashlib.sha256(body).hexdigest()
        await store.put_record(
            Record(kind=REQUEST, workspace_id=workspace_id, id=name, body=body, at=now)
        )


async def noted_requests(
    store: Storage, workspace_id: str, users: Mapping[str, int]
) -> list[Record]:
    """Return the notes about users.

    :param users: user id → the time before which a note must have come, in milliseconds.
    """
    return [
        record
        async for record, request in request_notes(store, workspace_id)
        if record.at < users.get(request.user_id or "", 0)
    ]


async def erasure_requests(
    store: Storage, workspace_id: str, names: Sequence[tuple[str, str]]
) -> AsyncIterator[Request]:
    """Yield the requests that are left: an erasure of the user removes them.

    :param names: see :meth:`engage.registry.Registry.erasure_requests`.
    """
    async for _, request in request_notes(store, workspace_id):
        yield request
    for origin, name in names:
        criteria = EventFilter(workspace_id=workspace_id, origin=origin, name=name)
        async for event in all_pages(functools.partial(store.scan, criteria)):
            if criteria.matches(event):
                yield Request(
                    origin=origin,
                    user_id=event.user_id,
                    anonymous_id=event.anonymous_id,
                    received_at=event.received_at,
                )


async def request_notes(
    store: Storage, workspace_id: str | None
) -> AsyncIterator[tuple[Record, Request]]:
    """Yield the notes of a workspace, with what they say; ``None``: of all workspaces."""
    read = functools.partial(store.list_records, REQUEST, workspace_id)
    async for record in all_pages(read):
        noted = orjson.loads(record.body)
        yield (
            record,
            Request(origin=noted["provider"], user_id=noted["userId"], received_at=record.at),
        )
