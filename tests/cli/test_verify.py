# SPDX-License-Identifier: Apache-2.0
"""``engage verify``."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engage.store.facade import Storage
from engage.testing.factories import letter
from engage.verify import Report
from support.commands import run
from support.exports import on_store
from support.server_process import start_server
from support.sqlite import config_file, new_store
from support.verifying import damage, full, verify_while_used

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config with a store that has two users."""
    return new_store(
        tmp_path,
        full("i", type="identify", user_id="ann", traits={"plan": "pro"}),
        full("j", type="identify", user_id="bob\x1b[1m", traits={"plan": "pro"}),
    )


def test_a_healthy_store_is_proven(config: Path) -> None:
    done = run("verify", "--config", config)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "events\tchecked=2\tdifferent=0\tunprovable=0\n" in done.stdout
    assert "users\tchecked=2\tdifferent=0\tunprovable=0\n" in done.stdout


def test_differences_are_named_and_the_status_is_1(config: Path) -> None:
    damage(config.parent / "engage.db", ["UPDATE traits SET value = '\"free\"'"])
    done = run("verify", "--config", config)
    assert done.exit_code == 1
    assert "users\tchecked=2\tdifferent=2\tunprovable=0\n" in done.stdout
    lines = sorted(done.stderr.splitlines())
    assert lines[0] == (
        "engage: different: users: acme: 'ann': the trait 'plan' differs from the events"
    )
    assert "\x1b" not in done.stderr


def test_what_differs_is_repaired(config: Path) -> None:
    damage(config.parent / "engage.db", ["UPDATE traits SET value = '\"free\"'"])
    done = run("verify", "--config", config, "--repair")
    assert done.exit_code == 0
    lines = sorted(done.stderr.splitlines())
    assert lines[0] == (
        "engage: was different: users: acme: 'ann': the trait 'plan' differs from the events"
    )
    assert "users\tchecked=2\tdifferent=0\tunprovable=0\n" in done.stdout
    assert "repaired\tusers=2\n" in done.stdout
    assert run("verify", "--config", config).exit_code == 0
    done = run("verify", "--config", config, "--repair", "--json")
    assert done.exit_code == 0
    assert "repaired" not in json.loads(done.stdout)
    damage(config.parent / "engage.db", ["DELETE FROM traits"])
    done = run("verify", "--config", config, "--repair", "--json")
    assert json.loads(done.stdout)["repaired"] == {"users": 2}


def test_a_store_is_repaired_while_the_server_writes(tmp_path: Path) -> None:
    with start_server(tmp_path) as server:
        event = {"userId": "ann", "traits": {"plan": "pro"}}
        assert server.post("/v1/identify", event).status_code == 200
        damage(server.database, ["UPDATE traits SET value = '\"free\"'"])
        done = run("verify", "--config", server.config, "--repair")
        assert (done.exit_code, "repaired\tusers=1\n" in done.stdout) == (0, True)
        assert server.post("/v1/identify", {**event, "traits": {"n": 1}}).status_code == 200
        (user,) = server.export("users")
        assert user["traits"] == {"plan": "pro", "n": 1}


def test_what_only_the_storage_sees_is_not_repaired(config: Path) -> None:
    damage(config.parent / "engage.db", ["UPDATE profiles SET traits = 7"])
    done = run("verify", "--config", config, "--repair")
    assert done.exit_code == 1
    assert done.stderr.endswith(
        "engage: not repaired: counters of profiles: see docs/verify.md#repairing\n"
    )
    assert "repaired" not in done.stdout


def test_the_result_can_be_json(config: Path) -> None:
    damage(config.parent / "engage.db", ["DELETE FROM traits"])
    done = run("verify", "--config", config, "--json")
    result: dict[str, Any] = json.loads(done.stdout)
    assert (done.exit_code, done.stderr) == (1, "")
    names = "checked different differences unprovable failures seconds"
    assert result.keys() == set(names.split())
    assert result["checked"]["events"] == 2
    assert result["different"]["users"] == 2
    assert len(result["differences"]) == 4
    assert result["differences"][0].keys() == {"what", "message"}
    assert (result["unprovable"], result["failures"]) == ([], [])


