# SPDX-License-Identifier: Apache-2.0
"""SQLite with a writer process: the conformance suite, and what happens when a process ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from engage.api import Event, Status, StorageContext, StorageUnavailable
from engage.testing import StorageConformance, event, identify
from engage.testing.factories import ids, store_all
from engage.testing.harness import eventually
from engage_plugins.sqlite import engine, writer, writer_process
from engage_plugins.sqlite.store import SqliteStorage

pytestmark = pytest.mark.skipif(
    not writer_process.AVAILABLE, reason="needs sockets that are inherited"
)


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


def make(tmp_path: Path, writer: str = "process", *, timeout: float = 30) -> SqliteStorage:
    context = StorageContext(base_dir=tmp_path, identifiers={}, write_timeout=timeout)
    return SqliteStorage.from_options({"writer": writer}, context)


def writer_of(store: SqliteStorage) -> writer_process.WriterProcess:
    found = store._writer._process
    assert found is not None
    return found


async def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie whose parent has ended does not count.
    with contextlib.suppress(OSError):
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False


async def test_killing_the_process_loses_nothing(tmp_path: Path) -> None:
    """A thread continues to write at once, and no acknowledged event is lost."""
    store = make(tmp_path)
    await store.open(create=True)
    acknowledged = []
    for number in range(60):
        if number == 30:
            os.kill(writer_of(store)._process.pid, signal.SIGKILL)
        (outcome,) = await store.write([event(str(number))])
        # An event that the process stored without answering is a duplicate then.
        assert outcome.status in (Status.STORED, Status.DUPLICATE)
        acknowledged.append(str(number))
    assert store._writer._process is None
    assert await ids(store) == acknowledged
    await store.close()


async def test_killing_the_process_fails_no_waiting_write(tmp_path: Path) -> None:
    store = make(tmp_path)
    await store.open(create=True)
    writes = [
        asyncio.ensure_future(store.write([identify(f"{number}-{n}", "u", n) for n in range(50)]))
        for number in range(40)
    ]
    await asyncio.wait(writes[:3])
    os.kill(writer_of(store)._process.pid, signal.SIGKILL)
    await asyncio.gather(*writes)
    assert len(await ids(store)) == 2000
    await store.close()


async def test_a_busy_store_starts_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "BUSY_WRITES", 3)
    store = make(tmp_path, "auto")
    await store.open(create=True)
    number = 0

    async def one() -> None:
        nonlocal number
        number += 1
        await store_all(store, event(str(number)))

    await one()
    assert store._writer._process is None

    async def busy() -> None:
        # On a slow machine a second may have fewer than three writes.
        end = time.monotonic() + 60
        while store._writer._process is None:
            await one()
            assert time.monotonic() < end

    await busy()
    first = writer_of(store)._process.pid
    await one()
    os.kill(first, signal.SIGKILL)
    await one()
    assert store._writer._process is None
    # The process is started again after a pause.
    await busy()
    assert writer_of(store)._process.pid != first
    await one()
    assert await ids(store) == [str(n) for n in range(1, number + 1)]
    await store.close()


async def test_the_option_thread_starts_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "BUSY_WRITES", 1)
    store = make(tmp_path, "thread")
    await store.open(create=True)
    for number in range(10):
        await store_all(store, event(str(number)))
    assert store._writer._process is None
    assert store._writer._starting is None
    await store.close()


async def test_a_process_that_cannot_be_started_is_replaced_by_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "BUSY_WRITES", 1)
    monkeypatch.setattr(writer_process.sys, "executable", str(tmp_path / "no-python"))
    store = make(tmp_path, "auto")
    await store.open(create=True)
    await store_all(store, event("0"))
    await until(lambda: store._writer._starting is None)
    for number in range(1, 10):
        await store_all(store, event(str(number)))
    assert store._writer._process is None
    assert len(await ids(store)) == 10
    await store.close()


async def test_closing_the_store_ends_the_process(tmp_path: Path) -> None:
    store = make(tmp_path)
    await store.open(create=True)
    pid = writer_of(store)._process.pid
    await store_all(store, event("m"))
    await store.close()
    assert not is_alive(pid)
    with pytest.raises(StorageUnavailable):
        await store.write([event("n")])


async def test_closing_while_the_process_is_started_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that starts it cannot be cancelled, and returns after the store was closed."""
    spawn, spawned, go_on = writer_process._spawn, list[Any](), threading.Event()

    def slow(descriptor: int) -> Any:
        spawned.append(spawn(descriptor))
        assert go_on.wait(30)
        return spawned[0]

    monkeypatch.setattr(writer, "BUSY_WRITES", 1)
    monkeypatch.setattr(writer_process, "_spawn", slow)
    store = make(tmp_path, "auto")
    await store.open(create=True)
    await store_all(store, event("m"))
    await until(lambda: bool(spawned))
    closing = asyncio.create_task(store.close())
    await asyncio.sleep(0.01)
    go_on.set()
    await closing
    assert spawned[0].returncode is not None, "it was not waited for"


