# SPDX-License-Identifier: Apache-2.0
"""``engage dead-letters``."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from engage.api import DeadLetter, render_time
from engage.testing.factories import letter
from support import commands
from support.exports import audit_of, exported, on_store
from support.identity import REQUIRED
from support.pipeline import NOW
from support.replay import make_bench
from support.sqlite import config_file
from support.waiting import wait_for

run = functools.partial(commands.run, "dead-letters")


def letters(path: Path) -> list[DeadLetter]:
    """Return the dead letters of a store, oldest first."""

    async def read(store: Any) -> list[DeadLetter]:
        return list((await store.scan_dead_letters(None, after=None, limit=500)).items)

    return on_store(path, read)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Make a config whose store has a refused call, a batch's refused item, and a conflict."""

    async def fill() -> None:
        async with make_bench(tmp_path, backend="sqlite") as bench:
            await bench.send({"userId": "u-1", "properties": {"n": 9007199254740993}})
            bench.now += 1
            await bench.send_batch(
                [{"type": "identify", "userId": "u-2", "traits": 5}],
                {"context": {"app": "x"}},
            )
            bench.now += 1
            event = {"messageId": "m", "userId": "u-3", "event": "e\x1b[31m"}
            await bench.send(event)
            await bench.send({**event, "userId": "u-4"})

    asyncio.run(fill())
    return tmp_path / "engage.toml"


def test_letters_are_listed_newest_first(stored: Path) -> None:
    result = run("list", "--config", stored, "--workspace", "acme")
    assert result.exit_code == 0
    rows = [line.split("\t") for line in result.stdout.splitlines()]
    assert [row[1] for row in rows] == [one.id for one in reversed(letters(stored))]
    assert [row[2:6] for row in rows] == [
        ["message_id_conflict", "/userId", "website", "u-4"],
        ["invalid_payload", "/traits", "website", "u-2"],
        ["invalid_payload", "/event", "website", "u-1"],
    ]
    assert rows[2][6] == "event: is required"
    some = run(
        *("list", "--config", stored, "--workspace", "acme", "--reason", "invalid_payload"),
        *("--pointer", "/event", "--key", "website", "--limit", "1"),
    )
    assert some.stdout.splitlines() == result.stdout.splitlines()[2:]
    assert run("list", "--config", stored, "--workspace", "other").stdout == ""


def test_letters_are_grouped(stored: Path) -> None:
    result = run("list", "--config", stored, "--workspace", "acme", "--groups")
    rows = [line.split("\t") for line in result.stdout.splitlines()]
    assert [row[:4] for row in rows] == [
        ["1", "message_id_conflict", "/userId", "website"],
        ["1", "invalid_payload", "/traits", "website"],
        ["1", "invalid_payload", "/event", "website"],
    ]
    assert rows[2][6:] == [letters(stored)[0].id, "event: is required"]


def test_a_letter_is_shown(stored: Path) -> None:
    first, batch, _ = letters(stored)
    result = run("show", "--config", stored, "--workspace", "acme", first.id)
    assert result.exit_code == 0
    head, _, item = result.stdout.partition("\n\n")
    assert f"id: {first.id}" in head
    assert "reason: invalid_payload" in head
    assert "error: event: is required" in head
    assert "type: track" in head
    assert "replay: possible" in head
    assert '"n": 9007199254740993' in item
    alone = run("show", "--config", stored, "--workspace", "acme", "--item", first.id)
    assert alone.stdout == item
    shown = run("show", "--config", stored, "--workspace", "acme", batch.id).stdout
    assert 'envelope: {"context":{"app":"x"}}' in shown


