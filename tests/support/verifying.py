# SPDX-License-Identifier: Apache-2.0
"""Stores of every kind of record, in which everything follows from the events, to be verified."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from engage.api import (
    CONFLICT,
    DAY_MS,
    OPERATOR_ORIGIN,
    Count,
    Event,
    StorageContext,
    SubscriptionChange,
    render_time,
)
from engage.config import load
from engage.pipeline.validate import Schemas
from engage.registry import load_plugins
from engage.testing import event
from engage.testing.factories import IDENTIFIERS, TIME, letter, suppression, user, visitor
from engage.verify import Report, Settings, verify
from support.server_process import Server
from support.traffic import Sender, Traffic

SCHEMAS = Schemas.load()


def full(message_id: str, **fields: Any) -> Event:
    """Return an event with the times of a stored one; see :func:`engage.testing.event`."""
    at, received = fields.get("at", 0), fields.get("received")
    received = at if received is None else received
    times: dict[str, Any] = {
        "receivedAt": render_time(TIME + received),
        "timestamp": render_time(TIME + at),
    }
    return event(message_id, **times, **fields)


def random_events(random_: random.Random, count: int, *, users: int = 20) -> list[Event]:
    """Return events of all types, with equal and late timestamps, shared anonymous ids, visitors,
    removed traits and decisions of operators."""
    found = []
    for number in range(count):
        received = number * 7
        at = received - random_.choice((0, 0, 0, 3, 50, 4000))
        user = random_.choice((None, *(f"u{random_.randrange(users)}" for _ in range(2))))
        anonymous: str | None = random_.choice((None, f"a{random_.randrange(users)}", "u1"))
        if user is None and anonymous is None:
            anonymous = f"a{random_.randrange(users)}"
        kind = random_.choice(("identify", "identify", "track", "page", "group", "alias"))
        fields: dict[str, Any] = {"origin": random_.choice(("api", "api", "twilio"))}
        if kind == "identify":
            values = (1, 1.0, True, None, "x", {"b": [1, {"a": -0.0}]}, f"v{number}")
            names = random_.sample(("plan", "a.b", "$x", "n", "q"), 2)
            fields["traits"] = {name: random_.choice(values) for name in names}
            if random_.random() < 0.5:
                fields["traits"]["email"] = f"E{random_.randrange(users)}@b.c "
                if random_.random() < 0.5:
                    fields["context"] = {"engage": {"trusted": ["email"]}}
        elif kind == "group":
            fields |= {"groupId": f"g{random_.randrange(4)}", "traits": {"size": number % 5}}
            fields |= {"assigned": random_.choice((True, True, False))}
        elif kind == "alias":
            user = user or "u2"
            fields["previousId"] = random_.choice((f"a{random_.randrange(users)}", "u3", "null"))
            if random_.random() < 0.2:
                fields |= {"origin": OPERATOR_ORIGIN, "linked": random_.choice((True, False))}
        elif kind == "page":
            fields["name"] = "Home"
        if kind == "identify" and random_.random() < 0.1:
            fields = {"origin": OPERATOR_ORIGIN, "removedTraits": ["plan", "email"]}
        fields |= {"user_id": user, "anonymous_id": anonymous}
        one = full(f"m{number:05}", type=kind, at=at, received=received, **fields)
        found.append(_with_name(one))
    return found


def _with_name(one: Event) -> Event:
    document = one.document()
    one.name = {"track": document.get("event"), "page": document.get("name")}.get(one.type)
    return one


async def fill(
    store: Any, *, seed: int = 1, count: int = 400, changes: int = 40
) -> Sequence[Event]:
    """Put records of every kind into an open store, and return the events."""
    random_ = random.Random(seed)
    events = random_events(random_, count)
    shuffled = random_.sample(events, len(events))
    for start in range(0, len(shuffled), 37):
        await store.write(shuffled[start : start + 37])
    for number in range(changes):
        who = random_.choice((f"u{random_.randrange(20)}", f"a{random_.randrange(20)}", "new"))
        choices = {name: random_.choice((True, False)) for name in ("news", "a.b")}
        await store.apply(
            SubscriptionChange(
                id=f"c{number}",
                workspace_id="acme",
                subject=visitor(who) if who.startswith("a") else user(who),
                choices=choices,
                at=TIME + number,
                how="api",
            )
        )
    conflict = {"messageId": events[3].message_id, "userId": "u1", "type": "track", "event": "E"}
    await store.keep(
        [
            letter("l1", errors=[{"pointer": "/é", "message": "x"}], envelope=b"{}"),
            letter("l2", origin="twilio", headers=[("a", "b")]),
            letter(
                "l3",
                reason=CONFLICT,
                message_id=events[3].message_id,
                origin=events[3].origin,
                item=orjson.dumps(conflict),
            ),
        ]
    )
    await store.suppress([suppression()])
    hour = time.time_ns() // 3_600_000_000_000 * 3_600_000
    labels = ("website", "track", "conflict")
    await store.put_counts(
        [
            Count(
                step=3600,
                at=hour,
                process="p",
                name="events",
                workspace_id="acme",
                labels=labels,
                value=1,
            )
        ]
    )
    return events


async def small(store: Any) -> None:
    """Put what the damage needs into a store."""
    await fill(store, count=60, changes=8)
    await store.write(
        [
            full("seen", user_id="ann", anonymous_id="a-1", at=900_000),
            full(
                "i",
                type="identify",
                user_id="ann",
                traits={"plan": "pro", "email": "A@b.c"},
                context={"engage": {"trusted": ["email"]}},
            ),
            full("g", type="group", user_id="ann", groupId="crew", traits={"size": 3}),
            full("v", type="identify", anonymous_id="a-1", traits={"n": 1}),
        ]
    )


def damage(path: Path, statements: list[str]) -> None:
    """Change the file of a store as nothing of engage would."""
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        for statement in statements:
            db.execute(statement)
        assert db.total_changes


def context_of(store: Any) -> StorageContext:
    """Return the context of a store that a test made without a config."""
    found: StorageContext = getattr(store, "context", None) or StorageContext(
        base_dir=None,  # type: ignore[arg-type]
        identifiers=IDENTIFIERS,
    )
    return found


async def verified(store: Any, *, repair: bool = False, **fields: Any) -> Report:
    """Verify an open store.

    :param repair: repair it too.
    :param fields: of :class:`Settings`.
    """
    values: dict[str, Any] = {
        "context": context_of(store),
        "visitors_days": None,
        "is_valid": SCHEMAS.is_valid,
        **fields,
    }
    settings = Settings(**values)
    return await verify(store, settings, clock=lambda: time.time_ns() // 1_000_000, repair=repair)


def healthy(report: Report) -> None:
    """Check that nothing differs, and that everything could be looked at."""
    assert (report.differences, report.failures) == ([], []), report.differences


async def verify_while_used(server: Server, *, rounds: int = 2) -> list[dict[str, Any]]:
    """Verify the store of a server that receives events as fast as it can, while old events expire.

    :param server: its config has ``events_days = 1``.
    :return: what ``engage verify --json`` printed in each round.
    """
    config = load(server.config)
    store = load_plugins().make_storage(config)
    await store.open(create=False)
    # Events of the last days, of users that are also in the traffic.
    now = time.time_ns() // 1_000_000
    old = [
        full(
            f"old{number}",
            type="identify",
            user_id=f"user-{number % 40}",
            anonymous_id=f"anonymous-{number % 50}",
            traits={"t1": number, f"old{number % 7}": number},
            at=now - TIME - 3 * DAY_MS + number * 60_000,
        )
        for number in range(4000)
    ]
    for start in range(0, len(old), 500):
        await store.write(old[start : start + 500])
    sender = Sender(("127.0.0.1", server.port), Traffic(1), connections=4)
    sender.start()

    async def expire() -> None:
        while True:
            await store.expire(time.time_ns() // 1_000_000 - DAY_MS, limit=25)
            await asyncio.sleep(0.05)

    found = []
    expiring = asyncio.create_task(expire())
    try:
        for number in range(rounds):
            await asyncio.to_thread(sender.wait_for, acknowledged=300 * (number + 1))
            command = [sys.executable, "-m", "engage", "verify", "--config", str(server.config)]
            done = await asyncio.to_thread(
                subprocess.run, [*command, "--json"], capture_output=True, text=True, check=False
            )
            assert (done.returncode, done.stderr) == (0, ""), done
            found.append(json.loads(done.stdout))
    finally:
        expiring.cancel()
        await asyncio.gather(expiring, return_exceptions=True)
        await asyncio.to_thread(sender.stop)
        await store.close()
    assert sender.wrong == []
    return found
