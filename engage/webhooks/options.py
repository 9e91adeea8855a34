# SPDX-License-Identifier: Apache-2.0
"""What several providers have among their options."""

from __future__ import annotations

import base64
import binascii
import importlib.resources
from collections.abc import Mapping
from typing import Any

import orjson

from engage.api import ConfigError, ProviderContext, WebhookRequest

__all__ = [
    "options_schema",
    "public_url",
    "secrets",
    "signed_url",
    "standard_webhook_key",
]


def standard_webhook_key(secret: str) -> bytes:
    """Decode a secret of the Standard Webhooks form: base64, with or without ``whsec_`` before it.

    :raises ConfigError: it is not base64, or shorter than 16 bytes.
    """
    encoded = secret.removeprefix("whsec_")
    try:
        key = base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except (ValueError, binascii.Error) as error:
        raise ConfigError("secret: is not base64") from error
    if len(key) < 16:
        raise ConfigError(f"secret: too short ({len(key)} bytes, at least 16)")
    return key


def public_url(options: Mapping[str, Any], context: ProviderContext) -> str | None:
    """Read the option ``public_url`` of a provider that signs the URL.

    :return: the URL as it is registered at the provider, if it is not ``[server] public_url`` with
        this server's path; else ``None``.
    :raises ConfigError: there is neither.
    """
    own = options.get("public_url")
    if own is None and context.public_url is None:
        raise ConfigError(
            "this provider signs the URL: set server.public_url to the address under which it"
            " reaches this server"
        )
    return own


def secrets(options: Mapping[str, Any], name: str) -> list[str]:
    """Read a secret that may be one string or, during a rotation, a list of them.

    :raises ConfigError: it is missing, or one of them is empty.
    """
    value = options.get(name)
    found = [value] if isinstance(value, str) else list(value or ())
    if not found or not all(isinstance(secret, str) and secret for secret in found):
        raise ConfigError(f"{name}: a secret is required, an empty one lets everybody sign")
    return found


def options_schema(package: str, path: str) -> dict[str, Any]:
    """Read a provider's JSON Schema of options that is packaged with it.

    :param package: an importable package, such as ``engage_schemas``.
    :param path: of the file inside it, such as ``plugins/webhooks/acme.json``.
    """
    found = importlib.resources.files(package).joinpath(path)
    schema: dict[str, Any] = orjson.loads(found.read_bytes())
    return schema


def signed_url(own: str | None, request: WebhookRequest) -> str:
    """:return: the URL that the provider signed: the option ``public_url`` (with the request's
    query unless it has one of its own), or the request's public URL."""
    if own is None:
        return request.url
    return own if "?" in own or not request.query else f"{own}?{request.query}"
