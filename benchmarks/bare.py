# SPDX-License-Identifier: Apache-2.0
"""The baseline: plain Tornado, which answers every POST with 204 and stores nothing."""

from __future__ import annotations

import asyncio
import sys

from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets
from tornado.web import Application, RequestHandler


class _Handler(RequestHandler):
    def post(self) -> None:
        self.set_status(204)


async def main() -> None:
    """Serve on a free port of 127.0.0.1 and print its number."""
    (sock,) = bind_sockets(0, "127.0.0.1", backlog=1024)
    application = Application([(r"/.*", _Handler)], log_function=lambda handler: None)
    HTTPServer(application).add_socket(sock)
    sys.stdout.write(f"{sock.getsockname()[1]}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
