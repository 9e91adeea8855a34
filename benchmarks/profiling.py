# SPDX-License-Identifier: Apache-2.0
"""``python benchmarks/profiling.py``: shows the functions in which a loaded server spends its time.

The server runs in this process under cProfile, on the main thread. The work of SQLite in other
threads is not in the table. cProfile makes small functions look more expensive than they are.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import os
import pstats
import sys
import tempfile
import threading
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

import load  # noqa: E402

from engage.config import load as load_config  # noqa: E402
from engage.http1.sockets import listen  # noqa: E402
from engage.monitoring import logs  # noqa: E402
from engage.registry import load_plugins  # noqa: E402
from engage.server.worker import Worker, new_event_loop  # noqa: E402
from support.server_process import KEY, Server, config_text  # noqa: E402
from support.waiting import wait_for  # noqa: E402


def main() -> None:
    """Print the functions that take the most time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=32, help="number of connections")
    parser.add_argument("--events", type=int, default=1, help="events per request")
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds of load")
    parser.add_argument("--lines", type=int, default=10, help="functions to print")
    arguments = parser.parse_args()
    profile = cProfile.Profile()
    with tempfile.TemporaryDirectory(prefix="engage-profile-") as folder:
        server = Server(Path(folder), config_text())
        log = server.log_path.open("w")
        os.dup2(log.fileno(), 2)

        def drive() -> None:
            url = wait_for(server.listening, what="the server to listen")
            path = "/v1/track" if arguments.events == 1 else "/v1/batch"
            result = load.run(
                load.tool(),
                url + path,
                KEY,
                connections=arguments.connections,
                size=arguments.events,
                seconds=arguments.seconds,
                name="m",
            )
            print(f"{result.requests_per_second:,.0f} requests/s under cProfile")
            os.kill(os.getpid(), 15)

        threading.Thread(target=drive, daemon=True).start()
        config = load_config(server.config)
        registry = load_plugins()
        logs.configure(config.logging.level, config.logging.format)
        sock = listen(config.server.host, config.server.port)
        # In this process, without a parent.
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            profile.runcall(runner.run, Worker(config, registry, sock).run())
        log.close()
    pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(arguments.lines)


if __name__ == "__main__":
    main()
