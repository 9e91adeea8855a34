# SPDX-License-Identifier: Apache-2.0
"""engage.server.serve as a process: start, drain, signals, workers, metrics, logs."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import engage
from engage.config import Config, LogConfig, Selected, StorageConfig, Workspace, WriteKey
from engage.registry import Registry
from engage.registry.discovery import Discovered, Registered
from engage.server.serve import secrets_of
from support.commands import run
from support.console import CONSOLE, console_url, free_port
from support.processes import alive, descendants
from support.server_process import KEY, SECRET, Server, config_text, start_server
from support.waiting import DEADLINE, wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

EVENT = json.dumps({"userId": "u", "event": "Tested", "messageId": "slow"}).encode()
HEAD = (
    b"POST /v1/track HTTP/1.1\r\nHost: x\r\n"
    b"Authorization: Basic %s\r\nContent-Length: %d\r\n\r\n"
    % (base64.b64encode(f"{KEY}:".encode()), len(EVENT))
)
READY = b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n"


@contextlib.contextmanager
def _connected(server: Server) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE) as sock:
        yield sock


def _answer(sock: socket.socket) -> tuple[int, str, bytes]:
    """Read one answer: status, head in lower case, body."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = sock.recv(65536)
        assert more, f"the connection ended after {data!r}"
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    match = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
    assert match
    while len(body) < int(match[1]):
        body += sock.recv(65536)
    return int(head.split()[1]), head.decode("latin-1").lower(), body


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
            sock.listen()
        except OSError:
            return False
    return True


def _said(server: Server, message: str) -> None:
    wait_for(lambda: any(line["message"] == message for line in server.lines()), what=message)


# ------------------------------------------------------------------------------------------- drain
@pytest.mark.parametrize("workers", [1, 2])
def test_a_drain_answers_requests_in_flight_and_exits_with_0(tmp_path: Path, workers: int) -> None:
    with start_server(tmp_path, workers=workers) as server, _connected(server) as slow:
        slow.sendall(HEAD + EVENT[:10])
        assert server.track("quick").status_code == 200
        # Otherwise the request could still be unread in the kernel when the drain begins.
        with _connected(server) as other:
            other.sendall(READY)
            assert _answer(other)[0] == 200
        server.signal(signal.SIGTERM)
        _said(server, "draining")
        slow.sendall(EVENT[10:])
        status, head, body = _answer(slow)
        assert (status, json.loads(body)["messageId"]) == (200, "slow")
        assert "\r\nconnection: close" in head
        assert slow.recv(1) == b""
        assert server.wait() == 0
        assert sorted(event["messageId"] for event in server.export()) == ["quick", "slow"]


