# SPDX-License-Identifier: Apache-2.0
"""The requests to erase that providers reported. Only an operator carries them out, because a
delivery does not prove who asks."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Sequence

from engage.api import Event, EventFilter, EventStore
from engage.upkeep.export import all_pages

__all__ = ["erasure_requests"]


async def erasure_requests(
    store: EventStore, workspace_id: str, names: Sequence[tuple[str, str]]
) -> AsyncIterator[Event]:
    """Yield the stored requests in order of arrival: an erasure of the user removes them.

    :param names: see :meth:`engage.registry.Registry.erasure_requests`.
    """
    for origin, name in names:
        wanted = EventFilter(workspace_id=workspace_id, origin=origin, name=name)
        async for event in all_pages(functools.partial(store.scan, wanted)):
            if wanted.matches(event):
                yield event
