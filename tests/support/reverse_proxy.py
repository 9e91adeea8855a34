# SPDX-License-Identifier: Apache-2.0
"""A reverse proxy in front of the server that counts requests and loses answers on demand."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

#: Headers that belong to one connection and are not passed on.
_HOP = {"connection", "keep-alive", "transfer-encoding"}


class ReverseProxy:
    """A proxy that passes each request on over a new connection."""

    def __init__(self, target: str) -> None:
        #: Where requests go; may be changed.
        self.target = target
        #: (method, path, headers, body, status of the answer or None if it was lost).
        self.requests: list[tuple[str, str, dict[str, str], bytes, int | None]] = []
        #: Called with a complete answer's status before it is passed on; true: lose the answer.
        self.lose: Callable[[int], bool] = lambda status: False
        #: The beginning of a path, which is not passed on.
        self.strip = ""
        #: Replaces the seconds of ``Retry-After``, so that a test need not wait 5 to 30 seconds.
        self.retry_after: int | None = None
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self._body()
                address = urlsplit(proxy.target)
                connection = http.client.HTTPConnection(
                    address.hostname or "", address.port, timeout=120
                )
                headers = {
                    name: value
                    for name, value in self.headers.items()
                    if name.lower() not in {*_HOP, "content-length"}
                }
                headers["Content-Length"] = str(len(body))
                status: int | None = None
                try:
                    path = self.path.removeprefix(proxy.strip)
                    connection.request(self.command, path, body or None, headers)
                    answer = connection.getresponse()
                    content = answer.read()
                    if not proxy.lose(answer.status):
                        status = answer.status
                except (OSError, http.client.HTTPException):
                    pass
                finally:
                    connection.close()
                proxy.requests.append((self.command, self.path, dict(self.headers), body, status))
                if status is None:
                    self.close_connection = True
                    return
                self.send_response(status)
                for name, value in answer.getheaders():
                    if name.lower() == "retry-after" and proxy.retry_after is not None:
                        self.send_header(name, str(proxy.retry_after))
                    elif name.lower() not in {*_HOP, "content-length", "date", "server"}:
                        self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_PUT = do_OPTIONS = do_POST  # noqa: N815

            def _body(self) -> bytes:
                if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                    return self.rfile.read(int(self.headers.get("Content-Length", 0)))
                body = b""
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return body

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextlib.contextmanager
def reverse_proxy(target: str) -> Iterator[ReverseProxy]:
    """Start a proxy to the URL of a server."""
    proxy = ReverseProxy(target)
    try:
        yield proxy
    finally:
        proxy.close()
