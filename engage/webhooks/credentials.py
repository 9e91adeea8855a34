# SPDX-License-Identifier: Apache-2.0
"""Base classes of providers, by what their options hold: a signing secret or a credential."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from engage.api import Provider, ProviderContext, SignatureMismatch, Signing, WebhookRequest
from engage.webhooks.options import secrets
from engage.webhooks.reading import one_header
from engage.webhooks.signatures import check_secret, decode_base64

__all__ = ["SecretProvider", "StaticCredentialProvider"]


class SecretProvider(Provider):
    """A provider that signs its deliveries with a secret, which one option holds.

    The option is a string, or a list of strings during a rotation. A subclass sets ``signing`` and
    ``secret_option``, and defines ``verify`` and ``translate``; ``verify`` finds the keys in
    :attr:`keys`.
    """

    #: The name of the option that holds the secret.
    secret_option: ClassVar[str] = "secret"  # noqa: S105 - the name of an option

    #: The keys of all secrets, for :func:`~engage.webhooks.check_hmac`; at least one.
    keys: Sequence[bytes]

    def __init__(self, options: Mapping[str, Any], context: ProviderContext) -> None:
        """:raises ConfigError: if a secret is missing, empty or malformed."""
        self.keys = [self.key_of(secret) for secret in secrets(options, self.secret_option)]

    def key_of(self, secret: str) -> bytes:
        """Return the key that a secret stands for; a subclass overrides this to decode it.

        :return: the secret's UTF-8 bytes.
        :raises ConfigError: if the secret is malformed.
        """
        return secret.encode()

    def credentials(self) -> Sequence[bytes]:
        """Return the keys."""
        return self.keys


class StaticCredentialProvider(Provider):
    """A provider that signs nothing: each delivery carries a secret in a header.

    The secret proves that the sender knows it; nothing proves that the sender wrote the body. A
    subclass defines ``translate``. The options are ``header`` and ``value`` (the whole value of
    that header), or ``basic_user`` and ``basic_password`` for HTTP Basic. ``value`` and
    ``basic_password`` may be lists during a rotation.
    """

    #: The names of the options that hold a secret.
    secret_options: ClassVar[Sequence[str]] = ("value", "basic_password")

    def __init__(self, options: Mapping[str, Any], context: ProviderContext) -> None:
        """:raises ConfigError: if a secret is missing or empty."""
        self._header = "authorization"
        self._basic = "basic_user" in options
        if self._basic:
            user = options["basic_user"]
            self._keys = [f"{user}:{word}".encode() for word in secrets(options, "basic_password")]
        else:
            self._header = options.get("header", self._header).lower()
            self._keys = [value.encode() for value in secrets(options, "value")]
        self.signing = Signing(credential=self._header)

    def credentials(self) -> Sequence[bytes]:
        """Return the header values that authenticate a delivery."""
        if not self._basic:
            return self._keys
        return [b"Basic " + base64.b64encode(key) for key in self._keys]

    def verify(self, request: WebhookRequest, fetched: bytes | None) -> None:
        """Check that the header holds one of the secrets.

        :raises SignatureMismatch: if it does not.
        """
        value = one_header(request, self._header)
        if self._basic:
            # User and password are compared as one text: the schema allows no colon in the user
            # name, so there is only one way to split it.
            scheme, _, encoded = value.partition(" ")
            if scheme.lower() != "basic":
                raise SignatureMismatch("the credential is not Basic")
            check_secret(self._keys, decode_base64(encoded.strip(" ")))
        else:
            check_secret(self._keys, value.encode("latin-1"))
