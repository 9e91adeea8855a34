# SPDX-License-Identifier: Apache-2.0
"""The helper process that writes: it is found and shared, and nothing is lost when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from engage.api import Event, Record, Status, StorageMissing, StorageUnavailable
from engage.testing import StorageConformance, event, identify
from engage.testing.factories import ids, store_all
from engage_plugins.sqlite.writer import writer
from engage_plugins.sqlite.writer.protocol import PROTOCOL
from engage_plugins.sqlite.writer.sockets import AVAILABLE
from support.processes import alive
from support.rules import RuleTests
from support.writer import helped, helper, load, make, opened, pid_of, until

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="needs Unix sockets")


@pytest.mark.long
class TestSqliteProcess(RuleTests, StorageConformance):
    """The conformance suite with several processes, one of which writes for the others."""

    plugin = "engage_plugins.sqlite"
    syncs_with_os = False

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
    async with helped(tmp_path) as store:
        async with opened(make(tmp_path, "auto")) as other:
            assert pid_of(store) == pid_of(other) != os.getpid()
            await asyncio.gather(store_all(store, event("a")), store_all(other, event("b")))
            assert sorted(await ids(store)) == ["a", "b"]
        with pytest.raises(StorageUnavailable):
            await other.write([event("n")])
        pid = pid_of(store)
        # Its clients have events to write when a terminal or a service manager signals them all.
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)
        await store_all(store, event("m"))
        assert pid_of(store) == pid
    # It has closed the store, so that the file can be copied.
    assert not alive(pid)
    names = ["engage.db", "engage.db-keys", "engage.db-writer.lock"]
    assert sorted(one for one in os.listdir(tmp_path) if one.startswith("engage.db")) == names


async def test_reading_takes_no_lock_and_starts_no_thread(tmp_path: Path) -> None:
    missing = make(tmp_path)
    with pytest.raises(StorageMissing):
        await missing.open(create=False)
    async with opened(make(tmp_path)) as store:
        await store_all(store, event("m"))
    (tmp_path / "engage.db-writer.lock").unlink()
    reader = make(tmp_path)
    await reader.open(create=False)
    assert await ids(reader) == ["m"]
    assert not (tmp_path / "engage.db-writer.lock").exists()
    assert "engage-sqlite-writer" not in [thread.name for thread in threading.enumerate()]
    await store_all(reader, event("n"))
    await reader.close()


async def test_killing_the_process_loses_nothing(tmp_path: Path) -> None:
    """There is another one soon, and writes wait for it."""
    async with helped(tmp_path) as one, opened(make(tmp_path, supervised=True)) as other:
        async with load(one, other):
            for _ in range(2):
                await until(lambda: pid_of(one) == pid_of(other) != 0)
                killed = pid_of(one)
                os.kill(killed, signal.SIGKILL)
                await until(lambda killed=killed: pid_of(one) not in (0, killed))  # type: ignore[misc]
                assert not alive(killed)
        writes = [
            asyncio.ensure_future(one.write([identify(f"{number}-{n}", "u", n) for n in range(50)]))
            for number in range(40)
        ]
        await asyncio.wait(writes[:3])
        os.kill(pid_of(one), signal.SIGKILL)
        await asyncio.gather(*writes, one.check(), one.expire(0, limit=10))


async def test_a_thread_takes_over_when_the_process_ends(tmp_path: Path) -> None:
    """As for a command that writes for long, beside a server that is stopped."""
    async with helped(tmp_path):
        store = make(tmp_path)
        await store.open(create=True)
        assert pid_of(store) != os.getpid()
        await store_all(store, event("a"))
    await store_all(store, event("b"))
    assert pid_of(store) == os.getpid()
    async with helped(tmp_path) as other:
        assert pid_of(other) == os.getpid()
        await store_all(other, event("c"))
        await store.close()
        await store_all(other, event("d"))
        assert pid_of(other) not in (0, os.getpid())
        assert await ids(other) == ["a", "b", "c", "d"]


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
async def test_the_gauges_show_what_the_process_uses(tmp_path: Path) -> None:
    async with helped(tmp_path) as store:
        for _ in range(2):
            gauges, pid = store.gauges(), pid_of(store)
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
    async with opened(make(tmp_path)) as store:
        assert not [name for name in store.gauges() if name.startswith("writer")]


async def test_a_request_that_cannot_be_repeated_fails(tmp_path: Path) -> None:
    """The process may have made the change before it was killed."""
    async with helped(tmp_path) as store:
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


async def test_a_process_that_hangs_is_unavailability(tmp_path: Path) -> None:
    """The caller gets an error in time; when the process goes on, the store works."""
    async with helped(tmp_path) as patient:
        await store_all(patient, event("before"))
        hasty = make(tmp_path, supervised=True, timeout=0.7)
        await hasty.open(create=False)
        os.kill(pid_of(patient), signal.SIGSTOP)
        for _ in range(2):
            with pytest.raises(StorageUnavailable, match="no answer from the writer process"):
                await hasty.write([event("during")])
        os.kill(pid_of(patient), signal.SIGCONT)
        await store_all(patient, event("after"))
        # It has skipped the requests whose time was over.
        assert await ids(patient) == ["before", "after"]
        await hasty.close()


async def test_a_client_of_another_protocol_waits_until_the_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with helped(tmp_path) as store:
        pid = pid_of(store)
        other = make(tmp_path, timeout=1)
        with monkeypatch.context() as patch:
            patch.setattr(writer, "PROTOCOL", PROTOCOL + 1)
            with pytest.raises(StorageUnavailable, match=f"process {pid} is of another version"):
                await other.open(create=True)
        await store_all(store, event("m"))


async def test_the_settings_of_the_process_that_writes_apply(tmp_path: Path) -> None:
    first = make(tmp_path, identifiers=("email",))
    async with opened(first), helper(tmp_path):
        other = make(tmp_path, identifiers=("nick",), supervised=True)
        async with opened(other):
            assert pid_of(other) == os.getpid()
            await store_all(other, identify("1", "u", traits={"email": "e", "nick": "n"}))
            assert await first.find_users("acme", "email", ["e"]) == {"e": ["u"]}
            assert not await first.find_users("acme", "nick", ["n"])


async def test_the_outcomes_are_those_of_the_engine(tmp_path: Path) -> None:
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
        large = [event(f"large{n}", properties={"x": "x" * 9_000_000}) for n in range(2)]
        assert {one.status for one in await store.write([*many, *large])} == {Status.STORED}
        assert [one.status for one in await store.write([large[0]])] == [Status.DUPLICATE]
        assert len(await ids(store)) == 9002


async def test_a_reader_does_not_stop_writes_after_a_kill(tmp_path: Path) -> None:
    """A backup may read one state for minutes, and prevents a complete checkpoint."""
    path = tmp_path / "engage.db"
    async with helped(tmp_path) as store:
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
