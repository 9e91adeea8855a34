# SPDX-License-Identifier: Apache-2.0
"""Who gets in to the console, for how long, and who does not."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin

import httpx
import pytest
from click.testing import CliRunner

from engage.cli import main
from engage.config import load
from engage.console.application import ROUTES
from engage.console.sign_in.links import link_command
from engage.console.sign_in.passwords import ADDRESS_FAILURES, hash_password
from support.console import CONSOLE, browser, console_url, free_port, make_link, signed_in
from support.each import each
from support.exports import audit_of
from support.server_process import Server, start_server
from support.waiting import wait_for

PASSWORD = "correct horse battery"
HASH = hash_password(PASSWORD)
#: What anyone may open.
PUBLIC = {"/link", "/login", "/healthz"}


def is_in(client: httpx.Client) -> bool:
    """Return whether a client is signed in."""
    answer = client.get("audit")
    assert answer.status_code in (200, 303)
    return answer.status_code == 200


def actions(config: Path) -> list[tuple[str, str, str]]:
    """Return (action, who, from) of the audit, oldest first."""
    return [(entry.action, entry.actor.who, entry.actor.origin) for entry in audit_of(config)]


# ------------------------------------------------------------------------------------- no session
def test_no_page_opens_without_a_session(url: str) -> None:
    with browser(url) as client:
        for path in ROUTES:
            for method in ("get", "post", "head"):
                answer = client.request(method.upper(), path.lstrip("/"))
                if path in PUBLIC:
                    assert answer.status_code in (200, 403, 404, 405), (method, path)
                elif answer.status_code == 303:
                    target = urljoin(str(answer.url), answer.headers["Location"])
                    assert target.startswith(f"{url}/login"), path
                else:
                    json_route = path.endswith(".json")
                    assert answer.status_code in ({401, 405} if json_route else {405}), path
                assert "acme" not in answer.text.lower(), (method, path)
                assert not answer.cookies


def test_an_unknown_path_tells_nothing_to_a_stranger(server: Server, url: str) -> None:
    with browser(url) as client:
        assert client.get("nowhere").headers["Location"] == "login?next=nowhere"
    with signed_in(server) as client:
        answer = client.get("nowhere")
        assert answer.status_code == 404
        assert "There is no such page" in answer.text


def test_healthz_is_open_and_tells_nothing(url: str) -> None:
    answer = httpx.get(f"{url}/healthz")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


@each("cookie", ["", "x", "2|1:0|10:1|1:a|1:b|c", "é" * 3, "a" * 10_000])
def test_a_forged_cookie_is_no_session(url: str, cookie: str) -> None:
    port = url.rpartition(":")[2]
    header = f'engage-console-{port}="{cookie}"'.encode()
    answer = httpx.get(f"{url}/", headers=[(b"Cookie", header)])
    assert answer.status_code == 303


# ------------------------------------------------------------------------------------------- links
def test_a_link_signs_in_once_and_only_by_post(server: Server, url: str) -> None:
    token = make_link(server.config)
    with browser(url) as client, browser(url) as late:
        for _ in range(3):  # A program that previews links opens them.
            answer = client.get("link", params={"t": token})
            assert answer.status_code == 200
            assert answer.headers["Referrer-Policy"] == "no-referrer"
            assert not answer.cookies
            assert client.head("link", params={"t": token}).status_code == 200
        assert not is_in(client)
        answer = client.post("link", data={"t": token})
        assert (answer.status_code, answer.headers["Location"]) == (303, "./")
        assert is_in(client)
        answer = late.post("link", data={"t": token})
        assert answer.status_code == 403
        assert "no longer works" in answer.text
        assert token not in answer.text
        assert not is_in(late)
        assert is_in(client)


def test_an_expired_link_does_not_sign_in(server: Server, url: str) -> None:
    with browser(url) as client:
        answer = client.post("link", data={"t": make_link(server.config, age=601)})
        assert answer.status_code == 403
        assert client.post("link", data={"t": make_link(server.config, age=590)}).is_redirect


@each("token", ["", "x", "A" * 43, "A" * 10_000, "\x00"])
def test_a_made_up_link_does_not_sign_in(url: str, token: str) -> None:
    with browser(url) as client:
        assert client.post("link", data={"t": token}).status_code == 403
        assert client.post("link").status_code == 403


def test_the_token_of_a_link_is_stored_nowhere(server: Server, url: str) -> None:
    token = make_link(server.config)
    with browser(url) as client:
        client.get("link", params={"t": token})
        client.post("link", data={"t": token})
    for path in filter(Path.is_file, server.folder.iterdir()):
        assert token.encode() not in path.read_bytes(), path


def test_signing_in_leads_to_the_page_that_was_asked_for(server: Server, url: str) -> None:
    with browser(url) as client:
        location = client.get("events", params={"user": "a&b/c"}).headers["Location"]
        assert location == "login?next=events%3Fuser%3Da%2526b%252Fc"
        form = {"t": make_link(server.config), "next": "events?user=a%26b%2Fc"}
        assert client.post("link", data=form).headers["Location"] == "events?user=a%26b%2Fc"


def test_a_link_from_another_site_finds_the_session(server: Server, url: str) -> None:
    """The browser leaves the cookie out there; the page loads itself again, and then sends it."""
    with signed_in(server) as client:
        foreign = {"Sec-Fetch-Site": "cross-site"}
        answer = httpx.get(f"{url}/events?user=a%26b", headers=foreign, follow_redirects=True)
        match = re.search(r'http-equiv="refresh" content="0;url=([^"]+)"', answer.text)
        assert match
        again = client.get(match[1].replace("&amp;", "&"))
        assert (again.status_code, again.headers["Location"]) == (303, "events?user=a%26b")
    with browser(url) as stranger:
        answer = stranger.get(match[1])
        assert answer.status_code == 200
        assert "refresh" not in answer.text


# ----------------------------------------------------------------------------------------- cookies
def test_the_cookie_is_for_this_console_only(server: Server, url: str) -> None:
    with browser(url) as client:
        answer = client.post("link", data={"t": make_link(server.config)})
    cookie = answer.headers["Set-Cookie"]
    port = url.rpartition(":")[2]
    assert cookie.startswith(f"engage-console-{port}=")
    flags = {part.strip() for part in cookie.split(";")[1:]}
    assert flags == {"HttpOnly", "Path=/", "SameSite=Strict", "Max-Age=43200"}


def test_over_tls_the_cookie_is_bound_to_the_host(tmp_path: Path) -> None:
    extra = f'{CONSOLE}public_url = "https://ops.example.com/engage"\n'
    with start_server(tmp_path, config_extra=extra) as server:
        assert console_url(server) == "https://ops.example.com/engage"
        (console,) = server.consoles()
        local = f"http://127.0.0.1:{port_of(console)}"
        origin = {"Origin": "https://ops.example.com", "Host": "ops.example.com"}
        answer = httpx.post(
            f"{local}/engage/link", data={"t": make_link(server.config)}, headers=origin
        )
        assert answer.status_code == 303
        cookie = answer.headers["Set-Cookie"]
        assert cookie.startswith("__Secure-engage-console=")
        flags = {part.strip() for part in cookie.split(";")[1:]}
        path = "Path=/engage/"
        assert flags == {"HttpOnly", path, "SameSite=Strict", "Max-Age=43200", "Secure"}
        sent = {**origin, "Cookie": cookie.partition(";")[0]}
        assert httpx.get(f"{local}/engage/audit", headers=sent).status_code == 200


def test_a_session_is_for_the_host_at_which_it_began(server: Server, url: str) -> None:
    """A cookie ignores ports, so another server on a host that the browser opens gets it."""
    port = url.rpartition(":")[2]
    own, other = (f"{name}.localhost:{port}" for name in ("one", "two"))
    form = {"t": make_link(server.config)}
    headers = {"Host": own, "Origin": f"http://{own}"}
    answer = httpx.post(f"{url}/link", data=form, headers=headers)
    assert answer.status_code == 303
    cookie = {"Cookie": answer.headers["Set-Cookie"].partition(";")[0]}
    for host, status in ((own, 200), (own.upper(), 200), (other, 303), (f"127.0.0.1:{port}", 303)):
        assert httpx.get(f"{url}/audit", headers={"Host": host, **cookie}).status_code == status


def port_of(pid: int) -> int:
    """Return the port on which a process listens."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        match = re.fullmatch(r"socket:\[(\d+)\]", str(descriptor.readlink()))
        if match:
            inodes.add(match[1])
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            return int(fields[1].partition(":")[2], 16)
    raise AssertionError("it does not listen")


