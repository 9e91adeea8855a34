# SPDX-License-Identifier: Apache-2.0
"""The file of erasures beside the config: what a backup must not bring back.

``<config>.erasures`` has one JSON object in each line, appended and synced before anything is
erased. It has no id of a person, only keyed hashes (:func:`engage.store.keys.hash_of`), so that it
can be kept with the backups. It also notes which write keys were disabled, archived and enabled.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import msgspec
import orjson

from engage.api import EngageError
from engage.config import Config
from engage.config.config import ERASURES_SUFFIX
from engage.durable import sync_folder
from engage.store.keys import fingerprint

__all__ = [
    "Erasure",
    "ErasuresFileError",
    "KeyNote",
    "append",
    "check_writable",
    "erasures_path",
    "key_of",
    "newest",
    "read",
]


class ErasuresFileError(EngageError):
    """The file of erasures cannot be read or written; the message names it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Erasure:
    """An id that was erased with everything that the server received for it until then."""

    workspace: str
    #: ``user``: of events with this user id. ``visitor``: of events with this anonymous id and
    #: without a user id.
    kind: Literal["user", "visitor"]
    #: :func:`engage.store.keys.hash_of` the id.
    hash: str
    #: Milliseconds since 1970 UTC: what was received before is erased.
    at: int
    #: Names the key of the hash: the first digits of the SHA-256 of the key.
    key: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeyNote:
    """A write key that an operator disabled, archived or enabled; the last note of a key counts."""

    workspace: str
    write_key: str
    state: Literal["disabled", "archived", "enabled"]
    #: Milliseconds since 1970 UTC.
    at: int


def erasures_path(config: Config) -> Path:
    """Return the file of erasures of a config: its path with ``.erasures`` appended."""
    return config.path.with_name(config.path.name + ERASURES_SUFFIX)


def key_of(config: Config) -> str:
    """Return the key of the hashes.

    :raises EngageError: if the config has none. It says what to add.
    """
    if config.erasures.key is None:
        raise EngageError(
            f"the config has no key for erasures; add this to {config.path}, with a random text"
            ' such as `openssl rand -hex 32` prints:\n\n[erasures]\nkey = "…"\n\n'
            "Keep the key for as long as there are backups: they are compared by it"
        )
    return config.erasures.key


def append(path: Path, lines: Iterable[Erasure | KeyNote]) -> None:
    """Append lines, and return when they are durable: the file is created with mode 0600.

    A line without an end, which a crash left behind, is cut off first: nothing was erased for it.

    :raises ErasuresFileError: if the lines may not be durable.
    """
    data = b"".join(orjson.dumps(line) + b"\n" for line in lines)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "r+b") as file:
            _lock(descriptor)
            whole = file.read().rfind(b"\n") + 1
            file.truncate(whole)
            file.seek(whole)
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        sync_folder(path.parent)
    except OSError as error:
        reason = error.strerror or error
        raise ErasuresFileError(f"{path} cannot be written: {reason}") from error


def check_writable(path: Path) -> None:
    """Check that lines can be appended, without changing anything.

    :raises ErasuresFileError: if they cannot.
    """
    place = path if path.exists() else path.parent
    if not os.access(place, os.W_OK):
        reason = "this user may not write to it" if place.exists() else "there is no such folder"
        raise ErasuresFileError(f"{path} cannot be written: {place}: {reason}")


def read(path: Path, key: str | None) -> tuple[list[Erasure], list[KeyNote]]:
    """Return the lines of a file of erasures; none if it does not exist.

    A line without an end is left out: nothing was erased for it.

    :param key: of the config; with ``None``, only the notes of keys can be used, so a file with
        erasures is refused.
    :raises ErasuresFileError: if the file cannot be read, if a line is not understood, or if
        another key made a hash. Erasures that cannot be compared would bring a person back.
    """
    erasures: list[Erasure] = []
    notes: list[KeyNote] = []
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return erasures, notes
    except OSError as error:
        raise ErasuresFileError(f"{path} cannot be read: {error.strerror or error}") from error
    expected = None if key is None else fingerprint(key)
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), 1):
        try:
            fields = orjson.loads(line)
            entry: KeyNote | Erasure = (
                msgspec.convert(fields, KeyNote)
                if "write_key" in fields
                else msgspec.convert(fields, Erasure)
            )
        except (ValueError, TypeError) as error:
            raise ErasuresFileError(
                f"{path} is damaged at line {number}, or of a later version of engage: {error}"
            ) from error
        if isinstance(entry, KeyNote):
            notes.append(entry)
        elif entry.key == expected:
            erasures.append(entry)
        else:
            raise ErasuresFileError(
                f"{path} has at line {number} a hash of another key than [erasures] key in the"
                f" config; its SHA-256 begins with {entry.key}"
            )
    return erasures, notes


def newest(erasures: Iterable[Erasure]) -> Mapping[tuple[str, str, str], int]:
    """Return what to compare events with: (workspace, kind, hash) → the latest time."""
    times: dict[tuple[str, str, str], int] = {}
    for erasure in erasures:
        identity = (erasure.workspace, erasure.kind, erasure.hash)
        times[identity] = max(erasure.at, times.get(identity, erasure.at))
    return times


def _lock(descriptor: int) -> None:
    """Wait until no other process appends. Windows has no such lock."""
    try:
        import fcntl
    except ImportError:
        return
    fcntl.flock(descriptor, fcntl.LOCK_EX)
