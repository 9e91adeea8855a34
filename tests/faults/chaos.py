# SPDX-License-Identifier: Apache-2.0
"""Break a server and what is behind it at random, again and again, while clients send events.

Three setups take a third of the time each: a store of SQLite, one in MongoDB, and a Kafka log in
front of SQLite. In the end, each acknowledged event must be stored once, nothing else may be, the
profiles must be the merge of the events, and ``engage verify`` must find nothing. ``--seed``
repeats the faults and what the clients send.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import http.client
import json
import os
import random
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from faults import watch
from faults.program import Report, parser
from support import kafka, mongo
from support.loader_process import Loaders, judge, wait_until_stored
from support.preferences import GROUPS, SUBSCRIPTIONS
from support.preferences import members as signed
from support.provider_senders import PUBLIC_URL, SENDERS, webhooks_table
from support.recorded_disk import Fault, Recorder
from support.server_process import SQLITE, Server, config_text
from support.system_clock import SystemClock
from support.tcp_proxy import TcpProxy
from support.traffic import Request, Traffic, send
from support.waiting import wait_for

#: Seconds within which clients are acknowledged again after a fault.
RECOVERY = 150.0
CLIENTS = 6
#: Seconds of a setup in which no new fault begins, so that the last one has passed.
CALM = 5.0
#: The longest is longer than ``server.hang_timeout``.
LENGTHS = (0.3, 1.0, 1.0, 3.0, 3.0, 10.0)
DAY = 86_400
#: The beginning of the ids of users who only choose.
CHOOSERS = "chooser-"
#: A few users choose all the time.
LIMITS = "[limits]\nresubscriptions_per_day = 1000000\n"


class Mixed(Traffic):
    """Events, valid and not, conflicts, deliveries of Segment and changes of subscriptions.

    :param pause: seconds between two requests, which leave the machine to the other processes.
    """

    def __init__(self, seed: int, pause: float) -> None:
        super().__init__(seed)
        self._pause = pause

    def request(self) -> Request:
        time.sleep(self._pause)
        pick = self._random.random()
        if pick < 0.1:
            members = {"type", "messageId", "userId", "anonymousId", "timestamp"}
            event = {name: value for name, value in self._event().items() if name in members}
            # An identity of its own: those of clients and of providers are separate.
            event |= {"type": "track", "event": "Delivered", "messageId": f"w{event['messageId']}"}
            target = "/api/public/webhooks/segment"
            headers, body = SENDERS["segment"].deliver(
                target, time.time(), payload=json.dumps(event).encode()
            )
            named = {name: value.decode() for name, value in headers}
            return Request(target, body, (event["messageId"],), headers=named)
        if pick < 0.15:
            # A choice changes when a user was updated, which the judge makes of events only.
            user = f"{CHOOSERS}{self._random.randrange(self.USERS)}"
            link = signed(user)
            names = {"w": "workspaceId", "i": "identifier", "ik": "identifierKey", "h": "hash"}
            change = {names[name]: value for name, value in link.items()}
            choice = {"changes": {"news": self._random.random() < 0.5}}
            return Request(SUBSCRIPTIONS, json.dumps(change | choice).encode(), (), method="PUT")
        if pick < 0.17:
            # A conflict with an earlier event, if there is one with this id.
            event = self._event()
            event["messageId"] = f"m-{self._seed}-{self._random.randint(1, self._count)}"
            path = f"/v1/{event['type']}"
            return Request(path, json.dumps(event).encode(), (event["messageId"],))
        request = super().request()
        if request.path == "/v1/batch" and pick < 0.3:
            batch = json.loads(request.body)
            batch["batch"].append({"type": "track", "userId": "invalid", "n": self._count})
            return dataclasses.replace(request, body=json.dumps(batch).encode())
        return request


class Clients:
    """Clients that send each request again until it is acknowledged."""

    def __init__(self, address: tuple[str, int], traffic: Traffic) -> None:
        self._address, self._traffic = address, traffic
        self._lock = threading.Lock()
        self._stopping = False
        self.sent: set[str] = set()
        self.acknowledged: set[str] = set()
        self.requests = 0
        #: Answers other than 200 and 503.
        self.wrong: list[str] = []
        self.retries = 0
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop after each has been acknowledged what it has sent."""
        self._stopping = True
        end = time.monotonic() + RECOVERY
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _run(self) -> None:
        connection = http.client.HTTPConnection(*self._address, timeout=20)
        while not self._stopping:
            with self._lock:
                request = self._traffic.request()
                self.sent.update(request.message_ids)
            while True:
                try:
                    acknowledged, answer = send(connection, request)
                except (OSError, http.client.HTTPException):
                    connection.close()
                    acknowledged, answer = False, "503"
                with self._lock:
                    if acknowledged:
                        self.acknowledged.update(request.message_ids)
                        self.requests += 1
                        break
                    self.retries += 1
                    if not answer.startswith("503"):
                        self.wrong.append(f"{request.path}: {answer}")
                        break
                time.sleep(0.1)
        connection.close()


