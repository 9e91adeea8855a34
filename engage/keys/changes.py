# SPDX-License-Identifier: Apache-2.0
"""Changes of the write keys in a store, for the command line and the console alike.

Each change is one atomic write that expects the version of the record that was read, and is
followed by an entry of the audit (:mod:`engage.upkeep.audit`). The processes that answer requests
follow within seconds: see :mod:`engage.keys.table`.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterable, Mapping
from typing import Any, Final

import orjson

from engage.api import EngageError, EventStore, Record, RecordStore
from engage.config import Workspace
from engage.keys.effective import KEY, KEY_ID, OVERRIDE, Key, body_of, stored_key
from engage.monitoring import logs
from engage.upkeep.audit import Actor, record_audit

__all__ = ["KeyChangedError", "archive_key", "create_key", "disable_key", "enable_key"]

#: Maximum length of a name, as in ``schemas/config.json``.
MAX_NAME_LENGTH: Final = 256


class KeyChangedError(EngageError):
    """A key is not changed, because another operator has just changed it."""


async def create_key(
    store: EventStore,
    workspaces: Iterable[Workspace],
    workspace_id: str,
    key_id: str,
    *,
    name: str = "",
    actor: Actor,
    now: int,
) -> Key:
    """Create a key of 128 random bits in the store, and return it when it is durable.

    :param key_id: in the form of the ids of the config; no key of the workspace may ever have
        had it.
    :param name: for people; may be empty.
    :param now: milliseconds since 1970 UTC.
    :raises EngageError: if the workspace, the id or the name is not possible, or the id is taken.
    :raises StorageUnavailable: if the key may not be durable.
    """
    records, workspace = _records(store), _workspace(workspaces, workspace_id)
    name = name.strip()
    if not KEY_ID.fullmatch(key_id):
        raise EngageError(
            "the id of a key must be 1 to 64 letters, digits, - and _, and start with a letter or"
            " digit"
        )
    if len(name) > MAX_NAME_LENGTH:
        raise EngageError(f"the name of a key must have at most {MAX_NAME_LENGTH} characters")
    taken = f"the workspace {workspace_id!r} already has a key {key_id!r}; choose another id"
    if any(key.id == key_id for key in workspace.write_keys):
        raise EngageError(taken)
    key = secrets.token_hex(16)
    logs.mask([key])
    body = {
        "id": key_id,
        "key": key,
        "name": name,
        "createdAt": now,
        "by": actor.who,
        "disabled": False,
    }
    record = _record(KEY, workspace_id, key_id, body, now)
    version = await records.put_record(record, expected_version=0)
    if version is None:
        raise EngageError(taken)
    details = {"workspace": workspace_id, "key": key_id, "name": name}
    await record_audit(records, actor, "key-created", details, now=now)
    made = stored_key(dataclasses.replace(record, version=version))
    assert made is not None
    return made


async def disable_key(
    store: EventStore,
    workspaces: Iterable[Workspace],
    workspace_id: str,
    key_id: str,
    *,
    actor: Actor,
    now: int,
    expected_version: int | None = None,
) -> bool:
    """Refuse requests with a key from now on.

    :param expected_version: :attr:`Key.version` as the operator saw it; ``None``: whatever it is.
    :param now: milliseconds since 1970 UTC.
    :return: false if the key was disabled already.
    :raises KeyChangedError: if the key has another version; nothing is changed then.
    :raises EngageError: if there is no such key, or the store keeps no records.
    :raises StorageUnavailable: if the change may not be durable.
    """
    change = _Change(store, workspaces, workspace_id, key_id, actor, now, expected_version)
    return await change.apply("key-disabled", {"disabled": True})


async def enable_key(
    store: EventStore,
    workspaces: Iterable[Workspace],
    workspace_id: str,
    key_id: str,
    *,
    actor: Actor,
    now: int,
    expected_version: int | None = None,
) -> bool:
    """Accept requests with a key again. The parameters and errors are those of :func:`disable_key`.

    :return: false if the key was enabled already.
    :raises EngageError: also if the key is archived, or disabled in the config file.
    """
    change = _Change(store, workspaces, workspace_id, key_id, actor, now, expected_version)
    return await change.apply("key-enabled", {"disabled": False})


async def archive_key(
    store: EventStore,
    workspaces: Iterable[Workspace],
    workspace_id: str,
    key_id: str,
    *,
    actor: Actor,
    now: int,
    expected_version: int | None = None,
) -> bool:
    """Disable a key of the store for good. The parameters are those of :func:`disable_key`.

    :return: false if the key was archived already.
    :raises EngageError: also if the key is in the config file.
    """
    change = _Change(store, workspaces, workspace_id, key_id, actor, now, expected_version)
    return await change.apply("key-archived", {"disabled": True, "archived": True})


@dataclasses.dataclass(frozen=True, slots=True)
class _Change:
    """A change of one record, which fails if another operator has just changed the record."""

    store: EventStore
    workspaces: Iterable[Workspace]
    workspace_id: str
    key_id: str
    actor: Actor
    now: int
    expected_version: int | None

    async def apply(self, action: str, values: Mapping[str, bool]) -> bool:
        """Give the record some values; return whether that changed it."""
        store = _records(self.store)
        workspace = _workspace(self.workspaces, self.workspace_id)
        configured = next((key for key in workspace.write_keys if key.id == self.key_id), None)
        if configured is not None:
            if "archived" in values:
                raise EngageError(self._text("is in the config file; remove it there"))
            if configured.disabled and not values["disabled"]:
                raise EngageError(self._text("is disabled in the config file; enable it there"))
        kind = KEY if configured is None else OVERRIDE
        while True:
            record = await store.get_record(kind, self.workspace_id, self.key_id)
            body = {} if record is None else body_of(record)
            version = 0 if record is None else record.version
            if kind == KEY and (record is None or "key" not in body):
                raise EngageError(self._text("does not exist"))
            if self.expected_version not in (None, version):
                break
            if body.get("archived") and "archived" not in values:
                if values["disabled"]:
                    return False
                raise EngageError(self._text("is archived; create another key"))
            if all(body.get(name, False) is value for name, value in values.items()):
                return False
            if configured is not None and configured.disabled and values["disabled"]:
                return False
            changed = _record(kind, self.workspace_id, self.key_id, {**body, **values}, self.now)
            if await store.put_record(changed, expected_version=version) is not None:
                details = {"workspace": self.workspace_id, "key": self.key_id}
                await record_audit(store, self.actor, action, details, now=self.now)
                return True
            if self.expected_version is not None:
                break
        raise KeyChangedError(
            self._text("was changed by another operator; reload the page and try again")
        )

    def _text(self, problem: str) -> str:
        return f"the key {self.key_id!r} of the workspace {self.workspace_id!r} {problem}"


def _record(kind: str, workspace_id: str, key_id: str, body: Mapping[str, Any], now: int) -> Record:
    encoded = orjson.dumps(body)
    return Record(kind=kind, workspace_id=workspace_id, id=key_id, body=encoded, at=now)


def _records(store: EventStore) -> RecordStore:
    if not isinstance(store, RecordStore):
        raise EngageError(
            "the storage does not keep write keys; add them to the config file instead"
        )
    return store


def _workspace(workspaces: Iterable[Workspace], workspace_id: str) -> Workspace:
    for workspace in workspaces:
        if workspace.id == workspace_id:
            return workspace
    raise EngageError(f"the config does not contain a workspace {workspace_id!r}")
