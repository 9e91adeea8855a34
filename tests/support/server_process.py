# SPDX-License-Identifier: Apache-2.0
"""A whole server as a process: ``python -m engage serve`` on a free port."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx

from engage.reading.export import RecordKind
from support.exports import exported
from support.nursery import Forked, nursery
from support.processes import children
from support.waiting import DEADLINE, wait_for

#: The write key of the workspace ``acme`` that every server here has.
KEY = "test-write-key-of-acme"
#: The subscription secret of the workspace ``acme``.
SECRET = "test-subscription-secret-of-acme"

SQLITE = """
[storage]
backend = "sqlite"

[storage.sqlite]
path = "engage.db"
"""


#: Whether servers may be forked. The tests set it; benchmarks and the programs of ``tests/faults``
#: measure processes that are as those of an operator.
FORKS = False
#: How variables begin that only a new interpreter reads.
_INTERPRETER = "LD_", "PYTHON", "TZ"


class Server:
    """A server process. At the end of a ``with`` block it is killed."""

    #: The command of ``engage``.
    command = "serve"
    #: The Python of the environment in which it is installed.
    python = sys.executable
    #: Write key of the workspace ``acme``.
    key = KEY
    secret = SECRET

    def __init__(
        self,
        folder: Path,
        config: str,
        *,
        environment: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
        preexec: Callable[[], None] | None = None,
        fork: bool = True,
    ) -> None:
        self.folder = folder
        self.config = folder / "engage.toml"
        self.config.write_text(config)
        self.log_path = folder / "engage.log"
        self.environment = {**os.environ, **(environment or {})}
        self.arguments = tuple(arguments)
        self.preexec = preexec
        self._fork = fork and preexec is None and sys.platform == "linux"
        #: ``http://127.0.0.1:<port>``; another port after each restart.
        self.url = ""
        self._client: httpx.Client | None = None
        self._log_start = 0
        self.process: subprocess.Popen[bytes] | Forked | None = None

    # ------------------------------------------------------------------------------------ life
    def launch(self, *arguments: str) -> subprocess.Popen[bytes] | Forked:
        """Start the process; do not wait for it to be ready."""
        assert self.process is None, "it runs already"
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            if self._may_be_forked():
                words = self.command, "--config", str(self.config), *self.arguments, *arguments
                self.process = nursery().fork(words, log.fileno(), self.environment)
                return self.process
            self.process = subprocess.Popen(
                [
                    *(self.python, "-m", "engage", self.command),
                    *("--config", str(self.config)),
                    *self.arguments,
                    *arguments,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                preexec_fn=self.preexec,
                # A separate process group, so that signals to the test run do not reach the server.
                start_new_session=True,
            )
        return self.process

    def _may_be_forked(self) -> bool:
        usual = {name: os.environ.get(name) for name in self.environment}
        return (
            FORKS
            and self._fork
            and self.python == sys.executable
            and not any(
                name.startswith(_INTERPRETER) and value != usual[name]
                for name, value in self.environment.items()
            )
        )

    def start(self, *arguments: str, ready: bool = True) -> Self:
        """Start the process and wait until it listens.

        :param arguments: further arguments of ``engage serve``.
        :param ready: also wait until ``/readyz`` answers 200.
        :raises AssertionError: if it ends or does not become ready; the message has its log.
        """
        process = self.launch(*arguments)
        try:
            self.url = wait_for(self.listening, what="the server to listen")
            if ready:
                wait_for(self._ready, what="/readyz to answer 200")
        except BaseException as error:
            status = process.poll()
            self.kill()
            state = "was killed" if status is None else f"ended with status {status}"
            raise AssertionError(f"the server {state}: {error}\n{self.log()[-4000:]}") from error
        return self

    def listening(self) -> str | None:
        """Return the URL from the log, once the server listens."""
        url = next((line["url"] for line in self.lines() if line["message"] == "listening"), None)
        if url is None and self.process is not None:
            assert self.process.poll() is None, "it ended before it listened"
        return url

    def _ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, "it ended before it was ready"
        try:
            return httpx.get(f"{self.url}/readyz", timeout=DEADLINE).status_code == 200
        except httpx.TransportError:
            return False

    def of_kind(self, kind: str) -> set[int]:
        """Return the process ids of the children of a kind, such as ``loader``."""
        return {pid for pid in self.children() if kind_of(pid) == kind}

    def workers(self) -> set[int]:
        """Return the process ids of the workers."""
        return self.of_kind("worker")

    @property
    def worker(self) -> int:
        """Return the process id of the only worker."""
        (pid,) = self.workers()
        return pid

    def consoles(self) -> set[int]:
        """Return the process id of the console, if it runs."""
        return self.of_kind("console")

    @property
    def helper(self) -> int:
        """Return the process id of the helper process of the storage."""
        (pid,) = self.of_kind("helper")
        return pid

    def children(self) -> set[int]:
        """Return the process ids of all children."""
        assert self.process is not None
        return children(self.process.pid)

    def signal(self, number: int) -> None:
        """Send a signal to the server's main process."""
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self) -> int:
        """Wait for the end and return the exit status."""
        assert self.process is not None
        status = self.process.wait(DEADLINE)
        self._gone()
        return status

    def stop(self) -> int:
        """Drain (SIGTERM), wait for the end and return the exit status."""
        assert self.process is not None
        self.process.terminate()
        return self.wait()

    def kill(self) -> None:
        """Kill the server and its workers (SIGKILL); it is not an error if it does not run."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(DEADLINE)
        self._gone()

    def restart(self, *arguments: str) -> Self:
        """Start again with the same folder and config, after :meth:`stop` if it still runs."""
        if self.process is not None:
            self.stop()
        return self.start(*arguments)

    def _gone(self) -> None:
        self.process = None
        if self._client is not None:
            self._client.close()
            self._client = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    # -------------------------------------------------------------------------------- requests
    @property
    def authorization(self) -> str:
        """Return the header with the write key of the workspace ``acme``."""
        return "Basic " + base64.b64encode(f"{self.key}:".encode()).decode()

    @property
    def database(self) -> Path:
        """Return the path of SQLite's file."""
        return self.folder / "engage.db"

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def client(self) -> httpx.Client:
        """Return a client that keeps connections to the server open until it ends."""
        if self._client is None:
            self._client = httpx.Client(base_url=self.url, timeout=DEADLINE)
        return self._client

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.client.get(path, **options)

    def post(
        self, path: str, body: Any, *, key: str | None = KEY, **options: Any
    ) -> httpx.Response:
        """Send a POST with the write key; bytes are sent unchanged, anything else as JSON."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        if key is not None:
            options.setdefault("auth", (key, ""))
        headers = {"Content-Type": "application/json", **options.pop("headers", {})}
        return self.client.post(path, content=content, headers=headers, **options)

    def track(self, message_id: str, **fields: Any) -> httpx.Response:
        """Send one small track event."""
        event = {"userId": "u", "event": "Tested", "messageId": message_id, **fields}
        return self.post("/v1/track", event)

    def export(self, kind: RecordKind = "events") -> list[dict[str, Any]]:
        """Return the records of a kind in the store; the server may run or not."""
        return exported(self.config, kind, environment=self.environment)

    # ----------------------------------------------------------------------------------- its log
    def log(self) -> str:
        """Return what the running (or last) process wrote to standard output and error."""
        data = self.log_path.read_bytes()[self._log_start :] if self.log_path.exists() else b""
        return data.decode("utf-8", "replace")

    def lines(self) -> list[dict[str, Any]]:
        """Return the complete JSON lines of :meth:`log`."""
        lines = []
        for line in self.log().splitlines():
            with contextlib.suppress(ValueError):
                if isinstance(fields := json.loads(line), dict) and "message" in fields:
                    lines.append(fields)
        return lines

    def metrics(self) -> str:
        """Return the metrics; the config must set ``server.metrics_port = 0``."""
        url = wait_for(
            lambda: next((x["url"] for x in self.lines() if x["message"] == "metrics"), None),
            what="the metrics' address",
        )
        return httpx.get(url, timeout=DEADLINE).text


def kind_of(pid: int) -> str | None:
    """Return what a child is, in one word; ``None`` if it is not a child."""
    try:
        forked = Path(f"/proc/{pid}/comm").read_text().strip().partition("engage-")[2]
        if forked:
            return forked
        line = Path(f"/proc/{pid}/cmdline").read_bytes().decode().rstrip("\0").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return None
    name = "engage.server.child"
    return line[line.index(name) + 1] if name in line else None


def config_text(
    *,
    workers: int = 1,
    server: str = "",
    storage: str = SQLITE,
    workspace: str = "",
    config_extra: str = "",
) -> str:
    """Return the config of :func:`start_server`."""
    if "write_timeout" not in storage:
        # A disk that others use may need longer than the usual 8 s; that is no failure here.
        storage = storage.replace("[storage]", "[storage]\nwrite_timeout = 60", 1)
    if "shutdown_grace" not in server:
        server += "\nshutdown_grace = 60"
    return f"""
