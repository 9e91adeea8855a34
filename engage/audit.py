# SPDX-License-Identifier: Apache-2.0
"""The audit: who changed what on this server, from where and when.

An entry is a record of kind :data:`AUDIT`. All entries belong to the whole server, and their ids
are UUIDs of version 7, so that a store lists them in the order of time.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import uuid
from collections.abc import Mapping
from typing import Any, Final

import orjson

from engage.api import MAX_RECORD_BYTES, Record, StorageError
from engage.store.facade import Storage

__all__ = ["AUDIT", "Actor", "AuditEntry", "new_id", "read_entry", "record_audit"]

_log = logging.getLogger(__name__)

#: The kind of the records.
AUDIT: Final = "audit"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """Who acts, and from where."""

    #: A name, such as that of a user of the system.
    who: str
    #: ``command line``, or the address of a client.
    origin: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One action."""

    #: The id of the record.
    id: str
    #: When: milliseconds since 1970 UTC.
    at: int
    actor: Actor
    #: The action, such as ``key-disabled``.
    action: str
    #: The objects of the action, such as ``workspace`` and ``key``. Never a secret.
    details: Mapping[str, Any]


async def record_audit(
    store: Storage,
    actor: Actor,
    action: str,
    details: Mapping[str, Any],
    *,
    now: int,
    entry_id: str | None = None,
) -> None:
    """Write an entry about an action that has been carried out.

    A store that is unavailable now does not undo the action: the entry is then logged as an error.

    :param now: milliseconds since 1970 UTC.
    :param entry_id: of an entry that this one replaces.
    """
    body = {
        "at": now,
        "who": actor.who,
        "from": actor.origin,
        "action": action,
        "details": dict(details),
    }
    encoded = orjson.dumps(body)
    if len(encoded) > MAX_RECORD_BYTES:
        encoded = orjson.dumps({**body, "details": {"tooLong": len(encoded)}})
    record = Record(kind=AUDIT, workspace_id="", id=entry_id or new_id(now), body=encoded, at=now)
    try:
        await store.put_record(record)
    except StorageError as error:
        _log.error("an entry of the audit could not be stored: %s", error, extra=_logged(body))
    else:
        _log.info("audit", extra=_logged(body))


def _logged(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an entry's line in the log. The names of a log record are taken."""
    fields = {name: body[name] for name in ("action", "who", "from")}
    return {**fields, **{f"detail.{name}": value for name, value in body["details"].items()}}


def read_entry(record: Record) -> AuditEntry:
    """Return the entry in a record of kind :data:`AUDIT`; missing fields are empty."""
    try:
        loaded = orjson.loads(record.body)
    except ValueError:
        loaded = None
    body: dict[str, Any] = loaded if isinstance(loaded, dict) else {}
    at, details = body.get("at"), body.get("details")
    return AuditEntry(
        id=record.id,
        at=at if isinstance(at, int) else record.at,
        actor=Actor(who=str(body.get("who", "")), origin=str(body.get("from", ""))),
        action=str(body.get("action", "")),
        details=details if isinstance(details, dict) else {},
    )


def new_id(now: int) -> str:
    """Return a UUID of version 7 (RFC 9562)."""
    value = (now & 0xFFFFFFFFFFFF) << 80 | secrets.randbits(80)
    value = value & ~(0xF << 76) | 0x7 << 76
    return str(uuid.UUID(int=value & ~(0x3 << 62) | 0x2 << 62))
