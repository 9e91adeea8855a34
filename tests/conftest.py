# SPDX-License-Identifier: Apache-2.0
"""Fixtures and settings for all tests."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import httpx._transports.default as httpx_transports
import hypothesis
import pytest
from tornado.ioloop import IOLoop

pytest.register_assert_rewrite("support.rules")

from engage.monitoring.logs import ACCESS  # noqa: E402
from support import mongo, postgres, server_process, virtual_time  # noqa: E402
from support.server_process import SQLITE, Server, start_server  # noqa: E402

if TYPE_CHECKING:
    from support.kafka import Cluster

# For each client, httpx reads the certificates of all authorities, for 30 ms of a processor.
httpx_transports.create_ssl_context = functools.cache(  # type: ignore[attr-defined]
    httpx.create_ssl_context
)


server_process.FORKS = True

#: Only `make test-all` runs the tests with one of these marks …
LONGER = ("long", "mongo", "kafka", "sdk", "browser", "timing")
#: … and collects these, which need packages that `make test` does not install.
LONGER_PATHS = (
    *("tests/browser", "tests/clients", "tests/sdks", "tests/plugins/kafka", "tests/plugins/mongo"),
    "tests/plugins/postgres",
    *("tests/docs/test_nginx.py", "tests/server/test_hosts.py", "tests/server/test_load_kafka.py"),
    *("tests/server/test_memory.py", "tests/server/test_overload.py"),
)
#: Except these, by the beginning of their ids: `make test` runs them where what they need is there.
WHERE_POSSIBLE = {
    "tests/plugins/mongo/test_conformance.py::": (
        mongo.is_ready(),
        "that MongoDB keeps what a storage must (no server in ENGAGE_TEST_MONGO_URL)",
    ),
    "tests/plugins/postgres/test_conformance.py::": (
        postgres.is_ready(),
        "that PostgreSQL keeps what a storage must (no server, or no asyncpg)",
    ),
    "tests/sdks/test_calls.py::test_each_call_is_stored_as_meant[segment-analytics-node]": (
        shutil.which("npm") is not None,
        "that an SDK works unmodified (no Node.js)",
    ),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that selects a part of the tests, and those that make some longer."""
    parser.addoption(
        "--part",
        choices=("quick", "rest"),
        help="run only the tests of `make test`, or only those that `make test-all` adds",
    )
    parser.addoption(
        "--rounds",
        type=int,
        default=5,
        help="how often the tests of durability kill the server, or the loaders",
    )
    parser.addoption(
        "--histories",
        type=int,
        default=120,
        help="with how many random histories an adversary tries to reach others' choices",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give the run a folder for the temporary files of all programs that it starts.

    A server that a test kills removes none of its files. The processes of a parallel run inherit
    the folder. That of pytest stays where it is, because it is kept for the next runs.
    """
    if hasattr(config, "workerinput"):
        return
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A script starts its background jobs in this way. The servers of tests would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    usual = tempfile.gettempdir()
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", usual)
    # A short name: it is a part of the paths of sockets.
    folder = tempfile.mkdtemp(prefix="engage-test-")
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = tempfile.tempdir = folder

    def remove() -> None:
        tempfile.tempdir = usual
        os.environ["TMPDIR"] = before or usual
        # What was just killed may still write into it.
        for _ in range(50):
            shutil.rmtree(folder, ignore_errors=True)
            if not os.path.exists(folder):
                return
            time.sleep(0.1)

    config.add_cleanup(remove)


@functools.cache
def _group_of(path: str) -> str:
    """Return what a process of a parallel run takes as a whole: a file, or all tests that share the
    Kafka nodes, which would only wait for each other. Empty: each test of the file by itself,
    because all together take minutes."""
    text = Path(path).read_text()
    if "kafka_nodes" in text:
        return "kafka"
    return "" if "support.mongo_conformance" in text or "postgres.shared" in text else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute the groups in the order of collection."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _group_of(str(config.rootpath / nodeid.partition("::")[0])) or nodeid

    config.option.loadscopereorder = False
    return ByGroup(config, log) if config.option.dist == "loadfile" else None


def _is_quick(item: pytest.Item) -> bool:
    """Return whether `make test` runs a test."""
    for prefix, (possible, _) in WHERE_POSSIBLE.items():
        if item.nodeid.startswith(prefix):
            return possible
    return not (item.nodeid.startswith(LONGER_PATHS) or any(map(item.get_closest_marker, LONGER)))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import what is left out as a whole, unless it has a test that is run where it can."""
    path = collection_path.relative_to(config.rootpath).as_posix()
    if config.option.part != "quick" or any(
        possible and prefix.startswith(path) for prefix, (possible, _) in WHERE_POSSIBLE.items()
    ):
        return None
    return True if path.startswith(LONGER_PATHS) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the part of the tests that the option names, and begin a parallel run with the longest
    groups, so that none is left alone at the end."""
    if part := config.option.part:
        timing = {item for item in items if item.get_closest_marker("timing")}
        quick = {item for item in items if _is_quick(item)}
        left_out = timing | quick if part == "rest" else {*items} - quick
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    if not hasattr(config, "workerinput"):
        return
    long = {item.path for item in items if item.get_closest_marker("long")}
    items.sort(key=lambda item: (_group_of(str(item.path)) != "kafka", item.path not in long))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print what was not shown: by a quick run, and by the servers of the MongoDB tests."""
    mongo.summary(terminalreporter)
    if config.option.part == "quick":
        missing = [text for possible, text in WHERE_POSSIBLE.values() if not possible]
        if missing:
            terminalreporter.write_line("Only `make test-all` shows: " + "; ".join(missing))


# No time limits for single examples: a busy machine exceeds them.
hypothesis.settings.register_profile(
    "tests", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
# In CI hypothesis always draws the same examples, so that a second run has the same result.
hypothesis.settings.register_profile(
    "ci", hypothesis.settings.get_profile("tests"), derandomize=True, print_blob=True
)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "tests")


@pytest.fixture(autouse=True)
def io_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[IOLoop]:
    """Replace pytest-tornasync's, which calls the deprecated ``make_current()``."""
    if request.node.get_closest_marker("virtual_time"):
        virtual_time.install(monkeypatch)
    asyncio.set_event_loop(asyncio.events.new_event_loop())
    loop = IOLoop.current()
    yield loop
    asyncio.set_event_loop(None)
    loop.close(all_fds=True)


@pytest.fixture(autouse=True)
def _logging() -> Iterator[None]:
    """Undo the logging that a test has configured: another one reads the records of its own."""
    root, access = logging.getLogger(), logging.getLogger(ACCESS)
    before = root.level, list(root.handlers), list(access.handlers), access.propagate
    yield
    root.setLevel(before[0])
    root.handlers[:], access.handlers[:], access.propagate = before[1:]


@pytest.fixture
def engage(tmp_path: Path) -> Iterator[Server]:
    """Start a server for one test."""
    with start_server(tmp_path) as server:
        yield server


@pytest.fixture
def short_timeout(tmp_path: Path) -> Iterator[Server]:
    """Start a server for a test that locks its store: a write fails after three seconds.

    Where the store is not locked, the disk of a busy machine may need as long.
    """
    storage = SQLITE.replace("[storage]", "[storage]\nwrite_timeout = 3")
    with start_server(tmp_path, storage=storage) as server:
        yield server


@pytest.fixture
def kafka_nodes() -> Iterator[Cluster]:
    """Have the three Kafka nodes, without topics; the test may kill and stop them.

    The test is marked ``kafka``, and ``timeout(…, func_only=True)``: it may wait for another one.
    """
    from support.kafka import cluster

    with cluster() as nodes:
        yield nodes


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Leave long bytes out of the names of tests.

    They may contain the time of day (gzip does), and every process of a parallel run must find the
    same tests."""
    return argname if isinstance(val, bytes) and len(val) > 16 else None
