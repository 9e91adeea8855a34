# SPDX-License-Identifier: Apache-2.0
"""The fetcher of certificates: which URLs it calls, what it keeps, how often it calls."""

from __future__ import annotations

import asyncio
import datetime
import socket
import ssl
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tornado.httpclient import HTTPClientError, HTTPRequest
from tornado.simple_httpclient import SimpleAsyncHTTPClient

from engage.api import Fetch
from engage.deliveries.fetcher import (
    CALLS,
    FAILED_SECONDS,
    KEPT_SECONDS,
    MAX_BYTES,
    MAX_KEPT,
    Fetcher,
    FetchError,
    FetchRefusedError,
)
from support.each import each

#: A server's context, and the file that clients must trust.
Tls = tuple[ssl.SSLContext, str]

HOSTS = (r"docs\.example\.com",)
URL = "https://docs.example.com/a.pem"


class Client:
    """An HTTP client that answers from a table and counts the calls."""

    def __init__(self) -> None:
        self.urls: list[str] = []
        #: URL → status and body.
        self.answers: dict[str, tuple[int, bytes]] = {}
        #: Set it to let the calls go on; ``None``: they do not wait.
        self.gate: asyncio.Event | None = None

    async def fetch(self, request: HTTPRequest, raise_error: bool = True) -> Any:
        self.urls.append(request.url)
        assert request.follow_redirects is False
        assert request.request_timeout is not None
        assert request.request_timeout <= 3
        if self.gate is not None:
            await self.gate.wait()
        status, body = self.answers.get(request.url, (200, b"document"))

        error = HTTPClientError(status) if status == 599 else None
        return SimpleNamespace(code=status, error=error, body=body)

    def close(self) -> None:
        pass


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def made() -> tuple[Fetcher, Client, Clock]:
    client, clock = Client(), Clock()
    return Fetcher(client, clock), client, clock


@each(
    "url",
    [
        *("http://docs.example.com/a.pem", "https://docs.example.com:443/a.pem"),
        *("https://docs.example.com:8443/a.pem", "https://user@docs.example.com/a.pem"),
        "https://user:pass@docs.example.com/a.pem",
        "https://docs.example.com@evil.example/a.pem",
        *("https://docs.example.com#@evil.example/a.pem", "https://docs.example.com/a.pem#x"),
        *("https://docs.example.com.evil.example/a.pem", "https://evil.example/docs.example.com"),
        "https://evil.example\\@docs.example.com/a.pem",
        *("https://docs.example.com\\.evil.example/", "https://docsXexample.com/a.pem"),
        *("https://docs.example.com\n/a.pem", "https://docs.example.com/a.pem\n"),
        *("https://docs.example.com/a b", "https://DOCS.example.com/a.pem"),
        *("https://docs。example.com/a.pem", "https://169.254.169.254/latest/meta-data"),
        *("https://[::1]/", "//docs.example.com/a.pem", "file:///etc/passwd"),
        *("https:/docs.example.com/", "https://docs.example.com", ""),
    ],
)
async def test_only_allowed_hosts_are_called(url: str) -> None:
    fetcher, client, _ = made()
    with pytest.raises(FetchRefusedError):
        await fetcher.get(Fetch(url), HOSTS)
    with pytest.raises(FetchRefusedError):
        await fetcher.get(Fetch(URL), ())
    assert client.urls == []


async def test_a_document_is_kept_for_a_day() -> None:
    fetcher, client, clock = made()
    for _ in range(3):
        assert await fetcher.get(Fetch(URL), HOSTS) == b"document"
    assert client.urls == [URL]
    clock.now += KEPT_SECONDS
    await fetcher.get(Fetch(URL), HOSTS)
    assert client.urls == [URL, URL]


async def test_a_call_that_is_not_cacheable_is_made_each_time() -> None:
    fetcher, client, _ = made()
    for _ in range(3):
        await fetcher.get(Fetch(URL, cacheable=False), HOSTS)
    assert len(client.urls) == 3


async def test_the_sixteen_documents_used_last_are_kept() -> None:
    fetcher, client, clock = made()
    urls = [f"{URL}?{n}" for n in range(MAX_KEPT + 1)]
    for url in urls:
        clock.now += 60
        await fetcher.get(Fetch(url), HOSTS)
        await fetcher.get(Fetch(urls[0]), HOSTS)
    assert client.urls == urls
    clock.now += 60
    await fetcher.get(Fetch(urls[1]), HOSTS)
    assert client.urls == [*urls, urls[1]]


