# SPDX-License-Identifier: Apache-2.0
"""A real Chromium, and web pages for it whose origin differs from that of the server."""

from __future__ import annotations

import http.server
import json
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

from support.cache import cached
from support.node import node, node_project

WEB = Path(__file__).resolve().parents[1] / "browser/web"

#: Seconds that tests wait for something that must happen.
PATIENCE = 60


def bundles() -> Path:
    """Return a folder with each browser SDK as one script, which esbuild makes from its package."""
    project = node_project(WEB)
    sources = sorted(WEB.glob("*.js"))

    def make(folder: Path) -> None:
        for source in sources:
            shutil.copy(source, project)
            done = subprocess.run(
                [
                    *(node(), project / "node_modules/esbuild/bin/esbuild", project / source.name),
                    *("--bundle", "--format=iife", "--log-level=warning"),
                    f"--outfile={folder / source.name}",
                ],
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert done.returncode == 0, done.stdout + done.stderr

    ingredients = b"".join(source.read_bytes() for source in sources)
    return cached("bundles", ingredients + (WEB / "package-lock.json").read_bytes(), make)


class Pages:
    """A web server for the bundles and for pages of a test, with a separate origin."""

    def __init__(self) -> None:
        #: Path → HTML.
        self.pages: dict[str, str] = {}
        pages = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path = self.path.split("?")[0]
                kind, content = "text/html; charset=utf-8", b""
                if path in pages.pages:
                    content = pages.pages[path].encode()
                elif path.endswith(".js"):
                    kind, content = "text/javascript", (bundles() / path[1:]).read_bytes()
                status = 200 if content else 204
                self.send_response(status)
                if content:
                    self.send_header("Content-Type", kind)
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

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


class Browser:
    """One headless Chromium with an empty profile."""

    def __init__(self, profile: Path) -> None:
        options = Options()
        binary = shutil.which("chromium") or shutil.which("chromium-browser")
        driver = shutil.which("chromedriver")
        assert binary, "chromium is not installed: apt-get install chromium chromium-driver"
        assert driver, "chromedriver is not installed: apt-get install chromium chromium-driver"
        options.binary_location = binary
        for flag in (
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--disable-quic", "--no-first-run", "--disable-background-networking"),
            *("--disable-component-update", "--disable-sync", f"--user-data-dir={profile}"),
        ):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(driver))
        self.driver.set_page_load_timeout(PATIENCE)
        self.driver.set_script_timeout(PATIENCE)
        #: Of the pages' requests: id → URL.
        self._requests: dict[str, str] = {}
        #: (page, URL) of all requests that :meth:`errors` found in the log.
        self.requested: list[tuple[str, str]] = []

    def open(self, url: str) -> None:
        self.driver.get(url)

    def run(self, script: str, *arguments: Any) -> Any:
        """Run JavaScript in the page, and return its value."""
        return self.driver.execute_script(script, *arguments)

    def cdp(self, command: str, **arguments: Any) -> Any:
        return self.driver.execute_cdp_cmd(command, arguments)

    def leave(self) -> None:
        """Open an empty page, which unloads the current one."""
        self.driver.get("about:blank")

    def errors(self) -> list[str]:
        """Return console errors and failed requests since the last call."""
        found = [
            entry["message"]
            for entry in self.driver.get_log("browser")  # type: ignore[no-untyped-call]
            if entry["level"] == "SEVERE"
        ]
        for entry in self.driver.get_log("performance"):  # type: ignore[no-untyped-call]
            message = json.loads(entry["message"])["message"]
            method, params = message["method"], message["params"]
            if method == "Network.requestWillBeSent":
                # The start page of the browser sends requests, too; they do not count.
                if params["documentURL"].startswith("http://127.0.0.1"):
                    self._requests[params["requestId"]] = params["request"]["url"]
                    self.requested.append((params["documentURL"], params["request"]["url"]))
            elif method == "Network.loadingFailed" and not params.get("canceled"):
                if url := self._requests.get(params["requestId"]):
                    found.append(f"failed: {url} {params.get('errorText')}")
            elif method == "Network.responseReceived" and params["response"]["status"] >= 400:
                found.append(f"{params['response']['status']} {params['response']['url']}")
        return found

    def close(self) -> None:
        self.driver.quit()


def eventually(read: Callable[[], Any], good: Callable[[Any], bool]) -> Any:
    """Read a value until it is good, and return it.

    :raises AssertionError: after :data:`PATIENCE` seconds, with the last value.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        value = read()
        if good(value):
            return value
        assert time.monotonic() < deadline, value
        time.sleep(0.2)
