# SPDX-License-Identifier: Apache-2.0
"""What a backup leaves out, and the record of the last one, which the console shows."""

from __future__ import annotations

import dataclasses
from typing import Final

import msgspec

from engage.api import Backup, Record
from engage.audit import Actor
from engage.store.facade import Storage

__all__ = ["LEFT_OUT", "LastBackup", "last_backup", "record_backup"]

#: The kinds of records that are not in a backup: its reader must not be able to sign in.
LEFT_OUT: Final = ("console-secret", "ended-session", "link", "refused")

#: The kind and the id of the record.
_KIND: Final = "backup"
_ID: Final = "last"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LastBackup:
    """The last backup that ``engage backup`` made."""

    #: From when it is: milliseconds since 1970 UTC.
    made_at: int
    events: int
    #: Of its file, in bytes.
    size: int
    #: Its file, on the host that ``origin`` names.
    path: str
    who: str
    origin: str


async def record_backup(store: Storage, backup: Backup, path: str, actor: Actor) -> None:
    """Store that a backup is complete.

    :param path: of its file.
    :raises StorageUnavailable: if that may not be durable.
    """
    last = LastBackup(
        made_at=backup.made_at,
        events=backup.events,
        size=backup.size,
        path=path,
        who=actor.who,
        origin=actor.origin,
    )
    body = msgspec.json.encode(last)
    await store.put_record(
        Record(kind=_KIND, workspace_id="", id=_ID, body=body, at=backup.made_at)
    )


async def last_backup(store: Storage) -> LastBackup | None:
    """Return the last backup; ``None`` if there was none, or another version wrote its record.

    :raises StorageUnavailable: if the store does not answer.
    """
    record = await store.get_record(_KIND, "", _ID)
    try:
        return None if record is None else msgspec.json.decode(record.body, type=LastBackup)
    except msgspec.DecodeError:
        return None