def test_a_letter_is_corrected_checked_and_replayed(stored: Path, tmp_path: Path) -> None:
    first = letters(stored)[0]
    place = ("--config", stored, "--workspace", "acme", first.id)
    unchanged = run("check", *place)
    assert unchanged.exit_code == 1
    assert unchanged.stderr.splitlines() == [
        "/event\tis required",
        "engage: it would be refused: invalid_payload: event: is required",
    ]
    failed = run("replay", *place)
    assert failed.exit_code == 1
    assert failed.stderr.splitlines()[-1] == (
        "engage: not replayed: invalid_payload: event: is required"
    )
    file = tmp_path / "event.json"
    item = run("show", "--config", stored, "--workspace", "acme", "--item", first.id).stdout
    file.write_text(item.replace("{", '{"event": "e",', 1))
    checked = run("check", *place, file)
    assert (checked.exit_code, checked.stderr) == (0, "engage: it would be stored\n")
    event = json.loads(checked.stdout)
    assert event["context"] == {"engage": {"replayOf": first.id}}
    assert event["type"] == "track"
    assert len(exported(stored)) == 1
    replayed = run("replay", *place, "-", text=file.read_text())
    assert replayed.exit_code == 0, replayed.stderr
    assert replayed.stdout == f"stored\t{event['messageId']}\n"
    found = exported(stored)[-1]
    assert {**found, "receivedAt": 0} == {**event, "receivedAt": 0}
    assert len(letters(stored)) == 2
    again = run("replay", *place)
    assert again.exit_code == 1
    assert "it was replayed, deleted or has expired" in again.stderr
    entries = audit_of(stored)
    assert [entry.action for entry in entries] == ["letter-replayed"] * 2
    assert entries[0].details["outcome"] == "invalid_payload"
    details = entries[1].details
    assert (details["letter"], details["outcome"]) == (first.id, "stored")
    assert details["bytesAfter"] == len(file.read_bytes())
    assert entries[1].actor.origin.startswith("command line")


def test_a_conflict_is_replayed_with_a_new_id(stored: Path) -> None:
    conflict = letters(stored)[2]
    place = ("--config", stored, "--workspace", "acme", conflict.id)
    checked = run("check", *place)
    assert checked.exit_code == 1
    assert "it would become a dead letter: message_id_conflict" in checked.stderr
    assert "replay it with a new message id" in checked.stderr
    assert run("replay", *place).exit_code == 1
    assert run("check", *place, "--new-id").exit_code == 0
    assert run("replay", *place, "--new-id").exit_code == 0
    assert [event["userId"] for event in exported(stored)] == ["u-3", "u-4"]


def test_an_event_is_checked_before_it_is_sent(stored: Path, tmp_path: Path) -> None:
    file = tmp_path / "event.json"
    file.write_text('{"userId": "u", "traits": {"a": 1}, "anonymousId": "v"}')
    result = run("check", "--config", stored, "--type", "identify", "--key", "website", file)
    assert result.exit_code == 0
    assert result.stderr.splitlines() == [
        "engage: it would be stored",
        "engage: the user u would exist",
        "engage: sets traits of the user u: a",
        "engage: links the anonymous id v to the user u",
    ]
    event = json.loads(result.stdout)
    assert (event["workspaceId"], event["writeKeyId"]) == ("acme", "website")
    assert event["type"] == "identify"
    assert "engage" not in event.get("context", {})
    # Without a file, it is read from standard input; without a type, it must have one.
    result = run("check", "--config", stored, text='{"userId": "u"}')
    assert result.exit_code == 1
    assert result.stderr.splitlines()[0].startswith("/type\t")
    same = {"messageId": "m", "userId": "u-3", "event": "e\x1b[31m", "type": "track"}
    result = run("check", "--config", stored, "-", text=json.dumps(same))
    assert (result.exit_code, result.stderr) == (0, "engage: it is stored already\n")
    result = run("check", "--config", stored, "-", text=json.dumps({**same, "userId": "x"}))
    assert result.exit_code == 1
    assert "message_id_conflict" in result.stderr
    assert len(exported(stored)) == 1
    assert audit_of(stored) == []


def test_an_event_is_checked_without_a_store(tmp_path: Path) -> None:
    path = config_file(tmp_path)
    result = run("check", "--config", path, text='{"type":"track","userId":"u","event":"e"}')
    assert (result.exit_code, result.stderr) == (0, "engage: it would be stored\n")
    assert not (tmp_path / "engage.db").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--key", "nope"), "there is no write key 'nope'"),
        (("--workspace", "other"), "there is no write key"),
        (("--workspace", "nope"), "does not contain a workspace 'nope'"),
    ],
)
def test_a_check_needs_a_write_key(stored: Path, arguments: tuple[str, ...], message: str) -> None:
    result = run("check", "--config", stored, *arguments, text="{}")
    assert result.exit_code == 1
    assert message in result.stderr


