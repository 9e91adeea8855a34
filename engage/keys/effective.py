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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
import orjson

from engage.api import EngageError, Record
from engage.config import Workspace, WriteKey, key_problem
from engage.reading.scans import all_pages
from engage.store.facade import Storage

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
    "options_of",
    "rate_of",
    "read_key_records",
    "shown_rate",
    "stored_key",
    "words",
]

#: The kinds of the records.
KEY: Final = "key"
OVERRIDE: Final = "key-override"

#: The form of an id, as in ``schemas/config.json``.
# The hyphen is escaped because browsers get this as the pattern of a field, and want that.
KEY_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_\-]{0,63}")
#: The form of a key, as in ``schemas/config.json``.
_KEY: Final = re.compile(r"[!-9;-~]{1,512}")

_NUMBER: Final = re.compile(r"\d{1,15}(\.\d{1,6})?", re.ASCII)

#: The names of what an operator chooses for a key, in the config and in its record alike.
_FIELDS: Final = tuple(field.name for field in dataclasses.fields(WriteKey))
_OPTIONS: Final = tuple(set(_FIELDS) - {"id", "key", "sha256", "disabled"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Key(WriteKey):
    """A write key, as it counts: requests with a :attr:`disabled` one are refused."""

    workspace_id: str
    #: For people; may be empty.
    name: str = ""
    #: Where the key is defined.
    source: Literal["config", "store"]
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
    #: Every public key in the config and in the records, used or not: they must not appear in the
    #: log.
    secrets: frozenset[str] = dataclasses.field(repr=False)


def is_possible_key(text: str) -> bool:
    """Return whether a text has the form of a write key that the store can have."""
    return _KEY.fullmatch(text) is not None


async def read_key_records(store: Storage) -> list[Record]:
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
    #: (workspace, id) of every key, and SHA-256 of the key → where it is.
    ids: set[tuple[str, str]] = set()
    places: dict[str, str] = {}
    workspace_ids: set[str] = set()
    for workspace in workspaces:
        workspace_ids.add(workspace.id)
        for write_key in workspace.write_keys:
            identity = (workspace.id, write_key.id)
            override = overrides.pop(identity, None)
            # Only an override that says so enables a key.
            off = override is not None and body_of(override).get("disabled") is not False
            keys.append(
                Key(
                    **{name: getattr(write_key, name) for name in _FIELDS}
                    | {"disabled": write_key.disabled or off},
                    workspace_id=workspace.id,
                    source="config",
                    disabled_in_config=write_key.disabled,
                    changed_at=None if override is None else override.at,
                    version=0 if override is None else override.version,
                )
            )
            ids.add(identity)
            what = f"the key {write_key.id!r} of the workspace {workspace.id!r} in the config"
            places[write_key.sha256] = what
    masked = {key.key for key in keys}
    for record in sorted(stored, key=lambda record: (record.workspace_id, record.id)):
        what = f"the key {record.id!r} of the workspace {record.workspace_id!r} in the store"
        key = stored_key(record)
        if key is None:
            problems.append(f"{what} is not valid, and is ignored")
            continue
        masked.add(key.key)
        if key.workspace_id not in workspace_ids:
            problems.append(f"{what} is ignored: the config does not have its workspace")
        elif (key.workspace_id, key.id) in ids:
            problems.append(f"{what} is ignored: the config has a key with this id")
        elif key.sha256 in places:
            problems.append(f"{what} is ignored: {places[key.sha256]} is the same")
        else:
            keys.append(key)
            places[key.sha256] = what
    for workspace_id, key_id in sorted(overrides):
        if workspace_id in workspace_ids:
            problems.append(
                f"the key {key_id!r} of the workspace {workspace_id!r} is disabled in the store,"
                " but the config no longer has it"
            )
    return EffectiveKeys(keys=keys, problems=problems, secrets=frozenset(masked - {""}))


async def list_keys(store: Storage, workspaces: Iterable[Workspace]) -> EffectiveKeys:
    """Return the keys that count now.

    :raises StorageUnavailable: if the store does not answer.
    """
    records = await read_key_records(store)
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
    name, by, created = (body.get(x) for x in ("name", "by", "createdAt"))
    given = {name: body[name] for name in ("key", "sha256", *_OPTIONS) if name in body}
    try:
        # A key whose options are not understood is not accepted without them.
        write_key = msgspec.convert({"id": record.id, **given}, WriteKey)
    except msgspec.ValidationError:
        return None
    possible = is_possible_key(write_key.key) or (write_key.sha256 and not write_key.key)
    if not (possible and KEY_ID.fullmatch(record.id)) or key_problem(given) is not None:
        return None
    archived = body.get("archived", False) is not False
    return Key(
        **{name: getattr(write_key, name) for name in _FIELDS}
        | {"disabled": archived or body.get("disabled", False) is not False},
        workspace_id=record.workspace_id,
        name=name if isinstance(name, str) else "",
        source="store",
        archived=archived,
        created_at=created if isinstance(created, int) else None,
        created_by=by if isinstance(by, str) else "",
        changed_at=record.at,
        version=record.version,
    )


def words(text: str) -> list[str]:
    """Return the items of a list that an operator wrote, divided by commas or spaces."""
    return text.replace(",", " ").split()


def rate_of(text: str) -> dict[str, float]:
    """Return the rate that an operator wrote: ``100``, or ``events_per_second=100,burst=500``.

    :raises EngageError: if it has another form, such as ``1,000``.
    """
    rate: dict[str, float] = {}
    for word in words(text):
        name, sign, value = word.rpartition("=")
        if not _NUMBER.fullmatch(value) or (sign and not name):
            raise EngageError(f"rate: {word!r} must end with a number, as in burst=500")
        name = name or "events_per_second"
        if name in rate:
            raise EngageError(f"rate: {text!r} has {name} twice; write 1000, not 1,000")
        rate[name] = float(value)
    return rate


def shown_rate(rate: Mapping[str, float]) -> str:
    """Return a rate as :func:`rate_of` reads it."""
    return ",".join(f"{name}={value:.15g}" for name, value in rate.items())


def options_of(key: WriteKey) -> dict[str, Any]:
    """Return the options of a key that are not the defaults, as the config and its record have
    them."""
    default = WriteKey(id="")
    chosen = {name: getattr(key, name) for name in sorted(_OPTIONS)}
    options = {name: value for name, value in chosen.items() if value != getattr(default, name)}
    made: dict[str, Any] = orjson.loads(orjson.dumps(options))
    return made
