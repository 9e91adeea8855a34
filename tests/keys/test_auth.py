# SPDX-License-Identifier: Apache-2.0
"""Where a write key may be, and the errors for a wrong one."""

from __future__ import annotations

import base64

import pytest

from engage.config import Workspace, WriteKey
from engage.errors import ApiError
from engage.keys.auth import Authenticator
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
