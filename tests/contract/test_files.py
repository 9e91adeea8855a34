# SPDX-License-Identifier: Apache-2.0
"""Files for browsers: the script, the API description, its page, and the settings of SDKs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from urllib.parse import quote

import pytest

from support.server_inprocess import BASIC, serving
from support.server_process import KEY

FILES = ("/engage.js", "/openapi.json", "/docs")
SETTINGS = (f"/v1/projects/{KEY}/settings", "/sourceConfig")
ORIGINS = '[cors]\norigins = ["https://shop.example.com"]\n'
#: A write key may have any character; in a path each is escaped.
ODD = "odd/key+=_-%25&<>?#"
ODD_KEY = f'[[workspaces.write_keys]]\nid = "odd"\nkey = "{ODD}"\n'
OLD_KEY = '[[workspaces.write_keys]]\nid = "old"\nkey = "old-key"\ndisabled = true\n'


@pytest.mark.parametrize("origins", ["", ORIGINS], ids=["any origin", "a list of origins"])
@pytest.mark.parametrize("path", [*FILES, *SETTINGS])
async def test_a_file_is_not_sent_again(tmp_path: Path, path: str, origins: str) -> None:
    """A cache asks for settings each time, because the key may be disabled meanwhile."""
    key = None if path in FILES else BASIC
    async with serving(tmp_path, config_extra=origins) as server, await server.connect() as client:
        plain = await server.send(path, method="GET", key=key, client=client)
        assert plain.status == 200
        assert "content-encoding" not in plain.headers
        strong = plain.headers["etag"].removeprefix("W/")
        known = [strong, f"W/{strong}", "*", f'"other", {strong}']
        unknown = ['"other"', strong.strip('"'), ""]
        if path in FILES:
            zipped = await server.send(
                path, method="GET", key=key, client=client, headers={"Accept-Encoding": "br, gzip"}
            )
            assert zipped.headers["content-encoding"] == "gzip"
            assert gzip.decompress(zipped.body) == plain.body
            unknown.append(zipped.headers["etag"])
        for etag in known:
            for method in ("GET", "HEAD"):
                again = await server.send(
                    path, method=method, key=key, client=client, headers={"If-None-Match": etag}
                )
                assert (etag, again.status, again.body) == (etag, 304, b"")
                for name in ("etag", "cache-control", "vary"):
                    assert again.headers.get(name) == plain.headers.get(name)
        for etag in unknown:
            again = await server.send(
                path, method="GET", key=key, client=client, headers={"If-None-Match": etag}
            )
            assert (etag, again.status, again.body) == (etag, 200, plain.body)


BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.mark.parametrize("console", ["", "[console]\nport = 8081", "[console]\nport = 0"])
@pytest.mark.parametrize("public", ["", 'public_url = "https://events.example.com"'])
async def test_a_browser_that_opens_the_server_gets_a_page(
    tmp_path: Path, console: str, public: str
) -> None:
    """It names the console only if the server is not public."""
    async with serving(tmp_path, server=public, config_extra=console) as server:
        page = await server.send("/", method="GET", key=None, headers=BROWSER)
        assert page.status == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert page.headers["content-security-policy"].startswith("default-src 'none'; style-src")
        assert page.headers["vary"].startswith("Accept, Accept-Encoding")
        assert b'href="docs"' in page.body
        assert (b'href="http://127.0.0.1:8081"' in page.body) == ("8081" in console and not public)
        assert KEY.encode() not in page.body
        for path, method, headers in (
            *(("/", "GET", {}), ("/", "GET", {"Accept": "*/*"})),
            *(("/", "GET", {"Accept": "application/json"}), ("/", "POST", BROWSER)),
            ("/other", "GET", BROWSER),
        ):
            other = await server.send(path, method=method, key=None, headers=headers)
            assert (other.status, other.headers["content-type"]) == (404, page_type(other.body))


def page_type(body: bytes) -> str:
    """Return the content type of an error, after a look at it."""
    assert json.loads(body)["code"] == "not_found"
    return "application/json; charset=utf-8"


async def test_a_client_without_gzip_gets_the_plain_file(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        for accept in ("", "gzip;q=0", "*;q=0.0", "br", "identity"):
            headers = {"Accept-Encoding": accept}
            answer = await server.send("/engage.js", method="GET", key=None, headers=headers)
            assert "content-encoding" not in answer.headers, accept


async def test_head_has_the_headers_of_get(tmp_path: Path) -> None:
    """The body is missing."""
    unequal = {"x-request-id", "date"}
    async with serving(tmp_path) as server, await server.connect() as client:
        for path in (*FILES, *SETTINGS):
            got = await server.send(path, method="GET", client=client)
            head = await server.send(path, method="HEAD", client=client)
            assert (got.status, head.status) == (200, 200)
            for name in (got.headers.keys() | head.headers.keys()) - unequal:
                assert head.headers.get(name) == got.headers.get(name), (path, name)


async def test_settings_are_found_by_write_key(tmp_path: Path) -> None:
    """Only of known write keys, and in any escaping."""
    public = 'public_url = "https://events.example.com/in/"'
    async with (
        serving(tmp_path, server=public, config_extra=ODD_KEY + OLD_KEY) as server,
        await server.connect() as client,
    ):
        for key in (KEY, ODD):
            path = f"/v1/projects/{quote(key, safe='')}/settings"
            answer = await server.send(path, method="GET", key=None, client=client)
            assert answer.json["integrations"]["Segment.io"] == {
                "apiKey": key,
                "httpConfig": {
                    "rateLimitConfig": {"maxRetryCount": 100},
                    "backoffConfig": {"maxRetryCount": 100},
                },
                "apiHost": "events.example.com/in/v1",
                "protocol": "https",
            }
            assert answer.headers["cache-control"] == "no-cache"
        for unknown in ("nope", "%00", "%ff", "%2e%2e", "old-key", quote(quote(ODD, ""), "")):
            path = f"/v1/projects/{unknown}/settings"
            answer = await server.send(path, method="GET", client=client)
            assert (answer.status, answer.json["code"]) == (404, "not_found")
            assert "cache-control" not in answer.headers


@pytest.mark.parametrize("origins", ["", ORIGINS], ids=["any origin", "a list of origins"])
async def test_the_source_config_is_found_by_write_key(tmp_path: Path, origins: str) -> None:
    """The key is in a header or in the query; a cache must not mix up keys."""
    async with (
        serving(tmp_path, config_extra=ODD_KEY + OLD_KEY + origins) as server,
        await server.connect() as client,
    ):
        for path, key, name in (
            ("/sourceConfig", BASIC, "website"),
            (f"/sourceConfig/?p=npm&writeKey={KEY}", None, "website"),
            (f"/sourceConfig/?writeKey={quote(ODD, safe='')}", None, "odd"),
        ):
            answer = await server.send(path, method="GET", key=key, client=client)
            assert answer.json["source"]["id"] == name
            assert answer.json["source"]["updatedAt"] == answer.json["updatedAt"] > "2020"
            vary = answer.headers["vary"].split(", ")
            assert sorted(vary) == (["Authorization", "Origin"] if origins else ["Authorization"])
        for path, status in (
            ("/sourceConfig", 401),
            ("/sourceConfig?writeKey=nope", 401),
            ("/sourceConfig?writeKey=old-key", 401),
        ):
            answer = await server.send(path, method="GET", key=None, client=client)
            assert (path, answer.status) == (path, status)
            assert "cache-control" not in answer.headers
