# SPDX-License-Identifier: Apache-2.0
"""Send millions of events, and compare the memory of each process after two minutes and at the end.

It fails if a process has more than 5 % more memory, other descriptors, or has died, if an event is
missing, or if the log has an error. SQLite's writer may have 2 MB more for each million of events,
which its filters of keys take.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import sqlite3
import tempfile
import time
from pathlib import Path

from faults import watch
from faults.fuzz import answer
from faults.program import Report, parser
from support.server_process import KEY, Server, start_server

#: Events of a request, and connections.
BATCH, CONNECTIONS = 200, 8
#: A process may have this many times the memory, and the writer in addition bytes for an event.
GROWTH, WRITER_BYTES = 1.05, 2.0
#: Users, so that the profiles do not grow.
USERS = 20_000
_HEAD = (
    "POST /v1/batch HTTP/1.1\r\nHost: a\r\n"
    f"Authorization: Basic {base64.b64encode(KEY.encode() + b':').decode()}\r\nContent-Length: "
)


def _event(number: int) -> str:
    user, name = number * 7919 % USERS, f'"messageId":"soak-{number}"'
    if number % 10 == 0:
        traits = f'"traits":{{"plan":"p{number % 7}","visits":{number}}}'
        return f'{{"type":"identify","userId":"u{user}",{name},{traits}}}'
    properties = f'"properties":{{"total":{number % 1000},"page":"/shop/{number % 500}"}}'
    return f'{{"type":"track","userId":"u{user}",{name},"event":"Ordered",{properties}}}'


class Load:
    """Clients that send one event after another."""

    def __init__(self, server: Server, events: int) -> None:
        self._port = server.port
        self._batches = iter(range(0, events, BATCH))
        #: Events that were acknowledged.
        self.sent = 0

    async def run(self, seconds: float = float("inf")) -> None:
        """Send all events, or those of some seconds."""
        end = time.monotonic() + seconds
        await asyncio.gather(*(self._client(end) for _ in range(CONNECTIONS)))

    async def _client(self, end: float) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        while time.monotonic() < end:
            if (first := next(self._batches, None)) is None:
                break
            items = ",".join(map(_event, range(first, first + BATCH)))
            body = f'{{"batch":[{items}]}}'.encode()
            status = 503
            while status == 503:
                writer.write(f"{_HEAD}{len(body)}\r\n\r\n".encode() + body)
                status, _ = await answer(reader, "POST")
            assert status == 200, status
            self.sent += BATCH
        writer.close()


async def soak(server: Server, report: Report, events: int, warm: float) -> None:
    """Send the events, and report what is wrong."""
    watch.copy_a_log(server)
    log, load = watch.LogReader(server), Load(server, events)

    async def say() -> None:
        while True:
            await asyncio.sleep(60)
            log.read()
            report.say(f"{load.sent:,} events; {watch.describe(watch.usage(server))}")

    saying = asyncio.create_task(say())
    await load.run(warm)
    before, first = watch.quiet(server), load.sent
    report.say(f"after {warm:.0f} s: {first:,} events; {watch.describe(before)}")
    await load.run()
    saying.cancel()
    after = watch.quiet(server, {pid: use.descriptors for pid, use in before.items()})
    log.read()
    report.say(f"at the end: {load.sent:,} events; {watch.describe(after)}")
    if first == load.sent:
        report.fail(f"all events were sent within {warm:.0f} s: nothing is compared")
    for pid, use in before.items():
        filters = WRITER_BYTES * (load.sent - first) if use.kind == "helper" else 0
        watch.judge(report, use, after.get(pid), int(use.rss * (GROWTH - 1) + filters))
    for line in log.wrong:
        report.fail(f"in the log: {line}")
    with contextlib.closing(sqlite3.connect(f"file:{server.database}?mode=ro", uri=True)) as db:
        counting = "SELECT count(*) FROM events WHERE message_id LIKE 'soak-%'"
        (stored,) = db.execute(counting).fetchone()
    if stored != load.sent:
        report.fail(f"{load.sent} events were acknowledged, and {stored} are stored")


def main() -> None:
    """Run the program."""
    arguments = parser(__doc__)
    arguments.add_argument("--events", type=int, default=10_000_000)
    arguments.add_argument("--warm", type=float, default=120, help="seconds before the first look")
    given = arguments.parse_args()
    report = Report("soak", given.seed)
    with (
        tempfile.TemporaryDirectory(prefix="engage-soak-") as folder,
        start_server(Path(folder), workers=2) as server,
    ):
        asyncio.run(soak(server, report, given.events, given.warm))
        if server.stop() != 0:
            report.fail(f"the server ended badly: {server.log()[-2000:]}")
    report.finish()


if __name__ == "__main__":
    main()
