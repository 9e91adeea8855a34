# SPDX-License-Identifier: Apache-2.0
"""Server keys, which are known by their SHA-256, and what keys may not do."""

from __future__ import annotations

import base64
import hashlib
import io
import logging
from collections.abc import Iterator

import pytest

from engage.config import Workspace, WriteKey
from engage.errors import ApiError
from engage.keys.auth import Authenticator, Principal
from engage.keys.rules import Rules
from engage.monitoring import logs
from support.each import each

SECRET = "5e" * 16
DIGEST = hashlib.sha256(SECRET.encode()).hexdigest()
SERVER = WriteKey(id="backend", sha256=DIGEST.upper(), kind="server")
PUBLIC = WriteKey(id="website", key="key-1")
SHOP = "https://shop.example.com"


def workspace(*keys: WriteKey) -> Workspace:
    return Workspace(id="acme", name="Acme", write_keys=keys)


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Configure the log of this process, and return what it writes."""
    stream = io.StringIO()
    root = logging.getLogger()
    level = root.level
    logs.configure("info", "json", stream=stream)
    yield stream
    for logger in (root, logging.getLogger(logs.ACCESS)):
        for handler in list(logger.handlers):
            if getattr(handler, "stream", None) is stream:
                logger.removeHandler(handler)
    root.setLevel(level)


HEADERS = [
    *(f"Basic {encoded(SECRET + ':')}", f"Bearer {encoded(SECRET + ':')}"),
    *(f"Basic {encoded(SECRET + ':password')}", f"Basic {encoded(SECRET)}"),
    *(f"basic {encoded(SECRET + ':').rstrip('=')}", f"Basic {SECRET}", f"Bearer {SECRET}"),
]


@pytest.mark.parametrize("header", HEADERS)
def test_a_server_key_is_found_by_its_hash_and_masked_from_then_on(
    log: io.StringIO, header: str
) -> None:
    authenticator = Authenticator([workspace(PUBLIC, SERVER)])
    logging.getLogger("test").warning("before %s", SECRET)
    assert SECRET in log.getvalue(), "it is not known before"
    for _ in range(2):
        principal = authenticator.header_or_query(header, [])
        assert principal is not None
        assert principal.write_key.id == "backend"
    log.truncate(0)
    for text in (header, *HEADERS, f"?writeKey={SECRET}&x=1"):
        logging.getLogger("test").warning("after %s", text)
    assert log.getvalue().count("***") == len(HEADERS) + 2
    assert SECRET not in log.getvalue()
    assert encoded(SECRET)[:40] not in log.getvalue()


def test_a_server_key_is_masked_also_where_it_is_refused(log: io.StringIO) -> None:
    disabled = WriteKey(id="backend", sha256=DIGEST, kind="server", disabled=True)
    with pytest.raises(ApiError, match="it is disabled"):
        Authenticator([workspace(disabled)]).header_or_query(HEADERS[0], [])
    logging.getLogger("test").warning("after %s", SECRET)
    assert SECRET not in log.getvalue()


@each("sent", [SECRET.upper(), SECRET[:-1], SECRET + "5", DIGEST, DIGEST.upper(), "", "5e:5e"])
def test_only_the_key_itself_is_accepted(sent: str) -> None:
    """Neither a part of it, nor its hash, which is in the config and the store."""
    authenticator = Authenticator([workspace(SERVER)])
    for scheme in ("Basic", "Bearer"):
        for credential in (sent, encoded(f"{sent}:")):
            with pytest.raises(ApiError) as caught:
                authenticator.header_or_query(f"{scheme} {credential}", [])
            assert caught.value.code == "invalid_write_key"
    with pytest.raises(ApiError):
        authenticator.body(sent)


def test_a_server_key_stays_known_when_the_keys_change() -> None:
    """Its header is looked up without a hash again, and not beyond its end."""
    authenticator = Authenticator([workspace(SERVER)])
    assert authenticator.header_or_query(HEADERS[0], []) is not None
    for disabled, keys in ((True, 1), (False, 1), (False, 0)):
        key = WriteKey(id="backend", sha256=DIGEST, kind="server", disabled=disabled)
        authenticator.replace([(workspace(), key)] * keys)
        if keys and not disabled:
            assert authenticator.header_or_query(HEADERS[0], []) is not None
            continue
        with pytest.raises(ApiError) as caught:
            authenticator.header_or_query(HEADERS[0], [])
        assert caught.value.code == ("write_key_disabled" if disabled else "invalid_write_key")


def rules(**options: object) -> Rules | None:
    key = WriteKey(id="k", key="key-1", **options)  # type: ignore[arg-type]
    return Rules.of(workspace(key), key)


def test_most_keys_have_no_rules() -> None:
    """So that their requests cost nothing."""
    assert rules() is None
    assert Principal(workspace(PUBLIC), PUBLIC).rules is None


@each(
    "origin, allowed",
    [
        *((SHOP, True), ("HTTPS://SHOP.example.com", True)),
        *(("https://admin.example.com:8443", True), ("https://admin.example.com", False)),
        *((f"{SHOP}:443", False), ("http://shop.example.com", False)),
        *(("https://evil.shop.example.com", False), ("https://shop.example.com.evil.com", False)),
        *((f"{SHOP}/", False), (f"{SHOP},{SHOP}", False), ("*", False), ("null", False)),
        *(("", False), (None, False)),
    ],
)
def test_only_the_exact_origins_may_use_a_key(origin: str | None, allowed: bool) -> None:
    own = rules(origins=(SHOP, "https://Admin.example.com:8443"))
    assert own is not None
    if allowed:
        own.check_request(origin)
        return
    with pytest.raises(ApiError) as caught:
        own.check_request(origin)
    assert (caught.value.status, caught.value.code) == (403, "origin_not_allowed")
    # RudderStack's 1.x SDKs stop only if they find these words.
    assert "invalid write key" in caught.value.message
    assert (origin or "no Origin") in caught.value.message
