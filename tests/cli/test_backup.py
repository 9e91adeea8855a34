# SPDX-License-Identifier: Apache-2.0
"""``engage backup`` and ``engage restore``."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from engage.api import Record
from engage.config.erasures_file import KeyNote, append, read
from engage.console.sign_in import housekeeping, sessions
from engage.copy.backups import LEFT_OUT, last_backup
from engage.monitoring.sampler import REFUSED_RECORD
from engage.registry import Registry
from engage.store.facade import Storage
from engage.testing import event
from engage.testing.factories import TIME, ids
from support.commands import run
from support.exports import audit_of, on_store, records_in
from support.memory_store import MemoryEvents
from support.server_process import SQLITE, start_server
from support.sqlite import config_file, new_store

MONGO = """
[storage.mongo]
url = "mongodb://ann:secret@db1:27017,db2/my-events?replicaSet=rs0&authSource=admin"
[[workspaces]]
id = "acme"
[[workspaces.write_keys]]
id = "website"
key = "k-acme"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Make a config and a store with two events and a write key."""
    path = new_store(tmp_path, event("a"), event("b"))
    result = run("keys", "add", "--config", path, "--workspace", "acme", "--id", "ios")
    assert result.exit_code == 0
    return path


def restored(config: Path, backup: Path, *arguments: str) -> tuple[Path, list[str]]:
    """Restore a backup into another folder, and return its config and the lines of the command."""
    folder = backup.with_suffix(".restored")
    folder.mkdir()
    path = config_file(folder)
    result = run("restore", "--config", path, *arguments, backup)
    assert result.exit_code == 0, result.stderr
    return path, result.stdout.splitlines() + result.stderr.splitlines()


def test_a_backup_is_restored(config: Path, tmp_path: Path) -> None:
    backup = tmp_path / "backup.db"
    result = run("backup", "--config", config, backup)
    assert (result.exit_code, result.stderr) == (0, "")
    size = backup.stat().st_size
    assert result.stdout.startswith(f"{backup}: 2 events, {size:,} bytes, as of 20")
    assert stat.S_IMODE(backup.stat().st_mode) == 0o600
    at = result.stdout.split()[-1]
    path, lines = restored(config, backup)
    assert lines == [
        f"restored 2 events, {size:,} bytes, as of {at}; what was received since is missing",
        f"{path}.erasures does not exist: no erasure is repeated",
    ]

    assert on_store(path, ids) == ["a", "b"]
    assert [record.id for record in records_in(path, "key")] == ["ios"]
    entries = audit_of(path)
    assert [entry.action for entry in entries] == ["key-created", "store-restored"]
    assert entries[1].details == {"madeAt": at, "events": 2}
    assert stat.S_IMODE(os.stat(path.with_name("engage.db")).st_mode) == 0o600


def test_the_last_backup_is_recorded(config: Path, tmp_path: Path) -> None:
    assert on_store(config, last_backup) is None
    for name in ("first.db", "second.db"):
        assert run("backup", "--config", config, tmp_path / name).exit_code == 0
        found = on_store(config, last_backup)
        assert found is not None
        assert found.path == str(tmp_path / name)
        assert found.size == (tmp_path / name).stat().st_size
        assert (found.events, found.origin[:12]) == (2, "command line")
    # The first one is in the second one.
    assert len(records_in(config, "backup")) == 1


def test_a_backup_that_cannot_be_recorded_is_complete(config: Path, tmp_path: Path) -> None:
    """Such as one of another user than the store's, or on a full disk."""
    text = config.read_text().replace("min_free_bytes = 0", "min_free_bytes = 9000000000000000")
    # Here it is another disk for the backup, where that does not count.
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second disk")
    config.write_text(text)
    backup = other / f"engage-test-{os.getpid()}.db"
    try:
        result = run("backup", "--config", config, backup)
        assert result.exit_code == 0
        assert "the backup is complete, but the console does not show it" in result.stderr
        assert "min_free_bytes" in result.stderr
        assert backup.exists()
    finally:
        backup.unlink(missing_ok=True)


def test_what_lets_people_sign_in_is_left_out(config: Path, tmp_path: Path) -> None:
    assert set(LEFT_OUT) == {
        *(*housekeeping.KINDS, sessions.SECRET_KIND, sessions.ENDED_KIND, REFUSED_RECORD)
    }

    async def write(store: Storage) -> None:
        for kind in (*LEFT_OUT, "log_gap"):
            body = b'{"kind":"%s"}' % kind.encode()
            one = Record(kind=kind, workspace_id="", id="one", body=body, at=TIME)
            await store.put_record(one)

    on_store(config, write)
    assert run("backup", "--config", config, tmp_path / "backup.db").exit_code == 0
    path, _ = restored(config, tmp_path / "backup.db")
    assert [kind for kind in (*LEFT_OUT, "log_gap") if records_in(path, kind)] == ["log_gap"]


