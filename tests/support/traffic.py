# SPDX-License-Identifier: Apache-2.0
"""Random requests to a server that is killed, and what must be in the store afterwards."""

from __future__ import annotations

import base64
import http.client
import json
import queue
import random
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from support.server_process import KEY
from support.waiting import DEADLINE, wait_for


@dataclass(frozen=True)
class Request:
    """A request, which may be sent again."""

    path: str
    body: bytes
    message_ids: tuple[str, ...]
    method: str = "POST"
    #: In addition to the usual ones.
    headers: Mapping[str, str] = field(default_factory=dict)


class Traffic:
    """Random requests of every kind about few users, so that their profiles change often.

    :param seed: the same seed makes the same requests.
    """

    USERS, GROUPS, TRAITS = 12, 4, 5

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._count = 0
        self._seed = seed

    def request(self) -> Request:
        """Make the next request: a single event, or a batch of up to 12."""
        if self._random.random() < 0.6:
            event = self._event()
            path = f"/v1/{event['type']}"
            return Request(path, json.dumps(event).encode(), (event["messageId"],))
        events = [self._event() for _ in range(self._random.randint(1, 12))]
        ids = tuple(event["messageId"] for event in events)
        return Request("/v1/batch", json.dumps({"batch": events}).encode(), ids)

    def _event(self) -> dict[str, Any]:
        pick = self._random
        self._count += 1
        # Few different times, so that events have the same time or arrive late.
        at = datetime(2024, 5, 1, tzinfo=UTC) + timedelta(milliseconds=pick.randrange(200))
        event: dict[str, Any] = {
            "type": pick.choice(
                ["track", "track", "page", "identify", "identify", "group", "alias"]
            ),
            "messageId": f"m-{self._seed}-{self._count}",
            "userId": f"user-{pick.randrange(self.USERS)}",
            "timestamp": at.isoformat(),
        }
        traits = {
            f"t{number}": pick.choice([None, True, self._count, "x" * pick.randrange(30)])
            for number in pick.sample(range(self.TRAITS), 2)
        }
        if event["type"] == "track":
            event |= {"event": "Ordered", "properties": {"n": self._count}}
        elif event["type"] == "identify":
            event["traits"] = traits
        elif event["type"] == "group":
            event |= {"groupId": f"group-{pick.randrange(self.GROUPS)}", "traits": traits}
            if pick.random() < 0.3:
                event["assigned"] = False
        elif event["type"] == "alias":
            event["previousId"] = f"before-{pick.randrange(40)}"
        if pick.random() < 0.3:
            event["anonymousId"] = f"anonymous-{pick.randrange(40)}"
        return event


class Slowly(Traffic):
    """Random requests at a rate that leaves the machine to those who load them."""

    pause = 0.02

    def request(self) -> Request:
        time.sleep(self.pause)
        return super().request()


class VerySlowly(Slowly):
    """For FerretDB, which stores few events a second that change profiles."""

    pause = 0.2


@dataclass
class Sender:
    """Sends requests over several connections until the server has gone."""

    address: tuple[str, int]
    traffic: Traffic
    connections: int = 6
    acknowledged: list[Request] = field(default_factory=list)
    unanswered: list[Request] = field(default_factory=list)
    #: Answers other than 200 and 503.
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._run, daemon=True) for _ in range(self.connections)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def wait_for(self, *, acknowledged: int) -> None:
        """Wait until this number of requests has been acknowledged."""
        wait_for(lambda: len(self.acknowledged) >= acknowledged, what="acknowledged requests")

    def join(self) -> None:
        """Wait until every connection has noticed that the server is gone."""
        for thread in self._threads:
            thread.join(DEADLINE)
            assert not thread.is_alive(), "a connection waits although the server is gone"

    def stop(self) -> None:
        """Stop after the open requests, while the server runs."""
        self._stopping = True
        self.join()

    def _run(self) -> None:
        connection = http.client.HTTPConnection(*self.address, timeout=DEADLINE)
        while not self._stopping:
            with self._lock:
                request = self.traffic.request()
            try:
                acknowledged, answer = send(connection, request)
            except (OSError, http.client.HTTPException):
                with self._lock:
                    self.unanswered.append(request)
                connection.close()
                return
            with self._lock:
                (self.acknowledged if acknowledged else self.unanswered).append(request)
                if not acknowledged and not answer.startswith("503"):
                    self.wrong.append(answer)
            if not acknowledged:
                # As a client does. Otherwise a fast refusal makes thousands of requests, which
                # a slow store must take afterwards.
                time.sleep(0.2)
        connection.close()


