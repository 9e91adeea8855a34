# SPDX-License-Identifier: Apache-2.0
"""Drives one of the three Python SDKs (their clients have one shape) by a plan on standard input.

Runs in a virtual environment of its own that has the SDK and nothing of engage. The plan is
``{"module", "host", "key", "options": {…}, "pause", "calls": [{"call", "arguments": {…}}]}``; a
``timestamp`` is ISO 8601, and ``pause`` the seconds from one call to the next. Prints ``{"errors":
[text, …]}``.
"""

import importlib
import json
import sys
import threading
import time
from datetime import datetime

plan = json.load(sys.stdin)
errors: list[str] = []
lock = threading.Lock()


def on_error(error: object, items: list[object]) -> None:
    with lock:
        errors.append(f"{error} ({len(items)} items)")


module = importlib.import_module(plan["module"])
client = module.Client(plan["key"], host=plan["host"], on_error=on_error, **plan["options"])
start = time.monotonic()
for number, call in enumerate(plan["calls"]):
    time.sleep(max(0, start + plan["pause"] * number - time.monotonic()))
    arguments = dict(call["arguments"])
    if "timestamp" in arguments:
        arguments["timestamp"] = datetime.fromisoformat(arguments["timestamp"])
    getattr(client, call["call"])(**arguments)
client.flush()
client.shutdown()
json.dump({"errors": errors}, sys.stdout)