# --------------------------------------------------------------------------------- end of sessions
def test_signing_out_ends_the_session_and_no_other(server: Server) -> None:
    with signed_in(server) as client, signed_in(server) as other:
        copied = dict(client.cookies)
        answer = client.post("logout")
        assert (answer.status_code, answer.headers["Location"]) == (303, "login")
        assert not client.cookies
        assert not is_in(client)
        with browser(str(client.base_url).rstrip("/"), cookies=copied) as thief:
            assert not is_in(thief)
        assert is_in(other)


def test_console_logout_ends_all_sessions(server: Server) -> None:
    with signed_in(server) as client, signed_in(server) as other:
        assert is_in(client)
        result = CliRunner().invoke(main, ["console-logout", "--config", str(server.config)])
        assert result.exit_code == 0, result.output
        wait_for(lambda: not is_in(client), what="the end of the session")
        assert not is_in(other)


def test_what_people_do_to_get_in_is_in_the_audit(server: Server) -> None:
    before = len(actions(server.config))
    with signed_in(server) as client:
        client.post("logout")
    found = actions(server.config)[before:]
    assert [action for action, _, _ in found] == ["signed-in", "signed-out"]
    assert {origin for _, _, origin in found} == {"127.0.0.1"}
    assert len({who for _, who, _ in found}) == 1
    result = CliRunner().invoke(main, ["console-logout", "--config", str(server.config)])
    assert result.exit_code == 0
    assert actions(server.config)[-1][0] == "all-signed-out"


