# SPDX-License-Identifier: Apache-2.0
"""``engage export events --cursor-file``."""

from __future__ import annotations

import errno
import os
import re
import shlex
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import Result

from engage.api import render_time
from engage.store.facade import Storage
from engage.testing import event
from engage.testing.factories import TIME
from support.commands import run
from support.exports import on_store
from support.sqlite import config_file, new_store


def export(config: Path, place: Path, *arguments: str) -> Result:
    return run("export", "events", "--config", config, "--cursor-file", place, *arguments)


def names(result: Result) -> list[str]:
    assert result.exit_code == 0, result.stderr
    return [orjson.loads(line)["messageId"] for line in result.stdout.splitlines()]


def write(config: Path, *messages: str, **fields: Any) -> None:
    async def add(store: Storage) -> None:
        await store.write([event(name, **fields) for name in messages])

    on_store(config, add)


def test_each_run_writes_what_arrived_since_the_run_before(tmp_path: Path) -> None:
    config, place = new_store(tmp_path, event("a"), event("b")), tmp_path / "place"
    assert names(export(config, place)) == ["a", "b"]
    assert names(export(config, place)) == []
    write(config, "c")
    write(config, "d", type="page", name="Home")
    assert names(export(config, place, "--type", "page")) == ["d"]
    # It has passed the one that was not wanted.
    assert names(export(config, place)) == []


def test_the_events_since_a_time_are_the_first(tmp_path: Path) -> None:
    old = [event(f"o{number}", received=1000 + number) for number in range(3)]
    config, place = new_store(tmp_path, *old, event("a", received=2000)), tmp_path / "place"
    since = render_time(TIME + 1002)
    assert names(export(config, place, "--since", since)) == ["o2", "a"]
    write(config, "b")
    assert names(export(config, place)) == ["b"]


def test_an_event_is_written_twice_rather_than_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full after the events were written: the next run writes them again."""
    config, place = new_store(tmp_path, event("a")), tmp_path / "place"
    assert names(export(config, place)) == ["a"]
    write(config, "b")
    before = place.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        result = export(config, place)
    assert result.exit_code == 1
    assert "place cannot be written: No space left on device" in result.stderr
    assert orjson.loads(result.stdout)["messageId"] == "b"
    assert place.read_bytes() == before
    assert names(export(config, place)) == ["b"]


def test_a_restored_store_is_another_one(tmp_path: Path) -> None:
    """The error has the line that goes on."""
    config, place = new_store(tmp_path, event("a"), event("b")), tmp_path / "place"
    backup, folder = tmp_path / "backup.db", tmp_path / "restored"
    assert run("backup", "--config", config, backup).exit_code == 0
    assert names(export(config, place)) == ["a", "b"]
    folder.mkdir()
    new = config_file(folder)
    assert run("restore", "--config", new, backup).exit_code == 0
    result = export(new, place)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "another store, or from before a restore" in result.stderr
    place.rename(tmp_path / "moved away")
    line = shlex.split(re.search(r"engage export events .*", result.stderr)[0])  # type: ignore[index]
    since = line[line.index("--since") + 1]
    write(new, "c", received=4_000_000_000_000)
    assert names(export(new, place, "--since", since)) == ["c"]
    assert names(export(new, place)) == []


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b'{"cursor": "x", "at": "y"}', b'{"cursor": "[1]", "at": 1}']
)
def test_a_file_without_a_cursor_is_not_replaced(tmp_path: Path, content: bytes) -> None:
    config, place = new_store(tmp_path, event("a")), tmp_path / "place"
    place.write_bytes(content)
    result = export(config, place)
    assert result.exit_code in (1, 2)
    assert "cursor" in result.stderr
    assert place.read_bytes() == content


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    config, place = new_store(tmp_path, event("a")), tmp_path / "no folder" / "place"
    result = export(config, place)
    assert result.exit_code == 1
    assert f"{place} cannot be written: No such file or directory" in result.stderr


@pytest.mark.parametrize("arguments", [("--after", "[1,1]"), ("--limit", "1")])
def test_options_that_have_a_place_of_their_own_are_refused(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    config = new_store(tmp_path, event("a"))
    assert export(config, tmp_path / "place", *arguments).exit_code == 2
    assert run("export", "users", "--cursor-file", "x", "--config", config).exit_code == 2
    assert not os.path.exists(tmp_path / "place")
