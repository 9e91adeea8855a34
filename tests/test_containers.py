# SPDX-License-Identifier: Apache-2.0
"""Dockerfile and compose.yaml are only read here, because there may be no container engine."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from engage.cli import main
from engage.config import load
from engage.registry import load_plugins

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).resolve().parents[1]


def instructions() -> list[tuple[str, str]]:
    """Return (instruction, arguments) of the Dockerfile."""
    text = (ROOT / "Dockerfile").read_text("utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def compose() -> Any:
    """Return the contents of compose.yaml."""
    return yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))


def test_the_dockerfile_has_known_instructions() -> None:
    known = {"FROM", "COPY", "RUN", "USER", "WORKDIR", "VOLUME", "ENV", "EXPOSE", "HEALTHCHECK"}
    assert {name for name, _ in instructions()} == known | {"CMD"}
    for name, arguments in instructions():
        if name in ("CMD", "HEALTHCHECK"):
            assert json.loads(arguments.removeprefix("CMD "))
        else:
            assert shlex.split(arguments)


def test_the_image_has_the_files_that_the_wheel_needs() -> None:
    """.dockerignore lets them through, and every file that it lets through exists."""
    lines = (ROOT / ".dockerignore").read_text("utf-8").split()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    assert lines[0] == "*"
    assert allowed == {"engage", "plugins", "schemas", "pyproject.toml", "README.md", "LICENSE"}
    assert all((ROOT / name).exists() for name in allowed)


def test_the_image_has_a_supported_python() -> None:
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    versions = {re.match(r"python:(3\.\d+)-slim", image)[1] for image in froms()}  # type: ignore[index]
    for version in versions:
        assert f"Programming Language :: Python :: {version}" in project


def froms() -> list[str]:
    """Return the images that the Dockerfile starts from."""
    return [arguments for name, arguments in instructions() if name == "FROM"]


def test_the_commands_are_commands_of_engage() -> None:
    commands = [
        json.loads(dict(instructions())["CMD"]),
        compose()["services"]["engage"]["command"],
    ]
    for command in commands:
        assert command[:2] == ["engage", "serve"]
        # Only published ports reach a container, so its console listens on all its addresses.
        assert command[command.index("--console-host") + 1] == "0.0.0.0"
        result = CliRunner().invoke(main, [*command[1:], "--config", "/nowhere/engage.toml"])
        # Wrong usage would be 2: only the config is missing.
        assert result.exit_code == 1
        assert "does not exist" in result.stderr


def test_the_parts_of_compose_fit_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = compose()
    services = document["services"]
    assert services["engage"]["depends_on"].keys() <= services.keys()
    for service in services.values():
        for volume in service.get("volumes", ()):
            assert volume.split(":")[0] in document["volumes"]
        for config in service.get("configs", ()):
            assert config["source"] in document["configs"]
    target = services["engage"]["configs"][0]["target"]
    environment = next(text for name, text in instructions() if name == "ENV")
    assert f"ENGAGE_CONFIG={target}" in environment.split()


def test_the_config_in_compose_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "engage.toml"
    content = compose()["configs"]["engage"]["content"]
    path.write_text(content.replace("$$", "$"))
    variables = compose()["services"]["engage"]["environment"]
    for name in variables:
        monkeypatch.setenv(name, "k")
    config = load(path)
    load_plugins().check(config)
    assert config.storage.backend == "mongo"
    assert config.console is not None
    assert (
        f"127.0.0.1:{config.console.port}:{config.console.port}"
        in (compose()["services"]["engage"]["ports"])
    )
    assert config.workspaces[0].write_keys[0].key == "k"
