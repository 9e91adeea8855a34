# SPDX-License-Identifier: Apache-2.0
"""The rule: what a client without a key can make a server process hold is bounded.

Whole servers: connections that never become a request, uploads that stall, and no file descriptors
left. Other clients are answered meanwhile. ``http1/test_capacity.py`` has unread answers.
"""

from __future__ import annotations

import contextlib
import resource
import socket
import sys
import time
from pathlib import Path

import httpx
import pytest

from support.server_process import Server, start_server
from support.waiting import DEADLINE, wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

MIB = 1024 * 1024


def rss(server: Server) -> int:
    """Return the resident memory of the server's worker, in bytes."""
    status = Path(f"/proc/{server.worker}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def connect(server: Server, receive_bytes: int = 4096) -> socket.socket:
    """Connect with a small receive buffer, so that the kernel holds little for the client."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.settimeout(DEADLINE)
    client.connect(("127.0.0.1", server.port))
    return client


def test_connections_that_never_become_a_request_cost_nobody_a_place(tmp_path: Path) -> None:
    """2,048 connections with one byte each: new clients and idle ones are served."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    try:
        with start_server(tmp_path) as server, contextlib.ExitStack() as stack:
            assert server.track("first").status_code == 200  # This connection is idle now.
            for _ in range(2048 + 300):
                stack.enter_context(connect(server)).sendall(b"P")
            for number in range(20):
                fresh = httpx.post(
                    f"{server.url}/v1/track",
                    json={"userId": "u", "event": "E", "messageId": f"fresh-{number}"},
                    auth=(server.key, ""),
                    timeout=DEADLINE,
                )
                assert fresh.status_code == 200
            idle = server.client
            assert idle.get("/healthz").status_code == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("trickles", [False, True], ids=["stalled", "trickling"])
def test_uploads_that_stall_shut_nobody_out(tmp_path: Path, trickles: bool) -> None:
    """52 of them fill ``limits.inflight_bytes`` exactly; the requests of others all succeed."""
    limits = "[limits]\ninflight_bytes = 20_000_000\nbody_bytes = 5_000_000\n"
    head = b"POST /v1/batch?writeKey=test-write-key-of-acme HTTP/1.1\r\nHost: a\r\n"
    head += b"Content-Length: 1000000\r\n\r\n"
    with start_server(tmp_path, config_extra=limits) as server, contextlib.ExitStack() as stack:
        hostile = [stack.enter_context(connect(server)) for _ in range(21)]
        for client in hostile:
            client.sendall(head + b"x" * 990_000)
        for size in [9000] * 21 + [100] * 120:  # What is left, by connections within their share.
            client = stack.enter_context(connect(server))
            client.sendall(head + b"x" * size)
        answers = []
        for number in range(60):
            if trickles:
                for client in hostile:
                    with contextlib.suppress(OSError):
                        client.send(b"x")
            answers.append(server.track(f"m{number}").status_code)
            time.sleep(0.02)
        assert answers == [200] * 60
        time.sleep(1.0)
        large = [
            {"type": "track", "userId": "u", "event": "E", "properties": {"x": "y" * 10_000}}
        ] * 90
        assert server.post("/v1/batch", {"batch": large}).status_code == 200
        assert rss(server) < 250 * MIB


@pytest.mark.long
def test_exhausted_file_descriptors_are_logged_and_accepting_goes_on(tmp_path: Path) -> None:
    """One error with the cure, however long it lasts; the processor is not kept busy."""
    extra = "metrics_port = 0\n"
    with start_server(tmp_path, server=extra) as server:
        pid = server.worker
        assert server.track("before").status_code == 200  # This connection stays.
        hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
        # Below all that are open, so that one which is closed meanwhile is not free either.
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))

        def errors() -> list[str]:
            return [x["message"] for x in server.lines() if "LimitNOFILE" in x["message"]]

        wait_for(errors, what="the error in the log")
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                stack.enter_context(connect(server)).sendall(b"GET /healthz HTTP/1.1\r\n")
            spent = _processor_seconds(pid)
            time.sleep(2.5)
            assert _processor_seconds(pid) - spent < 1.0
            assert server.track("meanwhile").status_code == 200
        assert len(errors()) == 1
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))
        wait_for(lambda: any("opened again" in x["message"] for x in server.lines()))
        assert httpx.get(f"{server.url}/healthz", timeout=DEADLINE).status_code == 200
        assert 'engage_dropped_total{what="accept"}' in server.metrics()


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100