def test_a_letter_that_cannot_be_replayed_says_why(stored: Path) -> None:
    old = letter("0" * 32, item=b'{"userId":"u","event":"e"}', errors=[], reason="event_refused")
    cut = letter("1" * 32, item=b'{"userId":', truncated=True)
    on_store(stored, lambda store: store.put([old, cut]))
    place = ("--config", stored, "--workspace", "acme")
    for one, why in ((old, "context and integrations"), (cut, "first 16 KiB")):
        assert why in run("show", *place, one.id).stdout
        for command in ("check", "replay"):
            result = run(command, *place, one.id)
            assert result.exit_code == 1
            assert why in result.stderr


def many(path: Path, count: int) -> None:
    """Keep letters of which the first three cannot be replayed."""

    async def put(store: Any) -> None:
        for start in range(0, count, 500):
            await store.put(
                [
                    letter(
                        f"{n:032x}",
                        item=orjson.dumps({"userId": "u", **({"event": "e"} if n > 2 else {})}),
                        reason="transform_failed",
                        operation="track",
                        envelope=b"{}",
                    )
                    for n in range(start, min(start + 500, count))
                ]
            )

    on_store(path, put)


def test_all_letters_of_a_reason_are_replayed(stored: Path) -> None:
    many(stored, 60)
    place = ("--config", stored, "--workspace", "acme")
    result = run("replay", *place, "--reason", "transform_failed", "--all")
    assert result.exit_code == 1
    assert result.stdout == "57 stored, 0 stored before, 3 failed\n"
    lines = result.stderr.splitlines()
    assert lines[0] == f"engage: {0:032x}: invalid_payload: event: is required"
    assert lines[-1] == "engage: 3 of 60 dead letters failed"
    assert len(letters(stored)) == 6
    (entry,) = audit_of(stored)
    assert (entry.action, entry.details["stored"]) == ("letters-replayed", 57)
    result = run("replay", *place, "--reason", "nothing", "--all")
    assert (result.exit_code, result.stdout) == (0, "0 stored, 0 stored before, 0 failed\n")


def test_events_whose_time_cannot_be_read_happened_when_they_arrived(tmp_path: Path) -> None:
    """All of them with one command; their other values stay, and the clock is not corrected."""

    async def fill() -> None:
        async with make_bench(tmp_path, backend="sqlite") as bench:
            common = {"type": "track", "userId": "u", "event": "e"}
            for number, time in enumerate(["4:30:29 PM", "28 Nov 2026", "1764304229"]):
                bench.now = NOW + number
                item = {**common, "messageId": f"m{number}", "timestamp": time, "n": 2**53 + 1}
                await bench.send_batch([item], {"sentAt": "2020-01-01T00:00:00Z"})
            bench.now = NOW + 10
            wrong = {"timestamp": "x", "originalTimestamp": "y", "sentAt": "z"}
            await bench.send({"userId": "u", "event": "e", "messageId": "m3", **wrong})
            await bench.send({"userId": "u", "messageId": "m4"})

    asyncio.run(fill())
    path = tmp_path / "engage.toml"
    place = ("--config", path, "--workspace", "acme", "--pointer", "/timestamp")
    assert run("replay", *place, "--all").stdout == "0 stored, 0 stored before, 3 failed\n"
    result = run("replay", *place, "--set", "/timestamp=receivedAt", "--all")
    assert (result.exit_code, result.stdout) == (0, "3 stored, 0 stored before, 0 failed\n")
    found = {event["messageId"]: event for event in exported(path)}
    for number in range(3):
        event = found[f"m{number}"]
        assert event["timestamp"] == render_time(NOW + number)
        assert (event["n"], event["sentAt"]) == (2**53 + 1, "2020-01-01T00:00:00Z")
        assert "originalTimestamp" not in event
    assert audit_of(path)[-1].details["undated"] == ["timestamp"]
    _, other = letters(path)
    every = ("--config", path, "--workspace", "acme")
    times = [f"--set=/{name}=receivedAt" for name in ("timestamp", "originalTimestamp", "sentAt")]
    assert run("replay", *every, *times[:2], "--all").stdout.startswith("0 stored")
    # Letters with another fault are refused as before.
    replayed = run("replay", *every, *times, "--all")
    assert replayed.stdout == "1 stored, 0 stored before, 1 failed\n"
    assert "event: is required" in replayed.stderr
    assert exported(path)[-1]["timestamp"] == render_time(NOW + 10)
    for wrong in ("/timestamp=now", "/properties=receivedAt", "timestamp"):
        assert run("replay", *every, "--set", wrong, "--all").exit_code == 2
    assert run("replay", *every, *times, other.id).exit_code == 2


