# SPDX-License-Identifier: Apache-2.0
"""The conformance suite on a scheme whose signature is in the body, as the docs describe it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hmac
import json
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from engage import api, webhooks
from engage.testing import ProviderConformance

Part = tuple[bytes, Callable[[bytes], api.WebhookRequest]]


class Mailer(api.Provider):
    """A provider that signs a timestamp and a token, and nothing else."""

    signing = api.Signing(past=300, future=300)

    def __init__(self, options: Mapping[str, Any], context: api.ProviderContext) -> None:
        self.keys = [secret.encode() for secret in webhooks.secrets(options, "key")]

    def credentials(self) -> list[bytes]:
        return self.keys

    def verify(self, request: api.WebhookRequest, fetched: bytes | None) -> None:
        signed = webhooks.parse_object(request.body).get("signed")
        if not isinstance(signed, dict) or not all(isinstance(v, str) for v in signed.values()):
            raise api.SignatureMismatch("not signed")
        webhooks.check_timestamp(signed.get("at", ""), request.now)
        text = (signed["at"] + signed.get("token", "")).encode()
        webhooks.check_hmac(self.keys, text, [self.decoded(signed.get("signature", ""))])

    def decoded(self, signature: str) -> bytes:
        return webhooks.decode_hex(signature)

    def translate(self, request: api.WebhookRequest) -> api.Translation:
        body = webhooks.parse_object(request.body)
        if (message_id := webhooks.message_id(body.get("id"))) is None:
            raise api.PayloadInvalid("id: is missing")
        document = webhooks.track(
            "Email Opened",
            message_id=message_id,
            timestamp=None,
            user="ann",
            properties=webhooks.merged(body, without=["id", "signed"]),
        )
        return api.Translation(events=[api.TranslatedEvent(document)])


class Lax(Mailer):
    """A provider that accepts a signature in several spellings."""

    def decoded(self, signature: str) -> bytes:
        return webhooks.decode_hex(signature.strip())


SCHEMA = {"type": "object", "properties": {"key": {"type": ["string", "array"]}}}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, provider in (("mailer", Mailer), ("lax", Lax)):

        def register(take: Callable[..., None], name: str = name, made: type = provider) -> None:
            take(name, made, SCHEMA)

        module: Any = types.SimpleNamespace(engage_register_webhook=register)
        monkeypatch.setitem(sys.modules, f"engage_test_{name}", module)


class TestMailer(ProviderConformance):
    plugin = "engage_test_mailer"
    options = {"key": "one"}
    other_options = {"key": "another"}
    secret_option = "key"
    body = b'{"id": "e1", "list": [1, {"a": null}]}'

    def delivery(self, body: bytes, options: Any, timestamp: str) -> api.WebhookRequest:
        with contextlib.suppress(ValueError, RecursionError, TypeError):
            sent = {**json.loads(body)}
            key, text = options["key"].encode(), (timestamp + "token").encode()
            signature = hmac.new(key, text, "sha256").hexdigest()
            signed = {"at": timestamp, "token": "token", "signature": signature}
            body = json.dumps({**sent, "signed": signed}).encode()
        return api.WebhookRequest(method="POST", headers=[], body=body, url=self.url, now=self.now)

    def signed_parts(self, request: api.WebhookRequest) -> Iterator[Part]:
        for name in ("at", "token"):
            yield (
                self.signed(request)[name].encode(),
                functools.partial(self.with_part, request, name),
            )

    def signature(self, request: api.WebhookRequest) -> str:
        text: str = self.signed(request)["signature"]
        return text

    def with_signature(self, request: api.WebhookRequest, signature: str) -> api.WebhookRequest:
        return self.changed(request, "signature", signature)

    def with_part(self, request: api.WebhookRequest, name: str, raw: bytes) -> api.WebhookRequest:
        return self.changed(request, name, raw.decode("latin-1"))

    def signed(self, request: api.WebhookRequest) -> Any:
        return json.loads(request.body)["signed"]

    def changed(self, request: api.WebhookRequest, name: str, value: str) -> api.WebhookRequest:
        signed = {**self.signed(request), name: value}
        body = json.dumps({**json.loads(request.body), "signed": signed}).encode()
        return dataclasses.replace(request, body=body)


class _OfLax(TestMailer):
    plugin = "engage_test_lax"


class _Unnamed(TestMailer):
    secret_option = "secret"


def test_the_suite_finds_another_spelling_of_a_signature_in_the_body() -> None:
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        _OfLax().test_a_signature_has_one_spelling_and_is_complete()


def test_the_suite_reports_a_wrong_name_of_the_secret_option() -> None:
    with pytest.raises(AssertionError, match="secret_option: name the option with the secret"):
        _Unnamed().test_both_secrets_are_accepted_during_a_rotation()
