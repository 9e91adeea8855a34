# SPDX-License-Identifier: Apache-2.0
"""Dockerfile and the Compose files are only read here, because there may be no container engine."""

from __future__ import annotations

import base64
import json
import re
import shlex
import subprocess
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from engage.config import Config, load
from support.commands import run
from support.exports import registry

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).resolve().parents[1]


def instructions() -> list[tuple[str, str]]:
    """Return (instruction, arguments) of the Dockerfile."""
    text = (ROOT / "Dockerfile").read_text("utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


KEY = "k" * 64
#: The services of deploy/kafka.yaml that are engage's loaders, and those that are Kafka.
LOADERS = ("load-1", "load-2")
BROKERS = ("kafka-1", "kafka-2", "kafka-3")
#: Compose file → its services that are servers, and all others.
FILES = {
    "compose.yaml": (("engage",), ()),
    "deploy/mongo.yaml": (("engage",), ("mongo",)),
    "deploy/kafka.yaml": (("serve-1", "serve-2"), (*LOADERS, *BROKERS, "mongo")),
}


def compose(name: str) -> Any:
    """Return the contents of a Compose file, with the services that it takes from others."""
    path = ROOT / name
    document = yaml.safe_load(path.read_text("utf-8"))
    for service, content in document["services"].items():
        if extends := content.get("extends"):
            other = compose(str((path.parent / extends["file"]).relative_to(ROOT)))
            document["services"][service] = other["services"][extends["service"]]
    return document


def instruction(name: str) -> str:
    """Return the arguments of the only instruction of this name."""
    (arguments,) = (text for one, text in instructions() if one == name)
    return arguments


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


@pytest.mark.parametrize("name", FILES)
def test_the_commands_are_commands_of_engage(name: str) -> None:
    services, servers = compose(name)["services"], FILES[name][0]
    image = json.loads(instruction("CMD"))
    serving = [services[server].get("command", image) for server in servers]
    for command in serving:
        assert command[:2] == ["engage", "serve"]
        # Only published ports reach a container, so its console listens on all its addresses.
        assert command[command.index("--console-host") + 1] == "0.0.0.0"
    loading = [services[loader]["command"] for loader in LOADERS if loader in services]
    for command in loading:
        assert command[:2] == ["engage", "load"]
    for command in serving + loading:
        result = run(*command[1:], "--config", "/nowhere/engage.toml")
        # Wrong usage would be 2: only the config is missing.
        assert result.exit_code == 1
        assert "does not exist" in result.stderr


@pytest.mark.parametrize("name", FILES)
def test_the_parts_of_compose_fit_together(name: str) -> None:
    document, (servers, others) = compose(name), FILES[name]
    services = document["services"]
    assert services.keys() == {*servers, *others}
    volumes = set()
    for service in services.values():
        assert set(service.get("depends_on", ())) <= services.keys()
        for needed in service.get("depends_on", ()):
            assert "healthcheck" in services[needed]
        for volume in service.get("volumes", ()):
            volumes.add(volume.split(":")[0])
        for config in service.get("configs", ()):
            assert config["source"] in document["configs"]
        if "build" in service:
            assert (ROOT / name).parent.joinpath(service["build"], "Dockerfile").exists()
    assert volumes == document["volumes"].keys()
    for server in (*servers, *(loader for loader in LOADERS if loader in services)):
        target = services[server]["configs"][0]["target"]
        assert f"ENGAGE_CONFIG={target}" in instruction("ENV").split()
    ports = [port for server in servers for port in services[server]["ports"]]
    assert len(set(ports)) == len(ports) == len(servers) + 1


def test_the_store_of_compose_outlives_the_container_and_the_user_may_write_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "compose.yaml").read_text("utf-8")
    assert text.count("\n") <= 20
    (mount,) = compose("compose.yaml")["services"]["engage"]["volumes"]
    folder = mount.split(":")[1]
    config = config_of("compose.yaml", tmp_path, monkeypatch)
    path = config.storage.options.get("path", "engage.db")
    target = compose("compose.yaml")["services"]["engage"]["configs"][0]["target"]
    assert (PurePosixPath(target).parent / path).parent == PurePosixPath(folder)
    # A new volume gets the content and the owner of the image's folder: it is the home of the user
    # of the server, and exists before it becomes a volume.
    assert instruction("VOLUME") == folder
    names = [name for name, _ in instructions()]
    made = next(n for n, one in enumerate(instructions()) if "useradd" in one[1])
    assert made < names.index("USER") < names.index("VOLUME")
    words = instructions()[made][1].split()
    assert words[-1] == instruction("USER")
    assert "--create-home" in words
    assert words[words.index("--home-dir") + 1] == folder
    # Compose waits for the answers and the store, before it kills the server.
    grace = compose("compose.yaml")["services"]["engage"]["stop_grace_period"]
    assert int(grace.removesuffix("s")) > config.server.shutdown_grace + 10


