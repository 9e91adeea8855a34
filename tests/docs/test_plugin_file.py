# SPDX-License-Identifier: Apache-2.0
"""The transform of docs/write-a-plugin.md, as one file that the config names."""

from __future__ import annotations

import re
from pathlib import Path

from support.server_process import Server, config_text

PAGE = Path(__file__).resolve().parents[2] / "docs/write-a-plugin.md"


def test_the_server_runs_a_transform_of_one_file(tmp_path: Path) -> None:
    text = PAGE.read_text("utf-8")
    shown = re.findall(r"^```[a-z]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (source,) = [block for block in shown if "def engage_register_transform(" in block]
    (config,) = [block for block in shown if "[[transforms]]" in block]
    (tmp_path / "drop.py").write_text(source, "utf-8")
    with Server(tmp_path, config_text() + config).start() as server:
        assert server.track("Heartbeat", event="Heartbeat").status_code == 200
        assert server.track("other").status_code == 200
        assert [event["messageId"] for event in server.export()] == ["other"]