def test_keys_that_were_disabled_since_are_disabled_again(config: Path, tmp_path: Path) -> None:
    """A key that is newer than the backup is named."""
    backup = tmp_path / "backup.db"
    run("keys", "add", "--config", config, "--workspace", "acme", "--id", "android")
    assert run("backup", "--config", config, backup).exit_code == 0

    def note(key: str, state: Any) -> KeyNote:
        return KeyNote(workspace="acme", write_key=key, state=state, at=TIME)

    file = tmp_path / "erasures"
    append(
        file,
        [
            *(note("website", "disabled"), note("ios", "disabled"), note("ios", "archived")),
            *(note("android", "disabled"), note("android", "enabled"), note("later", "disabled")),
        ],
    )
    path, lines = restored(config, backup, "--erasures", str(file))
    assert lines[1:] == [
        f"0 erased ids in {file}; erased: nothing",
        "engage: the key 'later' of the workspace 'acme' does not exist",
    ]
    # The next restore of this config knows it as well.
    _, notes = read(path.with_name("engage.toml.erasures"), None)
    assert {(one.write_key, one.state) for one in notes} == {
        *(("website", "disabled"), ("ios", "archived"))
    }
    listed = run("keys", "list", "--config", path).stdout
    states = {line.split("\t")[1]: line for line in listed.splitlines()}
    assert "disabled" in states["website"]
    assert "archived" in states["ios"]
    assert "disabled" not in states["android"]


def test_a_person_who_was_erased_since_stays_erased(config: Path, tmp_path: Path) -> None:
    """By the file beside the config, or by another one."""
    # An erasure waits for twice the timeout.
    text = config.read_text().replace("[storage]", "[storage]\nwrite_timeout = 1", 1)
    config.write_text(f'{text}[erasures]\nkey = "{"k" * 64}"\n')
    events = [event("of-ann", user_id="ann"), event("of-bob", user_id="bob")]
    on_store(config, lambda store: store.write(events))
    backup = tmp_path / "backup.db"
    assert run("backup", "--config", config, backup).exit_code == 0
    options = ("--config", config, "--workspace", "acme", "--user", "ann", "--yes")
    erased = run("erase", "user", *options)
    assert erased.exit_code == 0, erased.stderr
    beside = config.with_name(config.name + ".erasures")
    (tmp_path / "gone").mkdir()
    config.with_name("engage.db").rename(tmp_path / "gone" / "engage.db")
    result = run("restore", "--config", config, backup)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[1] == f"1 erased id in {beside}; erased: events 1"
    other = tmp_path / "other"
    other.mkdir()
    new = other / "engage.toml"
    new.write_text(config.read_text())
    result = run("restore", "--config", new, "--erasures", beside, backup)
    assert result.exit_code == 0, result.stderr
    for path in (config, new):
        assert {"of-ann", "of-bob"} & {*on_store(path, ids)} == {"of-bob"}
    on_store(config, lambda store: store.write(events))
    assert "of-ann" not in on_store(config, ids), "a late retry stores nothing"


def test_a_damaged_file_of_erasures_prevents_a_restore(config: Path, tmp_path: Path) -> None:
    """Otherwise someone who was forgotten would come back."""
    assert run("backup", "--config", config, tmp_path / "backup.db").exit_code == 0
    (tmp_path / "new").mkdir()
    path = config_file(tmp_path / "new")
    path.with_name("engage.toml.erasures").write_text("damaged\n")
    result = run("restore", "--config", path, tmp_path / "backup.db")
    assert result.exit_code == 1
    assert "is damaged at line 1" in result.stderr
    assert not path.with_name("engage.db").exists()
    result = run("restore", "--config", path, "--erasures", "missing", tmp_path / "backup.db")
    assert result.exit_code == 2


def test_errors_are_one_line(config: Path, tmp_path: Path) -> None:
    for arguments, reason in (
        (("backup", tmp_path), "a folder; give the name of a new file in it"),
        (("backup", tmp_path / "engage.db"), "there is a file already, and it is not replaced"),
        (("restore", config), "not a backup of a SQLite store"),
        (("restore", tmp_path / "no.db"), "No such file or directory"),
    ):
        result = run(arguments[0], "--config", config, arguments[1])
        assert result.exit_code == 1
        assert result.stderr.startswith(f"engage: {arguments[1]}: {reason}")
        assert result.stderr.count("\n") == 1


def test_mongodb_names_the_lines_to_type(tmp_path: Path) -> None:
    """Without the password."""
    path = tmp_path / "mongo.toml"
    path.write_text(MONGO)
    for command in ("backup", "restore"):
        result = run(command, "--config", path, tmp_path / "file")
        assert result.exit_code == 1
        assert result.stderr.splitlines() == [
            "engage: not for the storage 'mongo'; type this instead",
            "  to back up: mongodump --uri mongodb://db1:27017,db2:27017 --db my-events --gzip"
            " --archive=engage.archive.gz",
            "  to restore: mongorestore --uri mongodb://db1:27017,db2:27017 --nsInclude"
            " 'my-events.*' --gzip --archive=engage.archive.gz",
        ]


def test_another_storage_is_copied(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Registry, "make_storage", lambda *_, **__: MemoryEvents())
    result = run("backup", "--config", config, tmp_path / "file")
    assert result.exit_code == 1
    lines = result.stderr.splitlines()
    assert lines[1] == (
        f"  to back up: engage copy --from {config} --to sqlite.toml"
        " && engage backup --config sqlite.toml TARGET"
    )
    assert lines[3].startswith(f"make sqlite.toml first: a copy of {config} with backend")


def test_a_running_server_is_backed_up(tmp_path: Path) -> None:
    """And its store cannot be restored meanwhile."""
    with start_server(tmp_path, storage=SQLITE) as server:
        assert server.post("/v1/track", {"userId": "ann", "event": "A"}).status_code == 200
        backup = tmp_path / "backup.db"
        result = run("backup", "--config", server.config, backup)
        assert (result.exit_code, result.stderr) == (0, "")
        assert ": 1 event, " in result.stdout
        result = run("restore", "--config", server.config, backup)
        assert result.exit_code == 1
        assert "writes to it: stop it before you restore a backup" in result.stderr
        assert server.post("/v1/track", {"userId": "ann", "event": "B"}).status_code == 200
