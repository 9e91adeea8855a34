# SPDX-License-Identifier: Apache-2.0
"""The loop of the writer process: turns, limits, and clients that do not behave.

The loop runs in a thread of the test, and the clients are sockets of the test.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from engage.api import StorageUnavailable
from engage.store import events
from engage.store.keys import key_of
from engage.store.tables import Plan, Row
from engage.testing import event
from engage_plugins.sqlite.engine import Engine
from engage_plugins.sqlite.writer import scheduler, server, session
from engage_plugins.sqlite.writer.operations import CHECK, OPEN, WRITE, of
from engage_plugins.sqlite.writer.protocol import Kind
from engage_plugins.sqlite.writer.sockets import AVAILABLE
from support.waiting import wait_for
from support.writer_loop import Client, Loop

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="needs Unix sockets")


@pytest.fixture
def closed_loop(tmp_path: Path) -> Iterator[Loop]:
    """A loop whose store is not open."""
    loop = Loop(tmp_path / "engage.db")
    yield loop
    loop.end()


@pytest.fixture
def loop(closed_loop: Loop) -> Loop:
    """A loop whose store is open."""
    assert closed_loop.client().call(OPEN, True) == (Kind.DONE, None)
    return closed_loop


EXPIRE = of(events.expire)


def rows(*names: str, **properties: Any) -> list[Row]:
    """Return the rows of events, each with its key."""
    found = [events.row_of(event(name, properties=properties)) for name in names]
    return [(*row, key_of(*row[:3])) for row in found]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The message ids of each transaction of events."""
    calls: list[list[str]] = []
    run = Engine.run

    def recorded(self: Engine, plan: Plan[..., Any], arguments: Sequence[Any]) -> Any:
        if plan is events.write:
            calls.append([row[2] for row in arguments[0]])
        return run(self, plan, arguments)

    monkeypatch.setattr(Engine, "run", recorded)
    return calls