# --------------------------------------------------------------------------------------- passwords
@pytest.fixture
def with_password(tmp_path: Path) -> Iterator[Server]:
    extra = f'[console]\nport = {free_port()}\npassword = "{HASH}"\n'
    with start_server(tmp_path, config_extra=extra) as started:
        yield started


def test_the_password_signs_in_until_it_is_changed(with_password: Server) -> None:
    server = with_password
    with browser(console_url(server)) as client:
        assert 'type="password"' in client.get("login").text
        answer = client.post("login", data={"password": PASSWORD, "next": "keys?workspace=acme"})
        assert (answer.status_code, answer.headers["Location"]) == (303, "keys?workspace=acme")
        assert is_in(client)
        cookies = dict(client.cookies)
    for text, valid in ((HASH, True), (hash_password("another password"), False)):
        server.stop()
        server.config.write_text(server.config.read_text().replace(HASH, text))
        server.start()
        with browser(console_url(server), cookies=cookies) as client:
            assert is_in(client) == valid


def test_too_many_wrong_passwords_are_refused(with_password: Server) -> None:
    server = with_password
    url = console_url(server)
    with browser(url) as client:
        for _ in range(ADDRESS_FAILURES):
            answer = client.post("login", data={"password": "wrong"})
            assert answer.status_code == 403
            assert "The password is wrong" in answer.text
        for password in ("wrong", PASSWORD):
            answer = client.post("login", data={"password": password})
            assert answer.status_code == 429
            assert 800 < int(answer.headers["Retry-After"]) <= 900
            assert not answer.cookies
        # Another address that a client claims to have changes nothing.
        claimed = client.post(
            "login", data={"password": PASSWORD}, headers={"X-Forwarded-For": "203.0.113.9"}
        )
        assert claimed.status_code == 429
    failed = [entry for entry in actions(server.config) if entry[0] == "sign-in-failed"]
    assert 1 <= len(failed) <= 2, "one an hour; an hour may have begun meanwhile"
    assert PASSWORD not in server.log()
    # The owner can still get in.
    with signed_in(server) as client:
        assert is_in(client)


def test_a_console_without_a_password_accepts_none(server: Server, url: str) -> None:
    with browser(url) as client:
        assert 'type="password"' not in client.get("login").text
        assert "engage console-link" in client.get("login").text
        assert client.post("login", data={"password": ""}).status_code == 404


@pytest.mark.parametrize(
    ("path", "shown"),
    [("engage.toml", ""), ("ops/one.toml", " --config ops/one.toml"), ("/", " --config PATH")],
)
def test_the_command_for_a_link_works_where_the_server_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, shown: str
) -> None:
    """Anyone can read it, so it names no absolute path."""
    text = '[[workspaces]]\nid = "acme"\n'
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ENGAGE_CONFIG", raising=False)
    config = tmp_path / "engage.toml" if path == "/" else Path(path)
    config.parent.mkdir(exist_ok=True)
    config.write_text(text)
    monkeypatch.setenv("PATH", "")
    assert link_command(load(config)) == f"engage console-link{shown}"
    program = tmp_path / "venv with space/bin/engage"
    program.parent.mkdir(parents=True)
    program.touch()
    monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
    assert link_command(load(config)) == f"'venv with space/bin/engage' console-link{shown}"
