# SPDX-License-Identifier: Apache-2.0
"""Providers that sign nothing."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from engage.api import Provider, ProviderContext, SignatureMismatch, Signing, WebhookRequest
from engage.webhooks.options import secrets
from engage.webhooks.reading import one_header
from engage.webhooks.signatures import check_secret, decode_base64

__all__ = [
    "StaticCredentialProvider",
]


class StaticCredentialProvider(Provider):
    """A provider whose deliveries carry a secret in a header, and are signed by nobody.

    The secret proves that the sender knows it; nothing proves that the body is the sender's. A
    subclass brings ``translate``. Options: ``header`` and ``value`` (one or several), the header's
    whole value; or ``basic_user`` and ``basic_password`` (one or several) for HTTP Basic.
    """

    def __init__(self, options: Mapping[str, Any], context: ProviderContext) -> None:
        """:raises ConfigError: a secret is missing or empty."""
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
        """See :meth:`Provider.credentials`: what stands in the header."""
        if not self._basic:
            return self._keys
        return [b"Basic " + base64.b64encode(key) for key in self._keys]

    def verify(self, request: WebhookRequest, fetched: bytes | None) -> None:
        """See :meth:`Provider.verify`."""
        value = one_header(request, self._header)
        if self._basic:
            # Compared whole: the name cannot hold a colon, so there is one way to split it.
            scheme, _, encoded = value.partition(" ")
            if scheme.lower() != "basic":
                raise SignatureMismatch("the credential is not Basic")
            check_secret(self._keys, decode_base64(encoded.strip(" ")))
        else:
            check_secret(self._keys, value.encode("latin-1"))
