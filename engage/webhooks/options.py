# SPDX-License-Identifier: Apache-2.0
"""Options that several providers have, and base classes of providers by what their options hold: a
signing secret or a credential."""

from __future__ import annotations

import base64
import binascii
import importlib.resources
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import orjson

from engage.api import (
    ConfigError,
    Provider,
    ProviderContext,
    ProviderFactory,
    Register,
    SignatureMismatch,
    Signing,
    WebhookRequest,
    hookimpl,
)
from engage.webhooks.requests import check_secret, decode_base64, one_header

__all__ = [
    "SecretProvider",
    "StaticCredentialProvider",
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
    texts = [value] if isinstance(value, str) else list(value or ())
    if not texts or not all(isinstance(secret, str) and secret for secret in texts):
        raise ConfigError(f"{name}: must not be empty: anyone can sign with an empty secret")
    return texts


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
