# SPDX-License-Identifier: Apache-2.0
"""``python benchmarks/trace.py``: counts the way of one request through the code of engage.

The request is a track call, or with ``--webhook`` a delivery that becomes a track event. A server
with SQLite runs with one worker and the process that writes. Both record with ``sys.setprofile``
which functions of ``engage/`` and ``plugins/`` they call, from the first byte of a request until
shortly after its answer. The server is warm. Its timers add calls to some requests, so the figures
are those of the request with the fewest calls of five:

- *calls* of functions, and how many *functions* and *files* are among them. Each part of a
  coroutine between two waits is a call; comprehensions are none.
- *entries*: how often a call is in another room than the call before it. A room is a folder or a
  module directly in ``engage/``, or a plugin.
- *back up*: the entries of a room that lies farther out than the one before, by ``LAYERS`` in
  ``tests/test_architecture.py``. Plugins lie inside of all rooms, because the way ends there.

``--hops`` also prints the calls of one request in their order, by process and turn of its event
loop; a call is indented below its caller. ``--root`` counts another checkout with a ``.venv``.
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import hashlib
import hmac
import http.client
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
#: The most that one request may need. ``tests/test_trace.py`` holds these bounds; a change that
#: raises one names the number in its commit.
BOUNDS = {
    "track": {"calls": 212, "files": 42, "back_up": 14},
    "webhook": {"calls": 244, "files": 46, "back_up": 22},
}
#: Requests before the counted ones, and counted requests.
WARM, COUNTED = 20, 5
#: Seconds after an answer whose calls still belong to it.
AFTER = 0.15
#: Maximum seconds until the server listens, and until it has ended.
PATIENCE = 60.0

#: Every Python process of the server runs this first. It writes a line for each call.
RECORDER = """
import os, sys, threading, time

ROOT = os.environ["ENGAGE_TRACE_ROOT"] + os.sep
OURS = ROOT + "engage/", ROOT + "plugins/"
OUT = os.open(os.environ["ENGAGE_TRACE_OUT"] + f"/{os.getpid()}", os.O_WRONLY | os.O_CREAT)

def record(frame, event, _):
    code = frame.f_code
    path = code.co_filename
    if event != "call" or not path.startswith(OURS):
        return
    if code.co_name.startswith("<") and code.co_name != "<lambda>":
        return
    depth, back = 0, frame.f_back
    while back is not None:
        depth += back.f_code.co_filename.startswith(OURS)
        # What a loop calls is not a part of what started the loop.
        if back.f_code.co_filename.endswith(("asyncio/runners.py", "asyncio/base_events.py")):
            break
        back = back.f_back
    line = f"{time.monotonic()} {depth} {path[len(ROOT):]} {code.co_qualname}\\n"
    os.write(OUT, line.encode())

