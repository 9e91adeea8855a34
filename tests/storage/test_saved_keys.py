# SPDX-License-Identifier: Apache-2.0
"""The file with the keys of the store, for a start while the store is away."""

from __future__ import annotations

import dataclasses
import os
import stat
from pathlib import Path
from typing import Any

import orjson
import pytest

from engage.api import Record
from engage.config import Config, LogConfig
from engage.storage.keys import KEY, OVERRIDE
from engage.storage.saved_keys import SavedKeys, save_if_changed, saved_keys_path
from support.pipeline import ACME, NOW, OTHER

STORED = "0123456789abcdef0123456789abcdef"


def record(key_id: str, kind: str = KEY, workspace: str = "acme", **body: Any) -> Record:
    body = {"key": STORED, **body} if kind == KEY else body
    return Record(
        kind=kind, workspace_id=workspace, id=key_id, body=orjson.dumps(body), at=NOW, version=1
    )


RECORDS = [
    record("ios"),
    record("off", key="another", disabled=True),
    record("gone", key="archived", archived=True),
    record("web", workspace="other", key="third"),
    record("broken", key=5),
    record("website", OVERRIDE, disabled=True),
    record("enabled", OVERRIDE, disabled=False),
]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "engage.toml.keys.json"
    saved = SavedKeys.of(RECORDS)
    saved.write(path)
    assert SavedKeys.read(path) == saved
    assert [(key.workspace_id, key.id, key.disabled) for key in saved.keys] == [
        ("acme", "gone", True),
        ("acme", "ios", False),
        ("acme", "off", True),
        ("other", "web", False),
    ]
    assert saved.overrides == [("acme", "website")]
    assert os.listdir(tmp_path) == [path.name]


def test_the_file_is_beside_the_config_or_where_the_config_says(tmp_path: Path) -> None:
    config = Config(path=tmp_path / "engage.toml", base_dir=tmp_path)
    assert saved_keys_path(config) is None
    for name, expected in (
        (None, tmp_path / "engage.toml.keys.json"),
        ("keys", tmp_path / "keys"),
        ("/var/lib/keys", Path("/var/lib/keys")),
    ):
        log = LogConfig(keys_file=name)
        assert saved_keys_path(dataclasses.replace(config, log=log)) == expected


def test_the_file_has_no_key_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text("{}")
    path.chmod(0o644)
    old = os.umask(0)
    try:
        assert save_if_changed(path, RECORDS)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    for key in (STORED, "another", "archived", "third"):
        assert key not in text
    # Salted: the same key has another hash in another file.
    first, second = SavedKeys.of(RECORDS), SavedKeys.of(RECORDS)
    assert first.digest_of(STORED) != second.digest_of(STORED)
    assert first.digest_of(STORED) in first.accepted([ACME])


def test_the_file_is_written_only_after_a_change(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    assert save_if_changed(path, RECORDS)
    before = path.read_bytes()
    assert not save_if_changed(path, list(reversed(RECORDS)))
    assert path.read_bytes() == before
    assert save_if_changed(path, RECORDS[1:])
    assert save_if_changed(path, [record("ios", disabled=True), *RECORDS[1:]])
    assert save_if_changed(path, RECORDS[:-2])


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.json"
    save_if_changed(path, RECORDS)
    before = path.read_bytes()

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("engage.storage.saved_keys.os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        save_if_changed(path, RECORDS[:1])
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]


GOOD = orjson.loads(
    orjson.dumps(
        {
            "version": 1,
            "salt": "00" * 16,
            "keys": [{"workspace": "acme", "id": "a", "sha256": "0" * 64, "disabled": False}],
            "disabled": [["acme", "b"]],
        }
    )
)


@pytest.mark.parametrize(
    "damage",
    [
        {"version": 2},
        {"salt": "x"},
        {"salt": 5},
        {"keys": None},
        {"keys": [{"workspace": "acme"}]},
        {"keys": [{**GOOD["keys"][0], "disabled": "no"}]},
        {"keys": [{**GOOD["keys"][0], "id": 5}]},
        {"keys": ["key"]},
        {"disabled": [["acme"]]},
        {"disabled": [5]},
        {"disabled": [["acme", None]]},
    ],
    ids=str,
)
def test_a_damaged_file_is_an_error(tmp_path: Path, damage: dict[str, Any]) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(orjson.dumps(GOOD))
    assert SavedKeys.read(path).overrides == [("acme", "b")]
    path.write_bytes(orjson.dumps({**GOOD, **damage}))
    with pytest.raises(ValueError):  # noqa: PT011
        SavedKeys.read(path)
    # And the next change replaces it.
    assert save_if_changed(path, RECORDS)
    assert SavedKeys.read(path).overrides == [("acme", "website")]


@pytest.mark.parametrize("content", [b"", b"\0", b"[]", b"5", b'{"version": 1', b"\xff\xfe"])
def test_a_file_that_is_cut_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(content)
    with pytest.raises(ValueError):  # noqa: PT011
        SavedKeys.read(path)


def test_the_config_wins_over_the_file() -> None:
    saved = SavedKeys.of(
        [
            record("website", key="same-id-as-the-config"),
            record("x", key="key-1"),
            record("y", workspace="unknown", key="no-such-workspace"),
            record("z", key="fine"),
        ]
    )
    assert [key.id for key in saved.accepted([ACME, OTHER]).values()] == ["z"]
