# SPDX-License-Identifier: Apache-2.0
"""CORS headers, without HTTP; ``contract/test_http.py`` tests them over HTTP."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engage.config import Cors
from engage.handlers.cors import CorsPolicy
from support.each import each

ANY = CorsPolicy(Cors())
LIST = CorsPolicy(Cors(origins=("https://a.example", "null")))


def test_credentials_are_allowed_only_for_beacons() -> None:
    """The origin is then echoed: browsers refuse credentials with ``*``."""
    with_credentials = ANY.headers("https://x.example", credentials=True)
    assert with_credentials["Access-Control-Allow-Origin"] == "https://x.example"
    assert with_credentials["Access-Control-Allow-Credentials"] == "true"
    without = ANY.headers("https://x.example", credentials=False)
    assert without["Access-Control-Allow-Origin"] == "*"
    assert "Access-Control-Allow-Credentials" not in without


@each("origin", ["https://a.example", "HTTPS://A.example", "null"])
def test_a_listed_origin_is_echoed(origin: str) -> None:
    assert LIST.headers(origin, credentials=True)["Access-Control-Allow-Origin"] == origin
    assert LIST.headers(origin, credentials=False)["Access-Control-Allow-Origin"] == origin


@each("origin", [None, "", "https://b.example", "https://a.example.b", "*"])
def test_an_origin_that_is_not_listed_gets_only_vary(origin: str | None) -> None:
    """Caches must know that the answer depends on the origin."""
    for credentials in (True, False):
        assert LIST.headers(origin, credentials=credentials) == {"Vary": "Origin"}


def test_a_preflight_allows_what_it_requests() -> None:
    """For a limited time."""
    got = LIST.preflight(
        "https://a.example", " authorization,x-a ", ("POST", "OPTIONS"), credentials=True
    )
    assert got["Access-Control-Allow-Headers"] == "authorization,x-a"
    assert got["Access-Control-Allow-Methods"] == "POST, OPTIONS"
    assert got["Access-Control-Max-Age"] == "7200"
    refused = LIST.preflight("https://b.example", "a", ("POST",), credentials=True)
    assert not any(name.startswith("Access-Control") for name in refused)


@each("asked", ["a" * 1025, "a b", "a,,b", "*, é", "x\ty", "authorization;q=1", ","])
def test_a_preflight_with_odd_headers_echoes_nothing(asked: str) -> None:
    got = LIST.preflight("https://a.example", asked, ("POST",), credentials=True)
    assert got["Access-Control-Allow-Headers"] == "authorization, content-type"


@given(st.text(), st.text(), st.booleans())
def test_odd_values_cannot_break_the_headers(origin: str, asked: str, credentials: bool) -> None:
    """For any request, the headers of the answer are short lines of printable ASCII."""
    for policy in (ANY, LIST):
        for headers in (
            policy.headers(origin, credentials=credentials),
            policy.preflight(origin, asked, ("POST",), credentials=credentials),
        ):
            for value in headers.values():
                assert value.isascii()
                assert value.replace("\t", " ").isprintable()
                assert len(value) <= 1024
