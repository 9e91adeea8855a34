# SPDX-License-Identifier: Apache-2.0
"""``engage check`` with a log: how far the loaders are, and what needs attention."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from click.testing import Result

from engage.api import LogRecord, Record
from engage.config import Config
from engage.registry import Registry
from engage.store.facade import Storage
from support.commands import run
from support.exports import on_store
from support.memory_log import MemoryBroker, MemoryLog
from support.server_process import config_text

#: The config names a log that is installed; the tests replace what is made from it.
LOG = '[log]\n[log.kafka]\nservers = "127.0.0.1:1"\n'


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> MemoryBroker:
    """Connect every log to this broker."""
    made = MemoryBroker(2, retention=1000 * 86_400)

    def make_log(_: Registry, config: Config) -> MemoryLog:
        return MemoryLog(made)

    monkeypatch.setattr(Registry, "make_log", make_log)
    return made


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Return a config with a log whose store exists."""
    path = tmp_path / "engage.toml"
    path.write_text(config_text(config_extra=LOG))
    on_store(path, Storage.check)
    return path


def check(config: Path) -> Result:
    return run("check", "--config", config)


def append(broker: MemoryBroker, partition: int = 0) -> None:
    broker.inject(LogRecord(key=b"k", value=b"{}", headers={}), partition=partition)


def test_check_shows_how_far_the_loaders_are(config: Path, broker: MemoryBroker) -> None:
    result = check(config)
    assert result.exit_code == 0, result.output
    assert "\nlog\tkafka: open, accepts events; everything is loaded\n" in result.stdout
    assert "\nstorage\tsqlite: open" in result.stdout
    broker.clock = lambda: 0
    append(broker)
    append(broker)
    result = check(config)
    # Events that are too old cost the clients, and not the operator's next step.
    assert result.exit_code == 0
    assert "\nlog\tkafka: open, accepts events; 2 records not loaded yet, the oldest" in (
        result.stdout
    )
    assert "\nwarning\tevents are answered 503: the oldest record" in result.stdout


def test_a_gap_makes_check_fail(config: Path, broker: MemoryBroker) -> None:
    for _ in range(3):
        append(broker, 1)
    broker.commit("engage", {1: 1})
    broker.expire(1, 2)
    result = check(config)
    assert result.exit_code == 1
    assert result.stderr.startswith("engage: acknowledged events may be lost: ")
    assert "partition 1 (expected 1, begins at 2)" in result.stderr
    # The rest is shown as well.
    assert "\nlog\tkafka: open, accepts events; 1 record not loaded yet" in result.stdout
    assert "\nstorage\tsqlite: open" in result.stdout
    broker.commit("engage", {1: 3})
    assert check(config).exit_code == 0


def test_a_gap_is_shown_after_the_loaders_have_gone_on(config: Path, broker: MemoryBroker) -> None:
    now = broker.clock()
    for partition in range(8):
        keep_gap(config, partition, now - partition * 60_000)
    keep_gap(config, 9, now - 15 * 86_400_000)
    result = check(config)
    assert result.exit_code == 0
    lines = [line for line in result.stdout.splitlines() if line.startswith("warning\t")]
    assert len(lines) == 6
    assert "acknowledged events may be lost: 3 records of partition 0, from 5 on" in lines[0]
    assert lines[5] == "warning\t3 more gaps in the log"


def keep_gap(config: Path, partition: int, at: int) -> None:
    """Keep a gap as a loader does."""
    body = orjson.dumps({"partition": partition, "expected": 5, "first": 8})
    record = Record(kind="log_gap", workspace_id="", id=f"{partition}-5", body=body, at=at)
    on_store(config, lambda store: store.put_record(record))


@pytest.mark.parametrize("what", ["down", "leaderless", "missing"])
def test_check_fails_if_the_log_accepts_nothing(
    config: Path, broker: MemoryBroker, what: str
) -> None:
    if what == "down":
        broker.down = True
    elif what == "leaderless":
        broker.leaderless.add(1)
    else:
        broker.exists = False
    result = check(config)
    assert result.exit_code == 1
    assert result.stderr.startswith("engage: the log is not available: ")
    assert "\nstorage\tsqlite: open" in result.stdout


def test_check_fails_if_the_log_could_lose_events(config: Path, broker: MemoryBroker) -> None:
    broker.weak = "min.insync.replicas"
    result = check(config)
    assert result.exit_code == 1
    assert "min.insync.replicas" in result.stderr