@pytest.mark.parametrize("workers", [1, 2])
def test_requests_are_answered_and_connections_closed_during_the_delay(
    tmp_path: Path, workers: int
) -> None:
    lines = "shutdown_delay = 1000\nshutdown_grace = 2000"
    with start_server(tmp_path, workers=workers, server=lines) as server:
        server.signal(signal.SIGTERM)
        # The processes begin the drain at different moments.
        wait_for(
            lambda: sum(line["message"] == "draining" for line in server.lines()) == 1 + workers,
            what="every process to drain",
        )
        drain = {line["process"] for line in server.lines() if line["message"] == "draining"}
        names = {1: {"worker"}, 2: {"worker 0", "worker 1"}}
        assert drain == {"supervisor"} | names[workers]
        for _ in range(8):
            with _connected(server) as sock:
                sock.sendall(READY)
                status, head, body = _answer(sock)
                assert status == 503
                assert json.loads(body)["code"] == "shutting_down"
                assert "\r\nconnection: close" in head
                assert re.search(r"\r\nretry-after: [1-5]\r\n", head + "\r\n")
        with _connected(server) as sock:
            sock.sendall(HEAD + EVENT)
            status, head, _ = _answer(sock)
            assert status == 200
            assert "\r\nconnection: close" in head
        # The second signal ends the server at once, although the delay has only begun.
        workers_there = server.workers()
        server.signal(signal.SIGTERM)
        assert server.wait() == 1
        wait_for(lambda: not any(map(alive, workers_there)), what="the workers to end")
        # Acknowledged events are stored in any case.
        assert [event["messageId"] for event in server.export()] == ["slow"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl+C", "systemd"])
def test_a_signal_to_all_processes_is_one_drain(tmp_path: Path, number: int) -> None:
    with start_server(tmp_path, workers=2, config_extra=CONSOLE) as server:
        assert server.process is not None
        os.killpg(server.process.pid, number)
        assert server.wait() == 0
        assert "Traceback" not in server.log()


def test_standard_input_may_be_closed(tmp_path: Path) -> None:
    """Its number is not given to a socket, which children would take for their input."""
    with start_server(tmp_path, preexec=lambda: os.close(0)) as server:
        assert server.track("m").status_code == 200
        assert server.stop() == 0


def test_modules_in_the_working_directory_are_not_imported(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('this is not the standard library')")
    # As the script "engage" that pip installs: it does not look into the working directory.
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\ncd "{tmp_path}" && exec "{sys.executable}" -P "$@"\n')
    script.chmod(0o755)
    server = Server(tmp_path, config_text(config_extra=CONSOLE))
    server.python = str(script)
    with server.start():
        server.track("m-stored")
        assert httpx.get(f"{console_url(server)}/login").status_code == 200


def _handle_sighup(handler: signal.Handlers) -> None:
    # The tests themselves may run under nohup.
    signal.signal(signal.SIGHUP, handler)


def test_a_closed_terminal_begins_a_drain(tmp_path: Path) -> None:
    """The kernel and the shell both send SIGHUP then."""
    with start_server(
        tmp_path,
        workers=2,
        server="shutdown_delay = 1",
        preexec=functools.partial(_handle_sighup, signal.SIG_DFL),
    ) as server:
        assert server.process is not None
        for _ in range(2):
            os.killpg(server.process.pid, signal.SIGHUP)
            time.sleep(0.2)
        assert server.track("during the drain").status_code == 200
        assert server.wait() == 0
        assert [event["messageId"] for event in server.export()] == ["during the drain"]


def test_nohup_keeps_the_server_running(tmp_path: Path) -> None:
    ignored = functools.partial(_handle_sighup, signal.SIG_IGN)
    with start_server(tmp_path, preexec=ignored) as server:
        assert server.process is not None
        os.killpg(server.process.pid, signal.SIGHUP)
        assert server.track("m").status_code == 200
        assert server.stop() == 0


def test_a_connection_waiting_to_be_accepted_is_answered_in_a_drain(tmp_path: Path) -> None:
    with start_server(tmp_path) as server:
        worker = server.worker
        os.kill(worker, signal.SIGSTOP)
        with contextlib.ExitStack() as stack:
            newcomers = [stack.enter_context(_connected(server)) for _ in range(20)]
            for sock in newcomers:
                sock.sendall(HEAD + EVENT)
            server.signal(signal.SIGTERM)
            os.kill(worker, signal.SIGCONT)
            for sock in newcomers:
                assert _answer(sock)[0] == 200
        assert server.wait() == 0


def test_an_endless_request_ends_with_the_grace_period(tmp_path: Path) -> None:
    with start_server(tmp_path, server="shutdown_grace = 3") as server, _connected(server) as slow:
        slow.sendall(HEAD + EVENT[:10])
        with _connected(server) as other:
            other.sendall(READY)
            assert _answer(other)[0] == 200
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert server.export() == []


# ---------------------------------------------------------------------------------------- start-up
def _cannot_start(server: Server) -> str:
    """Start a server that fails, and return the one line of its error."""
    server.launch()
    assert server.wait() == 1
    lines = [json.loads(line) for line in server.log().splitlines()]
    # The SQLite storage reports its version when it is open.
    errors: list[str] = [line["message"] for line in lines if line["level"] != "info"]
    assert len(errors) == 1, lines
    return errors[0]


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = config_text().replace("port = 0", f"port = {port}")
        message = _cannot_start(Server(tmp_path, config))
        assert message.startswith(f"cannot start: cannot listen on 127.0.0.1:{port}: address alre")
        config = config_text(workers=2, server=f"metrics_port = {port}")
        message = _cannot_start(Server(tmp_path, config))
    assert f"cannot listen on 127.0.0.1:{port}" in message
    assert "server.metrics_port" in message


@pytest.mark.parametrize("workers", [1, 2])
def test_a_store_that_cannot_be_opened_is_one_line(tmp_path: Path, workers: int) -> None:
    (tmp_path / "engage.db").mkdir()
    message = _cannot_start(Server(tmp_path, config_text(workers=workers)))
    assert message.startswith("cannot start: ")
    assert "engage.db" in message


def test_the_log_masks_all_secrets_of_the_config() -> None:
    schema = {
        "properties": {"token": {"writeOnly": True}, "url": {"writeOnly": True}, "region": {}}
    }
    tables = {
        kind: {
            "some": Registered(
                name="some", factory=object, schema=schema, plugin="some", distribution="some 1.0"
            )
        }
        for kind in ("storage", "log", "webhook", "transform", "observer")
    }
    registry = Registry(Discovered(plugins=(), tables=tables, commands={}, command_plugins={}))
    workspace = Workspace(
        id="acme",
        name="Acme",
        subscription_secrets=("subscription-1", "subscription-2"),
        write_keys=(WriteKey(id="website", key="the-write-key"),),
        webhooks={"some": {"token": ["signing-key-1", "key-2"], "region": "somewhere-else-1"}},
    )
    storage = StorageConfig(
        backend="some", options={"url": "scheme://user:pass@word@host/engage", "token": "storage-1"}
    )
    config = Config(
        path=Path(),
        base_dir=Path(),
        workspaces=(workspace,),
        storage=storage,
        log=LogConfig(backend="some", options={"token": "log-1"}),
        transforms=(Selected(name="some", options={"token": "transform-1"}),),
        observers=(Selected(name="some", options={"url": "https://hooks.example.com/T/secret"}),),
    )
    assert set(secrets_of(config, registry)) == {
        *("subscription-1", "subscription-2", "the-write-key", "signing-key-1", "key-2"),
        *("pass@word", "storage-1", "log-1", "transform-1", "https://hooks.example.com/T/secret"),
    }


def test_connections_may_exceed_the_usual_limit_of_open_files(tmp_path: Path) -> None:
    def few_files() -> None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))

    with (
        start_server(tmp_path, workers=2, preexec=few_files) as server,
        contextlib.ExitStack() as stack,
    ):
        # At least one of the workers has more than 128 of them.
        for _ in range(300):
            stack.enter_context(_connected(server)).sendall(b"POST /v1/track HTTP/1.1\r\n")
        assert server.track("one more").status_code == 200


