# SPDX-License-Identifier: Apache-2.0
"""``engage keys``, and what ``engage check`` says about keys."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
from click.testing import Result

from engage.keys.effective import KEY
from support.commands import run
from support.exports import audit_of, records_in
from support.sqlite import config_file, new_store


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Make a config with a store."""
    return new_store(tmp_path)


def keys(config: Path, *arguments: str) -> Result:
    command, *rest = arguments
    return run("keys", command, "--config", config, *rest)


def listed(config: Path, *arguments: str) -> list[list[str]]:
    result = keys(config, "list", *arguments)
    assert result.exit_code == 0
    return [line.split("\t") for line in result.stdout.splitlines()]


def test_a_key_is_created_listed_disabled_enabled_and_archived(config: Path) -> None:
    result = keys(config, "add", "--workspace", "other", "--id", "ios", "--name", "My \u202eapp")
    assert result.exit_code == 0
    key = result.stdout.removesuffix("\n")
    assert re.fullmatch("[0-9a-f]{32}", key)
    (website, ios) = listed(config)
    assert website == [
        *("acme", "website", "k-acme", "active", "config", "-", "-"),
        *("public", "-", "-", "-"),
    ]
    assert ios[:5] == ["other", "ios", key, "active", "store"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z", ios[5])
    assert ios[6] == r"My \u202eapp"
    for command, state, shown in (
        ("disable", "disabled", "disabled"),
        ("enable", "enabled", "active"),
        ("archive", "archived", "archived"),
    ):
        result = keys(config, command, "--workspace", "other", "ios")
        assert (result.exit_code, result.stdout) == (0, f"{state}\tios\n")
        assert listed(config, "--workspace", "other")[0][3] == shown
        again = keys(config, command, "--workspace", "other", "ios")
        assert (again.exit_code, again.stdout) == (0, "")
        assert f"is {state} already" in again.stderr
    entries = audit_of(config)
    assert sorted(entry.action for entry in entries) == [
        "key-archived",
        "key-created",
        "key-disabled",
        "key-enabled",
    ]
    assert all(entry.actor.who and "command line" in entry.actor.origin for entry in entries)


def test_a_key_with_origins_and_operations_is_created(config: Path) -> None:
    options = (
        *("--origins", "https://shop.example.com, http://localhost:3000"),
        *("--operations", "track,page"),
        *("--rate", "2.5,burst=100"),
    )
    result = keys(config, "add", "--workspace", "acme", "--id", "shop", *options)
    assert result.exit_code == 0
    (shop,) = (row for row in listed(config) if row[1] == "shop")
    assert shop[2] == result.stdout.strip()
    assert shop[7:] == [
        *("public", "https://shop.example.com,http://localhost:3000", "track,page"),
        "events_per_second=2.5,burst=100",
    ]


def test_the_origins_of_a_key_must_be_those_of_cors(config: Path) -> None:
    config.write_text(config.read_text() + '\n[cors]\norigins = ["https://shop.example.com"]\n')
    add = ("add", "--workspace", "acme", "--id", "shop", "--origins")
    result = keys(config, *add, "https://SHOP.example.com,https://other.example")
    assert result.exit_code == 1
    assert "origins[1]: add it to cors.origins too" in result.stderr
    assert records_in(config, KEY) == []
    assert keys(config, *add, "https://shop.example.com").exit_code == 0


def test_a_server_key_is_shown_once(config: Path) -> None:
    added = keys(config, "add", "--workspace", "acme", "--id", "backend", "--kind", "server")
    secret = added.stdout.strip()
    assert re.fullmatch("[0-9a-f]{32}", secret)
    for command, shown in (("disable", "disabled"), ("enable", "active"), ("archive", "archived")):
        assert keys(config, command, "--workspace", "acme", "backend").exit_code == 0
        (backend,) = (row for row in listed(config) if row[1] == "backend")
        assert (backend[2], backend[3], backend[7]) == ("-", shown, "server")
    digest = hashlib.sha256(secret.encode()).hexdigest()
    (record,) = records_in(config, KEY)
    assert digest.encode() in record.body
    stored = b"".join(path.read_bytes() for path in config.parent.iterdir() if path.is_file())
    assert digest.encode() in stored
    assert secret.encode() not in stored


def test_a_key_of_the_config_is_disabled(config: Path) -> None:
    assert keys(config, "disable", "--workspace", "acme", "website").exit_code == 0
    assert listed(config)[0][:5] == ["acme", "website", "k-acme", "disabled", "config"]
    assert records_in(config, KEY) == []
    assert keys(config, "enable", "--workspace", "acme", "website").exit_code == 0
    assert listed(config)[0][3] == "active"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("add", "--workspace", "nope", "--id", "a"), "a workspace 'nope'"),
        (("add", "--workspace", "acme", "--id", "website"), "already has a key 'website'"),
        (("add", "--workspace", "acme", "--id", "a b"), "letters, digits, - and _"),
        (
            ("add", "--workspace", "acme", "--id", "a", "--origins", "https://*.example.com"),
            "origins[0]: must be an origin without a path or wildcard",
        ),
        (
            ("add", "--workspace", "acme", "--id", "a", "--operations", "track,batch"),
            'operations[1]: must be one of "identify", "track"',
        ),
        (
            (
                *("add", "--workspace", "acme", "--id", "a", "--kind", "server"),
                *("--origins", "https://shop.example.com"),
            ),
            "origins: every web page is refused with a server key",
        ),
        (("disable", "--workspace", "acme", "nope"), "the key 'nope' of the workspace 'acme'"),
        (("archive", "--workspace", "acme", "website"), "is in the config file"),
        (("list", "--workspace", "nope"), "a workspace 'nope'"),
    ],
)
def test_an_error_is_one_line(config: Path, arguments: tuple[str, ...], message: str) -> None:
    result = keys(config, *arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("engage: ")
    assert message in line


def test_without_a_store_the_error_says_what_to_do(tmp_path: Path) -> None:
    result = keys(config_file(tmp_path), "add", "--workspace", "acme", "--id", "a")
    assert result.exit_code == 1
    assert "engage serve" in result.stderr


def test_check_reports_the_keys_of_the_store(config: Path) -> None:
    def lines() -> list[str]:
        result = run("check", "--config", config)
        assert result.exit_code == 0
        return [line for line in result.stdout.splitlines() if line.startswith(("keys", "warning"))]

    assert lines() == []
    for key_id in ("one", "two"):
        assert keys(config, "add", "--workspace", "acme", "--id", key_id).exit_code == 0
    assert lines() == ["keys\tacme: 2 write keys in the store"]
    for key_id in ("two", "website"):
        assert keys(config, "disable", "--workspace", "acme", key_id).exit_code == 0
    assert lines() == [
        "keys\tacme: 2 write keys in the store, 1 disabled;"
        " 1 write key of the config disabled in the store"
    ]
    # The config gets a key with the id of one in the store, and wins.
    more = '\n[[workspaces]]\nid = "third"\n'
    text = config.read_text().replace('id = "website"\n', 'id = "one"\n', 1)
    config.write_text(text + more)
    assert [line for line in lines() if line.startswith("warning")] == [
        "warning\tthe key 'one' of the workspace 'acme' in the store is ignored:"
        " the config has a key with this id",
        "warning\tthe key 'website' of the workspace 'acme' is disabled in the store,"
        " but the config no longer has it",
    ]
    assert "is ignored" in keys(config, "list").stderr


def test_a_table_on_a_terminal(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda _: True, raising=False)
    head, line = keys(config, "list").stdout.splitlines()
    assert head.split() == [
        *("WORKSPACE", "ID", "KEY", "STATE", "SOURCE", "CREATED", "NAME"),
        *("KIND", "ORIGINS", "OPERATIONS", "RATE"),
    ]
    assert line.split()[:3] == ["acme", "website", "k-acme"]
    assert head.index("KEY") == line.index("k-acme")
    result = keys(config, "disable", "--workspace", "acme", "website")
    assert "within 2.5 seconds" in result.stdout
