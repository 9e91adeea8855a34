# SPDX-License-Identifier: Apache-2.0
"""The options: addresses, TLS, SASL, on a listener that has both."""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import orjson
import pytest

from engage.api import ConfigError, StorageUnavailable
from engage_plugins.kafka import _make, engage_register_log
from engage_plugins.kafka.options import address
from support import kafka
from support.kafka_log import (
    connections_closed,
    make_log,
    opened,
    read_records,
    record,
    topic_name,
)

SCRAM = {
    "sasl_mechanism": "SCRAM-SHA-512",
    "sasl_username": kafka.USER,
    "sasl_password": kafka.PASSWORD,
}


@pytest.fixture
def schema() -> Any:
    found: dict[str, Any] = {}
    engage_register_log(lambda name, factory, schema: found.update({name: schema}))
    return found["kafka"]


def test_the_examples_of_the_schema_are_valid(schema: Any) -> None:
    assert schema["examples"]
    for example in schema["examples"]:
        jsonschema.validate(example, schema)
    for servers in ("k1", "k1:9092,", "http://k1:9092", "k1:9092 k2:9092", ""):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"servers": servers}, schema)
    for servers in ("k1:9092", "k1:1, k2:2", "[::1]:9092"):
        jsonschema.validate({"servers": servers}, schema)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"servers": "k1:9092, k2:99999"}, "servers: k2:99999 has no port from 1 to 65535"),
        ({"sasl_mechanism": "SCRAM-SHA-512"}, "sasl_username: is required"),
        ({"sasl_mechanism": "SCRAM-SHA-512", "sasl_username": "u"}, "sasl_password: is required"),
        ({"sasl_password": "hidden"}, "sasl_password: needs sasl_mechanism"),
        ({**SCRAM, "sasl_mechanism": "PLAIN"}, "sasl_mechanism: PLAIN sends the password"),
        ({"tls_ca": "ca.pem"}, "tls_ca: needs tls = true"),
        ({"tls": True, "tls_ca": "missing.pem"}, "tls_ca: cannot be read (No such file"),
        ({"tls": True, "tls_ca": "text"}, "tls_ca: cannot be used"),
        ({"tls": True, "tls_key": "text"}, "tls_key: needs tls_certificate"),
        ({"tls": True, "tls_certificate": "missing.pem"}, "tls_certificate: cannot be read"),
        ({"tls": True, "tls_certificate": "text"}, "tls_certificate: cannot be used"),
    ],
)
def test_options_that_do_not_fit_together(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("not PEM")
    with pytest.raises(ConfigError) as raised:
        address(options, tmp_path)
    assert str(raised.value).startswith(message)
    assert kafka.PASSWORD not in str(raised.value)


def test_a_password_is_not_shown() -> None:
    assert kafka.PASSWORD not in repr(address(SCRAM, Path()))


def test_addresses_may_have_spaces() -> None:
    assert address({"servers": " a:1 , b:2"}, Path()).servers == "a:1,b:2"


def test_a_missing_client_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("engage_plugins.kafka.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "aiokafka", None)
    with pytest.raises(ConfigError, match=r"engage-server\[kafka\]"):
        _make({}, None)


def test_the_client_is_imported_for_a_log_only() -> None:
    code = (
        "import sys; from engage.registry import load_plugins; "
        "assert 'kafka' in load_plugins().logs; assert 'aiokafka' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.kafka
@pytest.mark.timeout(600, func_only=True)
async def test_tls_and_sasl(kafka_nodes: kafka.Cluster) -> None:
    """Appending and reading, with each way to sign in."""
    servers = kafka_nodes.servers("secure")
    tls = {"tls": True, "tls_ca": str(kafka_nodes.ca)}
    ways: list[dict[str, Any]] = [
        {**tls, **SCRAM},
        {**tls, **SCRAM, "sasl_mechanism": "PLAIN"},
        {**tls, **SCRAM, "tls_certificate": str(kafka_nodes.client_certificate)},
    ]
    topic = topic_name()
    for number, options in enumerate(ways):
        async with opened(servers, topic, **options) as log:
            await log.check()
            await log.append([record(f"{number}")])
            reader = log.reader(f"g{number}")
            await reader.open()
            found = await read_records(reader, number + 1)
            await reader.close()
            assert [one.value for one in found] == [b"%d" % n for n in range(number + 1)]


@pytest.mark.kafka
@pytest.mark.timeout(600, func_only=True)
def test_a_server_that_is_not_trusted_gets_nothing(
    kafka_nodes: kafka.Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kafka.certificates(tmp_path)
    tls = {"tls": True, "tls_ca": str(kafka_nodes.ca)}
    servers = kafka_nodes.servers("secure")
    # Their certificates have the address, and not the name.
    named = servers.replace("127.0.0.1", "localhost")
    wrong: list[tuple[str, dict[str, Any]]] = [
        (servers, {**tls, **SCRAM, "sasl_password": "not the password"}),
        (servers, {**tls, **SCRAM, "tls_ca": str(tmp_path / "ca.pem")}),
        (named, {**tls, **SCRAM}),
        (servers, tls),
        (servers, {}),
    ]

    async def run(servers: str, options: dict[str, Any]) -> None:
        log = make_log(servers, topic_name(), **options)
        with pytest.raises(StorageUnavailable, match="none accepts how engage signs in") as raised:
            await log.open(create=False)
        assert "not the password" not in str(raised.value) + caplog.text
        # A server that is started all the same is not ready.
        await log.open(create=True)
        for call in (log.check(), log.append([record("a")])):
            with pytest.raises(StorageUnavailable):
                await call
        await log.close()
        await connections_closed()

    for one in wrong:
        asyncio.run(run(*one))


@pytest.mark.kafka
@pytest.mark.timeout(600, func_only=True)
async def test_brokers_whose_names_lead_nowhere_are_reported(kafka_nodes: kafka.Cluster) -> None:
    """The servers of the config answer, and name addresses on which nothing listens."""
    log = make_log(kafka_nodes.servers("proxied"), topic_name())
    with pytest.raises(StorageUnavailable, match="not ready"):
        await log.open(create=False)
    await log.open(create=True)
    with pytest.raises(StorageUnavailable):
        await log.append([record("a")])
    await log.close()
    await connections_closed()


@pytest.mark.checkout
def test_the_page_names_every_option_setting_and_metric() -> None:
    root = Path(__file__).parents[3]
    text = (root / "docs/log-kafka.md").read_text("utf-8")
    schema = orjson.loads((root / "schemas/plugins/kafka.json").read_bytes())
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| (.+?) \|", text, re.MULTILINE))
    assert schema["properties"].keys() == {name for name in rows if not name.startswith("engage_")}
    for name, option in schema["properties"].items():
        if "default" in option:
            assert rows[name].strip("`") == orjson.dumps(option["default"]).decode().strip('"')
    gauges = {f"engage_log_{name}" for name in make_log("a:1", "t").gauges()}
    assert {name for name in rows if name.startswith("engage_")} == gauges
    refused = text[
        text.index("## Settings that are refused") : text.index("## Settings of the brokers")
    ]
    for named in ("min.insync.replicas", "unclean.leader.election.enable", "cleanup.policy"):
        assert f"| `{named}` |" in refused
    for named in ("retention.bytes", "retention.ms", "message.timestamp.type"):
        assert f"| `{named}` |" in refused


def test_secrets_are_marked(schema: Any) -> None:
    secret = {
        name
        for name, value in schema["properties"].items()
        if value.get("$ref") == "#/$defs/secret"
    }
    assert secret == {"sasl_password", "tls_key_password"}
    assert schema["$defs"]["secret"]["writeOnly"] is True


def test_warnings_of_the_client_are_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It logs each attempt for each partition."""
    make_log("127.0.0.1:1", "t")
    client, group = logging.getLogger("aiokafka"), "aiokafka.consumer.group_coordinator"
    caplog.set_level("INFO")
    for _ in range(5):
        client.error("Unable to connect to %s", "a broker of this test")
        client.info("nothing new")
        logging.getLogger(group).info("joined")
    assert caplog.messages == ["Unable to connect to a broker of this test"]


#: Prints whether all modules of aiokafka, their classes and asyncio's logger are as before.
UNCHANGED = """
import asyncio, inspect, logging, sys
import aiokafka.admin.client, aiokafka.client
from engage.api import LogContext
from pathlib import Path

def seen():
    names = [name for name in sys.modules if name.partition(".")[0] == "aiokafka"]
    found = {name: dict(vars(sys.modules[name])) for name in names if name in before or not before}
    classes = {c for one in found.values() for c in one.values() if inspect.isclass(c)}
    for cls in classes:
        if cls.__module__.startswith("aiokafka"):
            found[cls] = {k: v for k, v in vars(cls).items() if callable(v)}
    logger = logging.getLogger("asyncio")
    found["asyncio"] = (list(logger.filters), list(logger.handlers), logger.level)
    return found

before = {}
before = seen()
import engage_plugins.kafka.log
from engage_plugins.kafka import _make

async def run():
    log = _make({"servers": "127.0.0.1:1"}, LogContext(base_dir=Path(), write_timeout=8.0))
    await log.open(create=True)
    await log.close()

names = before.keys()
assert all(before[name] == seen()[name] for name in names)
asyncio.run(run())
now = seen()
for name in names:
    one = now[name]
    if isinstance(one, dict):
        one = {key: one[key] for key in before[name]}
    assert before[name] == one, name
"""


def test_a_log_changes_nothing_outside_the_plugin() -> None:
    """Another library in the process may use aiokafka, and asyncio's reports are its own."""
    subprocess.run([sys.executable, "-c", UNCHANGED], check=True)


async def test_brokers_that_cannot_be_reached_are_reported_in_words() -> None:
    """The same words each time: aiokafka lists the servers in any order, as Python objects."""
    log = make_log("127.0.0.1:1,127.0.0.1:2", "t")
    with pytest.raises(StorageUnavailable) as raised:
        await log.open(create=False)
    assert str(raised.value) == (
        "Kafka cannot be reached: no server of log.kafka.servers answers, or none accepts how"
        " engage signs in; aiokafka has logged why"
    )
    await log.close()
