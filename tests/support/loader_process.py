# SPDX-License-Identifier: Apache-2.0
"""``engage load`` as a process beside a server, and how a store is judged after all went wrong."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any, Self

import httpx
from click.testing import Result

from support.commands import run
from support.exactly_once import check_exactly_once
from support.examples import TESTS
from support.server_process import Server
from support.traffic import expected_groups, expected_users
from support.waiting import DEADLINE, wait_for

#: The log that docs/write-a-log.md builds.
TAPE = f"""
[log]
backend = "tape"
load_port = 0
[log.tape]
path = "events.tape"
[plugins]
files = ["{TESTS / "example_log" / "engage_tape.py"}"]
"""
#: The file of a plugin with an observer that may kill its process: after events were stored, before
#: their places are committed.
ASSASSIN = """
import os, random, signal
from engage.api import hookimpl

def make(options):
    async def observe(events):
        if random.random() < options["chance"]:
            os.kill(os.getpid(), signal.SIGKILL)
    return observe

@hookimpl
def engage_register_observer(register):
    chance = {"type": "number", "default": 0}
    register("assassin", make, {"type": "object", "properties": {"chance": chance}})
"""


class Loaders(Server):
    """The processes of ``engage load`` on the config of a server; killed at the end of a ``with``.

    :param server: the server, running or not. Its config must have ``[log]``.
    :param name: of the log file.
    """

    command = "load"

    def __init__(
        self, server: Server, *, name: str = "load", arguments: Iterable[str] = ()
    ) -> None:
        config = server.config.read_text()
        super().__init__(
            server.folder,
            config,
            environment=server.environment,
            arguments=tuple(arguments),
            preexec=server.preexec,
        )
        self.log_path = server.folder / f"{name}.log"

    def start(self, *arguments: str, ready: bool = True) -> Self:
        """Start the processes, and wait until they load.

        :param ready: also wait until ``/readyz`` answers 200, if the config has ``load_port``.
        """
        process = self.launch(*arguments)
        try:
            wait_for(self._loads, what="the loaders to start")
            self.url = next(
                (
                    line["url"].removesuffix("/metrics")
                    for line in self.lines()
                    if line["message"] == "metrics"
                ),
                "",
            )
            if ready and self.url:
                wait_for(lambda: self.readyz().status_code == 200, what="/readyz to answer 200")
        except BaseException as error:
            status = process.poll()
            self.kill()
            raise AssertionError(f"{error}; status {status}\n{self.log()[-4000:]}") from error
        return self

    def _loads(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, "it ended before it loaded"
        return any(line["message"] == "loading" for line in self.lines())

    def readyz(self) -> httpx.Response:
        """Return the answer of ``/readyz``."""
        return httpx.get(f"{self.url}/readyz", timeout=DEADLINE)

    def metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics", timeout=DEADLINE).text

    def processes(self) -> set[int]:
        """Return the ids of the loaders."""
        return self.of_kind("loader")


def load_again(server: Server, since: str) -> Result:
    """Run ``engage load --from`` until it ends."""
    return run("load", "--config", server.config, "--from", since)


def stored_ids(server: Server) -> list[str]:
    """Return the message ids in the store of a server, in order of arrival."""
    return [event["messageId"] for event in server.export()]


def wait_until_stored(
    server: Server, acknowledged: Callable[[], Iterable[str]], *, deadline: float = 300
) -> None:
    """Wait until the store has every acknowledged event."""

    def all_stored() -> bool:
        if set(acknowledged()) <= set(stored_ids(server)):
            return True
        # Reading takes from the loaders what they need of the machine.
        time.sleep(0.2)
        return False

    wait_for(
        all_stored,
        what="the acknowledged events to be in the store",
        deadline=deadline,
    )


def judge(
    server: Server,
    acknowledged: Iterable[str],
    sent: Iterable[str],
    *,
    profiles: bool = True,
    choosers: str | None = None,
) -> None:
    """Check that the store has each acknowledged event exactly once, nothing that was never sent,
    and that the profiles are the merge of the stored events.

    :param profiles: whether to look at the profiles.
    :param choosers: the beginning of the ids of users who only made choices.
    """
    events: list[dict[str, Any]] = server.export()
    check_exactly_once([event["messageId"] for event in events], set(acknowledged), set(sent))
    if not profiles:
        return
    users = sorted(server.export("users"), key=lambda user: str(user["userId"]))
    if choosers is not None:
        users = [user for user in users if not user["userId"].startswith(choosers)]
    _same(users, expected_users(events))
    groups = sorted(server.export("groups"), key=lambda group: str(group["groupId"]))
    _same(groups, expected_groups(events))


def _same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    pairs = itertools.zip_longest(found, expected)
    different = [pair for pair in pairs if pair[0] != pair[1]]
    assert not different, f"{len(different)} differ, such as {different[:1]}"