def test_a_value_that_cannot_be_stored_is_shown_as_it_was_sent(tmp_path: Path) -> None:
    """And can be corrected."""
    values = [
        "12345678901234567890",
        "123456789012345678901",
        "1e400",
        r'{"a\ud83d":1,"a\ude00":2}',
    ]

    async def fill() -> None:
        async with make_bench(tmp_path, backend="sqlite") as bench:
            items = ",".join(
                f'{{"type":"track","userId":"u","event":"e","properties":{{"v":{value}}}}}'
                for value in values
            )
            body = f'{{"batch":[{items}]}}'.encode()
            await bench.core.pipeline.batch(body, principal=bench.core.principal)

    asyncio.run(fill())
    path = tmp_path / "engage.toml"
    place = ("--config", path, "--workspace", "acme")
    listed = run("list", *place, "--groups")
    assert (listed.exit_code, "/properties/v" in listed.stdout) == (0, True)
    for value, one, line in zip(values, letters(path), exported(path, "dead-letters"), strict=True):
        assert value in line["item"]
        assert run("show", *place, one.id).exit_code == 0
        item = run("show", *place, "--item", one.id).stdout
        assert value in item
        assert "invalid_json" in run("check", *place, one.id).stderr
        file = tmp_path / "event.json"
        file.write_text(item.replace(value, '"corrected"'))
        assert run("replay", *place, one.id, file).exit_code == 0
    assert [event["properties"] for event in exported(path)] == [{"v": "corrected"}] * len(values)


def test_letters_from_before_users_were_verified_need_the_operators_word(stored: Path) -> None:
    many(stored, 5)
    text = stored.read_text()
    stored.write_text(text.replace('id = "acme"\n', f'id = "acme"\n{REQUIRED}\n', 1))
    place = ("--config", stored, "--workspace", "acme")
    one = run("replay", *place, f"{4:032x}")
    assert one.exit_code == 1
    assert "identity_not_verified" in one.stderr
    assert "replay --unverified" in one.stderr
    refused = run("replay", *place, "--reason", "transform_failed", "--all")
    assert refused.stdout == "0 stored, 0 stored before, 5 failed\n"
    assert run("replay", *place, "--unverified", f"{4:032x}").exit_code == 0
    several = run("replay", *place, "--unverified", "--reason", "transform_failed", "--all")
    assert several.stdout == "1 stored, 0 stored before, 3 failed\n"
    assert [entry.details.get("unverified") for entry in audit_of(stored)] == [
        None,
        False,
        True,
        True,
    ]


def test_a_replay_that_was_killed_is_run_again(stored: Path) -> None:
    many(stored, 1003)
    place = ("--config", str(stored), "--workspace", "acme")
    command = [sys.executable, "-m", "engage", "dead-letters", "replay", *place]
    with subprocess.Popen(
        [*command, "--reason", "transform_failed", "--all"],
        stdout=subprocess.DEVNULL,
        env={**os.environ},
    ) as process:
        wait_for(lambda: len(exported(stored)) > 1)
        process.send_signal(signal.SIGKILL)
        process.wait()
    left = len(exported(stored))
    assert left < 1001
    result = run("replay", *place, "--reason", "transform_failed", "--all")
    assert result.stdout.endswith(" 3 failed\n")
    found = exported(stored)
    replayed = [one["context"]["engage"]["replayOf"] for one in found if "context" in one]
    assert len(set(replayed)) == len(replayed) == 1000
    assert len(letters(stored)) == 6