@contextlib.contextmanager
def busy(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep the loop busy, so that what is sent inside of the context is read together."""
    going, go_on = threading.Event(), threading.Event()
    check = Engine.check

    def slow(self: Engine) -> None:
        going.set()
        assert go_on.wait(20)
        check(self)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "check", slow)
        blocker = loop.client()
        blocker.sock.sendall(blocker.request(CHECK))
        assert going.wait(20)
        yield
        go_on.set()
        assert blocker.answer()[1] == Kind.DONE
    blocker.sock.close()


# -------------------------------------------------------------------------------------- turns
def test_one_transaction_has_the_events_of_all_clients(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, written: list[list[str]]
) -> None:
    clients = [loop.client() for _ in range(5)]
    with busy(loop, monkeypatch):
        for number, client in enumerate(clients):
            client.sock.sendall(client.request(WRITE, rows(f"{number}a", f"{number}b", "same")))
    others = [client.answer()[2][0] for client in clients]
    (batch,) = written
    assert len(batch) == 15
    # Two clients sent the same event: one of them stored it.
    assert [*map(len, others)].count(0) == 1
    assert [other[2]["status"] for other in others if other] == ["duplicate"] * 4


def test_a_commit_waits_for_a_client_that_sends_promptly(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, written: list[list[str]]
) -> None:
    monkeypatch.setattr(session, "PROMPT_SECONDS", 60.0)
    a, b = (loop.client() for _ in range(2))
    a.call(WRITE, rows("a1"))
    b.call(WRITE, rows("b1"))
    # A client is expected when it has sent a write soon after an answer.
    with busy(loop, monkeypatch):
        a.sock.sendall(a.request(WRITE, rows("a2")))
        b.sock.sendall(b.request(WRITE, rows("b2")))
    assert a.answer()[1] == b.answer()[1] == Kind.DONE
    written.clear()
    a.sock.sendall(a.request(WRITE, rows("a3")))
    # Other requests are not a reason to write, and not what is waited for.
    loop.clients[0].sock.sendall(loop.clients[0].request(CHECK))
    time.sleep(0.2)
    assert written == []
    b.sock.sendall(b.request(WRITE, rows("b3")))
    assert a.answer()[1] == b.answer()[1] == Kind.DONE
    assert [sorted(batch) for batch in written] == [["a3", "b3"]]
    # Now b sends nothing. The wait ends that many seconds after its last answer.
    monkeypatch.setattr(session, "PROMPT_SECONDS", 0.3)
    assert a.call(WRITE, rows("a4"))[0] == Kind.DONE
    assert written[1:] == [["a4"]]


def test_a_commit_does_not_wait_for_a_client_that_sends_now_and_then(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, written: list[list[str]]
) -> None:
    monkeypatch.setattr(session, "PROMPT_SECONDS", 0.0)
    a, b = (loop.client() for _ in range(2))
    for client, name in ((a, "a1"), (b, "b1"), (b, "b2")):
        client.call(WRITE, rows(name))
    # Its writes came later than this after the answers before.
    monkeypatch.setattr(session, "PROMPT_SECONDS", 60.0)
    began = time.monotonic()
    assert a.call(WRITE, rows("a2"))[0] == Kind.DONE
    assert time.monotonic() - began < 30
    assert written == [["a1"], ["b1"], ["b2"], ["a2"]]


def test_a_transaction_is_limited(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, written: list[list[str]]
) -> None:
    monkeypatch.setattr(scheduler, "MAX_EVENTS", 10)
    clients = [loop.client() for _ in range(3)]
    with busy(loop, monkeypatch):
        for name, client in zip("abc", clients, strict=True):
            for start in range(0, 12, 4):
                names = [f"{name}{number}" for number in range(start, start + 4)]
                client.sock.sendall(client.request(WRITE, rows(*names)))
    for client in clients:
        assert [client.answer()[:2] for _ in range(3)] == [(n, Kind.DONE) for n in (1, 2, 3)]
    assert all(len(batch) <= 10 for batch in written)
    # Clients take turns: two of them in the first transaction, the third at the start of the next.
    assert [sorted({name[0] for name in batch}) for batch in written][:2] == [
        ["a", "b"],
        ["a", "c"],
    ]
    monkeypatch.setattr(scheduler, "MAX_BYTES", 1000)
    written.clear()
    with busy(loop, monkeypatch):
        for name, client in zip("de", clients, strict=False):
            client.sock.sendall(client.request(WRITE, rows(name, x="x" * 900)))
    for client in clients[:2]:
        client.answer()
    assert written == [["d"], ["e"]]


def test_other_calls_are_made_between_the_writes_of_a_busy_client(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, written: list[list[str]]
) -> None:
    monkeypatch.setattr(scheduler, "MAX_EVENTS", 1)
    writing, other = loop.client(), loop.client()
    before: list[int] = []
    run = Engine.run

    def counted(self: Engine, plan: Plan[..., Any], arguments: Sequence[Any]) -> Any:
        if plan is events.expire:
            before.append(len(written))
        return run(self, plan, arguments)

    monkeypatch.setattr(Engine, "run", counted)
    with busy(loop, monkeypatch):
        requests = [writing.request(WRITE, rows(str(number))) for number in range(100)]
        writing.sock.sendall(b"".join(requests))
        other.sock.sendall(other.request(EXPIRE, 0, 10, False))
    assert other.answer()[1] == Kind.DONE
    assert before[0] < 90
    assert [writing.answer()[1] for _ in range(100)] == [Kind.DONE] * 100


def test_a_request_whose_time_is_over_is_skipped(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, written: list[list[str]]
) -> None:
    late, gone, waiting = (loop.client() for _ in range(3))
    with busy(loop, monkeypatch):
        late.sock.sendall(late.request(WRITE, rows("late"), seconds=-1))
        late.sock.sendall(late.request(WRITE, rows("in time")))
        gone.sock.sendall(gone.request(WRITE, rows("gone")))
        gone.sock.close()
        waiting.sock.sendall(waiting.request(WRITE, rows("waiting")))
    assert waiting.answer()[1] == Kind.DONE
    assert late.answer()[:2] == (2, Kind.DONE)
    # "gone" may be written if its end was not read yet, but as a whole.
    assert sorted(name for batch in written for name in batch if name != "gone") == [
        "in time",
        "waiting",
    ]


@pytest.mark.parametrize("error", [RuntimeError("bug"), StorageUnavailable("cannot be stored")])
def test_one_request_does_not_fail_the_others(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    run = Engine.run

    def picky(self: Engine, plan: Plan[..., Any], arguments: Sequence[Any]) -> Any:
        if any(row[2] == "poison" for row in arguments[0]):
            raise error
        return run(self, plan, arguments)

    monkeypatch.setattr(Engine, "run", picky)
    clients = [loop.client() for _ in range(4)]
    with busy(loop, monkeypatch):
        for number, client in enumerate(clients):
            name = "poison" if number == 1 else str(number)
            client.sock.sendall(client.request(WRITE, rows(name)))
    kinds = [client.answer()[1] for client in clients]
    failed = Kind.FAILED if isinstance(error, RuntimeError) else Kind.UNAVAILABLE
    assert kinds == [Kind.DONE, failed, Kind.DONE, Kind.DONE]


def test_a_store_that_is_down_is_not_tried_for_each_request(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def down(self: Engine, _: Plan[..., Any], arguments: Sequence[Any]) -> Any:
        calls.append(len(arguments[0]))
        raise StorageUnavailable("down")

    clients = [loop.client() for _ in range(6)]
    with busy(loop, monkeypatch):
        monkeypatch.setattr(Engine, "run", down)
        for number, client in enumerate(clients):
            client.sock.sendall(client.request(WRITE, rows(str(number))))
    assert [client.answer()[1:] for client in clients] == [(Kind.UNAVAILABLE, "down")] * 6
    assert calls == [6, 1, 1]
    monkeypatch.undo()


# ------------------------------------------------------------------------------------- limits
def test_a_client_that_reads_no_answers_has_limits(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it sends is not read any further, and the answers that wait for it are few."""
    monkeypatch.setattr(session, "MAX_WAITING_BYTES", 4_000_000)
    slow, other = loop.client(), loop.client()
    large = rows("large", x="x" * 900_000)
    other.call(WRITE, large)
    slow.sock.settimeout(0.2)
    sent = 0
    # Until the process stops reading its requests.
    with contextlib.suppress(TimeoutError, ConnectionError):
        while sent < 50:
            slow.sock.sendall(slow.request(WRITE, large))
            sent += 1
    # Those that wait, two whose answers are not read, and what the sockets take.
    assert sent < 10
    assert other.call(WRITE, rows("b")) == (Kind.DONE, [{}, 0])


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff\xff", b"\0\0\0\2{}"], ids=["too long", "no request"]
)
def test_a_process_that_does_not_speak_the_protocol_is_cut_off(loop: Loop, data: bytes) -> None:
    stranger, other = loop.client(), loop.client()
    stranger.sock.sendall(data)
    with pytest.raises((EOFError, ConnectionResetError)):
        stranger.body()
    assert other.call(CHECK) == (Kind.DONE, None)