class Planned(NamedTuple):
    """A fault of the schedule."""

    name: str
    #: Seconds before it, and seconds that it lasts.
    after: float
    lasts: float
    #: Chooses a process, and the like.
    pick: int
    #: Another one in the middle of it, which has no length.
    inside: str | None


#: They may happen while another fault lasts.
INSIDE = ("worker killed", "connections cut")


def schedule(seed: str, names: list[str]) -> Iterator[Planned]:
    """Return faults without end. All happen before one happens again."""
    chance = random.Random(seed)
    while True:
        for name in chance.sample(names, len(names)):
            inside = chance.choice(INSIDE) if chance.random() < 0.3 else None
            after, lasts = chance.uniform(0.5, 3.0), chance.choice(LENGTHS)
            yield Planned(name, after, lasts, chance.randrange(10**6), inside)


class Setup:
    """A server with all that is behind it, and what can happen to it."""

    #: Seconds between two requests of the clients.
    pause = 0.004
    workers = 2

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._clock = SystemClock(folder)
        self._disk = Recorder(folder, record=False)
        preload = " ".join(
            one["LD_PRELOAD"] for one in (self._clock.environment, self._disk.environment)
        )
        environment = {**self._clock.environment, **self._disk.environment, "LD_PRELOAD": preload}
        segment = webhooks_table(providers={"segment": SENDERS["segment"]})
        config = config_text(
            workers=self.workers,
            # A fault may last longer than the tests' usual time limits are short.
            storage=self.storage(folder, stack).replace(
                "[storage]", "[storage]\nwrite_timeout = 8"
            ),
            server=f'public_url = "{PUBLIC_URL}"\n',
            config_extra=segment + GROUPS + LIMITS + self.log(),
        )
        self.server = stack.enter_context(Server(folder, config, environment=environment).start())
        self.proxy = stack.enter_context(TcpProxy(("127.0.0.1", self.server.port)))
        self.faults: dict[str, Callable[[Planned], None]] = {
            "server killed": self._server_killed,
            "server restarted": self._server_restarted,
            "server stopped": self._server_stopped,
            "worker killed": lambda planned: self._kill(self._workers(), planned),
            "worker stopped": lambda planned: self._stop(self._workers(), planned),
            "connections cut": lambda planned: self.proxy.cut(),
            "connections held": self._held(self.proxy),
            "clock set": self._clock_set,
            **self.more(folder, stack),
        }

    def storage(self, folder: Path, stack: contextlib.ExitStack) -> str:
        """Start what is behind the server, and return the tables of the storage."""
        return SQLITE

    def log(self) -> str:
        """Return the tables of the log."""
        return ""

    def more(
        self, folder: Path, stack: contextlib.ExitStack
    ) -> Mapping[str, Callable[[Planned], None]]:
        """Return the faults of this setup beside those of the server."""
        return {
            "writer killed": lambda planned: self._kill({self.server.helper}, planned),
            "writer stopped": lambda planned: self._stop({self.server.helper}, planned),
            **self.of_the_disk(),
        }

    def of_the_disk(self) -> Mapping[str, Callable[[Planned], None]]:
        """Return the faults of the disk on which SQLite's store is."""
        slow = (
            Fault("log sync", times=0, delay=300_000),
            Fault("database write", times=0, delay=3000),
        )
        full = (
            Fault("log write", times=1 << 40, full=1),
            Fault("database write", times=1 << 40, full=1),
        )
        failing = Fault("log sync", every=3, times=1 << 40), Fault("database sync", times=1 << 40)
        return {
            "disk slow": lambda planned: self._on_disk(slow, planned),
            "disk full": lambda planned: self._on_disk(full, planned),
            "disk failing": lambda planned: self._on_disk(failing, planned),
        }

    def settle(self, clients: Clients) -> None:
        """Wait until all that was acknowledged is in the store."""

    # ------------------------------------------------------------------------------- faults
    def happen(self, planned: Planned) -> None:
        """Let a fault happen, and end it."""
        inside = None
        if planned.inside is not None:
            action = self.faults[planned.inside]
            inside = threading.Timer(planned.lasts / 2, _ignoring_the_dead(action), [planned])
            inside.start()
        _ignoring_the_dead(self.faults[planned.name])(planned)
        if inside is not None:
            inside.join()

    def _workers(self) -> set[int]:
        """Return the process ids of the workers; none while the server is dead."""
        return self.server.workers() if self.server.process is not None else set()

    def _kill(self, pids: set[int], planned: Planned) -> None:
        os.kill(sorted(pids)[planned.pick % len(pids)], signal.SIGKILL)

    def _stop(self, pids: set[int], planned: Planned) -> None:
        pid = sorted(pids)[planned.pick % len(pids)]
        os.kill(pid, signal.SIGSTOP)
        time.sleep(planned.lasts)
        os.kill(pid, signal.SIGCONT)

    def _server_killed(self, planned: Planned) -> None:
        self.server.kill()
        time.sleep(planned.lasts / 2)
        self._start(planned)

    def _server_restarted(self, planned: Planned) -> None:
        status = self.server.stop()
        # A worker that dies while it drains is a failure of the server.
        good = (0, 1) if planned.inside == "worker killed" else (0,)
        assert status in good, f"the server ended with status {status}"
        self._start(planned)

    def _start(self, planned: Planned) -> None:
        try:
            self.server.start(ready=False)
        except AssertionError:
            # A server whose first worker is killed while it starts ends; its operator starts it.
            if planned.inside != "worker killed":
                raise
            self.server.start(ready=False)
        self.proxy.target = ("127.0.0.1", self.server.port)

    def _server_stopped(self, planned: Planned) -> None:
        assert self.server.process is not None
        os.killpg(self.server.process.pid, signal.SIGSTOP)
        time.sleep(planned.lasts)
        os.killpg(self.server.process.pid, signal.SIGCONT)

    def _held(self, proxy: TcpProxy) -> Callable[[Planned], None]:
        def hold(planned: Planned) -> None:
            proxy.hold()
            time.sleep(planned.lasts)
            proxy.flow()

        return hold

    def _clock_set(self, planned: Planned) -> None:
        self._clock.set((DAY, -DAY, 400 * DAY, -400 * DAY, 100, -100)[planned.pick % 6])
        time.sleep(planned.lasts)
        self._clock.set(0)

    def _on_disk(self, faults: tuple[Fault, ...], planned: Planned) -> None:
        for number, fault in enumerate(faults):
            self._disk.set(number, fault)
        time.sleep(planned.lasts)
        for number, fault in enumerate(faults):
            self._disk.set(number, Fault(fault.call, times=0))