def send(connection: http.client.HTTPConnection, request: Request) -> tuple[bool, str]:
    """Send a request, and return whether it was acknowledged, and the status and the body.

    :raises OSError: if there is no answer, as ``http.client.HTTPException``.
    """
    token = base64.b64encode(f"{KEY}:".encode()).decode()
    headers = {"Authorization": f"Basic {token}", "Content-Type": "application/json"}
    connection.request(request.method, request.path, request.body, {**headers, **request.headers})
    response = connection.getresponse()
    answer = f"{response.status} {response.read()[:300]!r}"
    return response.status == 200, answer


def send_all(address: tuple[str, int], requests: Iterable[Request], connections: int = 4) -> None:
    """Send requests; every one must be acknowledged."""
    todo: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
    failures: list[str] = []
    for request in requests:
        todo.put(request)
    for _ in range(connections):
        todo.put(None)

    def run() -> None:
        connection = http.client.HTTPConnection(*address, timeout=DEADLINE)
        try:
            while (request := todo.get()) is not None:
                acknowledged, answer = send(connection, request)
                end = time.monotonic() + DEADLINE
                while answer.startswith("503") and time.monotonic() < end:
                    time.sleep(0.2)  # The disk of a busy machine may stall.
                    acknowledged, answer = send(connection, request)
                if not acknowledged:
                    failures.append(answer)
        except (OSError, http.client.HTTPException) as error:
            failures.append(repr(error))
        finally:
            connection.close()

    threads = [threading.Thread(target=run, daemon=True) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE)
    assert not failures, failures[:3]
    assert todo.empty()


# ---------------------------------------------------------------------------- what must be there
def expected_users(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what ``engage export users`` must print, sorted by id, for these exported events.

    Written only from the documentation, so that it shares no mistake with the server.
    """
    users: dict[str, dict[str, Any]] = {}
    links: dict[str, set[str]] = {}
    registers: dict[tuple[str, str, str], tuple[str, str, Any]] = {}
    for event in events:
        user = event.get("userId")
        if user is None:
            continue
        order = (event["timestamp"], event["messageId"])
        kind = event["type"]
        if kind in ("identify", "group", "alias"):
            seen = users.setdefault(
                user, {"createdAt": event["timestamp"], "updatedAt": event["timestamp"]}
            )
            seen["createdAt"] = min(seen["createdAt"], event["timestamp"])
            seen["updatedAt"] = max(seen["updatedAt"], event["timestamp"])
        if kind == "identify":
            for name, value in (event.get("traits") or {}).items():
                _set(registers, ("trait", user, name), order, value)
        if kind == "group":
            assigned = event.get("assigned") is not False
            _set(registers, ("group", user, event["groupId"]), order, assigned)
        for anonymous in (event.get("anonymousId"), event.get("previousId")):
            if anonymous is not None:
                links.setdefault(user, set()).add(anonymous)
    return [
        {
            "workspaceId": "acme",
            "userId": user,
            "traits": _values(registers, "trait", user),
            **seen,
            "anonymousIds": sorted(links.get(user, ())),
            "groups": sorted(
                group for group, is_in in _values(registers, "group", user).items() if is_in
            ),
        }
        for user, seen in sorted(users.items())
    ]


def expected_groups(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what ``engage export groups`` must print, sorted by id, for these exported events."""
    registers: dict[tuple[str, str, str], tuple[str, str, Any]] = {}
    groups = set()
    for event in events:
        if event["type"] == "group":
            groups.add(event["groupId"])
            for name, value in (event.get("traits") or {}).items():
                order = (event["timestamp"], event["messageId"])
                _set(registers, ("trait", event["groupId"], name), order, value)
    return [
        {"workspaceId": "acme", "groupId": group, "traits": _values(registers, "trait", group)}
        for group in sorted(groups)
    ]


Registers = dict[tuple[str, str, str], tuple[str, str, Any]]


def _set(
    registers: Registers, name: tuple[str, str, str], order: tuple[str, str], value: Any
) -> None:
    if name not in registers or registers[name][:2] < order:
        registers[name] = (*order, value)


def _values(registers: Registers, kind: str, owner: str) -> dict[str, Any]:
    return {
        name[2]: register[2] for name, register in registers.items() if name[:2] == (kind, owner)
    }
