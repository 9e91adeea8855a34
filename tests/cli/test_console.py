# SPDX-License-Identifier: Apache-2.0
"""``engage console-link``, ``console-logout``, ``console-password``; what ``init`` writes."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from engage.config import load
from engage.console.sign_in.links import KIND
from engage.console.sign_in.passwords import is_password
from engage.store.facade import Storage
from support.commands import run
from support.console import free_port
from support.exports import audit_of, on_store, records_in
from support.server_process import start_server
from support.waiting import wait_for


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config as ``engage init`` writes it, with its store."""
    assert run("init", tmp_path).exit_code == 0
    on_store(tmp_path / "engage.toml", Storage.check)
    return tmp_path / "engage.toml"


def test_init_writes_a_console_for_this_machine_only(config: Path) -> None:
    console = load(config).console
    assert console is not None
    assert (console.host, console.port, console.password) == ("127.0.0.1", 8081, None)


def test_a_link_is_for_the_url_that_people_use(config: Path) -> None:
    result = run("console-link", "--config", config)
    assert result.exit_code == 0
    pattern = r"http://[0-9a-f]{16}\.localhost:8081/link\?t=[\w-]{43}\n"
    assert re.fullmatch(pattern, result.stdout)
    text = config.read_text()
    for more, start in (
        ('public_url = "https://ops.example.com/engage"', "https://ops.example.com/engage/link?t="),
        ('host = "127.0.0.2"', "http://127.0.0.2:8081/link?t="),
    ):
        line = more.split()[0]
        kept = "\n".join(
            one for one in text.splitlines() if line == "public_url" or 'host = "127' not in one
        )
        config.write_text(kept.replace("[console]", f"[console]\n{more}"))
        assert run("console-link", "--config", config).stdout.startswith(start)


def test_the_store_has_the_hash_of_a_link_and_who_made_it(config: Path) -> None:
    token = run("console-link", "--config", config).stdout.strip().partition("t=")[2]
    (link,) = records_in(config, KIND)
    assert token.encode() not in link.body
    assert re.fullmatch("[0-9a-f]{64}", link.id)
    (entry,) = audit_of(config)
    assert entry.action == "link-made"
    assert entry.actor.origin.startswith("command line on ")


def test_the_printed_link_signs_in_while_the_server_runs(tmp_path: Path) -> None:
    port = free_port()
    with start_server(tmp_path, config_extra=f"[console]\nport = {port}\n") as server:
        wait_for(lambda: [line for line in server.lines() if line["message"] == "console"])
        link = run("console-link", "--config", server.config).stdout.strip()
        shown, _, token = link.partition("/link?t=")
        assert shown.endswith(f".localhost:{port}")
        # Not every system finds such a name, but every browser of today does.
        url, headers = f"http://127.0.0.1:{port}", {"Host": shown[7:], "Origin": shown}
        assert httpx.get(f"{url}/link?t={token}", headers=headers).status_code == 200
        answer = httpx.post(f"{url}/link", data={"t": token}, headers=headers)
        assert answer.status_code == 303
        assert token not in server.log()


@pytest.mark.parametrize("command", ["console-link", "console-logout"])
def test_what_is_missing_is_named(config: Path, command: str) -> None:
    text = config.read_text()
    config.write_text(text.replace("[console]", "[cors]").replace('host = "127.0.0.1"\n', ""))
    config.write_text(re.sub(r"\[cors\]\nport = 8081\n", "", config.read_text()))
    result = run(command, "--config", config)
    assert result.exit_code == 1
    assert result.stderr.endswith("there is no [console] section, so there is no console\n")
    config.write_text(text)
    (config.parent / "engage.db").unlink()
    result = run(command, "--config", config)
    assert result.exit_code == 1
    assert "there is no store" in result.stderr


def test_a_link_needs_a_port(config: Path) -> None:
    config.write_text(config.read_text().replace("port = 8081", "port = 0"))
    result = run("console-link", "--config", config)
    assert result.exit_code == 1
    assert "console.port is 0" in result.stderr


def test_a_password_is_asked_for_twice_and_its_hash_is_printed(config: Path) -> None:
    result = run("console-password", text="correct horse\ncorrect horse\n")
    assert result.exit_code == 0
    line = result.stdout.strip().splitlines()[-1]
    assert "correct horse" not in result.stdout
    config.write_text(config.read_text().replace("[console]", f"[console]\n{line}"))
    console = load(config).console
    assert console is not None
    assert console.password is not None
    assert is_password(console.password, "correct horse")
    assert "correct" not in repr(console)


def test_a_password_that_is_too_short_or_not_repeated_is_refused() -> None:
    assert run("console-password", text="short\nshort\n").exit_code == 1
    result = run("console-password", text="correct horse\nother horse\n")
    assert result.exit_code == 1
    assert "scrypt" not in result.output