def _ignoring_the_dead(action: Callable[[Planned], None]) -> Callable[[Planned], None]:
    """Return an action that does nothing to a process which has just died."""

    def act(planned: Planned) -> None:
        with contextlib.suppress(ProcessLookupError, ZeroDivisionError):
            action(planned)

    return act


class Mongo(Setup):
    """A store in MongoDB, or in a server of its protocol that can be killed."""

    pause = 0.05
    #: FerretDB loses updates of two clients to one document: see ``support.mongo``.
    workers = 1

    def storage(self, folder: Path, stack: contextlib.ExitStack) -> str:
        self._database = stack.enter_context(mongo.own(folder))
        self._between = stack.enter_context(TcpProxy(self._database.address))
        url = self._database.url("engage", "serverSelectionTimeoutMS=2000")
        url = url.replace(f":{self._database.port}/", f":{self._between.port}/")
        return f'[storage]\nbackend = "mongo"\n[storage.mongo]\nurl = "{url}"\n'

    def more(
        self, folder: Path, stack: contextlib.ExitStack
    ) -> Mapping[str, Callable[[Planned], None]]:
        return {
            "store killed": self._store_killed,
            "store stopped": lambda planned: self._stop(set(self._database.pids), planned),
            "connections to the store cut": lambda planned: self._between.cut(),
            "connections to the store held": self._held(self._between),
        }

    def _store_killed(self, planned: Planned) -> None:
        self._database.kill()
        time.sleep(planned.lasts)
        self._database.start()

    def _start(self, planned: Planned) -> None:
        # What the killed worker began ends before another one begins.
        time.sleep(1)
        super()._start(planned)


