# SPDX-License-Identifier: Apache-2.0
"""``engage load``: what it answers to wrong arguments and configs, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import Result

from support.commands import run
from support.server_process import config_text


def load(folder: Path, *arguments: str, log: str = "") -> Result:
    """Run the command with a config."""
    config = folder / "engage.toml"
    config.write_text(config_text(config_extra=log))
    return run("load", "--config", config, *arguments)


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ("", "there is no [log] section, so there is nothing to load"),
        ('[log]\nbackend = "none"\n', "log.backend: no log 'none' is installed"),
        ('[log]\nbackend = "kafka"\n[log.kafka]\nservers = "k1"\n', "log.kafka.servers"),
        ('[log]\nbackend = "kafka"\nloaders = 0\n', "log.loaders"),
    ],
)
def test_a_wrong_config_is_reported_in_one_line(tmp_path: Path, log: str, message: str) -> None:
    for arguments in ((), ("--from", "2020-01-01")):
        done = load(tmp_path, *arguments, log=log)
        assert done.exit_code == 1
        [line] = done.output.splitlines()
        assert line.startswith("engage: ")
        assert message in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--from", "yesterday"), "must be a time in RFC 3339"),
        (("--from", ""), "must be a time in RFC 3339"),
        (("--from", "2020-13-01"), "must be a time in RFC 3339"),
        (("--from", "9999-12-31T23:59:59-23:00"), "is in the future"),
        (("--from", "2020-01-01", "--workers", "2"), "--workers and --from cannot be combined"),
        (("--workers", "0"), "is not in the range"),
    ],
)
def test_wrong_arguments_are_reported(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = load(tmp_path, *arguments)
    assert done.exit_code == 2
    assert message in done.output
