# SPDX-License-Identifier: Apache-2.0
"""The server SDKs under test: how each is started, and how it behaves."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.node import node, node_project
from support.venv import venv

HERE = Path(__file__).parent

EVERY_CALL = ("identify", "track", "page", "screen", "group", "alias")

#: Seconds after which a driver that still runs is a failure.
PATIENCE = 120


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sdk:
    """One published SDK."""

    name: str
    #: ``python`` or ``node``.
    language: str
    #: The Python module, or the npm package.
    module: str
    #: Options of its client under which tests need not wait for timers.
    options: Mapping[str, Any]
    #: The option that turns gzip on or off, if it has one.
    gzip: str | None = None
    calls: Sequence[str] = EVERY_CALL
    #: Whether it sends again after a 503 or a lost answer.
    retries: bool = True
    #: Name and version that it puts in ``context.library``; ``None``: it sends no context.
    library: tuple[str, str] | None = None
    #: Whether a call's own time can be given.
    has_times: bool = True
    #: Whether it puts ``sentAt`` on its batches, so that clock skew can be corrected.
    sends_sent_at: bool = True
    #: Where the traits of an identify call go on the wire.
    traits_in_context: bool = False

    def __str__(self) -> str:
        return self.name

    def start(
        self,
        url: str,
        key: str,
        calls: Sequence[Mapping[str, Any]],
        *,
        options: Mapping[str, Any] | None = None,
        example: str | None = None,
        pause: float = 0,
    ) -> subprocess.Popen[str]:
        """Start a program that makes the calls, flushes and ends.

        :param calls: ``{"call": name, …}`` with camelCase names of the arguments.
        :param example: for Node, the code that makes the client, in place of the options.
        :param pause: seconds from one call to the next.
        """
        plan: dict[str, Any] = {
            "host": url,
            "key": key,
            "example": example,
            "pause": pause,
            "options": {**self.options, **(options or {})},
        }
        if self.language == "python":
            command = [str(venv(HERE / f"python/{self.name}.txt")), str(HERE / "python/driver.py")]
            plan["module"] = self.module
            plan["calls"] = [{"call": call["call"], "arguments": _snake(call)} for call in calls]
            environment = None
        else:
            project = node_project(HERE / "node")
            command = [str(node()), str(HERE / "node/driver.cjs")]
            plan["sdk"] = self.module
            plan["calls"] = [
                {"call": call["call"], "arguments": {k: v for k, v in call.items() if k != "call"}}
                for call in calls
            ]
            environment = {"NODE_PATH": str(project / "node_modules"), "PATH": "/usr/bin:/bin"}
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert process.stdin
        process.stdin.write(json.dumps(plan))
        process.stdin.close()
        process.stdin = None
        return process

    def finish(self, process: subprocess.Popen[str]) -> list[str]:
        """Wait for a program made by :meth:`start`.

        :return: the errors that the SDK told its error handler of.
        """
        try:
            output, trouble = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            output, trouble = process.communicate()
            raise AssertionError(f"{self} did not end: {output} {trouble}") from None
        assert process.returncode == 0, f"{self}: {output}\n{trouble}"
        errors: list[str] = json.loads(output)["errors"]
        return errors

    def run(self, url: str, key: str, calls: Sequence[Mapping[str, Any]], **more: Any) -> list[str]:
        """Start and finish."""
        return self.finish(self.start(url, key, calls, **more))


def _snake(call: Mapping[str, Any]) -> dict[str, Any]:
    names = {
        "userId": "user_id",
        "anonymousId": "anonymous_id",
        "groupId": "group_id",
        "previousId": "previous_id",
        "messageId": "message_id",
    }
    return {names.get(name, name): value for name, value in call.items() if name != "call"}


_PYTHON = {"upload_interval": 0.2, "max_retries": 10}
SDKS = [
    Sdk(
        name="segment-analytics-python",
        language="python",
        module="segment.analytics",
        options=_PYTHON,
        gzip="gzip",
        library=("analytics-python", "2.4.0"),
    ),
    Sdk(
        name="rudder-sdk-python",
        language="python",
        module="rudderstack.analytics",
        options=_PYTHON,
        gzip="gzip",
        library=("analytics-python", "2.1.9"),
        traits_in_context=True,
    ),
    Sdk(
        name="analytics-python",
        language="python",
        module="analytics",
        options=_PYTHON,
        gzip="gzip",
        library=("analytics-python", "1.4.post1"),
    ),
    Sdk(
        name="segment-analytics-node",
        language="node",
        module="@segment/analytics-node",
        options={"flushInterval": 200},
        library=("@segment/analytics-node", "3.1.0"),
    ),
    Sdk(
        name="rudder-sdk-node",
        language="node",
        module="@rudderstack/rudder-sdk-node",
        options={"flushInterval": 60000, "flushAt": 100},
        gzip="gzip",
        library=("analytics-node", "3.0.13"),
    ),
    Sdk(
        name="analytics-node",
        language="node",
        module="analytics-node",
        options={"flushInterval": 60000, "flushAt": 100, "retryCount": 6},
        library=("analytics-node", "6.2.0"),
    ),
    Sdk(
        name="dittofeed-sdk-node",
        language="node",
        module="@dittofeed/sdk-node",
        options={},
        calls=("identify", "track", "page", "screen"),
        retries=False,
        library=None,
        has_times=False,
        sends_sent_at=False,
    ),
]

if sys.platform == "win32":  # pragma: no cover
    raise RuntimeError("the SDK tests need a Unix")
