# SPDX-License-Identifier: Apache-2.0
"""The units of docs/running.md, as systemd itself reads them; none is started."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.checkout, pytest.mark.long]

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/running.md").read_text("utf-8")
#: Name of a file in /etc/systemd/system → its text.
UNITS = dict(re.findall(r"^```ini\n# /etc/systemd/system/(\S+)\n(.*?)^```$", PAGE, re.M | re.S))
#: In tenths: `systemd-analyze security` shows exposures from 0 to 10.
MOST_EXPOSED = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The units in one folder, with programs that this machine has."""
    if shutil.which("systemd-analyze") is None:
        pytest.fail("systemd-analyze is not installed (Debian: apt-get install systemd)")
    path = tmp_path_factory.mktemp("units")
    for name, text in UNITS.items():
        (path / name).write_text(
            text.replace("=/opt/engage/bin/engage ", f"={sys.executable} -m engage ").replace(
                "User=engage", "User=daemon"
            )
        )
    return path


@pytest.mark.parametrize("name", UNITS)
def test_systemd_reads_it_without_a_warning(folder: Path, name: str) -> None:
    assert {"engage.service", "engage-backup.service", "engage-backup.timer"} <= UNITS.keys()
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", folder / name],
        capture_output=True,
        text=True,
        check=False,
    )
    # It also looks at units of the machine, and at its own state.
    lines = [line for line in done.stderr.splitlines() if f"{folder}" in line or name in line]
    assert lines == []
    assert done.returncode == 0, done.stderr


def test_the_service_has_what_it_needs_and_little_else(folder: Path) -> None:
    done = subprocess.run(
        [
            *("systemd-analyze", "security", "--offline=true", "--no-pager"),
            *(f"--threshold={MOST_EXPOSED}", folder / "engage.service"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
