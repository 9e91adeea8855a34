# SPDX-License-Identifier: Apache-2.0
"""The write keys of a server: those of the config, and those that an operator made in the store.

A key of the store is a record of kind :data:`KEY`. A key of the config can be disabled by a record
of kind :data:`OVERRIDE` with its id. Keys are never deleted, because events carry their ids: they
are disabled, and archived (:mod:`engage.keys.changes`).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal

import orjson

from engage.api import EventStore, Record, RecordStore
from engage.config import Workspace
from engage.upkeep.export import all_pages

__all__ = [
    "KEY",
    "KEY_ID",
    "OVERRIDE",
    "EffectiveKeys",
    "Key",
    "body_of",
    "effective_keys",
    "is_possible_key",
    "list_keys",
    "read_key_records",
    "stored_key",
]

#: The kinds of the records.
KEY: Final = "key"
OVERRIDE: Final = "key-override"

#: The form of an id, as in ``schemas/config.json``.
# The hyphen is escaped because browsers get this as the pattern of a field, and want that.
KEY_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_\-]{0,63}")
#: The form of a key, as in ``schemas/config.json``.
_KEY: Final = re.compile(r"[!-9;-~]{1,512}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A write key, as it counts."""

    workspace_id: str
    id: str
    key: str = dataclasses.field(repr=False)
    #: For people; may be empty.
    name: str = ""
    #: Where the key is defined.
    source: Literal["config", "store"]
    #: Whether requests with the key are refused.
    disabled: bool = False
    #: Whether the config file disables the key; it cannot be enabled elsewhere then.
    disabled_in_config: bool = False
    #: Whether the key is out of use for good; it is also disabled.
    archived: bool = False
    #: When and by whom a key of the store was created: milliseconds since 1970 UTC.
    created_at: int | None = None
    created_by: str = ""
    #: When its record was last changed: milliseconds since 1970 UTC; ``None``: it has no record.
    changed_at: int | None = None
    #: The version of its record; 0: it has none. A change can expect it.
    version: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveKeys:
    """All keys of a server."""

    #: Those of the config in its order, then those of the store by workspace and id.
    keys: Sequence[Key]
    #: Mistakes for an operator to correct, such as a key of the store that the config hides.
    problems: Sequence[str]
    #: Every key in the config and in the records, used or not: they must not appear in the log.
    secrets: frozenset[str] = dataclasses.field(repr=False)


def is_possible_key(text: str) -> bool:
    """Return whether a text has the form of a write key that the store can have."""
    return _KEY.fullmatch(text) is not None


async def read_key_records(store: RecordStore) -> list[Record]:
    """Return the records from which :func:`effective_keys` computes the keys."""
    return [
        record
        for kind in (KEY, OVERRIDE)
        async for record in all_pages(functools.partial(store.list_records, kind), attempts=1)
    ]


def effective_keys(workspaces: Iterable[Workspace], records: Iterable[Record]) -> EffectiveKeys:
    """Return the keys that count.

    A key of the config wins over one of the store with its id, or with the same key. A record that
    cannot be read is ignored, and reported as a problem.
    """
    overrides: dict[tuple[str, str], Record] = {}
    stored: list[Record] = []
    for record in records:
        if record.kind == OVERRIDE:
            overrides[record.workspace_id, record.id] = record
        else:
            stored.append(record)
    keys: list[Key] = []
    problems: list[str] = []
    #: (workspace, id) of every key, and key → where it is.
    ids: set[tuple[str, str]] = set()
    places: dict[str, str] = {}
    known: set[str] = set()
    for workspace in workspaces:
        known.add(workspace.id)
        for one in workspace.write_keys:
            identity = (workspace.id, one.id)
            override = overrides.pop(identity, None)
            # Only an override that says so enables a key.
            off = override is not None and body_of(override).get("disabled") is not False
            keys.append(
                Key(
                    workspace_id=workspace.id,
                    id=one.id,
                    key=one.key,
                    source="config",
                    disabled=one.disabled or off,
                    disabled_in_config=one.disabled,
                    changed_at=None if override is None else override.at,
                    version=0 if override is None else override.version,
                )
            )
            ids.add(identity)
            places[one.key] = f"the key {one.id!r} of the workspace {workspace.id!r} in the config"
    masked = set(places)
    for record in sorted(stored, key=lambda record: (record.workspace_id, record.id)):
        what = f"the key {record.id!r} of the workspace {record.workspace_id!r} in the store"
        key = stored_key(record)
        if key is None:
            problems.append(f"{what} is not valid, and is ignored")
            continue
        masked.add(key.key)
        if key.workspace_id not in known:
            problems.append(f"{what} is ignored: the config does not have its workspace")
        elif (key.workspace_id, key.id) in ids:
            problems.append(f"{what} is ignored: the config has a key with this id")
        elif key.key in places:
            problems.append(f"{what} is ignored: {places[key.key]} is the same")
        else:
            keys.append(key)
            places[key.key] = what
    for workspace_id, key_id in sorted(overrides):
        if workspace_id in known:
            problems.append(
                f"the key {key_id!r} of the workspace {workspace_id!r} is disabled in the store,"
                " but the config no longer has it"
            )
    return EffectiveKeys(keys=keys, problems=problems, secrets=frozenset(masked))


async def list_keys(store: EventStore, workspaces: Iterable[Workspace]) -> EffectiveKeys:
    """Return the keys that count now; only those of the config if the store keeps no records.

    :raises StorageUnavailable: if the store does not answer.
    """
    records = await read_key_records(store) if isinstance(store, RecordStore) else ()
    return effective_keys(workspaces, records)


def body_of(record: Record) -> dict[str, Any]:
    """Return the members of a record; none if it is not an object."""
    try:
        body = orjson.loads(record.body)
    except orjson.JSONDecodeError:
        return {}
    return body if isinstance(body, dict) else {}


def stored_key(record: Record) -> Key | None:
    """Return the key in a record of kind :data:`KEY`, or ``None`` if it is not valid."""
    body = body_of(record)
    key, name, by, created = (body.get(x) for x in ("key", "name", "by", "createdAt"))
    if not (isinstance(key, str) and is_possible_key(key) and KEY_ID.fullmatch(record.id)):
        return None
    archived = body.get("archived", False) is not False
    return Key(
        workspace_id=record.workspace_id,
        id=record.id,
        key=key,
        name=name if isinstance(name, str) else "",
        source="store",
        disabled=archived or body.get("disabled", False) is not False,
        archived=archived,
        created_at=created if isinstance(created, int) else None,
        created_by=by if isinstance(by, str) else "",
        changed_at=record.at,
        version=record.version,
    )