class Log(Setup):
    """Three Kafka nodes as a log in front of SQLite, and two loaders."""

    pause = 0.01

    def storage(self, folder: Path, stack: contextlib.ExitStack) -> str:
        self._nodes = stack.enter_context(kafka.cluster())
        return super().storage(folder, stack)

    def log(self) -> str:
        servers = self._nodes.servers()
        return f'[log]\nload_port = 0\n[log.kafka]\nservers = "{servers}"\ntopic = "engage.chaos"\n'

    def more(
        self, folder: Path, stack: contextlib.ExitStack
    ) -> Mapping[str, Callable[[Planned], None]]:
        self._loaders = stack.enter_context(Loaders(self.server).start("--workers", "2"))
        return {
            "node killed": lambda planned: self._nodes_killed(planned, 1),
            "two nodes killed": lambda planned: self._nodes_killed(planned, 2),
            "node stopped": self._node_stopped,
            "loader killed": lambda planned: self._kill(self._loaders.processes(), planned),
            "loader stopped": lambda planned: self._stop(self._loaders.processes(), planned),
            "loaders killed": self._loaders_killed,
            **self.of_the_disk(),
        }

    def _chosen(self, planned: Planned, count: int) -> list[int]:
        return [kafka.NODES[(planned.pick + one) % len(kafka.NODES)] for one in range(count)]

    def _nodes_killed(self, planned: Planned, count: int) -> None:
        nodes = self._chosen(planned, count)
        self._nodes.kill(*nodes)
        time.sleep(planned.lasts)
        for node in nodes:
            self._nodes.start(node)
        self._nodes.wait()

    def _node_stopped(self, planned: Planned) -> None:
        [node] = self._chosen(planned, 1)
        self._nodes.pause(node)
        time.sleep(planned.lasts)
        self._nodes.resume(node)

    def _loaders_killed(self, planned: Planned) -> None:
        self._loaders.kill()
        time.sleep(planned.lasts / 2)
        self._loaders.start("--workers", "2", ready=False)

    def settle(self, clients: Clients) -> None:
        wait_until_stored(self.server, lambda: clients.acknowledged)
        assert self._loaders.stop() == 0


SETUPS: Mapping[str, type[Setup]] = {"sqlite": Setup, "mongo": Mongo, "log": Log}


def chaos(kind: str, seed: int, seconds: float, report: Report) -> None:
    """Break one setup for some time, and report what is wrong."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="engage-chaos-")))
        setup = SETUPS[kind](folder, stack)
        report.say(f"{kind}: {', '.join(sorted(setup.faults))}")
        traffic = Mixed(seed, setup.pause)
        clients = Clients(("127.0.0.1", setup.proxy.port), traffic)
        end, done = time.monotonic() + seconds - CALM, 0
        for planned in schedule(f"{seed}/{kind}", sorted(setup.faults)):
            time.sleep(planned.after)
            if time.monotonic() > end:
                break
            inside = f" ({planned.inside} meanwhile)" if planned.inside else ""
            report.say(f"{kind} {done}: {planned.name}, {planned.lasts} s{inside}")
            before = clients.requests
            setup.happen(planned)
            began, done = time.monotonic(), done + 1
            wait_for(
                lambda: clients.requests > before + CLIENTS,  # noqa: B023
                what=f"answers after: {planned.name}",
                deadline=RECOVERY,
            )
            if (waited := time.monotonic() - began) > 10:
                report.say(f"  {waited:.0f} s until clients were acknowledged again")
        clients.stop()
        wrong = collections.Counter(re.sub(r'"requestId":"\w+"', "", one) for one in clients.wrong)
        for answer, count in wrong.items():
            report.fail(f"{kind}: {count} times {answer}")
        if clients.sent != clients.acknowledged:
            report.fail(f"{kind}: {len(clients.sent - clients.acknowledged)} never acknowledged")
        setup.settle(clients)
        report.say(
            f"{kind}: {done} faults, {clients.requests} requests with "
            f"{len(clients.acknowledged)} events, sent again {clients.retries} times"
        )
        watch.verify(setup.server, report)
        if setup.server.stop() != 0:
            report.fail(f"{kind}: the server ended badly: {setup.server.log()[-2000:]}")
        try:
            judge(setup.server, clients.acknowledged, clients.sent, choosers=CHOOSERS)
        except AssertionError as error:
            report.fail(f"{kind}: {str(error)[:4000]}")


def main() -> None:
    """Run the program."""
    arguments = parser(__doc__)
    arguments.add_argument("--seconds", type=float, default=3600)
    arguments.add_argument("--only", choices=[*SETUPS], help="only this setup, for all of the time")
    given = arguments.parse_args()
    report = Report("chaos", given.seed)
    kinds = [given.only] if given.only else [*SETUPS]
    for kind in kinds:
        try:
            chaos(kind, given.seed, given.seconds / len(kinds), report)
        except AssertionError as error:
            report.fail(f"{kind}: {str(error)[:4000]}")
    report.finish()


if __name__ == "__main__":
    main()