def test_more_than_ten_differences_are_counted(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def verified(*_: Any, **__: Any) -> Report:
        report = Report()
        for number in range(12):
            report.differs("users", f"n{number}")
        report.judge("users", "x", "at a limit")
        return report

    monkeypatch.setattr(sys.modules["engage.cli.verify"], "verified", verified)
    done = run("verify", "--config", config)
    assert "engage: and 2 more\n" in done.stderr
    assert "engage: unprovable: users: 1: at a limit\n" in done.stderr


def test_what_cannot_be_looked_at_is_status_2(tmp_path: Path, config: Path) -> None:
    done = run("verify", "--config", tmp_path / "none.toml")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("engage: ")
    (tmp_path / "engage.db").unlink()
    done = run("verify", "--config", config)
    assert done.exit_code == 2
    assert "there is no store" in done.stderr
    assert not (tmp_path / "engage.db").exists()


def test_a_store_that_fails_meanwhile_is_status_2(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def verified(*_: Any, **__: Any) -> Report:
        return Report(failures=["the disk is gone"])

    monkeypatch.setattr(sys.modules["engage.cli.verify"], "verified", verified)
    done = run("verify", "--config", config)
    assert done.exit_code == 2
    assert done.stderr == "engage: could not be looked at: the disk is gone\n"


@pytest.mark.parametrize(
    ("statement", "failure"),
    [
        ("UPDATE traits SET value = '{'", "profiles: damaged: JSONDecodeError: "),
        ("UPDATE letters SET headers = 'x'", "letters: damaged: JSONDecodeError: "),
    ],
)
def test_what_cannot_be_read_is_status_2_and_the_rest_is_looked_at(
    config: Path, statement: str, failure: str
) -> None:
    on_store(config, lambda store: store.put([letter("l1")]))
    damage(config.parent / "engage.db", [statement])
    done = run("verify", "--config", config, "--json")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    result = json.loads(done.stdout)
    (problem,) = result["failures"]
    assert problem.startswith(failure)
    assert "suppressions" in result["checked"]


def test_a_locked_store_is_status_2(config: Path) -> None:
    with contextlib.closing(
        sqlite3.connect(config.parent / "engage.db", isolation_level=None)
    ) as db:
        db.execute("BEGIN IMMEDIATE")
        done = run("verify", "--config", config, "--json")
    result = json.loads(done.stdout)
    assert done.exit_code == 2
    assert result["failures"][0].startswith("keys: ")
    assert (result["different"], result["checked"]["users"]) == ({}, 2)


@pytest.mark.long
async def test_a_server_in_use_has_no_differences(tmp_path: Path) -> None:
    retention = "[retention]\nevents_days = 1\n"
    with start_server(tmp_path, config_extra=retention) as server:
        first, second = await verify_while_used(server)
    assert second["checked"]["events"] > first["checked"]["events"] / 2
    assert first["checked"]["users"] >= 12


@pytest.mark.long
def test_the_memory_does_not_grow_with_the_store(tmp_path: Path) -> None:
    """docs/verify.md has figures for millions of events; the traits here take 60 MB, twice."""

    def peak(users: int) -> int:
        """Return the peak memory of the command, in bytes, on a store with this many users."""
        folder = tmp_path / str(users)
        folder.mkdir()
        path = config_file(folder)

        async def fill(store: Storage) -> None:
            for start in range(0, users, 500):
                numbers = map(str, range(start, start + 500))
                traits = {"a": "x" * 2000}
                await store.write(
                    [full(one, type="identify", user_id=one, traits=traits) for one in numbers]
                )

        on_store(path, fill)
        program = (
            "import atexit, os, runpy; from support.overload import peak_memory;"
            "atexit.register(lambda: print(peak_memory(os.getpid())));"
            "runpy.run_module('engage', run_name='__main__')"
        )
        command = [sys.executable, "-c", program, "verify", "--json", "--config", str(path)]
        environment = {**os.environ, "PYTHONPATH": str(TESTS)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        answer, memory = done.stdout.splitlines()
        assert json.loads(answer)["checked"]["users"] == users
        return int(memory)

    assert peak(30_000) < peak(3000) + 30 * 2**20
