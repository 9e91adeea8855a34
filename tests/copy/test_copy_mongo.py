# SPDX-License-Identifier: Apache-2.0
"""Copying between SQLite and MongoDB in both directions, and on the command line."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from engage.api import Kind, Subject, SubscriptionChange
from engage.cli import main
from engage.testing.factories import AWKWARD, TIME, event, identify, letter
from engage.testing.storage.stored_events import VALUES
from support import mongo
from support.sqlite import config_file, open_store

pytestmark = [pytest.mark.mongo, pytest.mark.long]

KINDS = ("events", "users", "groups", "subscriptions", "dead-letters")
#: Arrays in arrays: some servers cannot store them, and refuse the event.
STORABLE = {name: value for name, value in VALUES.items() if name != "list in a list"}


def mongo_config(folder: Path, name: str, server: mongo.MongoServer) -> Path:
    """Write a config with a new database on a server."""
    path = config_file(folder, name)
    before, _, rest = path.read_text().partition("[storage]")
    tables = rest[rest.index("[[workspaces]]") :]
    url = server.url()
    path.write_text(f'{before}[storage]\n[storage.mongo]\nurl = "{url}"\n{tables}')
    return path


def fill(path: Path) -> None:
    """Put records of every kind, and awkward ones, into a store."""

    group = event("g1", type="group", user_id="ann", groupId="a.b$", traits=STORABLE, received=600)

    async def write() -> None:
        async with open_store(path) as opened:
            store: Any = opened
            await store.write([event(f"m{n}", user_id=f"u{n % 7}", at=n) for n in range(450)])
            await store.write([event(text, user_id=text, at=500, received=500) for text in AWKWARD])
            await store.write(
                [
                    identify("i1", "ann", 1, received=600, traits=STORABLE, anonymous_id="x"),
                    group,
                    event("m1", workspace="other", origin="twilio", user_id="ann", received=600),
                ]
            )
            for number, choice in enumerate((True, False, True)):
                await store.apply(
                    SubscriptionChange(
                        id=f"c{number}",
                        workspace_id="acme",
                        subject=Subject(Kind.USER, "ann"),
                        choices={"news": choice, "sms": True},
                        at=TIME + number,
                        how="api",
                    )
                )
            await store.put([letter("d1"), letter("d2", item=b"\xff\x00", headers=[("A", "b")])])

    asyncio.run(write())


def exported(path: Path) -> dict[str, list[str]]:
    """Return what ``engage export`` writes for each kind; kinds without an order are sorted."""
    found = {}
    for kind in KINDS:
        result = CliRunner().invoke(main, ["export", kind, "--config", str(path)])
        assert result.exit_code == 0, result.stderr
        lines = result.stdout.splitlines()
        found[kind] = lines if kind == "events" else sorted(lines)
    return found


def copied(source: Path, target: Path) -> dict[str, str]:
    """Copy, check that everything arrived, and return the counts of each kind."""
    result = CliRunner().invoke(main, ["copy", "--from", str(source), "--to", str(target)])
    assert (result.exit_code, result.stderr) == (0, "")
    return dict(line.split("\t", 1) for line in result.stdout.splitlines())


@pytest.mark.parametrize("kind", mongo.kinds())
def test_a_copy_there_and_back_is_exact(tmp_path: Path, kind: str) -> None:
    server = mongo.shared(kind)
    source = config_file(tmp_path, "source")
    middle = mongo_config(tmp_path, "middle", server)
    target = config_file(tmp_path, "target")
    fill(source)
    before = exported(source)
    assert len(before["events"]) == 450 + len(AWKWARD) + 3

    counts = copied(source, middle)
    assert (
        counts["events"] == f"copied={len(before['events'])}\tduplicate=0\tconflicting=0\trefused=0"
    )
    # One more for the choice that was repeated.
    assert counts["subscription changes"] == "copied=4\tduplicate=0\tconflicting=0\trefused=0"
    assert counts["dead letters"] == "copied=2\tduplicate=0\tconflicting=0\trefused=0"
    assert exported(middle) == before, "an export does not tell which storage it came from"

    counts = copied(source, middle)
    assert (
        counts["events"] == f"copied=0\tduplicate={len(before['events'])}\tconflicting=0\trefused=0"
    )

    copied(middle, target)
    assert exported(target) == before
