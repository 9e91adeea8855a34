# SPDX-License-Identifier: Apache-2.0
"""Debian's PostgreSQL, started by the tests as a user of its own.

``initdb`` and ``postgres`` are looked for on the PATH and where Debian installs them. They refuse
to run as root: then they run as ``postgres`` or ``nobody``.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from engage.api import StorageContext
from support.mongo import free_port
from support.processes import alive, children
from support.waiting import wait_for

HELP = "no server for the PostgreSQL tests: install the Debian package postgresql"


class NoServerError(Exception):
    """There is no server; the message says what to install."""


@functools.cache
def _programs() -> Path | None:
    """Return the folder of the newest server that is installed."""
    folders = [Path(path).parent for path in [shutil.which("initdb")] if path]
    folders += Path("/usr/lib/postgresql").glob("*/bin")
    installed = [path for path in folders if (path / "initdb").exists()]
    return max(
        installed, key=lambda path: (path.parent.name.isdigit(), path.parent.name), default=None
    )


def is_ready() -> bool:
    """Return whether there are a server and the driver."""
    return _programs() is not None and importlib.util.find_spec("asyncpg") is not None


def _user() -> pwd.struct_passwd | None:
    """Return the user as which the server runs, if that is not ours."""
    if os.getuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    return None


class PostgresServer:
    """A server, whose port stays the same when it is restarted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def _run(self, *command: str, **options: Any) -> subprocess.Popen[bytes]:
        programs, user = _programs(), _user()
        if programs is None:
            raise NoServerError(HELP)
        if user is not None:
            options |= {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        environment = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}
        return subprocess.Popen(
            [str(programs / command[0]), *command[1:]],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            **options,
        )

    def create(self) -> None:
        """Make the files of a database cluster."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if (user := _user()) is not None:
            os.chown(self.folder, user.pw_uid, user.pw_gid)
            # The folders of the tests are ours alone; it may pass through them.
            for parent in self.folder.parents:
                if parent.stat().st_uid == os.getuid() and str(parent) not in ("/", "/tmp"):
                    parent.chmod(parent.stat().st_mode | 0o011)
        options = ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C"]
        with (self.folder / "initdb.log").open("wb") as log:
            made = self._run(
                "initdb", f"-D{self.data}", "--no-sync", *options, stdout=log, stderr=log
            )
            if made.wait() != 0:
                text = (self.folder / "initdb.log").read_text()
                raise NoServerError(f"initdb fails: {text[-600:]}")

    def start(self) -> None:
        """Start the server, and wait until it answers. It creates its files the first time."""
        if not self.data.exists():
            self.create()
        settings = {
            "port": self.port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": self.folder,
            "max_connections": 60,
            "shared_buffers": "64MB",
            "autovacuum_naptime": 5,
        }
        words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        with self.log.open("ab") as log:
            self._process = self._run("postgres", f"-D{self.data}", *words, stdout=log, stderr=log)
        wait_for(self._answers, what="PostgreSQL to answer")

    @property
    def log(self) -> Path:
        """What the server writes."""
        return self.folder / "server.log"

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise NoServerError(f"PostgreSQL does not start: {self.log.read_text()[-600:]}")
        return self.psql("SELECT 1", check=False) == "1"

    def psql(self, query: str, database: str = "postgres", *, check: bool = True) -> str:
        """Return what ``psql`` prints for a query."""
        programs = _programs()
        assert programs is not None
        url = f"postgresql://postgres@127.0.0.1:{self.port}/{database}"
        command = [str(programs / "psql"), "-XAtq", "-v", "ON_ERROR_STOP=1", "-c", query, url]
        environment = {**os.environ, "PGOPTIONS": "-c default_transaction_read_only=off"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout.strip()

    def program(self, name: str, *arguments: str) -> None:
        """Run one of the server's programs, such as ``pg_dump``, as its user."""
        process = self._run(name, *arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        text = process.communicate()[0].decode()
        assert process.returncode == 0, text

    def set(self, **settings: str) -> None:
        """Change settings while it runs; with an empty text, back to the default."""
        for name, value in settings.items():
            self.psql(
                f"ALTER SYSTEM SET {name} = '{value}'" if value else f"ALTER SYSTEM RESET {name}"
            )
        self.psql("SELECT pg_reload_conf()")

    def url(self, user: str = "postgres", port: int | None = None) -> str:
        """Return a connection string."""
        return f"postgresql://{user}@127.0.0.1:{port or self.port}/postgres"

    def options(self, **options: Any) -> dict[str, Any]:
        """Return the options of a storage whose store does not exist yet."""
        return {"url": self.url(), "schema": f"test_{uuid.uuid4().hex[:16]}", **options}

    def signal(self, number: int) -> None:
        """Send a signal to all its processes."""
        assert self._process is not None
        pids = [self._process.pid, *children(self._process.pid)]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """Kill all its processes (SIGKILL), and wait for their end. Idempotent."""
        if self._process is not None:
            self.signal(signal.SIGSTOP)  # No new one is started meanwhile.
            left = children(self._process.pid)
            self.signal(signal.SIGKILL)
            self._process.wait()
            wait_for(lambda: not any(map(alive, left)), what="PostgreSQL's processes to end")
            self._process = None


@contextlib.contextmanager
def own() -> Iterator[PostgresServer]:
    """Start a server for some tests, which may do with it what they want.

    Its folder is not one of pytest's, to which another run forbids the way.
    """
    folder = Path(tempfile.mkdtemp(prefix="engage-postgres-"))
    made = PostgresServer(folder / "server")
    try:
        made.start()
        yield made
    finally:
        made.kill()
        shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def shared() -> PostgresServer:
    """Return the server that all tests of a process share, and that ends with it."""
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(own())


def make_store(options: dict[str, Any], **context: Any) -> Any:
    """Make a store, which is not opened yet."""
    from engage_plugins.postgres.store import PostgresStorage

    fields = {"identifiers": {}, "write_timeout": 20, "base_dir": Path(), **context}
    return PostgresStorage(options, StorageContext(**fields))


@contextlib.asynccontextmanager
async def opened(options: dict[str, Any], **context: Any) -> AsyncIterator[Any]:
    """Open a store, and close it afterwards."""
    made = make_store(options, **context)
    await made.open(create=True)
    try:
        yield made
    finally:
        await made.close()
