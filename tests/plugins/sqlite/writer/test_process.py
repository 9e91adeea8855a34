# SPDX-License-Identifier: Apache-2.0
"""The writer process: it is started, found and shared, and nothing is lost when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from engage.api import Event, Record, Status, StorageMissing, StorageUnavailable
from engage.testing import StorageConformance, event, identify
from engage.testing.factories import ids, store_all
from engage_plugins.sqlite.writer import start as writer_start
from engage_plugins.sqlite.writer.writer import AVAILABLE
from support.processes import alive, children
from support.writer import client_of, holder, make, opened, pid_of, until

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="needs Unix sockets")


@pytest.mark.slow
class TestSqliteProcess(StorageConformance):
    """The conformance suite with a writer process."""

    plugin = "engage_plugins.sqlite"

    def options(self, tmp_path: Path) -> Mapping[str, Any]:
        return {"path": str(tmp_path / "engage.db"), "writer": "process"}

    def break_store(self, options: Mapping[str, Any]) -> None:
        path = Path(options["path"])
        path.rename(path.with_suffix(".away"))
        path.mkdir()

    def mend_store(self, options: Mapping[str, Any]) -> None:
        path = Path(options["path"])
        path.rmdir()
        path.with_suffix(".away").rename(path)


async def test_all_storages_share_one_process(tmp_path: Path) -> None:
    async with opened(make(tmp_path)) as one, opened(make(tmp_path, "auto")) as other:
        assert pid_of(one) == pid_of(other) == holder(tmp_path / "engage.db")
        await asyncio.gather(store_all(one, event("a")), store_all(other, event("b")))
        assert sorted(await ids(one)) == ["a", "b"]


async def test_many_storages_that_open_at_once_start_one_process(tmp_path: Path) -> None:
    stores = [make(tmp_path) for _ in range(8)]
    await asyncio.gather(*(store.open(create=True) for store in stores))
    assert len({pid_of(store) for store in stores}) == 1
    assert len(children(os.getpid())) == 1
    await asyncio.gather(*(store.close() for store in stores))


async def test_the_process_ends_with_its_last_client(tmp_path: Path) -> None:
    async with opened(make(tmp_path)) as one:
        async with opened(make(tmp_path)) as other:
            pid = pid_of(one)
        assert alive(pid)
        await store_all(one, event("m"))
        with pytest.raises(StorageUnavailable):
            await other.write([event("n")])
    # close() waits until the store is closed, so that its file can be copied.
    names = ["engage.db", "engage.db-keys", "engage.db-writer.lock"]
    assert sorted(os.listdir(tmp_path)) == names
    await until(lambda: not Path(f"/proc/{pid}").exists())


async def test_reading_starts_no_process(tmp_path: Path) -> None:
    missing = make(tmp_path)
    with pytest.raises(StorageMissing):
        await missing.open(create=False)
    async with opened(make(tmp_path, "thread")) as store:
        await store_all(store, event("m"))
    reader = make(tmp_path)
    await reader.open(create=False)
    assert await ids(reader) == ["m"]
    assert not children(os.getpid())
    await store_all(reader, event("n"))
    assert alive(pid_of(reader))
    await reader.close()


async def test_killing_the_process_loses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next request starts another one, and waits for it."""
    async with opened(make(tmp_path)) as store:
        killed = []
        for number in range(60):
            if number % 20 == 10:
                killed.append(pid_of(store))
                os.kill(killed[-1], signal.SIGKILL)
            (outcome,) = await store.write([event(str(number))])
            # An event that the process stored without answering is a duplicate then.
            assert outcome.status in (Status.STORED, Status.DUPLICATE)
        assert await ids(store) == [str(number) for number in range(60)]
        assert len({*killed, pid_of(store)}) == 4
        # None stays as a zombie.
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in killed))
        await until(lambda: caplog.text.count("the writer process was killed by signal 9") == 3)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
