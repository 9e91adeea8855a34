# SPDX-License-Identifier: Apache-2.0
"""engage.monitoring.logs writes one JSON line per request, and no secret in any line."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import select
from collections.abc import Callable
from typing import Any

import pytest

from engage.monitoring import logs
from support.waiting import eventually

Configure = Callable[..., io.StringIO]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def configure() -> Configure:
    """Return a function like ``logs.configure`` that returns the stream with the lines."""

    def call(level: str = "info", style: str = "json", **options: Any) -> io.StringIO:
        stream: io.StringIO = options.pop("stream", io.StringIO())
        logs.configure(level, style, stream=stream, **options)
        return stream

    return call


def _request(**fields: Any) -> None:
    given = {"request_id": "r-1", "method": "POST", "route": "track", "status": 200}
    logs.log_request(**{**given, "seconds": 0.0123, **fields})


def test_a_request_is_one_json_object(configure: Configure) -> None:
    stream = configure()
    _request(workspace="acme", key_id="website", events=3)
    _request(status=400, code="invalid_json", request_id="r-2")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "info",
        "message": "request",
        "requestId": "r-1",
        "method": "POST",
        "route": "track",
        "status": 200,
        "ms": 12.3,
        "workspace": "acme",
        "writeKeyId": "website",
        "events": 3,
    }
    assert second["code"] == "invalid_json"
    assert "workspace" not in second


def test_a_terminal_gets_lines_for_people(configure: Configure) -> None:
    stream = configure(style="auto", stream=_Terminal())
    _request(workspace="acme", key_id="website")
    line = stream.getvalue()
    assert "POST track 200 12.30 ms acme/website r-1\n" in line
    assert not line.startswith("{")


@pytest.mark.parametrize("style", ["json", "text"])
def test_the_line_of_a_delivery_has_its_provider_type_and_outcome(
    configure: Configure, style: str
) -> None:
    stream = configure(style=style)
    more = {"provider": "resend", "workspace": "acme", "type": "email.sent", "outcome": "accepted"}
    _request(route="webhook", more=more)
    _request(route="webhook", status=401, code="c", more={"provider": "resend", "outcome": "c"})
    first, second = stream.getvalue().splitlines()
    if style == "json":
        assert json.loads(first).items() >= more.items()
        assert "type" not in json.loads(second)
    else:
        assert "POST webhook resend email.sent accepted 200 12.30 ms acme r-1" in first
        assert "POST webhook resend c 401 c 12.30 ms - r-1" in second


def test_auto_is_json_elsewhere(configure: Configure) -> None:
    stream = configure(style="auto")
    logging.getLogger("engage.x").warning("careful", extra={"disk": 5})
    line = json.loads(stream.getvalue())
    assert (line["level"], line["message"], line["disk"]) == ("warning", "careful", 5)


def test_a_line_names_its_process(configure: Configure) -> None:
    stream = configure(process="worker 1")
    logging.getLogger("engage.x").warning("careful")
    assert json.loads(stream.getvalue())["process"] == "worker 1"
    stream = configure(process="worker 1", style="text")
    logging.getLogger("engage.x").warning("careful")
    assert stream.getvalue().endswith(" warning worker 1: careful\n")
    stream = configure()
    logging.getLogger("engage.x").warning("careful")
    assert "process" not in json.loads(stream.getvalue())


def test_requests_are_not_logged_above_info(configure: Configure) -> None:
    stream = configure("warning")
    _request()
    logs.flush()
    assert stream.getvalue() == ""


async def test_lines_of_requests_are_gathered_and_stay_before_later_lines(
    configure: Configure,
) -> None:
    stream = configure()
    _request(request_id="first")
    assert stream.getvalue() == ""
    logging.getLogger("engage.x").error("second")
    messages = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["message"] for line in messages] == ["request", "second"]
    _request(request_id="third")
    await eventually(lambda: "third" in stream.getvalue())


@pytest.mark.parametrize("style", ["json", "text"])
def test_secrets_are_masked_in_messages_extras_and_exceptions(
    configure: Configure, style: str
) -> None:
    stream = configure(style=style, secrets=["wk-123", "wk-123-longer", ""])
    log = logging.getLogger("engage.x")
    try:
        raise ValueError("bad key wk-123-longer!")
    except ValueError:
        log.exception("POST /v1/track?writeKey=%s", "wk-123", extra={"url": "x?k=wk-123"})
    text = stream.getvalue()
    assert "wk-123" not in text
    assert "longer" not in text
    assert text.count("***") >= 3
    assert "ValueError" in text


def test_values_that_json_lacks_are_logged_as_text(configure: Configure) -> None:
    stream = configure()
    logging.getLogger("engage.x").info("odd", extra={"a": {1: object()}, "b": b"\xff"})
    assert json.loads(stream.getvalue())["message"] == "odd"


def test_a_reader_that_went_away_does_not_fail_requests(configure: Configure) -> None:
    stream = configure()
    stream.close()
    _request()
    logs.flush()


def _read(descriptor: int) -> list[dict[str, Any]]:
    """Read until the server has written everything."""
    text = b""
    while True:
        try:
            text += os.read(descriptor, 65536)
        except BlockingIOError:
            logs.flush()
            if not select.select([descriptor], [], [], 0)[0]:
                return [json.loads(line) for line in text.splitlines()]


def test_a_reader_that_does_not_read_delays_nothing(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example a service manager that hangs, or a pipe without a reader."""
    monkeypatch.setattr(logs, "BACKLOG_SIZE", 100_000)
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    with os.fdopen(reading, "rb"), os.fdopen(writing, "w") as stream:
        configure(stream=stream)
        for number in range(3000):
            _request(request_id=f"r-{number:08}")
            logs.flush()
            if number % 10 == 0:
                logging.getLogger("engage.x").warning("also", extra={"requestId": None})
        lines = _read(reading)
        kept = [line["requestId"] for line in lines if line["message"] == "request"]
        assert kept == [f"r-{number:08}" for number in range(len(kept))]
        assert 100 < len(kept) < 3000
        lost = [
            line["lines"] for line in lines if line["message"] == "lines of the log were dropped"
        ]
        assert sum(lost) + len(lines) - len(lost) == 3300
        _request(request_id="r-after")
        logs.flush()
        assert [line["requestId"] for line in _read(reading)] == ["r-after"]


