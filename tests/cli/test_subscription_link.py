# SPDX-License-Identifier: Apache-2.0
"""``engage subscription-link``; that its links work is tested with the page."""

from __future__ import annotations

import time
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from engage.api import Kind, Subject
from engage.subscriptions.links import subscription_hash
from engage.testing.factories import event, identify
from support.commands import run
from support.each import each
from support.exports import on_store

CONFIG = """
[server]
{server}

[storage]
backend = "sqlite"

[[workspaces]]
id = "acme"
subscription_secret = ["new", "old"]
subscription_identifiers = ["email"]

[[workspaces.subscription_groups]]
id = "news"
channel = "email"
type = "opt_out"

[[workspaces]]
id = "other"
"""
PUBLIC = 'public_url = "https://events.example.com/"'


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write(tmp_path, PUBLIC)


def write(folder: Path, server: str) -> Path:
    path = folder / "engage.toml"
    path.write_text(CONFIG.format(server=server))
    return path


def members(url: str) -> dict[str, str]:
    parts = urlsplit(url.strip())
    assert parts.path == "/api/public/subscription-management/page"
    return {name: value for name, (value,) in parse_qs(parts.query).items()}


def link(config: Path, *arguments: object, workspace: str = "acme") -> str:
    chosen = ("--config", config, "--workspace", workspace)
    result = run("subscription-link", *chosen, *arguments)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_a_link_is_signed_with_the_first_secret(config: Path) -> None:
    url = link(config, "--user", "ü 1&")
    assert url.startswith("https://events.example.com/api/")
    signed = subscription_hash(
        "new",
        subject=Subject(Kind.USER, "ü 1&"),
        workspace_id="acme",
        identifier="ü 1&",
        identifier_key="id",
    )
    assert members(url) == {"w": "acme", "i": "ü 1&", "ik": "id", "h": signed}


def test_a_link_names_a_visitor(config: Path) -> None:
    signed = subscription_hash(
        "new",
        subject=Subject(Kind.VISITOR, "v 1"),
        workspace_id="acme",
        identifier="v 1",
        identifier_key="anonymousId",
    )
    assert members(link(config, "--anonymous-id", "v 1")) == {
        "w": "acme",
        "i": "v 1",
        "ik": "anonymousId",
        "h": signed,
    }
    for ids in ((), ("--user", "u", "--anonymous-id", "v")):
        result = run("subscription-link", "--config", config, "--workspace", "acme", *ids)
        assert result.exit_code == 2
        assert "give either --user or --anonymous-id" in result.stderr


@each(
    "option, kind, address, found",
    [
        ("--user", Kind.USER, " ADA@x.org", {"i": "ada@x.org", "ik": "email"}),
        ("--anonymous-id", Kind.VISITOR, "ada@x.org", {"i": "ada@x.org", "ik": "email", "v": "1"}),
    ],
)
def test_a_link_by_an_address_has_the_id_too(
    config: Path, option: str, kind: Kind, address: str, found: dict[str, str]
) -> None:
    signed = subscription_hash(
        "new",
        subject=Subject(kind, "x 1"),
        workspace_id="acme",
        identifier=found["i"],
        identifier_key=found["ik"],
    )
    shown = members(link(config, option, "x 1", "--address", address))
    assert shown == {"w": "acme", "u": "x 1", "h": signed, **found}


def test_an_id_that_only_a_visitor_has_is_no_user(config: Path) -> None:
    visits = [
        event(name, type="identify", anonymous_id=name, traits={"a": 1}) for name in ("v 1", "both")
    ]
    on_store(config, lambda store: store.write([*visits, identify("m", "both")]))
    chosen = ("--config", config, "--workspace", "acme")
    result = run("subscription-link", *chosen, "--user", "v 1")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "use --anonymous-id 'v 1'" in result.stderr
    for name in ("both", "unknown"):
        assert members(link(config, "--user", name))["ik"] == "id"


def test_a_link_of_a_message_names_its_group_and_language_and_expires(config: Path) -> None:
    before = int(time.time())
    options = ("--group", "news", "--expires", 30, "--lang", "de")
    found = members(link(config, "--user", "u-1", *options))
    expires = int(found["e"])
    assert before + 30 * 86400 <= expires <= time.time() + 30 * 86400
    assert (found["s"], found["sub"], found["lang"]) == ("news", "0", "de")
    assert found["h"] == subscription_hash(
        "new",
        subject=Subject(Kind.USER, "u-1"),
        workspace_id="acme",
        identifier="u-1",
        identifier_key="id",
        expires=expires,
    )


def test_the_headers_are_those_of_rfc_8058(config: Path) -> None:
    url = link(config, "--user", "u-1", "--group", "news").strip()
    assert link(config, "--user", "u-1", "--group", "news", "--headers") == (
        f"List-Unsubscribe: <{url}>\nList-Unsubscribe-Post: List-Unsubscribe=One-Click\n"
    )


def test_a_link_without_a_public_url_is_for_this_machine(tmp_path: Path) -> None:
    path = write(tmp_path, "port = 81")
    result = run("subscription-link", "--config", path, "--workspace", "acme", "--user", "u-1")
    assert result.exit_code == 0
    assert result.stdout.startswith("http://127.0.0.1:81/api/")
    assert "server.public_url is not set" in result.stderr


@pytest.mark.parametrize("server", ["port = 81", 'public_url = "http://events.example.com"'])
def test_headers_need_https(tmp_path: Path, server: str) -> None:
    path = write(tmp_path, server)
    chosen = ("--config", path, "--workspace", "acme", "--user", "u-1")
    result = run("subscription-link", *chosen, "--headers")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "server.public_url must begin with https://" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--user", "u-1"), "choose one with --workspace: acme, other"),
        (("--user", "u-1", "--workspace", "other"), "has no subscription_secret"),
        (("--user", "u-1", "--workspace", "acme", "--group", "ads"), "(news)"),
        (("--user", "u", "--workspace", "acme", "--address", "x"), "neither an e-mail address nor"),
        (
            ("--user", "u", "--workspace", "acme", "--address", "+491"),
            "phone is not in subscription_identifiers of acme",
        ),
        (("--user", "", "--workspace", "acme"), "an id has 1 to 512 characters"),
        (("--user", "u" * 513, "--workspace", "acme"), "an id has 1 to 512 characters"),
    ],
)
def test_what_is_wrong_is_named(config: Path, arguments: tuple[str, ...], message: str) -> None:
    result = run("subscription-link", "--config", config, *arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert message in result.stderr


def test_the_longest_id_is_accepted(config: Path) -> None:
    assert members(link(config, "--user", "u" * 512))["i"] == "u" * 512
