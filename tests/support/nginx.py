# SPDX-License-Identifier: Apache-2.0
"""Runs the nginx configs of the docs as they are, with the addresses and paths of a test."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import ssl
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.kafka import certificates
from support.waiting import DEADLINE, wait_for

#: Debian puts nginx where only root's PATH leads.
PROGRAM = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")

ROOT = Path(__file__).resolve().parents[2]


def blocks(page: str) -> list[str]:
    """Return the blocks of nginx in a page of docs/."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    return re.findall(r"^```nginx\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


class Nginx:
    """A running nginx."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.url = f"https://127.0.0.1:{port}"

    def client(self, address: str = "127.0.0.1") -> httpx.AsyncClient:
        """Return a client, which does not check that the certificate is for the host.

        :param address: where it sends from.
        """
        context = ssl.create_default_context(cafile=self.folder / "ca.pem")
        transport = httpx.AsyncHTTPTransport(verify=context, local_address=address)
        return httpx.AsyncClient(base_url=self.url, transport=transport, timeout=DEADLINE)

    def log(self, name: str) -> str:
        """Return a log.

        :param name: ``access`` or ``error``.
        """
        return (self.folder / f"{name}.log").read_text()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


@contextlib.contextmanager
def nginx(config: str, upstreams: dict[str, int]) -> Iterator[Nginx]:
    """Run nginx with a config of the docs.

    :param upstreams: host and port in the config → the port where the server of the test listens.
    """
    if PROGRAM is None:
        pytest.fail("nginx is not installed (Debian: apt-get install nginx-light)")
    # The workers of nginx, which have another user, must reach what it writes here.
    with tempfile.TemporaryDirectory(prefix="engage-nginx-") as name:
        folder, port = Path(name), _free_port()
        certificates(folder)
        for host, actual in upstreams.items():
            assert host in config
            config = config.replace(host, f"127.0.0.1:{actual}")
        config, count = re.subn(r"listen 443 ssl;", f"listen 127.0.0.1:{port} ssl;", config)
        assert count == 1
        config, count = re.subn(
            r"(ssl_certificate(?:_key)?) [^;]+;", rf"\1 {folder}/node.pem;", config
        )
        assert count == 2
        config = config.replace("/var/log/nginx/", f"{folder}/")
        places = "".join(
            f"{kind}_temp_path {folder}/{kind};\n"
            for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        (folder / "nginx.conf").write_text(
            f"daemon off;\nmaster_process off;\npid {folder}/pid;\nerror_log {folder}/error.log;\n"
            f"events {{}}\nhttp {{\naccess_log {folder}/access.log;\n{places}{config}}}\n"
        )
        process = subprocess.Popen(
            [PROGRAM, "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
        )
        try:

            def listens() -> bool:
                assert process.poll() is None, (folder / "error.log").read_text()
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    return True
                return False

            wait_for(listens, what="nginx to listen")
            yield Nginx(folder, port)
        finally:
            process.kill()
            process.wait()