async def test_a_slow_reader_gets_everything(configure: Configure) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as reader, os.fdopen(writing, "w") as stream:
        configure(stream=stream)
        for number in range(2000):
            _request(request_id=f"r-{number:08}")
        logs.flush()
        lines = await asyncio.to_thread(lambda: [reader.readline() for _ in range(2000)])
    assert [json.loads(line)["requestId"] for line in lines] == [f"r-{n:08}" for n in range(2000)]


def test_configuring_again_replaces_the_handlers(configure: Configure) -> None:
    first, second = configure(), configure()
    logging.getLogger("engage.x").info("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


def test_a_request_is_an_ordinary_log_record_without_configuration(
    configure: Configure, caplog: pytest.LogCaptureFixture
) -> None:
    access = logging.getLogger(logs.ACCESS)
    access.handlers[:] = []
    access.propagate = True
    with caplog.at_level("INFO", logger=logs.ACCESS):
        _request()
    assert caplog.records[0].__dict__["requestId"] == "r-1"


class _Pipe(io.RawIOBase):
    """A pipe that keeps each piece that was written."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.pieces.append(bytes(data))
        return len(data)


async def test_lines_of_several_workers_are_not_mixed(configure: Configure) -> None:
    """A pipe keeps a piece together only up to ``PIPE_BUF``, so no line may cross this size."""
    pipe = _Pipe()
    stream = io.TextIOWrapper(io.BufferedWriter(pipe), line_buffering=True)
    configure(stream=stream)
    for number in range(450):
        _request(request_id=f"r-{number:05}", workspace="w" * (number % 64 + 1))
    logs.flush()
    assert all(len(piece) <= select.PIPE_BUF and piece.endswith(b"\n") for piece in pipe.pieces)
    found = [json.loads(line)["requestId"] for line in b"".join(pipe.pieces).splitlines()]
    assert found == [f"r-{number:05}" for number in range(450)]
    # Many lines are still one write.
    assert len(pipe.pieces) < 450
