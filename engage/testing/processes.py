# SPDX-License-Identifier: Apache-2.0
"""Child processes of the suites, which get a job and write lines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson


@contextlib.asynccontextmanager
async def run_children(
    code: str, jobs: Sequence[dict[str, Any]]
) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    """Start a process for each job; at the end, all of them have ended.

    :param code: the Python code of a process; it reads its job, a line of JSON, from standard
        input.
    """
    started: list[asyncio.subprocess.Process] = []
    try:
        for job in jobs:
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                code,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            started.append(child)
            assert child.stdin is not None
            child.stdin.write(orjson.dumps(job) + b"\n")
            await child.stdin.drain()
        yield started
    finally:
        for child in started:
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
            await child.wait()


def print_line(line: str) -> None:
    """Write a line to the parent at once, before the process may be killed."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
