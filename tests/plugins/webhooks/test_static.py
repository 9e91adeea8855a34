# SPDX-License-Identifier: Apache-2.0
"""Providers that sign nothing: the credential, its options, and bodies that make no sense."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from jsonschema import ValidationError

from engage.api import PayloadInvalid, SignatureMismatch
from support.each import each
from support.provider_static import BASIC, HEADER, basic, translate
from support.providers import make, request

PROVIDERS = ["amplitude", "mixpanel", "mparticle", "posthog", "postmark", "rudderstack"]
RIGHT = basic("hook:pä:ss")


@each("provider", PROVIDERS)
@each(
    "options, headers",
    [
        (HEADER, [("x-secret", "s3cret")]),
        ({"header": "X-Secret", "value": ["new", "s3cret"]}, [("X-SECRET", "s3cret")]),
        ({"value": "Bearer ü"}, [("Authorization", "Bearer ü".encode().decode("latin-1"))]),
        (BASIC, [("Authorization", RIGHT)]),
        (BASIC, [("authorization", RIGHT.replace("Basic", "bAsIc"))]),
        (BASIC | {"basic_password": ["x", "pä:ss"]}, [("Authorization", RIGHT)]),
    ],
)
def test_the_credential_verifies(
    provider: str, options: Mapping[str, Any], headers: Sequence[tuple[str, str]]
) -> None:
    made = make(provider, options)
    assert made.needs(request(b"", headers)) is None
    made.verify(request(b"", headers), None)


WRONG_HEADERS = [
    [],
    *([("X-Secret", v)] for v in ("", "S3CRET", "s3cret ", "s3cre", "s3cretx", "ÿ\x80")),
    *([("X-Secret", v), ("x-secret", "s3cret")] for v in ("s3cret", "bad")),
    [("Authorization", "s3cret")],
]
WRONG_BASIC = [
    *(basic("hook:pä"), basic("hook:pä:ss:"), RIGHT.rstrip("=")[:-1], RIGHT + "="),
    *(RIGHT.replace("Basic", "Bearer"), "Basic", "Basic ", "Basic ÿÿÿÿ", "hook:pä:ss"),
]


@each("provider", PROVIDERS)
@each(
    "options, headers",
    [
        *((HEADER, headers) for headers in WRONG_HEADERS),
        *((BASIC, [("Authorization", value)]) for value in WRONG_BASIC),
    ],
)
def test_another_credential_does_not_verify(
    provider: str, options: Mapping[str, Any], headers: Sequence[tuple[str, str]]
) -> None:
    with pytest.raises(SignatureMismatch):
        make(provider, options).verify(request(b"{}", headers), None)


@each("provider", PROVIDERS)
@each(
    "options",
    [
        *({}, {"header": "X-Secret"}, {"value": ""}, {"value": []}, {"value": [""]}),
        *({"header": "X Secret", "value": "x"}, {"basic_user": "hook"}, {"basic_password": "x"}),
        *({"basic_user": "ho:ok", "basic_password": "x"}, HEADER | BASIC, HEADER | {"typo": 1}),
    ],
)
def test_options_must_name_one_credential(provider: str, options: Mapping[str, Any]) -> None:
    with pytest.raises(ValidationError):
        make(provider, options)


def test_a_secret_is_the_same_in_any_spelling() -> None:
    [header] = make("mixpanel", {"value": RIGHT}).credentials()
    [named] = make("postmark", BASIC).credentials()
    assert header == named


@each("provider", PROVIDERS)
@each(
    "body", [b"", b"\xff", b"null", b"7", b'"x"', b"{}", b"[" * 100_000, b"{", b'{"a":NaN}', b"[7]"]
)
def test_a_body_that_makes_no_sense_is_invalid(provider: str, body: bytes) -> None:
    with pytest.raises(PayloadInvalid):
        translate(provider, body)