def test_ctrl_c_cancels_a_replay(stored: Path) -> None:
    many(stored, 2000)
    place = ("--config", str(stored), "--workspace", "acme")
    command = [sys.executable, "-m", "engage", "dead-letters", "replay", *place]
    with subprocess.Popen(
        [*command, "--reason", "transform_failed", "--all"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as process:
        wait_for(lambda: len(exported(stored)) > 1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=240)
    assert process.returncode == 1
    assert b"Traceback" not in errors
    left = len(exported(stored)) - 1
    assert left < 1997
    (entry,) = audit_of(stored)
    assert (entry.details["state"], entry.details["stored"]) == ("cancelled", left)
    result = run("replay", *place, "--reason", "nothing", "--all")
    assert (result.exit_code, result.stderr) == (0, "")


def test_letters_are_deleted(stored: Path) -> None:
    first, _, conflict = letters(stored)
    place = ("--config", stored, "--workspace", "acme")
    result = run("delete", *place, first.id, "nothing")
    assert (result.exit_code, result.stdout) == (1, "1 dead letter deleted\n")
    assert result.stderr == "engage: 1 of them did not exist\n"
    refused = run("delete", *place, "--reason", "invalid_payload", "--all")
    assert refused.exit_code == 2
    assert "--yes" in refused.stderr
    result = run("delete", *place, "--reason", "invalid_payload", "--all", "--yes")
    assert (result.exit_code, result.stdout) == (0, "1 dead letter deleted\n")
    assert letters(stored) == [conflict]
    assert [entry.action for entry in audit_of(stored)] == ["letters-deleted"] * 2
    assert audit_of(stored)[0].details["letters"] == [first.id, "nothing"]


@pytest.mark.parametrize(
    "arguments",
    [
        *(("show", "--workspace", "acme"), ("replay", "--workspace", "acme")),
        ("replay", "--workspace", "acme", "no-id"),
        ("replay", "--workspace", "acme", "--all", "0" * 32),
        ("replay", "--workspace", "acme", "--reason", "x", "0" * 32),
        ("delete", "--workspace", "acme"),
        ("delete", "--workspace", "acme", "--reason", "x", "0" * 32),
        *(("check", "--type", "nothing", "-"), ("check", "a", "b")),
    ],
)
def test_wrong_usage_is_status_2(stored: Path, arguments: tuple[str, ...]) -> None:
    result = run(arguments[0], "--config", stored, *arguments[1:])
    assert result.exit_code == 2, result.output
    assert "Error: " in result.stderr


def test_a_letter_with_an_impossible_time_is_listed_and_shown(stored: Path) -> None:
    odd = letter("0" * 32, received_at=10**18)
    on_store(stored, lambda store: store.put([odd]))
    for command in (("list",), ("list", "--groups"), ("show", "0" * 32)):
        result = run(command[0], "--config", stored, "--workspace", "acme", *command[1:])
        assert (result.exit_code, result.stderr) == (0, "")
        assert "9999-12-31T23:59:59.999Z" in result.stdout


@pytest.mark.parametrize("command", ["list", "show", "replay", "delete"])
def test_errors_are_one_line(tmp_path: Path, stored: Path, command: str) -> None:
    rest = () if command == "list" else ("0" * 32,)
    empty = tmp_path / "empty"
    empty.mkdir()
    result = run(command, "--config", config_file(empty), "--workspace", "acme", *rest)
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1
    result = run(command, "--config", stored, "--workspace", "nope", *rest)
    assert result.exit_code == 1
    assert "does not contain a workspace 'nope'" in result.stderr
    if command in ("show", "replay"):
        result = run(command, "--config", stored, "--workspace", "other", *rest)
        assert "has no dead letter" in result.stderr