async def test_signals_to_the_group_do_not_end_the_process(tmp_path: Path) -> None:
    """The parent has events to flush when a terminal or a service manager signals the group."""
    store = make(tmp_path)
    await store.open(create=True)
    pid = writer_of(store)._process.pid
    for one in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, one)
    await store_all(store, event("m"))
    assert writer_of(store)._process.pid == pid
    await store.close()


async def test_a_process_that_hangs_is_unavailability(tmp_path: Path) -> None:
    """The caller gets an error in time; when it is opened again, the store works."""
    store = make(tmp_path)
    await store.open(create=True)
    await store_all(store, event("before"))
    pid = writer_of(store)._process.pid
    writer_of(store)._timeout = 0.5
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(StorageUnavailable):
        await store.write([event("during")])
    await store.close()
    assert not is_alive(pid)
    await store.open(create=True)
    await store.write([event("during"), event("after")])
    assert sorted(await ids(store)) == ["after", "before", "during"]
    await store.close()


PARENT = """
import asyncio, sys
from pathlib import Path
from engage.api import StorageContext
from engage.testing import event
from engage_plugins.sqlite.store import SqliteStorage

async def main():
    context = StorageContext(base_dir=Path(sys.argv[1]), identifiers={})
    store = SqliteStorage.from_options({"writer": "process"}, context)
    await store.open(create=True)
    print(store._writer._process._process.pid, flush=True)
    number = 0
    while True:
        await store.write([event(str(number))])
        print(number, flush=True)
        number += 1

asyncio.run(main())
"""


async def test_the_process_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    """No process keeps the file."""
    parent = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        for _ in range(20):
            last = int(parent.stdout.readline())
        parent.kill()
        rest = [line for line in parent.stdout.read().splitlines(True) if line.endswith("\n")]
        last = int(rest[-1]) if rest else last
    await until(lambda: not is_alive(pid))
    store = make(tmp_path, "thread")
    await store.open(create=True)
    found = await ids(store)
    # All acknowledged events, and at most one more.
    assert found[: last + 1] == [str(number) for number in range(last + 1)]
    assert len(found) <= last + 2
    await store.close()


@pytest.mark.parametrize("last", ["an answer unread", "half a message", "half a length", "nothing"])
def test_the_end_of_the_parent_is_not_an_error(tmp_path: Path, last: str) -> None:
    """Nothing is written to standard error, which is the log, however the connection ends."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = subprocess.Popen(
            [sys.executable, "-m", "engage_plugins.sqlite.writer_process", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        theirs.close()
        settings = pickle.dumps(make(tmp_path)._settings)
        message = len(settings).to_bytes(4, "big") + settings
        if last == "an answer unread":
            ours.sendall(message)
            assert select.select([ours], [], [], 30)[0]
        elif last == "half a message":
            ours.sendall(message[:-10])
        elif last == "half a length":
            ours.sendall(message[:2])
    _, errors = child.communicate(timeout=30)
    assert (child.returncode, errors) == (0, b"")


async def test_the_process_and_the_thread_have_the_same_outcomes(tmp_path: Path) -> None:
    store = make(tmp_path)
    await store.open(create=True)
    first: list[Event] = [event("a", properties={"n": 1}), event("b\x00"), event("c")]
    bad = event("bad")
    object.__setattr__(bad, "message_id", "\ud800")
    outcomes = await store.write([*first, bad, event("a", properties={"n": 2})])
    assert [one.status.value for one in outcomes] == ["stored"] * 3 + ["refused", "duplicate"]
    assert outcomes[3].reason
    assert outcomes[4].stored == first[0].body
    await store.close()


async def test_an_io_error_of_the_process_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that continues acknowledges nothing before a checkpoint."""
    store = make(tmp_path)
    await store.open(create=True)
    await store_all(store, event("m"))
    trusted = []
    real = engine.Engine._checkpoint_everything

    def trust(self: engine.Engine, db: Any) -> None:
        trusted.append(True)
        real(self, db)

    monkeypatch.setattr(engine.Engine, "_checkpoint_everything", trust)
    os.kill(writer_of(store)._process.pid, signal.SIGKILL)
    (outcome,) = await eventually(lambda: store.write([event("m")]), StorageUnavailable)
    assert outcome.status is Status.DUPLICATE
    assert trusted
    await store.close()
