# SPDX-License-Identifier: Apache-2.0
"""CORS headers. Through HTTP they are tested in ``contract/test_http.py``."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engage.config import Cors
from engage.handlers.cors import CorsPolicy

ANY = CorsPolicy(Cors())
LIST = CorsPolicy(Cors(origins=("https://a.example", "null"), max_age=60))


def test_credentials_only_where_beacons_go() -> None:
    """And then never ``*``, which a browser refuses."""
    with_credentials = ANY.headers("https://x.example", credentials=True)
    assert with_credentials["Access-Control-Allow-Origin"] == "https://x.example"
    assert with_credentials["Access-Control-Allow-Credentials"] == "true"
    without = ANY.headers("https://x.example", credentials=False)
    assert without["Access-Control-Allow-Origin"] == "*"
    assert "Access-Control-Allow-Credentials" not in without


@pytest.mark.parametrize("origin", ["https://a.example", "HTTPS://A.example", "null"])
def test_listed(origin: str) -> None:
    """Echoed as it was sent."""
    assert LIST.headers(origin, credentials=True)["Access-Control-Allow-Origin"] == origin
    assert LIST.headers(origin, credentials=False)["Access-Control-Allow-Origin"] == origin


@pytest.mark.parametrize("origin", [None, "", "https://b.example", "https://a.example.b", "*"])
def test_not_listed(origin: str | None) -> None:
    """Nothing but the word to caches that the answer depends on it."""
    for credentials in (True, False):
        assert LIST.headers(origin, credentials=credentials) == {"Vary": "Origin"}


def test_preflight() -> None:
    """What is asked for is allowed, for a while."""
    got = LIST.preflight(
        "https://a.example", " authorization,x-a ", ("POST", "OPTIONS"), credentials=True
    )
    assert got["Access-Control-Allow-Headers"] == "authorization,x-a"
    assert got["Access-Control-Allow-Methods"] == "POST, OPTIONS"
    assert got["Access-Control-Max-Age"] == "60"
    refused = LIST.preflight("https://b.example", "a", ("POST",), credentials=True)
    assert not any(name.startswith("Access-Control") for name in refused)


@given(st.text(), st.text(), st.booleans())
def test_nothing_escapes_into_the_headers(origin: str, asked: str, credentials: bool) -> None:
    """Whatever is sent, the answer's headers are printable ASCII on one line, and short."""
    for policy in (ANY, LIST):
        for headers in (
            policy.headers(origin, credentials=credentials),
            policy.preflight(origin, asked, ("POST",), credentials=credentials),
        ):
            for value in headers.values():
                assert value.isascii()
                assert value.replace("\t", " ").isprintable()
                assert len(value) <= 1024
