# SPDX-License-Identifier: Apache-2.0
"""Old links and ended sessions are deleted."""

from __future__ import annotations

from engage.api import Record
from engage.audit import AUDIT
from engage.console.data.reader import Reader
from engage.console.sign_in.housekeeping import KINDS, expire_once
from engage.console.sign_in.sessions import LONGEST_SECONDS
from support.console import Clock
from support.memory_store import MemoryStore


async def test_old_records_of_the_console_are_deleted() -> None:
    clock, store = Clock(), MemoryStore()
    now = round(clock.now * 1000)
    for kind in KINDS:
        for name, age in (("old", LONGEST_SECONDS + 1), ("new", LONGEST_SECONDS - 1)):
            at = now - age * 1000
            await store.put_record(Record(kind=kind, workspace_id="", id=name, body=b"{}", at=at))
    # Keys are not deleted, and the audit only while the time can be trusted.
    for kind in ("key", AUDIT):
        await store.put_record(Record(kind=kind, workspace_id="", id="old", body=b"{}", at=1))
    await expire_once(store, Reader(5.0), clock)
    left = (await store.list_records(None, limit=99)).items
    kept = {("key", "old"), (AUDIT, "old"), *((kind, "new") for kind in KINDS)}
    assert {(one.kind, one.id) for one in left} == kept
