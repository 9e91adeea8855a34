# SPDX-License-Identifier: Apache-2.0
"""The erasures that a store knows: what was received of a person before is not stored any more.

A *tombstone* is a record of kind :data:`ERASURE`; its id is the kind of the erased id and its hash.
It is written before anything is erased. A plan that stores something looks for it: so nothing that
was on its way comes after an erasure, if plans are isolated.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import orjson

from engage.api import API_ORIGIN, ERASED, Event, Kind, Record, engage_mark
from engage.store.keys import fingerprint, hash_of
from engage.store.records import RECORDS, VERSIONS, record_of
from engage.store.tables import Context, Get, Key, Pages, Put, Recall, Remember, Steps, plan

#: The kind of the records.
ERASURE: Final = "erasure"
#: What a process remembers: the time of the newest erasure. What was received later costs nothing.
NEWEST: Final = "newest erasure"

#: Something of a person: workspace, user id, anonymous id, and when it was received.
Received = tuple[str, str | None, str | None, int]


@plan()
def put(tombstones: Sequence[Record], done: bool) -> Steps[str | None]:
    """Write tombstones, unless later ones are stored.

    :param done: whether all that they stand for is erased.
    :return: the fingerprint of the key by which the executing process compares ids with them.
    """
    ordered = sorted(tombstones, key=lambda record: record.at)
    new = {(ERASURE, record.workspace_id, record.id): record for record in ordered}
    stored = {key: record_of(row) for key, row in (yield Get(RECORDS, new.keys())).items()}
    rows = [
        (*key, record.body, record.at, old.version + 1 if old else 1)
        for key, record in new.items()
        if not (old := stored.get(key)) or old.at < record.at or (done and old.at == record.at)
    ]
    if rows:
        yield Put(RECORDS, rows)
        yield Put(VERSIONS, [(ERASURE, 1)])
    yield Remember(NEWEST, None)
    key = (yield Context()).erasures_key
    return None if key is None else fingerprint(key)


def covered(things: Sequence[Received]) -> Steps[list[bool]]:
    """Return of each thing whether an erasure covers it.

    An erasure of the future covers nothing: the clock was ahead when it was stamped.
    """
    key, newest = (yield Context()).erasures_key, (yield Recall(NEWEST)).get(NEWEST)
    if newest is None:
        newest, equal = 0, {"kind": ERASURE}
        if key is not None:
            page = yield Pages(RECORDS, 1, by=("kind", "at"), equal=equal, reverse=True)
            newest = max((record_of(row).at for row in page.rows), default=0)
        yield Remember(NEWEST, {NEWEST: newest})
    ids: list[Key] = []
    for space, user, visitor, at in things:
        kind, name = (Kind.VISITOR, visitor) if user is None else (Kind.USER, user)
        if key is None or name is None or at >= newest:
            ids.append(())
        else:
            ids.append((ERASURE, space, f"{kind}:{hash_of(key, space, name)}"))
    stored = (yield Get(RECORDS, {*filter(None, ids)})) if any(ids) else {}
    now = time.time_ns() // 1_000_000
    return [
        id_ in stored and thing[-1] < record_of(stored[id_]).at <= now
        for id_, thing in zip(ids, things, strict=True)
    ]


def mark_of(event: Event, key: str) -> bytes:
    """Return the mark that an event leaves when it is erased: a keyed hash of its ids.

    Whoever has no key cannot even tell which erased events were of one person. The mark is empty if
    engage looked up whose the event was: when the delivery is repeated, it finds somebody else.

    :param key: ``[erasures] key``.
    """
    if event.origin != API_ORIGIN and "foundBy" in engage_mark(event.document()):
        return b""
    names = [event.origin, event.message_id, event.user_id, event.anonymous_id]
    hashed = hash_of(key, event.workspace_id, orjson.dumps(names).decode())
    return b"%b%b:%b" % (ERASED, fingerprint(key).encode(), hashed.encode())
