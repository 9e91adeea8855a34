# SPDX-License-Identifier: Apache-2.0
"""Where a write key may be, and the errors for a wrong one; server keys."""

from __future__ import annotations

import base64
import hashlib
import io
import logging
from collections.abc import Iterator

import pytest

from engage.config import Workspace, WriteKey
from engage.errors import ApiError
from engage.keys.auth import Authenticator
from engage.monitoring import logs
from support.each import each
from support.pipeline import ACME, OTHER


def encoded(text: str) -> str:
    """Return the header that HTTP clients send."""
    return "Basic " + base64.b64encode(text.encode()).decode()


def as_bearer(header: str) -> str:
    """Return the header with the scheme that Dittofeed's OpenAPI description names."""
    return header.replace("Basic", "Bearer").replace("basic", "bearer").replace("BASIC", "BEARER")


@pytest.fixture
def authenticator() -> Authenticator:
    return Authenticator([ACME, OTHER])


@each(
    "header",
    [
        *(encoded("key-1:"), encoded("key-1:password"), encoded("key-1:pass:word")),
        *(encoded("key-1"), encoded("key-1:").rstrip("="), encoded("key-1").rstrip("=")),
        *("Basic key-1", "basic key-1", "BASIC " + encoded("key-1:").removeprefix("Basic ")),
        *("Basic   key-1  ", encoded("key-1:é")),
    ],
)
def test_a_key_in_the_header_names_the_workspace(authenticator: Authenticator, header: str) -> None:
    for sent in (header, as_bearer(header)):
        principal = authenticator.header_or_query(sent, [])
        assert principal is not None
        assert (principal.workspace.id, principal.write_key.id) == ("acme", "website")


def test_the_header_may_use_the_url_safe_alphabet() -> None:
    """The base64 of the key has characters that differ in the two alphabets."""
    key = "k>?k>?"
    workspace = Workspace(id="w", name="W", write_keys=(WriteKey(id="k", key=key),))
    header = "Basic " + base64.urlsafe_b64encode(f"{key}:".encode()).decode()
    assert "-" in header or "_" in header
    principal = Authenticator([workspace]).header_or_query(header, [])
    assert principal is not None
    assert principal.write_key.id == "k"


@each("sent", ["verbatim", "encoded", "encoded with colon"])
def test_a_key_may_be_base64(sent: str) -> None:
    """Keys of Dittofeed are the base64 of ``id:secret``."""
    key = base64.b64encode(b"c4609eb3:294f0b92").decode()
    workspace = Workspace(id="w", name="W", write_keys=(WriteKey(id="k", key=key),))
    header = {
        "verbatim": f"Basic {key}",
        "encoded": encoded(key),
        "encoded with colon": encoded(f"{key}:"),
    }[sent]
    for scheme in (header, as_bearer(header)):
        principal = Authenticator([workspace]).header_or_query(scheme, [])
        assert principal is not None
        assert principal.write_key.id == "k"


@pytest.mark.parametrize("text", ["id:secret", "id:secret:"])
def test_a_key_may_have_a_colon(text: str) -> None:
    workspace = Workspace(id="w", name="W", write_keys=(WriteKey(id="k", key="id:secret"),))
    assert Authenticator([workspace]).header_or_query(encoded(text), []) is not None


@each(
    "header",
    [
        *("Bearer", "Bearer key-9", "Bearer " + encoded("key-9:"), "Bearer key-1,"),
        *("Bearer\tkey-1", "Digest key-1", "key-1", "Basic", "Basic ", "", "Basic ***", "Basic é"),
        *(encoded("key-9:"), encoded(":key-1"), "Basic /////w==", encoded("KEY-1:")),
        *(encoded("key-1x:"), f"{encoded('key-1:')},{encoded('key-1:')}"),
    ],
)
def test_a_wrong_key_in_the_header_is_final(authenticator: Authenticator, header: str) -> None:
    """Even with a right key in the query: the first key that is found counts."""
    with pytest.raises(ApiError) as caught:
        authenticator.header_or_query(header, ["key-1"])
    assert (caught.value.status, caught.value.code) == (401, "invalid_write_key")
    assert caught.value.headers["WWW-Authenticate"].startswith("Basic ")
    assert "key-1" not in caught.value.message


def test_the_answer_to_an_unknown_key_says_how_to_see_the_keys(
    authenticator: Authenticator,
) -> None:
    for key in ("key-9", "not a key"):
        with pytest.raises(ApiError) as caught:
            authenticator.body(key)
        assert caught.value.code == "invalid_write_key"
        assert "invalid write key" in caught.value.message
        assert "`engage keys list`" in caught.value.message


def test_a_key_may_be_in_the_query(authenticator: Authenticator) -> None:
    principal = authenticator.header_or_query(None, ["key-2"])
    assert principal is not None
    assert principal.workspace.id == "other"
    assert authenticator.header_or_query(None, ["key-2", "key-2"]) == principal
    for keys in ([], [""]):
        assert authenticator.header_or_query(None, keys) is None, "the body decides"
    for keys in (["nope"], ["key-1", "key-2"]):
        with pytest.raises(ApiError) as caught:
            authenticator.header_or_query(None, keys)
        assert caught.value.code == "invalid_write_key"


# -------------------------------------------------------------------------------------- server keys
SECRET = "5e" * 16
DIGEST = hashlib.sha256(SECRET.encode()).hexdigest()
SERVER = WriteKey(id="backend", sha256=DIGEST.upper(), kind="server")
PUBLIC = WriteKey(id="website", key="key-1")


def workspace(*keys: WriteKey) -> Workspace:
    return Workspace(id="acme", name="Acme", write_keys=keys)


def base64_of(text: str) -> str:
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
    *(f"Basic {base64_of(SECRET + ':')}", f"Bearer {base64_of(SECRET + ':')}"),
    *(f"Basic {base64_of(SECRET + ':password')}", f"Basic {base64_of(SECRET)}"),
    *(f"basic {base64_of(SECRET + ':').rstrip('=')}", f"Basic {SECRET}", f"Bearer {SECRET}"),
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
    assert base64_of(SECRET)[:40] not in log.getvalue()


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
        for credential in (sent, base64_of(f"{sent}:")):
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