async def test_the_gauges_show_what_the_process_uses(tmp_path: Path) -> None:
    async with opened(make(tmp_path)) as store:
        for _ in range(2):
            gauges = store.gauges()
            pid = pid_of(store)
            assert gauges["writer_process_pid"] == pid
            assert gauges["writer_memory_bytes"] == pytest.approx(resident_bytes(pid), rel=0.2)
            start = gauges["writer_cpu_seconds"]
            for number in range(1000):
                await store.write([event(str(number))])
                if store.gauges()["writer_cpu_seconds"] > start:
                    break
            assert start < store.gauges()["writer_cpu_seconds"] < 60
            # There are no numbers of a process that has ended, and then those of the next one.
            os.kill(pid, signal.SIGKILL)
            await until(lambda: "writer_process_pid" not in store.gauges())
            await store.check()
    assert not [name for name in store.gauges() if name.startswith("writer")]
    async with opened(make(tmp_path, "thread")) as store:
        assert not [name for name in store.gauges() if name.startswith("writer")]


async def test_killing_the_process_fails_no_waiting_request(tmp_path: Path) -> None:
    async with opened(make(tmp_path)) as store:
        writes = [
            asyncio.ensure_future(
                store.write([identify(f"{number}-{n}", "u", n) for n in range(50)])
            )
            for number in range(40)
        ]
        await asyncio.wait(writes[:3])
        os.kill(pid_of(store), signal.SIGKILL)
        await asyncio.gather(*writes, store.check(), store.expire(0, limit=10))
        assert len(await ids(store)) == 2000


async def test_a_request_that_cannot_be_repeated_fails(tmp_path: Path) -> None:
    """The process may have made the change before it was killed."""
    async with opened(make(tmp_path)) as store:
        one = Record(kind="key", workspace_id="acme", id="a", body=b"{}", at=1)
        assert await store.put_record(one, expected_version=0) == 1
        pid = pid_of(store)
        os.kill(pid, signal.SIGSTOP)
        change = asyncio.ensure_future(store.put_record(one, expected_version=1))
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(StorageUnavailable, match="may have made the change"):
            await change
        assert await store.put_record(one, expected_version=1) == 2