def test_malformed_requests_are_cut_off_or_refused(loop: Loop) -> None:
    client, other = loop.client(), loop.client()
    kind, message = client.call(EXPIRE, "x", None)
    assert (kind, "Expected" in message) == (Kind.FAILED, True)
    kind, message = client.call(WRITE, [["x"]])
    assert (kind, "Expected" in message) == (Kind.FAILED, True)
    text = client.request(WRITE, rows("no utf-8"))
    client.sock.sendall(text.replace(b"no utf-8", b"no utf-\xff"))
    assert client.answer()[1] == Kind.FAILED
    client.sock.sendall(client.request(CHECK, name="explode"))
    assert client.answer()[1:] == (
        Kind.FAILED,
        "the writer does not know the operation explode",
    )
    assert client.call(CHECK) == (Kind.DONE, None)
    client.sock.sendall(b"\0\0\0\1\xc1")
    with pytest.raises((EOFError, ConnectionResetError)):
        client.body()
    assert other.call(CHECK) == (Kind.DONE, None)


def test_a_message_in_many_pieces_is_one(loop: Loop) -> None:
    client = loop.client()
    data = client.request(WRITE, rows("a")) + client.request(CHECK)
    for start in range(0, len(data), 7):
        client.sock.sendall(data[start : start + 7])
        time.sleep(0.001)
    assert [client.answer()[:2] for _ in range(2)] == [(1, Kind.DONE), (2, Kind.DONE)]


# -------------------------------------------------------------------------------------- opening
def test_clients_are_told_while_the_tables_are_changed(
    closed_loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes long, and meanwhile other clients connect and wait."""
    opened = threading.Event()
    open_engine = Engine.open

    def slow(self: Engine, create: bool, serving: bool) -> None:
        self.is_preparing = True
        assert opened.wait(20)
        self.is_preparing = False
        open_engine(self, True, serving)

    monkeypatch.setattr(Engine, "open", slow)
    loop = closed_loop
    one, other = loop.client(), loop.client()
    deadline = time.monotonic() + 1.5
    # It opens the store, so it has been read when the first report is sent.
    one.sock.sendall(one.request(CHECK, seconds=1.5))
    other.sock.sendall(other.request(OPEN, True))
    assert [client.answer()[:2] for client in (one, other)] == [(0, Kind.PROGRESS)] * 2
    third = loop.client()
    # Longer than it said that it would wait.
    wait_for(lambda: time.monotonic() > deadline, what="the deadline")
    opened.set()
    assert answer(one)[1] == answer(other)[1] == Kind.DONE
    third.sock.sendall(third.request(CHECK))
    assert answer(third)[1] == Kind.DONE


def answer(client: Client) -> tuple[int, int, Any]:
    """Return the next answer that is no report of progress."""
    while (found := client.answer())[1] == Kind.PROGRESS:
        pass
    return found


def test_an_unexpected_error_is_logged_and_the_loop_starts_again(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The clients connect again."""
    monkeypatch.setattr(server, "_TICK", 0.01)
    client = loop.client()
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "work", broken)
        with contextlib.suppress(EOFError, ConnectionResetError):
            while True:
                client.body()
    wait_for(lambda: "a bug" in caplog.text, what="the error in the log")
    assert loop.client().call(CHECK) == (Kind.DONE, None)


def test_why_it_cannot_listen_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its clients only know that nobody answers; it goes on when the cause is gone."""
    socket_file = tmp_path / "engage.db-writer.sock"
    socket_file.mkdir()
    loop = Loop(tmp_path / "engage.db")
    wait_for(lambda: caplog.messages, what="the reason in the log")
    acquired = (tmp_path / "engage.db-writer.lock").stat().st_mtime_ns
    wait_for(
        lambda: (tmp_path / "engage.db-writer.lock").stat().st_mtime_ns != acquired,
        what="another attempt",
    )
    assert caplog.messages == [
        f"SQLite: the writer cannot listen: {socket_file}: Address already in use"
    ]
    socket_file.rmdir()
    assert loop.client().call(OPEN, True) == (Kind.DONE, None)
    loop.end()


def broken(engine: Engine) -> bool:
    raise RuntimeError("a bug")
