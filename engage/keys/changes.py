# SPDX-License-Identifier: Apache-2.0
"""Changes of the write keys in a store, for the command line and the console alike.

Each change is one atomic write that expects the version of the record that was read, and is
followed by an entry of the audit (:mod:`engage.audit`). The processes that answer requests
follow within seconds: see :mod:`engage.keys.table`.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import orjson

from engage.api import EngageError, Record
from engage.audit import Actor, record_audit
from engage.config import Workspace, WriteKey, config_schema, key_problem
from engage.config.erasures_file import ErasuresFileError, KeyNote, append
from engage.config.schema_check import problems
from engage.keys.effective import KEY, KEY_ID, OVERRIDE, Key, body_of, stored_key
from engage.monitoring import logs
from engage.store.facade import Storage

__all__ = ["KeyChangedError", "KeyState", "change_key", "create_key"]

_log = logging.getLogger(__name__)

KeyState = Literal["disabled", "enabled", "archived"]
#: What each state sets in the record of a key.
_VALUES: Final[Mapping[KeyState, Mapping[str, bool]]] = {
    "disabled": {"disabled": True},
    "enabled": {"disabled": False},
    "archived": {"disabled": True, "archived": True},
}

#: Maximum length of a name, as in ``schemas/config.json``.
MAX_NAME_LENGTH: Final = 256


class KeyChangedError(EngageError):
    """A key is not changed, because another operator has just changed it."""


async def create_key(
    store: Storage,
    workspaces: Iterable[Workspace],
    workspace_id: str,
    key_id: str,
    *,
    name: str = "",
    options: Mapping[str, Any] | None = None,
    actor: Actor,
    now: int,
) -> Key:
    """Create a key of 128 random bits in the store, and return it when it is durable.

    Of a server key, the store gets only the SHA-256: its :attr:`Key.key` is in the result alone.

    :param key_id: in the form of the ids of the config; no key of the workspace may ever have
        had it.
    :param name: for people; may be empty.
    :param options: what the config may have for a key besides: its ``kind``, ``origins`` ….
    :param now: milliseconds since 1970 UTC.
    :raises EngageError: if the workspace, the id, the name or an option is not possible, or the id
        is taken.
    :raises StorageUnavailable: if the key may not be durable.
    """
    workspace = _workspace(workspaces, workspace_id)
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
    options = options or {}
    secret = options.get("kind") == "server"
    given = {"sha256": WriteKey(id=key_id, key=key).sha256} if secret else {"key": key}
    _check({"id": key_id, **given, **options})
    body = {
        "id": key_id,
        **given,
        **options,
        "name": name,
        "createdAt": now,
        "by": actor.who,
        "disabled": False,
    }
    record = _record(KEY, workspace_id, key_id, body, now)
    version = await store.put_record(record, expected_version=0)
    if version is None:
        raise EngageError(taken)
    details = {"workspace": workspace_id, "key": key_id, "name": name, **options}
    await record_audit(store, actor, "key-created", details, now=now)
    made = stored_key(dataclasses.replace(record, version=version))
    assert made is not None
    return dataclasses.replace(made, key=key)


async def change_key(
    store: Storage,
    workspaces: Iterable[Workspace],
    workspace_id: str,
    key_id: str,
    state: KeyState,
    *,
    actor: Actor,
    now: int,
    expected_version: int | None = None,
    notes: Path | None = None,
) -> bool:
    """Disable, enable or archive a key. An archived key is disabled for good.

    :param expected_version: :attr:`Key.version` as the operator saw it; ``None``: whatever it is.
    :param now: milliseconds since 1970 UTC.
    :param notes: the file of erasures, which notes the change: a backup from before must not enable
        the key again.
    :return: false if the key was in this state already.
    :raises KeyChangedError: if the key has another version; nothing is changed then.
    :raises EngageError: if there is no such key; if an archived key
        would be enabled; or if the config file decides.
    :raises StorageUnavailable: if the change may not be durable.
    """

    def text(problem: str) -> str:
        return f"the key {key_id!r} of the workspace {workspace_id!r} {problem}"

    workspace = _workspace(workspaces, workspace_id)
    configured = next((key for key in workspace.write_keys if key.id == key_id), None)
    values = _VALUES[state]
    if configured is not None:
        if state == "archived":
            raise EngageError(text("is in the config file; remove it there"))
        if configured.disabled and state == "enabled":
            raise EngageError(text("is disabled in the config file; enable it there"))
    kind = KEY if configured is None else OVERRIDE
    while True:
        record = await store.get_record(kind, workspace_id, key_id)
        body = {} if record is None else body_of(record)
        version = 0 if record is None else record.version
        if kind == KEY and not body.keys() & {"key", "sha256"}:
            raise EngageError(text("does not exist"))
        if expected_version not in (None, version):
            break
        if body.get("archived") and state == "enabled":
            raise EngageError(text("is archived; create another key"))
        if all(body.get(name, False) is value for name, value in values.items()):
            return False
        if configured is not None and configured.disabled:
            return False
        changed = _record(kind, workspace_id, key_id, {**body, **values}, now)
        if await store.put_record(changed, expected_version=version) is not None:
            details = {"workspace": workspace_id, "key": key_id}
            note = KeyNote(workspace=workspace_id, write_key=key_id, state=state, at=now)
            try:
                if notes is not None:
                    append(notes, [note])
            except ErasuresFileError as error:  # The key itself is changed.
                _log.error("a restored backup would not know of this change: %s", error)
            await record_audit(store, actor, f"key-{state}", details, now=now)
            return True
        if expected_version is not None:
            break
    raise KeyChangedError(text("was changed by another operator; reload the page and try again"))


def _check(key: Mapping[str, Any]) -> None:
    """Check a key as if it were in the config.

    :raises EngageError: naming the first option that is wrong.
    """
    schema = config_schema()
    items = schema["properties"]["workspaces"]["items"]["properties"]["write_keys"]["items"]
    mistakes = problems({**items, "$defs": schema["$defs"]}, key)
    if not mistakes and (problem := key_problem(key)) is not None:
        mistakes = [": ".join(problem)]
    if mistakes:
        raise EngageError(mistakes[0])


def _record(kind: str, workspace_id: str, key_id: str, body: Mapping[str, Any], now: int) -> Record:
    encoded = orjson.dumps(body)
    return Record(kind=kind, workspace_id=workspace_id, id=key_id, body=encoded, at=now)


def _workspace(workspaces: Iterable[Workspace], workspace_id: str) -> Workspace:
    for workspace in workspaces:
        if workspace.id == workspace_id:
            return workspace
    raise EngageError(f"the config does not contain a workspace {workspace_id!r}")