async def test_a_process_that_cannot_be_started_is_unavailability(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason is in the error, and it is not tried for each request."""
    monkeypatch.setattr(writer_start.sys, "executable", "/bin/false")
    store = make(tmp_path)
    with pytest.raises(StorageUnavailable, match="cannot be started: it ended with status 1"):
        await store.open(create=True)
    monkeypatch.setattr(writer_start.sys, "executable", str(tmp_path / "no-python"))
    with pytest.raises(StorageUnavailable, match=r"cannot be started: .*no-python"):
        await store.open(create=True)


async def test_signals_to_the_group_do_not_end_the_process(tmp_path: Path) -> None:
    """Its clients have events to flush when a terminal or a service manager signals them."""
    async with opened(make(tmp_path)) as store:
        pid = pid_of(store)
        for one in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, one)
        await store_all(store, event("m"))
        assert pid_of(store) == pid
        assert os.getsid(pid) == pid != os.getsid(0)


async def test_a_process_that_hangs_is_unavailability(tmp_path: Path) -> None:
    """The caller gets an error in time; when the process goes on, the store works."""
    async with opened(make(tmp_path)) as store:
        await store_all(store, event("before"))
        pid, client = pid_of(store), client_of(store)
        patient = client._settings
        os.kill(pid, signal.SIGSTOP)
        client._settings = dataclasses.replace(patient, timeout=0.7)
        with pytest.raises(StorageUnavailable, match=f"no answer from the writer process {pid}"):
            await store.write([event("during")])
        client._settings = patient
        os.kill(pid, signal.SIGCONT)
        await store.write([event("after")])
        # The process has skipped the request whose time was over.
        assert await ids(store) == ["before", "after"]


CLIENT = """
import asyncio, sys
from pathlib import Path
from engage.testing import event
from support.writer import make, pid_of

async def main():
    store = make(Path(sys.argv[1]))
    await store.open(create=True)
    print(pid_of(store), flush=True)
    number = 0
    while True:
        await store.write([event(sys.argv[2] + str(number))])
        print(number, flush=True)
        number += 1

asyncio.run(main())
"""


def client(tmp_path: Path, name: str) -> subprocess.Popen[str]:
    """Start a process that writes events, and prints the number of each that was acknowledged."""
    tests = Path(__file__).parents[3]
    return subprocess.Popen(
        [sys.executable, "-c", CLIENT, str(tmp_path), name],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tests)},
    )


async def test_the_process_ends_when_its_only_client_is_killed(tmp_path: Path) -> None:
    """No process keeps the file, and no acknowledged event is lost."""
    with client(tmp_path, "") as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        for _ in range(20):
            last = int(process.stdout.readline())
        process.kill()
        rest = [line for line in process.stdout.read().splitlines(True) if line.endswith("\n")]
        last = int(rest[-1]) if rest else last
    await until(lambda: not alive(pid))
    async with opened(make(tmp_path, "thread")) as store:
        found = await ids(store)
    # All acknowledged events, and at most one more.
    assert found[: last + 1] == [str(number) for number in range(last + 1)]
    assert len(found) <= last + 2


async def test_the_process_survives_the_client_that_started_it(tmp_path: Path) -> None:
    with client(tmp_path, "a") as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        async with opened(make(tmp_path)) as store:
            assert pid_of(store) == pid
            process.kill()
            process.wait()
            await store_all(store, event("b"))
            assert pid_of(store) == pid


async def test_the_process_inherits_no_descriptor(tmp_path: Path) -> None:
    """A listening socket that it kept would stay open when the server ends."""
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    async with opened(make(tmp_path)) as store:
        folder = f"/proc/{pid_of(store)}/fd"
        links = {os.readlink(f"{folder}/{name}") for name in os.listdir(folder)}
        assert os.readlink(f"/proc/self/fd/{writing}") not in links
        assert {link for link in links if not link.startswith(("socket:", "anon_inode:"))} == {
            "/dev/null",
            *(str(tmp_path / f"engage.db{end}") for end in ("", "-wal", "-shm", "-writer.lock")),
        }
    os.close(reading)
    os.close(writing)


async def test_the_process_and_the_thread_have_the_same_outcomes(tmp_path: Path) -> None:
    async with opened(make(tmp_path)) as store:
        first: list[Event] = [event("a", properties={"n": 1}), event("b\x00"), event("c")]
        bad = event("bad")
        object.__setattr__(bad, "message_id", "\ud800")
        outcomes = await store.write([*first, bad, event("a", properties={"n": 2})])
        assert [one.status.value for one in outcomes] == ["stored"] * 3 + ["refused", "duplicate"]
        assert outcomes[3].reason
        assert outcomes[4].stored == first[0].body


async def test_a_large_write_is_sent_in_parts(tmp_path: Path) -> None:
    async with opened(make(tmp_path)) as store:
        many = [event(str(number)) for number in range(9000)]
        large = [event(f"large{n}", properties={"x": "x" * 9_000_000}) for n in range(4)]
        assert {one.status for one in await store.write([*many, *large])} == {Status.STORED}
        assert [one.status for one in await store.write([large[0]])] == [Status.DUPLICATE]
        assert len(await ids(store)) == 9004


async def test_what_the_process_logs_is_in_the_log_of_a_client(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(make(tmp_path)) as store:
        os.unlink(tmp_path / "engage.db-writer.sock")
        await until(lambda: "the socket of the writer process was deleted" in caplog.text)
        assert client_of(store).is_connected


async def test_a_reader_does_not_stop_writes_after_a_kill(tmp_path: Path) -> None:
    """A backup may read one state for minutes, and prevents a complete checkpoint."""
    path = tmp_path / "engage.db"
    async with opened(make(tmp_path, timeout=10)) as store:
        await store_all(store, event("a"))
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
            db.execute("BEGIN")
            assert db.execute("SELECT message_id FROM events").fetchall() == [("a",)]
            await store_all(store, event("b"))
            os.kill(pid_of(store), signal.SIGKILL)
            await store_all(store, event("c"))
            assert (await store.write([event("b")]))[0].status is Status.DUPLICATE
            assert db.execute("SELECT message_id FROM events").fetchall() == [("a",)]
            db.execute("COMMIT")
            assert db.execute("PRAGMA quick_check").fetchall() == [("ok",)]
        assert await ids(store) == ["a", "b", "c"]
