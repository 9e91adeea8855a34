# SPDX-License-Identifier: Apache-2.0
"""Webhooks signed by the Standard Webhooks specification, whoever sends them.

The signature is HMAC-SHA256 over ``id.timestamp.body``; the key is the base64 after ``whsec_``.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from engage.api import (
    ConfigError,
    Provider,
    ProviderContext,
    ProviderFactory,
    SignatureMismatch,
    Signing,
    TranslatedEvent,
    Translation,
    WebhookRequest,
    hookimpl,
)
from engage.webhooks import (
    at,
    check_hmac,
    check_timestamp,
    decode_base64,
    email_recipient,
    event_id,
    iso_time,
    merged,
    one_header,
    options_schema,
    parse_object,
    secrets,
    text,
    track,
    user_id,
)

#: Seconds between signing and arrival, both ways, as the specification's own libraries have it.
TOLERANCE: Final = 300
MIN_KEY_BYTES: Final = 16


def signing_key(secret: str) -> bytes:
    """Decode a secret.

    :raises ConfigError: it is not base64, or shorter than 16 bytes.
    """
    encoded = secret.removeprefix("whsec_")
    try:
        key = base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except (ValueError, binascii.Error) as error:
        raise ConfigError("secret: is not base64") from error
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(f"secret: too short ({len(key)} bytes, at least {MIN_KEY_BYTES})")
    return key


def verify(
    request: WebhookRequest, keys: Sequence[bytes], read: Callable[[WebhookRequest, str], str]
) -> None:
    """Check the signature of a delivery.

    :param read: returns the value of the header ``id``, ``timestamp`` or ``signature``.
    """
    message_id = read(request, "id")
    timestamp = read(request, "timestamp")
    header = read(request, "signature")
    signatures = []
    for item in header.split(" ")[:16]:
        version, comma, value = item.partition(",")
        # v1a is another algorithm, and versions to come are not ours to judge.
        if version == "v1" and comma:
            signatures.append(decode_base64(value))
        elif not comma:
            raise SignatureMismatch("a signature without a version")
    check_timestamp(timestamp, request.now, past=TOLERANCE, future=TOLERANCE)
    signed = f"{message_id}.{timestamp}.".encode("latin-1") + request.body
    check_hmac(keys, signed, signatures)


class StandardWebhooks(Provider):
    """Deliveries of any sender that follows the specification."""

    signing = Signing(
        signature="webhook-signature",
        signature_pattern=r"v1,(?P<signature>[^ ]*)",
        encoding="base64",
        body=True,
        headers=("webhook-id",),
        timestamp="webhook-timestamp",
        past=TOLERANCE,
        future=TOLERANCE,
    )

    def __init__(self, options: Mapping[str, Any], context: ProviderContext) -> None:
        self._keys = [signing_key(secret) for secret in secrets(options, "secret")]
        self._user_paths = options.get("user_id", ["data.userId", "data.user_id", "data.id"])
        self._email_paths = options.get("email", ["data.email"])

    def credentials(self) -> Sequence[bytes]:
        """See :meth:`Provider.credentials`."""
        return self._keys

    def verify(self, request: WebhookRequest, fetched: bytes | None) -> None:
        """See :meth:`Provider.verify`."""
        verify(request, self._keys, lambda request, name: one_header(request, f"webhook-{name}"))

    def translate(self, request: WebhookRequest) -> Translation:
        """One track event, named by the payload's ``type``; ignored if it concerns no user."""
        payload = parse_object(request.body)
        webhook_id = one_header(request, "webhook-id")
        user = user_id(*(at(payload, path) for path in self._user_paths))
        recipient = email_recipient(*(at(payload, path) for path in self._email_paths))
        if user is None and recipient is None:
            return Translation(ignored=1)
        data = payload.get("data")
        timestamp = iso_time(payload.get("timestamp"))
        # What has a field of its own is left out, but only if the field could take it.
        fields = ["type", "timestamp"] if timestamp else ["type"]
        rest = merged(payload, without=[*fields, "data"] if isinstance(data, dict) else fields)
        document = track(
            text(payload.get("type")) or "Webhook Received",
            message_id=webhook_id if len(webhook_id) <= 256 else event_id(webhook_id),
            timestamp=timestamp,
            user=user,
            properties=merged(data, rest),
        )
        return Translation(events=[TranslatedEvent(document, recipient)])


@hookimpl
def engage_register_webhook(
    register: Callable[[str, ProviderFactory, Mapping[str, Any]], None],
) -> None:
    """Bring ``standard-webhooks``."""
    register(
        "standard-webhooks",
        StandardWebhooks,
        options_schema("engage_schemas", "plugins/webhooks/standard-webhooks.json"),
    )
