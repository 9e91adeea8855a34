# SPDX-License-Identifier: Apache-2.0
"""Dockerfile and compose.yaml are only read here, because there may be no container engine."""

from __future__ import annotations

import base64
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


#: The services of compose.yaml that are engage, and those that are Kafka.
SERVERS = ("engage", "serve-1", "serve-2")
LOADERS = ("load-1", "load-2")
BROKERS = ("kafka-1", "kafka-2", "kafka-3")


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


def test_the_image_can_use_kafka() -> None:
    (install,) = (text for name, text in instructions() if name == "RUN" and "pip" in text)
    assert install.endswith("'/source[kafka]'")


def test_the_commands_are_commands_of_engage() -> None:
    services = compose()["services"]
    serving = [json.loads(dict(instructions())["CMD"])]
    serving += [services[name]["command"] for name in SERVERS]
    for command in serving:
        assert command[:2] == ["engage", "serve"]
        # Only published ports reach a container, so its console listens on all its addresses.
        assert command[command.index("--console-host") + 1] == "0.0.0.0"
    loading = [services[name]["command"] for name in LOADERS]
    for command in loading:
        assert command[:2] == ["engage", "load"]
    for command in serving + loading:
        result = CliRunner().invoke(main, [*command[1:], "--config", "/nowhere/engage.toml"])
        # Wrong usage would be 2: only the config is missing.
        assert result.exit_code == 1
        assert "does not exist" in result.stderr


def test_the_parts_of_compose_fit_together() -> None:
    document = compose()
    services = document["services"]
    assert services.keys() == {*SERVERS, *LOADERS, *BROKERS, "mongo"}
    for service in services.values():
        assert set(service.get("depends_on", ())) <= services.keys()
        for needed in service.get("depends_on", ()):
            assert "healthcheck" in services[needed]
        for volume in service.get("volumes", ()):
            assert volume.split(":")[0] in document["volumes"]
        for config in service.get("configs", ()):
            assert config["source"] in document["configs"]
    environment = next(text for name, text in instructions() if name == "ENV")
    for name in (*SERVERS, *LOADERS):
        target = services[name]["configs"][0]["target"]
        assert f"ENGAGE_CONFIG={target}" in environment.split()
    # Without a profile, Compose starts what it always started.
    assert {name for name, one in services.items() if "profiles" not in one} == {"engage", "mongo"}
    ports = [port for name in SERVERS[1:] for port in services[name]["ports"]]
    assert len(set(ports)) == len(ports) == 3


def test_the_brokers_of_compose_are_a_cluster() -> None:
    """Each has an identity and a volume, and the settings that docs/log-kafka.md wants."""
    services = compose()["services"]
    seen = [services[name]["environment"] for name in BROKERS]
    voters = ",".join(f"{number}@kafka-{number}:9093" for number in (1, 2, 3))
    for number, environment in enumerate(seen, 1):
        assert environment["KAFKA_NODE_ID"] == number
        assert environment["KAFKA_ADVERTISED_LISTENERS"] == f"PLAINTEXT://kafka-{number}:9092"
        assert environment["KAFKA_CONTROLLER_QUORUM_VOTERS"] == voters
        assert environment["KAFKA_OFFSETS_TOPIC_REPLICATION_FACTOR"] == 3
        assert environment["KAFKA_BROKER_SESSION_TIMEOUT_MS"] == 3000
        mount = f"kafka-{number}:{environment['KAFKA_LOG_DIRS']}"
        assert services[f"kafka-{number}"]["volumes"] == [mount]
        # Kafka's ids have 16 bytes in Base64.
        assert len(base64.urlsafe_b64decode(environment["CLUSTER_ID"] + "==")) == 16
    tested = (ROOT / "tests/kafka_servers/jars.txt").read_text("utf-8")
    version = re.search(r" kafka-clients-(.+)\.jar", tested)
    assert version is not None
    assert {services[name]["image"] for name in BROKERS} == {f"apache/kafka:{version[1]}"}


@pytest.mark.parametrize("name", ["engage", "log"])
def test_the_configs_in_compose_are_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = tmp_path / "engage.toml"
    document = compose()
    path.write_text(document["configs"][name]["content"].replace("$$", "$"))
    service = "engage" if name == "engage" else "serve-1"
    for variable in document["services"][service]["environment"]:
        monkeypatch.setenv(variable, "k")
    config = load(path)
    load_plugins().check(config)
    assert config.storage.backend == "mongo"
    assert config.console is not None
    port = config.console.port
    assert f"127.0.0.1:{port}:{port}" in document["services"][service]["ports"]
    assert config.workspaces[0].write_keys[0].key == "k"
    if name == "engage":
        assert config.log is None
        return
    assert config.log is not None
    assert config.log.options["servers"] == ",".join(f"{broker}:9092" for broker in BROKERS)
    for loader in LOADERS:
        check = " ".join(document["services"][loader]["healthcheck"]["test"])
        assert f"http://{config.log.load_host}:{config.log.load_port}/readyz" in check
