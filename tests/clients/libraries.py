# SPDX-License-Identifier: Apache-2.0
"""HTTP client libraries behind one small interface: each sends requests in its usual way."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import aiohttp
import httpx
import requests

from support.cache import cached
from support.go import go

HERE = Path(__file__).parent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A request to send."""

    method: str
    url: str
    body: bytes = b""
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    #: Send the body in chunks, without a Content-Length.
    chunked: bool = False
    #: Ask the server to close the connection afterwards.
    close: bool = False


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer to a request."""

    status: int
    #: Lower-case names; repeated headers joined by ``, ``.
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> dict[str, object]:
        decoded: dict[str, object] = json.loads(self.body)
        return decoded


def _lower(headers: Iterator[tuple[str, str]]) -> dict[str, str]:
    joined: dict[str, str] = {}
    for name, value in headers:
        name = name.lower()
        joined[name] = f"{joined[name]}, {value}" if name in joined else value
    return joined


def _headers(request: Request) -> dict[str, str]:
    return {**request.headers, **({"Connection": "close"} if request.close else {})}


def _pieces(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), 7):
        yield body[start : start + 7]


def send_requests(wanted: Sequence[Request]) -> list[Answer]:
    """``requests``, one session."""
    answers = []
    with requests.Session() as session:
        session.trust_env = False
        for request in wanted:
            answer = session.request(
                request.method,
                request.url,
                data=_pieces(request.body) if request.chunked else request.body or None,
                headers=_headers(request),
                timeout=60,
                allow_redirects=False,
            )
            answers.append(
                Answer(answer.status_code, _lower(iter(answer.headers.items())), answer.content)
            )
    return answers


def send_httpx(wanted: Sequence[Request]) -> list[Answer]:
    """``httpx``, one client."""
    answers = []
    with httpx.Client(timeout=60, trust_env=False) as client:
        for request in wanted:
            answer = client.request(
                request.method,
                request.url,
                content=_pieces(request.body) if request.chunked else request.body or None,
                headers=_headers(request),
            )
            answers.append(
                Answer(answer.status_code, _lower(iter(answer.headers.items())), answer.content)
            )
    return answers


def send_aiohttp(wanted: Sequence[Request]) -> list[Answer]:
    """``aiohttp``, one session."""

    async def pieces(body: bytes) -> object:
        for piece in _pieces(body):
            yield piece

    async def send() -> list[Answer]:
        answers = []
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=60), auto_decompress=True
        ) as session:
            for request in wanted:
                async with session.request(
                    request.method,
                    request.url,
                    data=pieces(request.body) if request.chunked else io.BytesIO(request.body),
                    headers=_headers(request),
                    expect100=request.headers.get("Expect") == "100-continue",
                ) as answer:
                    body = await answer.read()
                    answers.append(
                        Answer(answer.status, _lower(iter(answer.headers.items())), body)
                    )
        return answers

    return asyncio.run(send())


def send_curl(wanted: Sequence[Request]) -> list[Answer]:
    """``curl``, one process (and so one connection, where that is possible)."""
    curl = shutil.which("curl")
    assert curl, "curl is not installed: apt-get install curl"
    command: list[str | bytes] = [curl, "-s", "--max-time", "60"]
    with tempfile.TemporaryDirectory() as folder:
        for number, request in enumerate(wanted):
            if number:
                command.append("--next")
            command += ["-s", "-i", "--raw", "-w", "\n--end--", request.url]
            if request.method == "HEAD":
                command.append("-I")
            else:
                command += ["-X", request.method]
            headers = dict(_headers(request))
            if request.chunked:
                headers["Transfer-Encoding"] = "chunked"
            for name, value in headers.items():
                command += ["-H", f"{name}: {value}"]
            if request.body:
                file = Path(folder) / str(number)
                file.write_bytes(request.body)
                command += ["--data-binary", f"@{file}"]
                if "Content-Type" not in headers:
                    command += ["-H", "Content-Type: application/json"]
        done = subprocess.run(command, capture_output=True, timeout=120)
    assert done.returncode == 0, (done.returncode, done.stderr)
    answers = []
    for text in done.stdout.split(b"\n--end--")[:-1]:
        head, _, body = text.partition(b"\r\n\r\n")
        while head.split()[1] == b"100":
            head, _, body = body.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        pairs = (line.split(": ", 1) for line in lines[1:])
        headers = _lower((name, value) for name, value in pairs)
        answers.append(Answer(int(lines[0].split()[1]), headers, body))
    return answers


def send_go(wanted: Sequence[Request]) -> list[Answer]:
    """Go's ``net/http``, one client."""
    source = HERE / "go"

    def make(folder: Path) -> None:
        done = subprocess.run(
            [go(), "build", "-o", str(folder / "client"), "."],
            cwd=source,
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "GOFLAGS": "-mod=mod"},
        )
        assert done.returncode == 0, done.stderr

    program = cached("go-client", (source / "main.go").read_bytes(), make) / "client"
    lines = [
        json.dumps(
            {
                "method": request.method,
                "url": request.url,
                "headers": dict(request.headers),
                "body": base64.b64encode(request.body).decode(),
                "chunked": request.chunked,
                "close": request.close,
            }
        )
        for request in wanted
    ]
    done = subprocess.run(
        [program], input="\n".join(lines), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    answers = []
    for line in done.stdout.splitlines():
        answer = json.loads(line)
        assert not answer.get("error"), answer["error"]
        pairs = ((name, value) for name, values in answer["headers"].items() for value in values)
        body = base64.b64decode(answer["body"])
        answers.append(Answer(answer["status"], _lower(pairs), body))
    return answers


Send = Callable[[Sequence[Request]], list[Answer]]

LIBRARIES: dict[str, Send] = {
    "requests": send_requests,
    "httpx": send_httpx,
    "aiohttp": send_aiohttp,
    "curl": send_curl,
    "go": send_go,
}
