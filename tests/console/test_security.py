# SPDX-License-Identifier: Apache-2.0
"""What other sites, other names, proxies and mistakes can do to the console: nothing."""

from __future__ import annotations

import html.parser
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import httpx
import pytest

from engage.console.application import MAX_BODY_BYTES, MAX_STRANGERS_BODY_BYTES, ROUTES
from engage.console.base import ConsoleHandler
from engage.console.headers import CONTENT_SECURITY_POLICY
from support.console import CONSOLE, browser, console_url, free_port, make_link, signed_in
from support.each import each
from support.reverse_proxy import reverse_proxy
from support.server_process import Server, start_server

#: The paths that accept a form.
FORMS = sorted(
    path
    for path, handler in ROUTES.items()
    if "post" in dir(handler)
    and (
        getattr(handler, "post") is not getattr(ConsoleHandler, "post")  # noqa: B009
    )
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("console")
    extra = f'{CONSOLE}allowed_hosts = ["console.lan"]\n'
    with start_server(folder, server='trusted_proxies = ["127.0.0.2"]', config_extra=extra) as one:
        yield one


# ------------------------------------------------------------------------------------ foreign pages
FOREIGN = [
    *({}, {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}),
    *({"Sec-Fetch-Site": "none"}, {"Origin": "null"}, {"Origin": "https://evil.example"}),
    *({"Origin": "http://127.0.0.1"}, {"Origin": "http://127.0.0.1:1"}),
    *({"Origin": "http://localhost.evil.example"}, {"Origin": ""}),
]


@each("headers", FOREIGN)
def test_a_form_of_a_foreign_page_changes_nothing(
    server: Server, url: str, headers: dict[str, str]
) -> None:
    """Neither a page on another site, nor one on another port of this machine."""
    token = make_link(server.config)
    with signed_in(server) as client:
        del client.headers["Origin"], client.headers["Sec-Fetch-Site"]
        for path in FORMS:
            if path == "/link" and headers.get("Origin") == "null":
                continue  # The next test.
            answer = client.post(path.lstrip("/"), headers=headers, data={"t": token})
            assert answer.status_code == 403, path
            assert not answer.cookies
        if "Sec-Fetch-Site" in headers:
            both = {**headers, "Origin": url}
            assert client.post("logout", headers=both).status_code == 403
        assert client.get("audit").status_code == 200
    with browser(url) as fresh:  # The link was not used up.
        assert fresh.post("link", data={"t": token}).status_code == 303


def test_own_forms_work_over_plain_http_to_another_machine(server: Server, url: str) -> None:
    """There browsers send no ``Sec-Fetch-Site``, and the page of a link sends ``Origin: null``."""
    port = urlsplit(url).port
    host = {"Host": f"console.lan:{port}"}
    token = make_link(server.config)
    answer = httpx.post(f"{url}/link", data={"t": token}, headers={**host, "Origin": "null"})
    assert answer.status_code == 303
    cookie = answer.headers["Set-Cookie"].partition(";")[0]
    own = {**host, "Cookie": cookie, "Origin": f"http://console.lan:{port}"}
    for origin in (f"http://127.0.0.1:{port}", "http://console.lan", "null"):
        foreign = {**own, "Origin": origin}
        assert httpx.post(f"{url}/logout", headers=foreign).status_code == 403
    assert httpx.get(f"{url}/audit", headers=own).status_code == 200
    assert httpx.post(f"{url}/logout", headers=own).status_code == 303
    assert httpx.get(f"{url}/audit", headers=own).status_code == 303


def test_get_and_head_change_nothing(server: Server) -> None:
    with signed_in(server) as client:
        for path in ROUTES:
            for method in ("GET", "HEAD"):
                client.request(method, path.lstrip("/"))
        assert client.get("audit").status_code == 200


# -------------------------------------------------------------------------------------------- hosts
FOREIGN_HOSTS = """
    evil.example evil.example:8081 127.0.0.1.evil.example console.lan.evil.example
    localhost@evil.example [::1].evil.example localhost.evil
"""


@each("host", ["", "a b", *FOREIGN_HOSTS.split()])
def test_a_foreign_host_is_refused_on_every_route(server: Server, url: str, host: str) -> None:
    with signed_in(server) as client:
        for path in (*ROUTES, "/static/console.css", "/nowhere"):
            answer = client.get(path.lstrip("/"), headers={"Host": host})
            # Tornado itself refuses what cannot be a host.
            assert answer.status_code in (421, 400), path
            assert not answer.headers.get("Location")
        assert client.post("logout", headers={"Host": host}).status_code in (421, 400)
        assert client.get("audit").status_code == 200


OWN_HOSTS = """
    127.0.0.1 127.0.0.1:9 [::1] [::1]:8081 localhost LOCALHOST:80 engage.localhost
    console.lan Console.LAN. 192.0.2.7
"""


@each("host", OWN_HOSTS.split())
def test_the_hosts_of_the_console_are_served(url: str, host: str) -> None:
    assert httpx.get(f"{url}/login", headers={"Host": host}).status_code == 200


# ------------------------------------------------------------------------------------------ headers
def test_every_answer_has_the_headers(server: Server, url: str) -> None:
    with signed_in(server) as client:
        answers = [client.get(path.lstrip("/")) for path in ROUTES]
        answers += [
            *(client.get("nowhere"), client.get("static/nowhere.css")),
            *(client.get("static/console.css"), client.get("static/../base.py")),
            client.get("static/%2e%2e/base.py"),
            *(client.get("", headers={"Host": "evil.example"}), client.put("keys")),
            *(client.options("keys"), client.delete("audit")),
            client.post("logout", headers={"Sec-Fetch-Site": "cross-site"}),
        ]
    for answer in answers:
        headers = answer.headers
        assert headers["Content-Security-Policy"] == CONTENT_SECURITY_POLICY, answer.url
        assert headers["Referrer-Policy"] == (
            "no-referrer" if answer.url.path == "/link" else "same-origin"
        )
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cross-Origin-Opener-Policy"] == "same-origin"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert headers["Cache-Control"] == "no-store" or "immutable" in headers["Cache-Control"]
        assert re.fullmatch("[0-9a-f]{16}", headers["X-Request-Id"])
        assert "Server" not in headers
        assert not [name for name in headers if name.lower().startswith("access-control-")]
        assert "Traceback" not in answer.text
        assert "tornado" not in answer.text.lower()
    assert [answer.status_code for answer in answers[-4:]] == [405, 405, 405, 403]


def test_static_files_are_kept_by_browsers_and_pages_are_not(server: Server) -> None:
    with signed_in(server) as client:
        page = client.get("audit").text
        names = re.findall(r'(?:href|src)="(static/[^"]+)"', page)
        assert names
        for name in names:
            answer = client.get(name)
            assert answer.status_code == 200
            assert answer.headers["Cache-Control"] == "public, max-age=31536000, immutable"


def test_an_error_page_has_the_id_of_the_log_and_nothing_of_the_request(server: Server) -> None:
    with signed_in(server) as client:
        answer = client.get("nowhere", params={"x": "what-was-sent"})
        assert answer.headers["X-Request-Id"] in answer.text
        assert "what-was-sent" not in answer.text
        assert client.get("audit", params={"workspace": "what-was-sent"}).status_code in (200, 404)
        json_answer = client.get("event.json", params={"workspace": "nowhere"})
        assert json_answer.headers["Content-Type"].startswith("application/json")


# ------------------------------------------------------------------------------------------ proxies
class _Links(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.forms: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "form" and given.get("method") == "post":
            self.forms.add(given.get("action") or "")
            return
        for name in ("href", "src", "action"):
            value = given.get(name)
            if value and not value.startswith("#"):
                self.found.add(value)


@pytest.mark.parametrize("strips", [True, False])
def test_every_link_works_under_the_path_of_a_proxy(tmp_path: Path, strips: bool) -> None:
    with reverse_proxy("") as proxy:
        proxy.strip = "/engage" if strips else ""
        url, port = f"{proxy.url}/engage", free_port()
        proxy.target = f"http://127.0.0.1:{port}"
        extra = f'[console]\nport = {port}\npublic_url = "{url}"\n'
        with start_server(tmp_path, config_extra=extra) as server:
            assert server.track("m1").status_code == 200
            assert server.post("/v1/track", {"userId": "u"}).status_code == 400
            assert console_url(server) == url
            with browser(url, headers={"Origin": proxy.url}) as client:
                assert client.get("events").headers["Location"] == "login?next=events"
                form = {"t": make_link(server.config), "next": "events"}
                answer = client.post("link", data=form)
                assert answer.status_code == 303, answer.text
                assert urljoin(f"{url}/link", answer.headers["Location"]) == f"{url}/events"
                if not strips:
                    answer = client.get(url)
                    assert urljoin(url, answer.headers["Location"]) == f"{url}/"
                seen = _crawl(client, f"{url}/")
                paths = {urlsplit(one).path for one in seen}
                assert {"/engage/", "/engage/keys", "/engage/event", "/engage/audit"} <= paths
                assert all(path.startswith("/engage/") for path in paths)
                assert len(seen) > 15


def _crawl(client: httpx.Client, start: str) -> set[str]:
    """Open every link of every page, and the targets of forms; all of them must be there."""
    waiting, seen = [start], {start}
    while waiting:
        url = waiting.pop()
        answer = client.get(url)
        assert answer.status_code == 200, (url, answer.status_code)
        if not answer.headers.get("Content-Type", "").startswith("text/html"):
            continue
        links = _Links()
        links.feed(answer.text)
        for form in links.forms:
            path = urlsplit(urljoin(url, form)).path
            assert path.startswith("/engage/"), (url, form)
            assert path.removeprefix("/engage") in FORMS, (url, form)
        for link in links.found:
            target = urljoin(url, link).partition("#")[0]
            if urlsplit(target).netloc != urlsplit(start).netloc:
                continue
            if target not in seen and len(seen) < 300:
                seen.add(target)
                waiting.append(target)
    return seen


# ------------------------------------------------------------------------------------------- bounds
def status_of(client: httpx.Client, size: int) -> int:
    """Return the status of a form; 400 if the connection was closed while it was sent."""
    try:
        return client.post("logout", content=b"t=" + b"x" * (size - 2)).status_code
    except httpx.TransportError:
        return 400


def test_a_form_that_is_too_large_is_refused(server: Server, url: str) -> None:
    """Decoding it takes time, so a stranger's form must be small."""
    with browser(url) as stranger:
        assert status_of(stranger, MAX_STRANGERS_BODY_BYTES) == 303
        assert status_of(stranger, MAX_STRANGERS_BODY_BYTES + 1) == 400
        stranger.cookies.set(f"engage-console-{urlsplit(url).port}", "2|1:0|10:1|1:a|1:b|c")
        assert status_of(stranger, MAX_STRANGERS_BODY_BYTES + 1) == 400
    with signed_in(server) as client:
        assert status_of(client, MAX_BODY_BYTES + 1) == 400
    with signed_in(server) as client:
        assert status_of(client, MAX_BODY_BYTES) == 303
    assert httpx.get(f"{url}/healthz").status_code == 200


def test_a_head_that_is_too_large_is_refused(url: str) -> None:
    try:
        answer = httpx.get(f"{url}/login", headers={"X": "x" * 70_000})
        assert answer.status_code >= 400
    except httpx.HTTPError:
        pass
    assert httpx.get(f"{url}/healthz").status_code == 200


def test_a_read_only_console_shows_and_changes_nothing(tmp_path: Path) -> None:
    with (
        start_server(tmp_path, config_extra=f"{CONSOLE}read_only = true\n") as server,
        signed_in(server) as client,
    ):
        for path in FORMS:
            if path not in ("/link", "/login", "/logout"):
                answer = client.post(path.lstrip("/"))
                assert answer.status_code == 403, path
                assert "read-only" in answer.text
        for page in ("keys", "rejected", "replays", "audit"):
            forms = re.findall(r'<form method="post" action="([^"]*)"', client.get(page).text)
            assert set(forms) <= {"logout"}, page
        assert client.post("logout").status_code == 303
