# SPDX-License-Identifier: Apache-2.0
"""How a command fails when the operating system refuses something."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.commands import run
from support.sqlite import new_store


def engage(folder: Path, arguments: str, redirected: str = "") -> tuple[int, str]:
    """Return the exit status and standard error."""
    command = f'exec "{sys.executable}" -m engage {arguments} {redirected}'
    done = subprocess.run(
        ["sh", "-c", command], cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("keys", "add", "--id", "ios"), ""),
        (("keys", "disable", "website"), "disabled"),
        (("dead-letters", "list"), ""),
        (("dead-letters", "show", "0" * 32), "the workspace 'acme' has no dead letter"),
        (("dead-letters", "check", "0" * 32), "the workspace 'acme' has no dead letter"),
        (("dead-letters", "replay", "0" * 32), "the workspace 'acme' has no dead letter"),
        (("dead-letters", "delete", "0" * 32), "0 dead letters deleted"),
        (("users", "show", "ann"), "the workspace 'acme' has no user"),
        (("users", "remove-trait", "ann", "plan"), "the workspace 'acme' has no user"),
    ],
)
def test_the_only_workspace_is_the_default(
    tmp_path: Path, arguments: tuple[str, ...], shown: str
) -> None:
    config = new_store(tmp_path)
    result = run(*arguments, "--config", config)
    assert result.stderr == "engage: choose one with --workspace: acme, other\n"
    assert (result.exit_code, result.stdout) == (1, "")
    text = config.read_text("utf-8")
    config.write_text(text.replace('[[workspaces]]\nid = "other"\n', ""), encoding="utf-8")
    result = run(*arguments, "--config", config)
    assert shown in result.output
    assert "--workspace" not in result.output


def test_a_command_fails_when_standard_output_is_full(tmp_path: Path) -> None:
    assert engage(tmp_path, "init")[0] == 0
    for command in ("export events", "check"):
        assert engage(tmp_path, command, ">&-") == (1, "engage: standard output is closed\n")
    if Path("/dev/full").exists():
        assert engage(tmp_path, "check", ">/dev/full") == (1, "engage: No space left on device\n")


def test_a_command_names_the_file_that_it_cannot_open(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    assert engage(tmp_path, "init taken/below") == (1, "engage: taken/below: Not a directory\n")


@pytest.mark.parametrize("arguments", ["check --config", "copy --to other.toml --from"])
def test_an_unreadable_config_is_a_failure_and_not_wrong_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    """The config belongs to root and the command runs as another user; root can read any file."""
    path = tmp_path / "engage.toml"
    path.write_text("")
    monkeypatch.setattr(os, "access", lambda *_: False)

    opened = Path.open

    def refuse(file: Path, *arguments: Any, **options: Any) -> Any:
        if file == path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
        return opened(file, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    done = run(*arguments.split(), path)
    assert (done.exit_code, done.stderr) == (
        1,
        f"engage: {path} cannot be read: Permission denied\n",
    )


@pytest.mark.parametrize("option", ["w=1", "w=0", "tlss=true"])
def test_a_command_names_the_whole_key_of_a_wrong_storage_option(
    tmp_path: Path, option: str
) -> None:
    path = tmp_path / "engage.toml"
    path.write_text(
        f'[storage.mongo]\nurl = "mongodb://localhost/engage?{option}"\n[[workspaces]]\nid = "a"\n'
    )
    done = run("check", "--config", path)
    assert done.exit_code == 1
    assert done.stderr.startswith(f"engage: {path}: storage.mongo.url: ")
