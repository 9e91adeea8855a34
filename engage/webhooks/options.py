# SPDX-License-Identifier: Apache-2.0
"""Options that several providers have: their schemas, and reading them."""

from __future__ import annotations

import base64
import binascii
import importlib.resources
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from engage.api import (
    ConfigError,
    ProviderContext,
    ProviderFactory,
    Register,
    WebhookRequest,
    hookimpl,
)

__all__ = [
    "options_schema",
    "public_url",
    "registration",
    "secrets",
    "signed_url",
    "standard_webhook_key",
]


def standard_webhook_key(secret: str) -> bytes:
    """Decode a secret of Standard Webhooks: base64, with or without the prefix ``whsec_``.

    :raises ConfigError: if it is not base64, or if it is shorter than 16 bytes.
    """
    encoded = secret.removeprefix("whsec_")
    try:
        key = base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except (ValueError, binascii.Error) as error:
        raise ConfigError("secret: must be base64") from error
    if len(key) < 16:
        raise ConfigError(f"secret: must be at least 16 bytes, not {len(key)}")
    return key


def public_url(options: Mapping[str, Any], context: ProviderContext) -> str | None:
    """Read the option ``public_url`` of a provider that signs the URL.

    :return: the URL as registered at the provider; ``None`` if that is ``[server] public_url`` with
        this server's path.
    :raises ConfigError: if neither is set.
    """
    own = options.get("public_url")
    if own is None and context.public_url is None:
        raise ConfigError(
            "this provider signs the URL: set server.public_url to the address at which it reaches"
            " this server"
        )
    return own


def secrets(options: Mapping[str, Any], name: str) -> list[str]:
    """Read a secret that may be a string or, during a rotation, a list of strings.

    :raises ConfigError: if the secret is missing or one of them is empty.
    """
    value = options.get(name)
    found = [value] if isinstance(value, str) else list(value or ())
    if not found or not all(isinstance(secret, str) and secret for secret in found):
        raise ConfigError(f"{name}: must not be empty: anyone can sign with an empty secret")
    return found


def options_schema(package: str, path: str) -> dict[str, Any]:
    """Read the JSON Schema of a provider's options from a file that is packaged with it.

    A ``$ref`` to another file of the same folder, such as ``common.json#/$defs/secret``, is
    replaced by its target; keywords beside the ``$ref`` take precedence. The schema that is
    returned refers to no other file.

    :param package: an importable package, such as ``engage_schemas``.
    :param path: the file's path in it, such as ``plugins/webhooks/acme.json``.
    """
    folder, _, name = path.rpartition("/")
    root = importlib.resources.files(package)
    files = root.joinpath(folder) if folder else root

    def inlined(schema: Any, file: str) -> Any:
        if isinstance(schema, list):
            return [inlined(item, file) for item in schema]
        if not isinstance(schema, dict):
            return schema
        own = {key: inlined(value, file) for key, value in schema.items()}
        other, _, pointer = str(own.get("$ref", "")).partition("#")
        other = other or file
        if "$ref" not in own or other == name or ":" in other:
            return own
        del own["$ref"]
        target: Any = orjson.loads(files.joinpath(other).read_bytes())
        for key in pointer.split("/")[1:]:
            target = target[key]
        return {**inlined(target, other), **own}

    schema: dict[str, Any] = inlined(orjson.loads(files.joinpath(name).read_bytes()), name)
    return schema


def registration(
    name: str, factory: ProviderFactory, *, package: str = "engage_schemas"
) -> Callable[[Register[ProviderFactory]], None]:
    """Return the hook ``engage_register_webhook`` that registers a provider.

    :param package: has the schema of its options, as ``plugins/webhooks/<name>.json``; see
        :func:`options_schema`.
    """

    @hookimpl
    def engage_register_webhook(register: Register[ProviderFactory]) -> None:
        register(name, factory, options_schema(package, f"plugins/webhooks/{name}.json"))

    return engage_register_webhook


def signed_url(own: str | None, request: WebhookRequest) -> str:
    """Return the URL that the provider signed.

    :param own: the option ``public_url``, see :func:`public_url`.
    :return: the option, with the request's query unless it has a query; without the option the
        request's public URL.
    """
    if own is None:
        return request.url
    return own if "?" in own or not request.query else f"{own}?{request.query}"