def test_the_brokers_of_compose_are_a_cluster() -> None:
    """Each has an identity and a volume, and the settings that docs/log-kafka.md wants."""
    services = compose("deploy/kafka.yaml")["services"]
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


def config_of(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Load the config in a Compose file, with keys of 64 characters ``k``."""
    document = compose(name)
    path = folder / "engage.toml"
    service = document["services"][FILES[name][0][0]]
    keys = ("ENGAGE_WRITE_KEY", "ENGAGE_ERASURES_KEY")
    content = document["configs"]["engage"]["content"]
    if "environment" in service:
        assert tuple(service["environment"]) == keys
        for key in keys:
            monkeypatch.setenv(key, KEY)
    else:  # Compose puts the keys into the file.
        assert sorted(re.findall(r"[^$]\$\{(\w+):\?", content)) == sorted(keys)
        content = re.sub(r"\$\{\w+:\?[^}]+\}", KEY, content)
    path.write_text(content.replace("$$", "$"))
    config = load(path)
    registry().check(config)
    return config


@pytest.mark.parametrize("name", FILES)
def test_the_configs_in_compose_are_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    services = compose(name)["services"]
    config = config_of(name, tmp_path, monkeypatch)
    assert config.storage.backend == ("sqlite" if name == "compose.yaml" else "mongo")
    assert config.console is not None
    port = config.console.port
    assert f"127.0.0.1:{port}:{port}" in services[FILES[name][0][0]]["ports"]
    assert config.workspaces[0].write_keys[0].key == KEY
    assert config.erasures.key == KEY
    if name != "deploy/kafka.yaml":
        assert config.log is None
        return
    assert config.log is not None
    assert config.log.options["servers"] == ",".join(f"{broker}:9092" for broker in BROKERS)
    for loader in LOADERS:
        check = " ".join(services[loader]["healthcheck"]["test"])
        assert f"http://{config.log.load_host}:{config.log.load_port}/readyz" in check


@pytest.mark.parametrize("name", FILES)
def test_the_lines_at_the_top_name_the_file_and_a_server(name: str, tmp_path: Path) -> None:
    """Compose reads the file ``.env`` in the folder of its file."""
    comment = (ROOT / name).read_text("utf-8").partition("services:")[0]
    file = "" if name == "compose.yaml" else f"-f {Path(name).name} "
    assert f"docker compose {file}up" in comment
    assert f"docker compose {file}exec {FILES[name][0][0]} engage console-link" in comment
    (line,) = re.findall(r"^# .*?(\[ -e \.env \] .*)$", comment, re.M)
    made = set()
    for _ in range(2):
        subprocess.run(["sh", "-c", line], cwd=tmp_path, check=True)
        made.add((tmp_path / ".env").read_text())
    # Keys that clients and backups have are never replaced.
    (keys,) = made
    assert re.fullmatch(r"ENGAGE_WRITE_KEY=\w{64}\nENGAGE_ERASURES_KEY=\w{64}\n", keys)
    assert ".env" in (ROOT / ".gitignore").read_text("utf-8").split()


@pytest.mark.parametrize("name", FILES)
def test_ports_are_for_this_machine_and_logs_are_limited(name: str) -> None:
    """Docker publishes a port past the firewall of the machine, and keeps logs without limit."""
    services = compose(name)["services"]
    for service in services.values():
        logging = service["logging"]
        assert logging["driver"] == "json-file"
        assert logging["options"].keys() == {"max-size", "max-file"}
        for port in service.get("ports", ()):
            address = port.removesuffix(":8080").removesuffix(":8081").rpartition(":")[0]
            assert address in ("127.0.0.1", "${ENGAGE_ADDRESS:-127.0.0.1}")
