# SPDX-License-Identifier: Apache-2.0
"""Loads what is in a log in memory into a store, as ``engage load`` does."""

from __future__ import annotations

from engage.api import DeadLetter, Event, unpack
from engage.store.facade import Storage
from support.memory_log import MemoryBroker

__all__ = ["items_of", "load"]


def items_of(broker: MemoryBroker) -> list[Event | DeadLetter]:
    """Return the events and letters in a log, partition by partition."""
    return [unpack(read.record) for read in broker.records]


async def load(broker: MemoryBroker, store: Storage, group: str = "engage") -> None:
    """Write everything that a group has not committed to a store, and commit it."""
    committed = broker.committed(group)
    wanted = [one for one in broker.records if one.offset >= committed.get(one.partition, 0)]
    items = [unpack(one.record) for one in wanted]
    await store.write([item for item in items if isinstance(item, Event)])
    await store.keep([item for item in items if isinstance(item, DeadLetter)])
    broker.commit(group, broker.ends())
