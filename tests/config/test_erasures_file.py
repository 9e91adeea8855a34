# SPDX-License-Identifier: Apache-2.0
"""The file of erasures."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from engage.api import EngageError
from engage.config import Config, Erasures
from engage.config import erasures_file as erasures
from engage.config.erasures_file import Erasure, ErasuresFileError, KeyNote
from engage.store.keys import fingerprint, hash_of

KEY = "k" * 32
OTHER = "o" * 32


def erasure(name: str, *, at: int = 5, key: str = KEY, kind: str = "user") -> Erasure:
    return Erasure(
        workspace="acme",
        kind=kind,  # type: ignore[arg-type]
        hash=hash_of(key, "acme", name),
        at=at,
        key=fingerprint(key),
    )


NOTE = KeyNote(workspace="acme", write_key="web", state="archived", at=7)


def test_the_file_is_beside_the_config_and_needs_a_key(tmp_path: Path) -> None:
    config = Config(path=tmp_path / "engage.toml", base_dir=tmp_path)
    assert erasures.erasures_path(config) == tmp_path / "engage.toml.erasures"
    with pytest.raises(EngageError, match=r"\[erasures\]\nkey = "):
        erasures.key_of(config)
    keyed = Config(path=config.path, base_dir=tmp_path, erasures=Erasures(key=KEY))
    assert erasures.key_of(keyed) == KEY
    assert KEY not in repr(keyed)


def test_a_hash_depends_on_the_key_the_workspace_and_the_id() -> None:
    hashes = {
        hash_of(key, workspace, name)
        for key in (KEY, OTHER)
        for workspace in ("a", "ab")
        for name in ("bc", "c", "ü\0")
    }
    assert len(hashes) == 12
    # `printf '["acme","ann"]' | openssl dgst -sha256 -hmac kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkk`
    assert hash_of(KEY, "acme", "ann").startswith("b7a55cccae74513f")


def test_what_is_appended_is_read(tmp_path: Path) -> None:
    path = tmp_path / "engage.toml.erasures"
    assert erasures.read(path, KEY) == ([], [])
    erasures.append(path, [erasure("ann"), erasure("a1", kind="visitor")])
    erasures.append(path, [NOTE])
    assert erasures.read(path, KEY) == ([erasure("ann"), erasure("a1", kind="visitor")], [NOTE])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert b"ann" not in path.read_bytes()


def test_a_line_without_an_end_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "e"
    erasures.append(path, [erasure("ann")])
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:-1])
    assert erasures.read(path, KEY) == ([erasure("ann")], [])
    erasures.append(path, [NOTE])
    assert erasures.read(path, KEY) == ([erasure("ann")], [NOTE])


@pytest.mark.parametrize("line", ["{", "[]", "1", "{}", '{"kind":"user"}', '{"write_key":1}', ""])
def test_a_line_that_is_not_understood_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "e"
    erasures.append(path, [erasure("ann")])
    with path.open("a") as file:
        file.write(f"{line}\n")
    erasures.append(path, [NOTE])
    with pytest.raises(ErasuresFileError, match="damaged at line 2"):
        erasures.read(path, KEY)


def test_a_hash_of_another_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "e"
    erasures.append(path, [NOTE, erasure("ann", key=OTHER)])
    for key in (KEY, None):
        with pytest.raises(ErasuresFileError, match="at line 2 a hash of another key"):
            erasures.read(path, key)


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "missing"
    with pytest.raises(ErasuresFileError, match="cannot be written: No such file"):
        erasures.append(folder / "e", [NOTE])
    with pytest.raises(ErasuresFileError, match="cannot be read: Is a directory"):
        erasures.read(tmp_path, KEY)


def test_what_is_not_synced_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ErasuresFileError, match="cannot be written: No space left"):
        erasures.append(tmp_path / "e", [NOTE])


def test_the_latest_time_of_an_id_counts() -> None:
    found = erasures.newest([erasure("ann", at=9), erasure("ann", at=5), erasure("bob", at=1)])
    assert found == {
        ("acme", "user", erasure("ann").hash): 9,
        ("acme", "user", erasure("bob").hash): 1,
    }
