# SPDX-License-Identifier: Apache-2.0
"""The conformance suite on a scheme whose signature is in the body."""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import json
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from engage import api, webhooks
from engage.testing import ProviderConformance


class Mailer(webhooks.SecretProvider):
    """A provider that signs a timestamp and a token, and nothing else."""

    secret_option = "key"
    signing = api.Signing(
        members=("signed.at", "token"),
        signature_member="signed.by",
        timestamp_member="signed.at",
        past=300,
        future=300,
    )

    def verify(self, request: api.WebhookRequest, fetched: bytes | None) -> None:
        at, token, signature = self.members(request)
        webhooks.check_timestamp(at, request.now)
        webhooks.check_hmac(self.keys, f"{at}{token}".encode(), [webhooks.decode_hex(signature)])

    def members(self, request: api.WebhookRequest) -> list[str]:
        return webhooks.body_members(request, "signed.at", "token", "signed.by")

    def translate(self, request: api.WebhookRequest) -> api.Translation:
        body = webhooks.parse_object(request.body)
        if (message_id := webhooks.message_id(body.get("id"))) is None:
            raise api.PayloadInvalid("id: is missing")
        document = webhooks.track(
            "Email Opened",
            message_id=message_id,
            timestamp=None,
            user="ann",
            properties=webhooks.merged(body, without=["id", "signed", "token"]),
        )
        return api.Translation(events=[api.TranslatedEvent(document)])


class LaxSignature(Mailer):
    """A provider that accepts a signature in several spellings."""

    def members(self, request: api.WebhookRequest) -> list[str]:
        at, token, signature = super().members(request)
        return [at, token, signature.strip()]


class LaxTime(Mailer):
    """A provider that accepts a timestamp in several spellings."""

    def verify(self, request: api.WebhookRequest, fetched: bytes | None) -> None:
        at, token, signature = self.members(request)
        with contextlib.suppress(ValueError):
            webhooks.check_timestamp(str(int(at)), request.now)
        webhooks.check_hmac(self.keys, f"{at}{token}".encode(), [webhooks.decode_hex(signature)])


class Timeless(Mailer):
    """A provider that accepts a timestamp from any year."""

    def verify(self, request: api.WebhookRequest, fetched: bytes | None) -> None:
        at, token, signature = self.members(request)
        webhooks.check_hmac(self.keys, f"{at}{token}".encode(), [webhooks.decode_hex(signature)])


class Tokenless(Mailer):
    """A provider that does not check the token."""

    def verify(self, request: api.WebhookRequest, fetched: bytes | None) -> None:
        at, _, signature = self.members(request)
        text = f"{at}token".encode()
        webhooks.check_timestamp(at, request.now)
        webhooks.check_hmac(self.keys, text, [webhooks.decode_hex(signature)])


class Trusting(Mailer):
    """A provider that reads the body as if it was always right."""

    def members(self, request: api.WebhookRequest) -> list[str]:
        body = json.loads(request.body)
        return [body["signed"]["at"], body["token"], body["signed"]["by"]]


class UndeclaredTime(Mailer):
    """A provider that does not tell the suite where the time is."""

    signing = dataclasses.replace(Mailer.signing, timestamp_member=None)


class UndeclaredAge(Mailer):
    """A provider that does not tell the suite how old a delivery may be."""

    signing = dataclasses.replace(Mailer.signing, past=None)


class ShownSecret(Mailer):
    """A provider whose schema does not mark the secret."""


CLASSES: list[type[Mailer]] = [Mailer, *Mailer.__subclasses__()]
PROVIDERS = {f"engage_test_{one.__name__.lower()}": one for one in CLASSES}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, provider in PROVIDERS.items():

        def register(take: Callable[..., None], made: type = provider) -> None:
            secret = {"type": ["string", "array"], "writeOnly": made is not ShownSecret}
            take("mailer", made, {"type": "object", "properties": {"key": secret}})

        module: Any = types.SimpleNamespace(engage_register_webhook=register)
        monkeypatch.setitem(sys.modules, name, module)


class TestMailer(ProviderConformance):
    plugin = "engage_test_mailer"
    options = {"key": "one"}
    other_options = {"key": "another"}
    secret_option = "key"
    body = b'{"id": "e1", "list": [1, {"a": null}]}'

    def sign(self, body: bytes, options: Any, timestamp: str) -> Mapping[str, Any]:
        key, text = options["key"].encode(), (timestamp + "token").encode()
        by = hmac.new(key, text, "sha256").hexdigest()
        return {"signed": {"at": timestamp, "by": by}, "token": "token"}


class _Unnamed(TestMailer):
    secret_option = "secret"


@pytest.mark.parametrize(
    ("provider", "test", "arguments"),
    [
        (LaxSignature, "a_signature_has_one_spelling_and_is_complete", ()),
        (LaxTime, "a_timestamp_has_one_spelling", (" 1",)),
        (LaxTime, "a_timestamp_has_one_spelling", ("1_000",)),
        (LaxTime, "a_timestamp_has_one_spelling", ("1e9",)),
        (Timeless, "a_timestamp_must_be_recent", ()),
        (Tokenless, "a_signature_of_other_content_is_refused", ()),
        (Tokenless, "every_bit_of_what_is_signed_counts", ()),
        (Trusting, "a_missing_or_mistyped_member_is_refused", ()),
        (Trusting, "an_unexpected_body_is_handled", ("objects nested 100 000 deep",)),
        (UndeclaredTime, "the_time_of_signing_is_declared", ()),
        (UndeclaredAge, "the_time_of_signing_is_declared", ()),
        (ShownSecret, "the_secret_is_never_shown", ()),
    ],
)
def test_the_suite_finds_what_is_wrong_with_a_signature_in_the_body(
    provider: type[Mailer], test: str, arguments: tuple[str, ...]
) -> None:
    case = TestMailer()
    case.plugin = f"engage_test_{provider.__name__.lower()}"  # type: ignore[misc]
    expected = (AssertionError, pytest.fail.Exception, TypeError, KeyError, RecursionError)
    with pytest.raises(expected):
        getattr(case, f"test_{test}")(*arguments)


def test_the_suite_reports_a_wrong_name_of_the_secret_option() -> None:
    with pytest.raises(AssertionError, match="secret_option: name the option with the secret"):
        _Unnamed().test_both_secrets_are_accepted_during_a_rotation()


class _Prefixed(TestMailer):
    def sign(self, body: bytes, options: Any, timestamp: str) -> Mapping[str, Any]:
        return {"signed": {"at": timestamp, "by": "v1=00"}, "token": "token"}


def test_the_suite_names_what_declares_the_spelling_of_a_signature() -> None:
    match = "signing.encoding, signing.signature_pattern: 'v1=00' is not hex"
    with pytest.raises(pytest.fail.Exception, match=match):
        _Prefixed().test_every_bit_of_the_signature_counts()