threading.setprofile(record)
sys.setprofile(record)
"""

#: Signs the deliveries.
SECRET = b"the secret of a benchmark"
#: The workspace accepts deliveries of any sender that signs as Standard Webhooks says.
WEBHOOK = f"""
[workspaces.webhooks.standard-webhooks]
secret = "whsec_{base64.b64encode(SECRET).decode()}"
"""
CONFIG = f"""
[server]
host = "127.0.0.1"
port = 0
workers = 1
[logging]
format = "json"
[storage]
backend = "sqlite"
[storage.sqlite]
path = "engage.db"
[[workspaces]]
id = "acme"
name = "Acme"
[[workspaces.write_keys]]
id = "website"
key = "trace"
{WEBHOOK}"""


class Call(NamedTuple):
    """One call of a function of engage."""

    #: Seconds of the clock that all processes share.
    time: float
    #: How many functions of engage have called each other to get here, in this turn of a loop.
    depth: int
    #: Below the root, such as ``engage/http1/connection.py``.
    path: str
    #: Such as ``Connection.data_received``.
    name: str
    process: int

    @property
    def room(self) -> str:
        """``http1``, ``app`` or ``plugins/sqlite``."""
        folder, name, *_ = self.path.removesuffix(".py").split("/")
        return name if folder == "engage" else f"{folder}/{name}"


class Way(NamedTuple):
    """The figures of one request."""

    calls: int
    functions: int
    files: int
    entries: int
    back_up: int


def levels(root: Path) -> dict[str, int]:
    """Return how far out each room of ``engage/`` lies."""
    tree = ast.parse((root / "tests/test_architecture.py").read_text("utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS":
            lines = ast.literal_eval(node.value)
            return {name: level for level, line in enumerate(lines) for name in line.split()}
    raise LookupError("tests/test_architecture.py defines no LAYERS")


def measure(calls: Sequence[Call], level: dict[str, int]) -> Way:
    """Return the figures of the calls of one request, in their order."""
    entries = back_up = 0
    for _, group in itertools.groupby(sorted(calls, key=lambda call: call.process), lambda c: c[4]):
        rooms = [level.get(room, -1) for room, _ in itertools.groupby(c.room for c in group)]
        entries += len(rooms)
        back_up += sum(after > before for before, after in itertools.pairwise(rooms))
    functions = {(call.path, call.name) for call in calls}
    files = {call.path for call in calls}
    return Way(len(calls), len(functions), len(files), entries, back_up)


def read(folder: Path) -> list[Call]:
    """Return all calls that the processes have recorded."""
    calls = []
    for file in folder.iterdir():
        # The server may be writing the last line.
        for line in file.read_text().rpartition("\n")[0].splitlines():
            seconds, depth, path, name = line.split(" ", 3)
            calls.append(Call(float(seconds), int(depth), path, name, int(file.name)))
    return sorted(calls)


@contextlib.contextmanager
def server(root: Path, folder: Path) -> Iterator[int]:
    """Run a server that records its calls in ``folder/calls``; the value is its port."""
    for name in ("calls", "site"):
        (folder / name).mkdir()
    (folder / "site/sitecustomize.py").write_text(RECORDER)
    (folder / "engage.toml").write_text(CONFIG)
    python = root / ".venv/bin/python"
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder / "site"),
        "ENGAGE_TRACE_ROOT": str(root),
        "ENGAGE_TRACE_OUT": str(folder / "calls"),
    }
    log = folder / "log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [python if python.exists() else sys.executable, "-m", "engage", "serve"],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=output,
        ) as process,
    ):
        try:
            yield _port(process, log)
        finally:
            process.terminate()
            process.wait(PATIENCE)


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        for line in log.read_text().splitlines():
            with contextlib.suppress(ValueError):
                fields = json.loads(line)
                if isinstance(fields, dict) and fields.get("message") == "listening":
                    return int(fields["url"].rpartition(":")[2])
        time.sleep(0.05)
    process.terminate()
    raise RuntimeError(f"the server does not listen:\n{log.read_text()}")


def requests(
    root: Path, send: Callable[[http.client.HTTPConnection, int], None]
) -> Generator[list[Call], None, None]:
    """Yield the calls of one request after the other until closed. The server is warm.

    :param send: sends a request with this number and reads its answer.
    """
    with tempfile.TemporaryDirectory(prefix="engage-trace-") as name:
        folder = Path(name).resolve()
        with (
            server(root.resolve(), folder) as port,
            contextlib.closing(
                http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
            ) as connection,
        ):
            for number in range(WARM):
                send(connection, number)
            for number in itertools.count(WARM):
                time.sleep(AFTER)
                start = time.monotonic()
                send(connection, number)
                time.sleep(AFTER)
                yield [call for call in read(folder / "calls") if call.time >= start]


def _track(connection: http.client.HTTPConnection, number: int) -> None:
    event = {"userId": f"user {number}", "event": "Traced", "messageId": f"message {number}"}
    authorization = "Basic " + base64.b64encode(b"trace:").decode()
    _post(connection, "/v1/track", json.dumps(event).encode(), {"Authorization": authorization})


def _deliver(connection: http.client.HTTPConnection, number: int) -> None:
    path = "/api/public/webhooks/standard-webhooks"
    _post(connection, path, *delivery(number))


def delivery(number: int) -> tuple[bytes, dict[str, str]]:
    """Return the body and the headers of a delivery, which names its user."""
    now = time.time()
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
    payload = {"type": "Traced", "timestamp": when, "data": {"userId": f"user {number}"}}
    body = json.dumps(payload).encode()
    signed = b"message %d.%d.%b" % (number, now, body)
    signature = base64.b64encode(hmac.digest(SECRET, signed, hashlib.sha256)).decode()
    return body, {
        "webhook-id": f"message {number}",
        "webhook-timestamp": str(int(now)),
        "webhook-signature": f"v1,{signature}",
    }


def _post(
    connection: http.client.HTTPConnection, path: str, body: bytes, headers: dict[str, str]
) -> None:
    connection.request("POST", path, body, {"Content-Type": "application/json", **headers})
    response = connection.getresponse()
    answer = response.read()
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {answer.decode()}")


def print_hops(calls: Sequence[Call]) -> None:
    """Print the calls of one request, by process and turn."""
    first = calls[0].process
    before = None
    for call in calls:
        if call.depth == 0 or before is None or before.process != call.process:
            print("\nworker" if call.process == first else "\nwriter")
        print(f"  {'  ' * call.depth}{call.name}  ({call.path})")
        before = call


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to count")
    parser.add_argument("--hops", action="store_true", help="print every call")
    parser.add_argument("--webhook", action="store_true", help="count a webhook delivery")
    arguments = parser.parse_args()
    level = levels(arguments.root)
    send = _deliver if arguments.webhook else _track
    with contextlib.closing(requests(arguments.root, send)) as endless:
        traced = sorted(itertools.islice(endless, COUNTED), key=len)
    if arguments.hops:
        print_hops(traced[0])
        print()
    ways = [measure(calls, level) for calls in traced]
    for name, values in zip(Way._fields, zip(*ways, strict=True), strict=True):
        print(f"{name.replace('_', ' '):>10} {values[0]:5}   {values}")


if __name__ == "__main__":
    main()
