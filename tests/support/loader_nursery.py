# SPDX-License-Identifier: Apache-2.0
"""Loaders that are killed by the dozen: a process that has imported everything forks them.

A loader begins to load a few hundredths of a second after its fork; ``engage load`` needs a second
until then. What it runs is the same: :class:`engage.server.load.process.LoaderProcess`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from engage.api import Event, Outcome
from engage.config import load
from engage.server.load.process import Load, LoaderProcess
from support.processes import alive, children

if TYPE_CHECKING:
    from support.server_process import Server


class Nursery:
    """Starts and kills loaders on the config of a server. At the end of a ``with`` all are killed.

    :param chance: how probable it is that a loader kills itself after a write, before the places
        are committed.
    """

    def __init__(self, server: Server, *, chance: float) -> None:
        code = "from support.loader_nursery import main; main()"
        self._log = (server.folder / "nursery.log").open("ab")
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}"),
                *(str(server.config), str(chance)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=server.environment,
        )
        self._loaders: set[int] = set()
        #: How many have died.
        self.deaths = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.living():
            self.kill(pid)
        for pid in children(self._process.pid):
            os.kill(pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._log.close()

    def start(self) -> int:
        """Start a loader and return its process id."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"%d\n" % random.randrange(10**6))
        self._process.stdin.flush()
        pid = int(self._process.stdout.readline())
        self._loaders.add(pid)
        return pid

    def living(self) -> list[int]:
        """Return the loaders that live; count those that have died since the last call."""
        dead = {pid for pid in self._loaders if not alive(pid)}
        self._loaders -= dead
        self.deaths += len(dead)
        return sorted(self._loaders)

    def kill(self, pid: int) -> None:
        """Kill a loader, wherever it is."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# -------------------------------------------------------------------------- in the other processes
def main() -> None:
    """Fork a loader for each line, which is a seed, and print its process id."""
    from support.exports import registry

    config, chance = Path(sys.argv[1]), float(sys.argv[2])
    registry()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            sys.stdin.close()
            os.close(1)
            _run(config, chance, random.Random(int(line)))
        print(pid, flush=True)


def _run(config: Path, chance: float, pick: random.Random) -> None:
    """Be a loader, which does not return."""
    from support.exports import registry

    make = Load.__init__

    def make_deadly(self: Load, *arguments: object, **options: object) -> None:
        make(self, *arguments, **options)  # type: ignore[arg-type]
        write = self.store.write

        async def write_and_perhaps_die(events: Sequence[Event]) -> Sequence[Outcome]:
            outcomes = await write(events)
            if pick.random() < chance:
                os.kill(os.getpid(), signal.SIGKILL)
            return outcomes

        self.store.write = write_and_perhaps_die  # type: ignore[method-assign]

    Load.__init__ = make_deadly  # type: ignore[method-assign]
    status = 1
    try:
        loader = LoaderProcess(load(config), registry(), number=0, server_running=True)
        status = asyncio.run(loader.run())
    finally:
        os._exit(status)