def test_a_system_that_allows_too_few_files_is_named(tmp_path: Path) -> None:
    def few_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))

    with start_server(tmp_path, preexec=few_files) as server:
        warning = next(line for line in server.lines() if line["level"] == "warning")
        assert "max_connections is 2048, but the system allows only 128" in warning["message"]


def test_the_start_warns_of_a_removed_key(tmp_path: Path) -> None:
    with start_server(tmp_path, config_extra="[limits]\nuser_links = 5\n") as server:
        said = [line for line in server.lines() if "has no effect" in line["message"]]
    warning = "limits.user_links has no effect: a user has at most 1000 anonymous ids."
    assert [(line["level"], line["message"]) for line in said] == [("warning", warning)]


@pytest.mark.parametrize("key", ["", "0123456789abcdef" * 2])
def test_the_start_says_why_nobody_can_be_erased(tmp_path: Path, key: str) -> None:
    (tmp_path / "engage.toml.erasures").mkdir()
    extra = f'[erasures]\nkey = "{key}"\n' if key else ""
    with start_server(tmp_path, config_extra=extra) as server:
        said = [line for line in server.lines() if "people cannot be erased" in line["message"]]
    assert len(said) == 1
    # Without a key, it is a choice of the operator.
    reason = "cannot be read: Is a directory" if key else "the config has no key for erasures"
    assert reason in said[0]["message"]
    assert said[0]["level"] == ("warning" if key else "info")


