# SPDX-License-Identifier: Apache-2.0
"""Fetch and build what the tests use besides Python packages, before any of them waits for it.

``python tests/support/prepare.py``; with ``browser``, only what a browser needs. Each test
would do this itself, but what takes minutes on a new machine would then run into the time limit of
a test. A failure here is only reported in short: the test that needs the program fails too, with a
better message.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

from support import kafka, mongo  # noqa: E402
from support.browser import bundles  # noqa: E402
from support.node import node_project  # noqa: E402
from support.recorded_disk import shim  # noqa: E402
from support.venv import venv  # noqa: E402


def _steps() -> Iterator[tuple[str, Callable[[], object]]]:
    kinds = mongo.kinds()
    if "ferretdb" in kinds:
        yield "FerretDB", mongo.ferretdb_binary
    if "java" in kinds:
        yield "mongo-java-server", mongo.java_classpath
    yield "Kafka", kafka.server
    yield "client in Go", _go_client
    yield "record of a disk", shim
    yield "SDKs for Node", lambda: node_project(TESTS / "sdks/node")
    yield "SDKs for browsers", bundles
    libraries = [*(TESTS / "sdks/python").glob("*.txt"), TESTS / "monitoring/grafana.txt"]
    for requirements in sorted(libraries):
        yield requirements.stem, lambda path=requirements: venv(path)  # type: ignore[misc]


def _go_client() -> object:
    from clients.libraries import send_go

    return send_go([])


def main() -> None:
    """Do all steps in order; print which took long and which failed."""
    steps = [("SDKs for browsers", bundles)] if "browser" in sys.argv[1:] else _steps()
    for name, step in steps:
        started = time.monotonic()
        try:
            step()
        except Exception as error:
            line = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"not ready: {name} ({line[:300]})", file=sys.stderr)
        else:
            if (seconds := time.monotonic() - started) > 1:
                print(f"ready: {name}, {seconds:.0f} s")


if __name__ == "__main__":
    main()
