# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run, measure what they claim to, and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from engage.api import EventFilter
from engage.testing.factories import all_pages
from support import mongo
from support.processes import alive
from support.server_process import config_text, start_server
from support.waiting import wait_for

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
sys.path.append(str(BENCHMARKS))

import fill  # noqa: E402
import load  # noqa: E402
import run as run_module  # noqa: E402
import usage  # noqa: E402
from ledger import Balance, Ledger  # noqa: E402
from load import Case  # noqa: E402


def run(name: str, folder: Path, *arguments: str) -> str:
    """Run a benchmark until it ends, and return what it printed."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *arguments],
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    # Another status: a request failed.
    assert done.returncode == 0, done.stdout + done.stderr
    assert processes_in(folder) == []
    assert not list(folder.glob("engage-bench-*"))
    return done.stdout


def rows(output: str, count: int) -> list[list[str]]:
    """Return the cells of the table with this number of columns, without its head."""
    found = [line.strip("| ").split(" | ") for line in output.splitlines() if line[:1] == "|"]
    tables = [row for row in found if len(row) == count and not row[0].startswith("---")]
    return tables[1:]


def processes_in(folder: Path) -> Sequence[int]:
    """Return the processes that have the folder in their command line or open files in it."""
    named = [
        int(process.name)
        for process in Path("/proc").glob("[0-9]*")
        if str(folder).encode() in _command(process) and int(process.name) != os.getpid()
    ]
    return [pid for pid in {*named, *usage.holders(folder)} if alive(pid)]


def _command(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


def positive(text: str) -> bool:
    """Return whether a cell has a positive number."""
    return float(text.replace(",", "")) > 0


@pytest.mark.long
def test_make_bench_prints_the_rates_and_the_cpu_time_of_each_process(tmp_path: Path) -> None:
    output = run(
        "run.py",
        tmp_path,
        *("--seconds", "1", "--only", "2x1,1x100", "--tool", "python", "--workers", "1,2"),
    )
    found = rows(output, 12)
    assert [row[:3] for row in found] == [
        ["Tornado 204", "32", "1"],
        ["engage, 1 worker", "2", "1"],
        ["engage, 2 workers", "2", "1"],
        ["engage, 1 worker", "1", "100"],
        ["engage, 2 workers", "1", "100"],
    ]
    for row in found:
        assert all(positive(cell) for cell in (*row[3:8], row[11])), row
    # One figure for each worker.
    assert [len(row[8].split(" + ")) for row in found] == [1, 1, 2, 1, 2]


def test_the_goals_are_those_of_two_workers_and_count_all_processes_of_a_role() -> None:
    cpu = {"worker": [50.0, 40.0], "writer": [15.0], "supervisor": [1.0]}
    row = run_module.Row(rate=1.0, p50=1.0, p99=1.0, ratio=2.5, cpu=cpu)
    case = Case(256, 1)
    assert run_module.goals({(1, case): row}) == []
    found = [goal.row() for goal in run_module.goals({(2, case): row})]
    assert found == [
        ["c256: ratio to Tornado", "≥ 2.4", "2.500", "reached"],
        ["c256: CPU per request, workers together", "≤ 80 µs", "90 µs", "**not reached**"],
        ["c256: CPU per request, writers together", "≤ 20 µs", "15 µs", "reached"],
    ]


def test_the_medians_of_rounds_are_compared_with_the_baseline_of_the_same_round() -> None:
    samples = [
        run_module.Sample(load.Result(rate, p50, 9.0, 0, 100), {"worker": worker})
        for rate, p50, worker in ((100, 1, [3.0]), (300, 2, [5.0, 7.0]), (200, 3, [4.0, 9.0]))
    ]
    row = run_module.Row.of(samples, [100, 100, 400])
    assert (row.rate, row.p50, row.ratio) == (200, 2, 1)
    assert row.cpu == {"worker": [4, 8]}


@pytest.mark.long
def test_make_bench_large_compares_stores_of_several_sizes(tmp_path: Path) -> None:
    stores = tmp_path / "stores"
    output = run(
        "large.py",
        tmp_path,
        *("--events", "0,5000", "--seconds", "1", "--only", "2x1", "--tool", "python"),
        *("--minutes", "0.02", "--rounds", "1", "--no-retention", "--folder", str(stores)),
    )
    assert [row[:3] for row in rows(output, 12)] == [["0", "2", "1"], ["5,000", "2", "1"]]
    steps = [line for line in output.splitlines() if line.startswith("| 5,000 | ")][1:]
    assert [line.split(" | ")[1] for line in steps] == [
        "first line of export",
        "check",
        "serve",
        "check, store not in the page cache",
        "serve, store not in the page cache",
        "events in the store, with those of the load",
    ]
    assert "| 5,000 to " in steps[-1]
    # The empty store is not kept.
    assert [folder.name for folder in stores.iterdir()] == ["5000"]
    for role in ("supervisor", "worker"):
        assert f"growth of the {role}'s memory" in output
    events = asyncio.run(_events(stores / "5000"))
    # Those of the load came in addition.
    assert sum(name.startswith("fill-") for name in events) == 5000 < len(events)


async def _events(folder: Path) -> list[str]:
    store = fill.open_config(folder / "engage.toml")
    await store.open(create=False)
    try:
        return [event.message_id for event in await all_pages(store.scan, EventFilter())]
    finally:
        await store.close()


@pytest.mark.long
def test_the_events_of_a_filled_store_are_those_that_a_server_stores(tmp_path: Path) -> None:
    fill.make_store(tmp_path / "store", 30)
    (tmp_path / "engage.toml").write_text(config_text())
    like = fill.template()
    store = fill.open_config(tmp_path / "store" / "engage.toml")

    async def stored() -> list[tuple[int, dict[str, object]]]:
        await store.open(create=False)
        try:
            events = await all_pages(store.scan, EventFilter())
            return [(event.received_at, event.document()) for event in events]
        finally:
            await store.close()

    found = asyncio.run(stored())
    received = [at for at, _ in found]
    assert received == sorted(received)
    assert len(found) == 30
    # Spread over three days until now.
    assert received[-1] - received[0] == pytest.approx(3 * 86_400_000 * 29 / 30, rel=0.01)
    assert time.time() * 1000 - received[-1] < 60_000
    own = {"messageId", "receivedAt"}
    for _, document in found:
        assert {name: document[name] for name in document if name not in own} == {
            name: value for name, value in like.document().items() if name not in own
        }


@pytest.mark.long
def test_idle_connections_are_measured_and_stay_open(tmp_path: Path) -> None:
    output = run(
        "idle.py",
        tmp_path,
        *("--connections", "60", "--seconds", "0.5", "--rounds", "1", "--tool", "python"),
    )
    assert [row[:3] for row in rows(output, 12)] == [["0", "32", "1"], ["60", "32", "1"]]
    assert re.search(r"memory for each idle connection: -?[\d.]+ KiB", output)


@pytest.mark.long
def test_the_mixed_load_accounts_for_every_event_on_a_slow_disk(tmp_path: Path) -> None:
    output = run(
        "mixed.py",
        tmp_path,
        *("--minutes", "0.1", "--users", "150", "--load", "0.2", "--slow-seconds", "1"),
        *("--slow-every", "3", "--sync", "0.05"),
    )
    [balance] = [row for row in rows(output, 6) if row[0].replace(",", "").isdigit()]
    acknowledged, stored, *rest = (int(cell.replace(",", "")) for cell in balance)
    assert acknowledged == stored > 150
    assert rest == [0, 0, 0, 0]
    delayed = re.search(r"calls that the slow disk delayed: ([\d,]+)", output)
    assert delayed is not None
    assert positive(delayed[1])
    assert {row[0] for row in rows(output, 7)} >= {"batch", "identify", "webhook"}


def test_the_ledger_finds_what_is_lost_repeated_and_foreign() -> None:
    ledger = Ledger()
    a, b, c, d = (ledger.next("x") for _ in range(4))
    ledger.acknowledge([a, b])
    ledger.acknowledge([d])
    balance = ledger.compare([a, a, c, "x-9", "y-000000000", "other"])
    assert balance == Balance(acknowledged=3, stored=6, lost=2, repeated=1, foreign=3, unanswered=1)
    assert not balance.good


def test_the_ledger_accepts_what_was_not_acknowledged_as_stored_or_not() -> None:
    ledger = Ledger()
    a, b, c = (ledger.next("x") for _ in range(3))
    ledger.acknowledge([a])
    assert ledger.compare([b, a]) == Balance(acknowledged=1, stored=2, unanswered=2)
    assert c.startswith("x-")


@pytest.mark.long
def test_the_processes_of_a_server_are_found_by_their_roles(tmp_path: Path) -> None:
    console = "[console]\nport = 0\n"
    with start_server(tmp_path, fork=False, workers=2, config_extra=console) as server:
        wait_for(server.consoles, what="the console")
        roles = usage.roles(server)
        kinds = sorted(set(roles.values()))
        assert kinds == ["console", "supervisor", "worker", "writer"]
        assert list(roles.values()).count("worker") == 2
        assert all(usage.memory(pid) for pid in roles)
        with usage.Meter(lambda: usage.roles(server)) as meter:
            for number in range(50):
                assert server.post("/v1/track", {"userId": "u", "event": f"{number}"}).is_success
        assert sum(meter.seconds["worker"]) > 0
        assert len(meter.per(50)["worker"]) == 2


@pytest.mark.long
@pytest.mark.parametrize("name", ["large.py", "mixed.py"])
def test_an_interrupted_benchmark_leaves_nothing(tmp_path: Path, name: str) -> None:
    with subprocess.Popen(
        [sys.executable, str(BENCHMARKS / name), "--minutes", "1"]
        + (["--events", "1000000"] if name == "large.py" else []),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as process:
        try:
            # The store of the fill, or of the load.
            wait_for(lambda: list(tmp_path.rglob("engage.db-wal")), what="a store")
            time.sleep(1)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=240)
        finally:
            process.kill()
    assert process.returncode == 130, errors
    assert errors.endswith("interrupted\n")
    wait_for(lambda: not processes_in(tmp_path), what="the end of its processes")
    assert not list(tmp_path.iterdir())


@pytest.mark.long
@pytest.mark.mongo
def test_the_benchmark_of_mongodb_prints_ratios(tmp_path: Path) -> None:
    """Of batches, which need no hand-written service to compare with."""
    kind = mongo.proxied_kind()
    printed = run(
        "mongo.py",
        tmp_path,
        *("--seconds", "1", "--rounds", "2", "--only", "2x20", "--kind", kind, "--tool", "python"),
        *("--delay", "2"),
    )
    measured = rows(printed, 9)
    assert [row[:4] for row in measured] == [
        ["insert_many", "_id", "1", "20"],
        ["insert_many", "engage", "1", "20"],
        ["engage", "engage", "2", "20"],
    ]
    for row in measured:
        rate, p50, *_, cpu, server_cpu = (float(cell.replace(",", "")) for cell in row[4:])
        assert rate > 0
        assert p50 > 2, "each command is delayed by 2 ms"
        assert cpu > 0
        assert server_cpu > 0
    ratios = rows(printed, 6)
    assert [row[:3] for row in ratios] == [
        ["insert_many, 20 event(s)", "_id", "2"],
        ["insert_many, 20 event(s)", "engage", "2"],
    ]
    for row in ratios:
        least, greatest = map(float, row[4].split(", "))
        assert 0 < least <= float(row[3]) <= greatest
