# SPDX-License-Identifier: Apache-2.0
"""A server is upgraded under load, and the operator goes back, as docs/running.md describes.

By default, this engage is upgraded to a made-up next version of itself, whose store only it can
read. ``.ci/upgrade`` sets two environment variables to the Python of an environment each:
``ENGAGE_OLD`` has the engage to upgrade from, and ``ENGAGE_NEW`` the one to upgrade to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from support.exactly_once import check_exactly_once
from support.server_process import Server, config_text
from support.traffic import Request, Sender, Traffic, expected_users, send_all
from support.waiting import DEADLINE

MADE_UP = Path(__file__).resolve().parents[1] / "support/made_up_version"


@dataclasses.dataclass(frozen=True)
class Program:
    """An installed engage.

    :param path: additional folder of its modules.
    """

    python: str
    path: str = ""

    @property
    def environment(self) -> Mapping[str, str]:
        # Without the safe path, Python would import engage from the current folder.
        return {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": self.path}

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Python and return what it wrote."""
        return subprocess.run(
            [self.python, *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )

    def versions(self) -> tuple[str, int, int]:
        """Return the version of engage, that of its stores, and the oldest that can read them."""
        code = (
            "import engage, json; from engage_plugins.sqlite import schema;"
            "print(json.dumps([engage.__version__, schema.VERSION, schema.MIN_READER]))"
        )
        release, version, least = json.loads(self.run("-c", code).stdout)
        return release, version, least

    def server(self, folder: Path) -> Server:
        """Return a server, on the store in a folder if there is one."""
        server = Server(folder, config_text(workers=2), environment=self.environment)
        server.python = self.python
        return server

    def export(self, server: Server, kind: str) -> list[dict[str, Any]]:
        """Return the records of a kind in the store."""
        done = self.run("-m", "engage", "export", kind, "--config", str(server.config))
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]


OLD = Program(os.environ.get("ENGAGE_OLD", sys.executable))
NEW = Program(
    os.environ.get("ENGAGE_NEW", OLD.python), "" if "ENGAGE_NEW" in os.environ else str(MADE_UP)
)


def ids(requests: Iterable[Request]) -> set[str]:
    """Return the message ids of requests."""
    return {message_id for request in requests for message_id in request.message_ids}


def load(server: Server, seed: int, end: str) -> Sender:
    """Let clients send to a server until it ends; return what they sent.

    :param end: ``stop`` or ``kill``.
    """
    sender = Sender(("127.0.0.1", server.port), Traffic(seed))
    sender.start()
    sender.wait_for(acknowledged=100)
    if end == "stop":
        assert server.stop() == 0
    else:
        server.kill()
    sender.join()
    assert not sender.wrong
    return sender


def check(
    program: Program,
    server: Server,
    acknowledged: Iterable[Request],
    unanswered: Iterable[Request] = (),
) -> None:
    """Check that the store has each acknowledged event once, and the users that follow."""
    events = program.export(server, "events")
    stored = [event["messageId"] for event in events]
    check_exactly_once(stored, ids(acknowledged), ids(acknowledged) | ids(unanswered))
    users = program.export(server, "users")
    assert sorted(users, key=lambda user: str(user["userId"])) == expected_users(events)


@pytest.mark.long
@pytest.mark.parametrize("end", ["stop", "kill"])
def test_an_upgrade_under_load_and_the_way_back_lose_nothing(tmp_path: Path, end: str) -> None:
    release, version, least = NEW.versions()
    _, old_version, _ = OLD.versions()
    saved = tmp_path / "saved.db"
    traffic = Traffic(0)
    first = [traffic.request() for _ in range(50)]

    with OLD.server(tmp_path).start() as server:
        send_all(("127.0.0.1", server.port), first)
        with contextlib.closing(sqlite3.connect(server.database)) as db:
            db.execute("VACUUM INTO ?", (str(saved),))
        before = load(server, 1, end)
    with NEW.server(tmp_path).start() as server:
        send_all(("127.0.0.1", server.port), before.unanswered)
        after = load(server, 2, end)
        # Its clean end makes the store one file.
        assert server.start().stop() == 0
    there = [*first, *before.acknowledged, *before.unanswered, *after.acknowledged]
    check(NEW, server, there, after.unanswered)

    if least <= old_version:
        with OLD.server(tmp_path).start() as server:
            again = load(server, 3, "stop")
        there += again.acknowledged
        check(OLD, server, there, [*after.unanswered, *again.unanswered])
        return
    content = server.database.read_bytes()
    refused = OLD.run("-m", "engage", "serve", "--config", str(server.config))
    assert refused.returncode == 1
    assert (
        f"by a newer version of engage (store version {version}, readable from version {least} on; "
        f"this is version {old_version}): use engage {release} or newer"
    ) in refused.stderr
    assert server.database.read_bytes() == content
    shutil.copyfile(saved, server.database)
    with OLD.server(tmp_path).start() as server:
        again = load(server, 3, "stop")
    check(OLD, server, [*first, *again.acknowledged], again.unanswered)
