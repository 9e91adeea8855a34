# SPDX-License-Identifier: Apache-2.0
"""A copy of the write keys in the store, beside the config, for a start while the store is away.

With a log, a server accepts events while the store is away, also if it starts then. So it saves the
keys whenever they change. The file has no key: it has the hash of each with a salt, so that a copy
of the file lets nobody send events.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import secrets
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import orjson

from engage.api import Record
from engage.config import Config, Workspace
from engage.storage.keys import KEY, OVERRIDE, body_of, stored_key

__all__ = ["SavedKey", "SavedKeys", "save_if_changed", "saved_keys_path"]

_VERSION: Final = 1
_SALT_BYTES: Final = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavedKey:
    """A key of the store, without the key."""

    workspace_id: str
    id: str
    #: The hexadecimal SHA-256 of the salt and the key.
    digest: str
    disabled: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavedKeys:
    """The keys of a store, as a file has them."""

    salt: bytes
    keys: Sequence[SavedKey]
    #: The keys of the config that are disabled in the store: workspace id, key id.
    overrides: Sequence[tuple[str, str]]

    @classmethod
    def of(cls, records: Iterable[Record], salt: bytes | None = None) -> SavedKeys:
        """Return the keys in records of a store.

        :param salt: ``None`` for a new one.
        """
        salt = secrets.token_bytes(_SALT_BYTES) if salt is None else salt
        keys, overrides = [], []
        for record in sorted(records, key=lambda one: (one.workspace_id, one.id)):
            if record.kind == OVERRIDE:
                if body_of(record).get("disabled") is not False:
                    overrides.append((record.workspace_id, record.id))
            elif record.kind == KEY and (key := stored_key(record)) is not None:
                digest = _digest(salt, key.key)
                keys.append(
                    SavedKey(
                        workspace_id=key.workspace_id,
                        id=key.id,
                        digest=digest,
                        disabled=key.disabled,
                    )
                )
        return cls(salt=salt, keys=keys, overrides=overrides)

    @classmethod
    def read(cls, path: Path) -> SavedKeys:
        """Read a file that :meth:`write` wrote.

        :raises OSError: if it cannot be read.
        :raises ValueError: if it is damaged.
        """
        document: Any = orjson.loads(path.read_bytes())
        try:
            if document["version"] != _VERSION:
                raise ValueError("another version of engage wrote it")
            keys = [
                SavedKey(
                    workspace_id=_text(one["workspace"]),
                    id=_text(one["id"]),
                    digest=_text(one["sha256"]),
                    disabled=_flag(one["disabled"]),
                )
                for one in document["keys"]
            ]
            overrides = [
                (_text(workspace), _text(key_id)) for workspace, key_id in document["disabled"]
            ]
            return cls(salt=bytes.fromhex(document["salt"]), keys=keys, overrides=overrides)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error

    def write(self, path: Path) -> None:
        """Replace a file, which only its owner can read. A reader sees the old or the new one.

        :raises OSError: if it cannot be written; the old one stays.
        """
        document = {
            "version": _VERSION,
            "salt": self.salt.hex(),
            "keys": [
                {
                    "workspace": key.workspace_id,
                    "id": key.id,
                    "sha256": key.digest,
                    "disabled": key.disabled,
                }
                for key in self.keys
            ],
            "disabled": self.overrides,
        }
        # ``mkstemp`` makes a file with mode 0600.
        number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(number, "wb") as file:
                file.write(orjson.dumps(document, option=orjson.OPT_INDENT_2))
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def accepted(self, workspaces: Iterable[Workspace]) -> Mapping[str, SavedKey]:
        """Return digest → key of those that count beside the keys of a config.

        The rules are those of :func:`engage.storage.keys.effective_keys`: a key of the config wins.
        """
        ids, digests, known = set(), set(), set()
        for workspace in workspaces:
            known.add(workspace.id)
            for one in workspace.write_keys:
                ids.add((workspace.id, one.id))
                digests.add(_digest(self.salt, one.key))
        accepted: dict[str, SavedKey] = {}
        for key in self.keys:
            taken = (key.workspace_id, key.id) in ids or key.digest in digests
            if key.workspace_id in known and not taken:
                accepted.setdefault(key.digest, key)
        return accepted

    def digest_of(self, key: str) -> str:
        """Return the digest that a key has in this file."""
        return _digest(self.salt, key)


def saved_keys_path(config: Config) -> Path | None:
    """Return the path of the file for a config; ``None`` if it has no log."""
    if config.log is None:
        return None
    name = config.log.keys_file
    return config.base_dir / (f"{config.path.name}.keys.json" if name is None else name)


def save_if_changed(path: Path, records: Sequence[Record]) -> bool:
    """Write the keys in records to a file, unless it has them.

    :return: whether it was written.
    :raises OSError: if it cannot be written.
    """
    try:
        saved = SavedKeys.read(path)
        if saved == SavedKeys.of(records, saved.salt):
            return False
    except (OSError, ValueError):
        pass
    SavedKeys.of(records).write(path)
    return True


def _digest(salt: bytes, key: str) -> str:
    return hashlib.sha256(salt + key.encode()).hexdigest()


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("a text is expected")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError("true or false is expected")
    return value