# ----------------------------------------------------------------------------------------- workers
@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_dies_is_replaced(tmp_path: Path, workers: int) -> None:
    with start_server(tmp_path, workers=workers) as server:
        before = wait_for(lambda: (now := server.workers()) and len(now) == workers and now)
        victim = min(before)
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: victim not in server.workers() and len(server.workers()) == workers)
        died = [line for line in server.lines() if "died" in line["message"]]
        assert [(line["level"], line["pid"]) for line in died] == [("error", victim)]
        for number in range(10):
            with httpx.Client(timeout=DEADLINE) as fresh:
                url = f"{server.url}/v1/track?writeKey={KEY}"
                event = {"userId": "u", "event": "E", "messageId": f"m{number}"}
                assert fresh.post(url, json=event).status_code == 200
        assert len(server.export()) == 10
        assert server.stop() == 0


def test_a_worker_that_is_told_to_end_is_replaced_without_an_error(tmp_path: Path) -> None:
    with start_server(tmp_path, workers=2) as server:
        before = wait_for(lambda: len(now := server.workers()) == 2 and now)
        os.kill(min(before), signal.SIGTERM)
        wait_for(lambda: len(now := server.workers()) == 2 and min(before) not in now)
        ended = [line for line in server.lines() if "has ended" in line["message"]]
        assert [(line["level"], line["pid"]) for line in ended] == [("warning", min(before))]
        assert not [line for line in server.lines() if line["level"] == "error"]
        assert server.stop() == 0


def test_a_new_worker_waits_for_a_store_that_is_away(tmp_path: Path) -> None:
    """It does not create another store, and it does not end until the server would give up."""
    path, away = tmp_path / "engage.db", tmp_path / "away.db"
    with start_server(tmp_path, workers=2) as server:
        assert server.track("before").status_code == 200
        wait_for(lambda: len(server.workers()) == 2)
        path.rename(away)
        victims = server.workers()
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        wait_for(lambda: sum("cannot be opened" in line["message"] for line in server.lines()) >= 2)
        started = wait_for(lambda: len(new := server.workers() - victims) == 2 and new)
        wait_for(lambda: server.track("during").status_code == 503)
        assert not path.exists()
        away.rename(path)
        wait_for(lambda: server.track("after").status_code == 200)
        wait_for(lambda: httpx.get(f"{server.url}/readyz").status_code == 200)
        assert server.workers() == started, server.lines()
        assert [event["messageId"] for event in server.export()] == ["before", "after"]
        assert server.stop() == 0


@pytest.mark.long
def test_ten_deaths_in_a_minute_end_the_server(tmp_path: Path) -> None:
    with start_server(tmp_path, workers=5) as server:
        assert server.process is not None
        parent = server.process
        killed: set[int] = set()
        while parent.poll() is None:
            wait_for(
                lambda: parent.poll() is not None or server.workers() - killed,
                what="a new worker",
            )
            for pid in server.workers() - killed:
                killed.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        assert server.wait() == 1
        assert len(killed) >= 10
        assert "giving up" in server.log()


