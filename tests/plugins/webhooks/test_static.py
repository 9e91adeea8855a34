# SPDX-License-Identifier: Apache-2.0
"""Providers that sign nothing: the credential, its options, and bodies that make no sense."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from jsonschema import ValidationError

from engage.api import PayloadInvalid, SignatureMismatch
from support.provider_static import BASIC, HEADER, basic, translate
from support.providers import make, request

PROVIDERS = ["amplitude", "mixpanel", "mparticle", "posthog", "postmark", "rudderstack"]


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(
    ("options", "headers"),
    [
        (HEADER, [("x-secret", "s3cret")]),
        ({"header": "X-Secret", "value": ["new", "s3cret"]}, [("X-SECRET", "s3cret")]),
        ({"value": "Bearer ü"}, [("Authorization", "Bearer ü".encode().decode("latin-1"))]),
        (BASIC, [("Authorization", basic("hook:pä:ss"))]),
        (BASIC, [("authorization", basic("hook:pä:ss").replace("Basic", "bAsIc"))]),
        (BASIC | {"basic_password": ["x", "pä:ss"]}, [("Authorization", basic("hook:pä:ss"))]),
    ],
)
def test_the_credential_verifies(
    provider: str, options: Mapping[str, Any], headers: Sequence[tuple[str, str]]
) -> None:
    made = make(provider, options)
    assert made.needs(request(b"", headers)) is None
    made.verify(request(b"", headers), None)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(
    ("options", "headers"),
    [
        (HEADER, []),
        (HEADER, [("X-Secret", "")]),
        (HEADER, [("X-Secret", "s3cret"), ("X-Secret", "s3cret")]),
        (HEADER, [("X-Secret", "bad"), ("x-secret", "s3cret")]),
        (HEADER, [("X-Secret", "S3CRET")]),
        (HEADER, [("X-Secret", "s3cret ")]),
        (HEADER, [("X-Secret", "s3cre")]),
        (HEADER, [("X-Secret", "s3cretx")]),
        (HEADER, [("X-Secret", "ÿ\x80")]),
        (HEADER, [("Authorization", "s3cret")]),
        (BASIC, [("Authorization", basic("hook:pä"))]),
        (BASIC, [("Authorization", basic("hook:pä:ss:"))]),
        (BASIC, [("Authorization", basic("hook:pä:ss").rstrip("=")[:-1])]),
        (BASIC, [("Authorization", basic("hook:pä:ss") + "=")]),
        (BASIC, [("Authorization", basic("hook:pä:ss").replace("Basic", "Bearer"))]),
        (BASIC, [("Authorization", "Basic")]),
        (BASIC, [("Authorization", "Basic ")]),
        (BASIC, [("Authorization", "Basic ÿÿÿÿ")]),
        (BASIC, [("Authorization", "hook:pä:ss")]),
    ],
)
def test_another_credential_does_not_verify(
    provider: str, options: Mapping[str, Any], headers: Sequence[tuple[str, str]]
) -> None:
    with pytest.raises(SignatureMismatch):
        make(provider, options).verify(request(b"{}", headers), None)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"header": "X-Secret"},
        {"value": ""},
        {"value": []},
        {"value": [""]},
        {"header": "X Secret", "value": "x"},
        {"basic_user": "hook"},
        {"basic_password": "x"},
        {"basic_user": "ho:ok", "basic_password": "x"},
        HEADER | BASIC,
        HEADER | {"typo": 1},
    ],
)
def test_options_must_name_one_credential(provider: str, options: Mapping[str, Any]) -> None:
    with pytest.raises(ValidationError):
        make(provider, options)


def test_a_secret_is_the_same_in_any_spelling() -> None:
    [header] = make("mixpanel", {"value": basic("hook:pä:ss")}).credentials()
    [named] = make("postmark", BASIC).credentials()
    assert header == named


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(
    "body", [b"", b"\xff", b"null", b"7", b'"x"', b"{}", b"[" * 100_000, b"{", b'{"a":NaN}', b"[7]"]
)
def test_a_body_that_makes_no_sense_is_invalid(provider: str, body: bytes) -> None:
    with pytest.raises(PayloadInvalid):
        translate(provider, body)