[server]
host = "127.0.0.1"
port = 0
workers = {workers}
{server}
[logging]
format = "json"
{storage}
[[workspaces]]
id = "acme"
name = "Acme"
subscription_secret = "{SECRET}"
{workspace}
[[workspaces.write_keys]]
id = "website"
key = "{KEY}"

{config_extra}
"""


def start_server(
    folder: Path,
    *,
    workers: int = 1,
    server: str = "",
    storage: str = SQLITE,
    workspace: str = "",
    config_extra: str = "",
    environment: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
    preexec: Callable[[], None] | None = None,
    fork: bool = True,
) -> Server:
    """Start a server and wait until it is ready. Use it in a ``with`` or kill it in the end.

    :param folder: for its config, its store and its log.
    :param server: further lines of ``[server]``.
    :param storage: the tables of the storage; SQLite in ``folder`` by default.
    :param workspace: further lines of the workspace ``acme``.
    :param config_extra: further tables; ``[[workspaces.…]]`` and ``[workspaces.webhooks.…]`` belong
        to ``acme``.
    :param arguments: further arguments of ``engage serve``.
    :param fork: whether the processes may be forked from one that has imported engage.
    :raises AssertionError: if it does not become ready; then it is killed.
    """
    config = config_text(
        workers=workers,
        server=server,
        storage=storage,
        workspace=workspace,
        config_extra=config_extra,
    )
    return Server(
        folder,
        config,
        environment=environment,
        arguments=arguments,
        preexec=preexec,
        fork=fork,
    ).start()