def test_a_killed_server_leaves_no_process(tmp_path: Path) -> None:
    with start_server(tmp_path, workers=2) as server:
        wait_for(lambda: len(server.workers()) == 2, what="all workers")
        assert server.track("before").status_code == 200
        assert server.process is not None
        family = descendants(server.process.pid)
        assert server.helper in family
        port = server.port
        server.signal(signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL
        wait_for(lambda: not any(map(alive, family)), what="the orphans to end")
        # A process with several threads is a zombie before the last of them closes its files.
        wait_for(lambda: _is_free(port), what="the port")
        server.start()
        assert server.track("after").status_code == 200
        assert [event["messageId"] for event in server.export()] == ["before", "after"]


# ----------------------------------------------------------------------------------------- metrics
def _value(text: str, start: str) -> float:
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(start))


def test_metrics_are_the_sum_of_all_workers(tmp_path: Path) -> None:
    with start_server(tmp_path, workers=3, server="metrics_port = 0") as server:
        for number in range(30):
            # A connection for each request, so that several workers get some.
            assert httpx.post(
                f"{server.url}/v1/track?writeKey={KEY}",
                json={"userId": "u", "event": "E", "messageId": f"m{number % 20}"},
                timeout=DEADLINE,
            ).is_success
        assert server.post("/v1/track", {"userId": "u"}).status_code == 400
        assert server.post("/nowhere/at/all", {}).status_code == 404
        # They have a port of their own.
        assert server.get("/metrics").status_code == 404

        def counted() -> str | None:
            text = server.metrics()
            counts = (
                _value(text, 'engage_requests_total{route="unknown"'),
                _value(text, 'engage_requests_total{route="track"'),
                _value(text, 'engage_request_seconds_count{route="track"'),
                _value(text, "engage_events_total"),
                _value(text, "engage_write_events_sum"),
                # After the last write, the queue is empty.
                1 - _value(text, "engage_queue_events"),
            )
            return text if counts == (2, 31, 31, 31, 30, 1) else None

        text = wait_for(counted, what="all requests to be counted")
        requests = 'engage_requests_total{route="track",status='
        assert _value(text, f'{requests}"200"}}') == 30
        assert _value(text, f'{requests}"400"}}') == 1
        assert _value(text, 'engage_request_seconds_count{route="track"') == 31
        stored = 'engage_events_total{outcome="%s",type="track"}'
        assert _value(text, stored % "stored") == 20
        assert _value(text, stored % "duplicate") == 10
        assert _value(text, stored % "invalid_payload") == 1
        assert _value(text, "engage_write_events_sum") == 30
        assert _value(text, "engage_write_seconds_count") >= 1
        assert _value(text, "engage_queue_events") == 0
        assert _value(text, "engage_storage_free_bytes") > 0
        assert "engage_storage_wal_bytes" in text
        assert "nowhere" not in text
        assert KEY not in text


def test_counts_of_a_dead_worker_stay_and_a_restart_begins_at_zero(tmp_path: Path) -> None:
    with start_server(tmp_path, workers=2, server="metrics_port = 0") as server:
        assert server.process is not None
        assert server.track("m").status_code == 200
        name = 'engage_events_total{outcome="stored",type="track"}'
        wait_for(lambda: _value(server.metrics(), name) == 1)
        for victim in server.workers():
            os.kill(victim, signal.SIGKILL)
        wait_for(lambda: server.lines()[-1] and server.log().count(" died ") == 2)
        assert _value(server.metrics(), name) == 1
        server.kill()
        server.start()
        assert _value(server.metrics(), name) == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_metrics_say_what_was_started_again_and_when_the_last_backup_was(
    tmp_path: Path, workers: int
) -> None:
    """The first worker reads the record of the last backup when it starts."""
    port = f"metrics_port = {free_port()}"
    with start_server(tmp_path, workers=workers, server=port, config_extra=CONSOLE) as server:
        kinds = ("worker", "console", "helper")
        name = 'engage_process_restarts{process="%s"}'

        def shows(*counts: float) -> None:
            def shown() -> bool:
                # A single worker serves them itself.
                with contextlib.suppress(httpx.TransportError):
                    text = server.metrics()
                    return tuple(_value(text, name % kind) for kind in kinds) == counts
                return False

            wait_for(shown, what=f"the counts {counts}")

        wait_for(server.consoles, what="the console")
        shows(0, 0, 0)
        for kind in kinds:
            assert name % kind in server.metrics()
        assert f'engage_build_info{{version="{engage.__version__}"}} 1.0' in server.metrics()
        backup = "engage_last_backup_timestamp_seconds"
        wait_for(lambda: f"{backup} 0.0" in server.metrics(), what="a server without a backup")
        assert run("backup", tmp_path / "b.db", "--config", server.config).exit_code == 0
        os.kill(min(server.workers()), signal.SIGKILL)
        shows(1, 0, 0)
        for victim in server.workers():
            os.kill(victim, signal.SIGKILL)
        shows(1 + workers, 0, 0)
        wait_for(lambda: _value(server.metrics(), backup) > time.time() - 600, what="the backup")
        os.kill(server.helper, signal.SIGKILL)
        (console,) = server.consoles()
        os.kill(console, signal.SIGKILL)
        shows(1 + workers, 1, 1)


