# SPDX-License-Identifier: Apache-2.0
"""schemathesis against a live server: every answer is one that the API description has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.server_process import Server

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

HERE = Path(__file__).parent

#: How many requests of each kind schemathesis makes for an operation.
EXAMPLES = int(os.environ.get("ENGAGE_SCHEMATHESIS_EXAMPLES", "6"))


def test_schemathesis_finds_no_undescribed_answer(engage: Server, tmp_path: Path) -> None:
    """It sends valid and invalid data to every operation; a 5xx is a failure, too."""
    program = Path(sys.executable).with_name("schemathesis")
    done = subprocess.run(
        [
            *(program, "--config-file", HERE / "schemathesis.toml"),
            *("run", f"{engage.url}/openapi.json"),
            *("--url", engage.url, "--auth", f"{engage.key}:", "--mode", "all"),
            *("--phases", "examples,coverage,fuzzing", "--max-examples", str(EXAMPLES)),
            *("--generation-deterministic", "--no-color"),
            *("--request-timeout", "120", "--suppress-health-check", "all"),
        ],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(HERE),
            "SCHEMATHESIS_HOOKS": "schemathesis_hooks",
        },
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert engage.process is not None
    assert engage.process.poll() is None
    assert "internal_error" not in engage.log()
