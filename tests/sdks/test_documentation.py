# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/clients.md are run unchanged."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from sdks.catalogue import HERE, SDKS, Sdk

from support.clients_page import PAGE, example
from support.identity import SECRET, hash_of, start_verifying
from support.node import node, node_project
from support.server_process import Server
from support.venv import venv

pytestmark = [pytest.mark.sdk, pytest.mark.timeout(300)]

PYTHON_CALL = '\nanalytics.track("u", "Documented")'
NODE_END = {
    "@segment/analytics-node": "await analytics.closeAndFlush();",
    "@rudderstack/rudder-sdk-node": "await new Promise((done) => analytics.flush(done));",
    "analytics-node": "await new Promise((done) => analytics.flush(done));",
    "@dittofeed/sdk-node": "await analytics.flush();",
}


def run(sdk: Sdk, engage: Server, calls: str = "") -> None:
    """Run the example of an SDK.

    :param calls: what it calls; by default, it sends one event.
    """
    if sdk.language == "python":
        code = example(sdk.name, engage) + (calls or PYTHON_CALL) + "\nanalytics.shutdown()\n"
        command = [str(venv(HERE / f"python/{sdk.name}.txt")), "-c", code]
        environment = None
    else:
        code = example(sdk.module, engage)
        if "DittofeedSdk" in code:
            code += "\nconst analytics = DittofeedSdk;"
        call = calls or 'analytics.track({ userId: "u", event: "Documented" });'
        if sdk.module == "analytics-node":
            # It sends the first event at once, and its flush does not wait for that.
            call = "await new Promise((done) => {" + call.replace(" });", " }, done);", 1) + "});"
        code = f"(async () => {{ {code}\n{call}\n{NODE_END[sdk.module]} process.exit(0); }})()"
        command = [str(node()), "-e", code]
        modules = node_project(HERE / "node") / "node_modules"
        environment = {"NODE_PATH": str(modules), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("sdk", SDKS, ids=str)
def test_the_example_of_an_sdk_works(engage: Server, sdk: Sdk) -> None:
    run(sdk, engage)
    [event] = engage.export("events")
    assert event["event"] == "Documented"
    assert event["userId"] == "u"


@pytest.mark.parametrize("sdk", SDKS, ids=str)
def test_the_lines_for_verified_users_work(tmp_path: Path, sdk: Sdk) -> None:
    user_hash = hash_of("u-1")
    with start_verifying(tmp_path) as engage:
        if sdk.language == "python":
            calls = f'\nuser_hash = "{user_hash}"\n' + example("userHash in Python", engage)
        else:
            calls = f'const userHash = "{user_hash}";\n' + example("userHash in Node", engage)
        run(sdk, engage)  # without a hash
        run(sdk, engage, calls)
        events = engage.export("events")
        assert {(event["type"], event["userId"]) for event in events} == {
            ("identify", "u-1"),
            ("track", "u-1"),
        }
        assert all(event["context"]["engage"] == {"verified": True} for event in events)
        assert user_hash not in str(events)


def test_the_line_that_makes_a_hash_in_node_works() -> None:
    page = (PAGE.parent / "events.md").read_text("utf-8")
    lines = next(part for part in page.split("```") if "const userHash" in part)
    names = f"const secret = {json.dumps(SECRET)}, userId = 'ü';"
    command = [
        str(node()),
        "-e",
        f"{names}\n{lines.removeprefix('js')}\nprocess.stdout.write(userHash)",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == hash_of("ü"), done.stderr


def test_every_sdk_has_its_version_in_the_table() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    for sdk in SDKS:
        name = sdk.name if sdk.language == "python" else sdk.module
        if sdk.language == "python":
            pinned = (HERE / f"python/{sdk.name}.txt").read_text()
        else:
            pinned = (HERE / "node/package.json").read_text()
        [row] = [row for row in rows if name in row.split("|")[1].replace(" ", "").split(",")]
        version = row.split("|")[2].strip()
        assert f"{name}=={version}" in pinned or f'"{name}": "{version}"' in pinned