def test_without_a_port_there_are_no_metrics(tmp_path: Path) -> None:
    with start_server(tmp_path) as server:
        assert not [line for line in server.lines() if line["message"] == "metrics"]
        assert server.get("/metrics").status_code == 404


# -------------------------------------------------------------------------------------------- logs
def test_each_request_is_one_line_without_key_or_payload(tmp_path: Path) -> None:
    with start_server(tmp_path, workers=2) as server:
        secret = "payload-of-somebody"
        event = {"userId": secret, "event": secret, "properties": {secret: secret}}
        given = {"X-Request-Id": "request-of-the-test"}
        assert server.post("/v1/track", event, headers=given).status_code == 200
        beacon = {"batch": [{"type": "track", **event}, {"type": secret}]}
        path = f"/beacon/v1/batch?writeKey={KEY}"
        assert server.post(path, beacon, key=None).status_code == 200
        body_key = {"writeKey": KEY, **event}
        assert server.post("/v1/track", body_key, key=None).status_code == 200
        wrong = server.post(f"/v1/track?writeKey={secret}", event, key=f"wrong-{secret}")
        assert wrong.status_code == 401
        assert server.post(f"/{secret}?writeKey={KEY}", event).status_code == 404
        assert server.post("/v1/track", f'{{"{secret}'.encode()).status_code == 400
        change = {"workspaceId": "acme", "identifier": secret, "hash": secret, "changes": {}}
        assert server.client.put(
            "/api/public/subscription-management/user-subscriptions", json=change
        ).is_error
        assert server.stop() == 0
        log = server.log()
        requests = [line for line in server.lines() if line["message"] == "request"]
    for word in (KEY, SECRET, secret, base64.b64encode(KEY.encode()).decode()[:-4]):
        assert word not in log
    mine = next(line for line in requests if line["requestId"] == "request-of-the-test")
    assert mine["level"] == "info"
    assert (mine["route"], mine["status"], mine["method"]) == ("track", 200, "POST")
    assert (mine["workspace"], mine["writeKeyId"]) == ("acme", "website")
    assert mine["ms"] > 0
    assert len([line for line in requests if line["method"] != "GET"]) == 7
    assert all(line["requestId"] for line in requests)


def test_lines_on_a_terminal_are_for_people(tmp_path: Path) -> None:
    config = config_text().replace('format = "json"', 'format = "text"')
    server = Server(tmp_path, config)
    with server:
        server.launch()
        found = wait_for(lambda: re.search(r"listening.* url=(http://\S+)", server.log()))
        server.url = found[1]
        assert server.track("m").status_code == 200
        assert server.stop() == 0
        assert re.search(r"(?m)^\d\d:\d\d:\d\d POST track 200 .*acme/website", server.log())