@pytest.mark.parametrize("status", [301, 302, 307, 204, 404, 500, 599])
async def test_a_failure_is_remembered_for_five_minutes(status: int) -> None:
    fetcher, client, clock = made()
    client.answers[URL] = (status, b"")
    for _ in range(3):
        with pytest.raises(FetchError):
            await fetcher.get(Fetch(URL), HOSTS)
    assert client.urls == [URL]
    del client.answers[URL]
    clock.now += FAILED_SECONDS
    assert await fetcher.get(Fetch(URL), HOSTS) == b"document"


async def test_an_unexpected_document_is_a_failure() -> None:
    fetcher, client, clock = made()
    fetch = Fetch(URL, check=lambda document: document.index(b"BEGIN"))
    for _ in range(3):
        with pytest.raises(FetchError):
            await fetcher.get(fetch, HOSTS)
    assert client.urls == [URL]
    client.answers[URL] = (200, b"BEGIN")
    clock.now += FAILED_SECONDS
    for _ in range(3):
        assert await fetcher.get(fetch, HOSTS) == b"BEGIN"
    assert client.urls == [URL, URL]


async def test_a_document_that_is_too_long_is_refused() -> None:
    fetcher, client, _ = made()
    client.answers[URL] = (200, b"x" * (MAX_BYTES + 1))
    with pytest.raises(FetchError):
        await fetcher.get(Fetch(URL), HOSTS)


async def test_there_is_one_call_at_a_time() -> None:
    fetcher, client, _ = made()
    client.gate = asyncio.Event()
    same = [asyncio.ensure_future(fetcher.get(Fetch(URL), HOSTS)) for _ in range(5)]
    await asyncio.sleep(0)
    with pytest.raises(FetchError, match="under way"):
        await fetcher.get(Fetch(URL + "?2"), HOSTS)
    same[0].cancel()  # the first caller is cancelled; the others go on waiting
    client.gate.set()
    assert await asyncio.gather(*same[1:]) == [b"document"] * 4
    assert client.urls == [URL]


async def test_there_are_ten_calls_a_minute() -> None:
    fetcher, client, clock = made()
    for n in range(CALLS):
        await fetcher.get(Fetch(f"{URL}?{n}"), HOSTS)
    with pytest.raises(FetchError, match="last minute"):
        await fetcher.get(Fetch(f"{URL}?x"), HOSTS)
    assert len(client.urls) == CALLS
    clock.now += 61
    await fetcher.get(Fetch(f"{URL}?x"), HOSTS)


async def test_closing_ends_a_call() -> None:
    fetcher, client, _ = made()
    client.gate = asyncio.Event()
    waiting = asyncio.ensure_future(fetcher.get(Fetch(URL), HOSTS))
    await asyncio.sleep(0)
    await fetcher.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await fetcher.close()


# ---- with a real HTTPS server
@pytest.fixture
def tls(tmp_path: Path) -> Tls:
    """Return a server's context with a certificate for the allowed host, and the file to trust."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "docs.example.com")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("docs.example.com")]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path / "cert.pem"
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM) + pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    return context, str(path)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", b"hello"),
        (b"HTTP/1.1 302 Found\r\nLocation: https://docs.example.com/b\r\n\r\n", None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 70000\r\n\r\n" + b"x" * 70000, None),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 200_000, None),
        (b"nonsense\r\n\r\n", None),
        (b"", None),
    ],
)
async def test_a_call_is_made_over_tls(
    tls: Tls, answer: bytes, expected: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, trusted = tls
    calls = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        calls.append(await reader.readuntil(b"\r\n\r\n"))
        try:
            writer.write(answer)
            await writer.drain()
        except OSError:
            pass
        writer.close()

    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    server = await asyncio.start_server(serve, sock=sock, ssl=context)
    initialize = SimpleAsyncHTTPClient.initialize

    mapping: dict[Any, Any] = {
        "docs.example.com": "127.0.0.1",
        ("docs.example.com", 443): ("127.0.0.1", port),
    }

    def redirected(self: SimpleAsyncHTTPClient, **options: Any) -> None:
        initialize(self, **options, hostname_mapping=mapping, defaults={"ca_certs": trusted})

    monkeypatch.setattr(SimpleAsyncHTTPClient, "initialize", redirected)
    fetcher = Fetcher()
    try:
        if expected is not None:
            assert await fetcher.get(Fetch(URL), HOSTS) == expected
        else:
            with pytest.raises(FetchError):
                await fetcher.get(Fetch(URL), HOSTS)
    finally:
        await fetcher.close()
        server.close()
        await server.wait_closed()
    assert len(calls) == 1
    assert calls[0].startswith(b"GET /a.pem HTTP/1.1\r\n")
