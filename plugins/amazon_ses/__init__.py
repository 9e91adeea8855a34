# SPDX-License-Identifier: Apache-2.0
"""Amazon SES, whose events are delivered through an SNS topic.

==========  =============================================================
``sns.py``  verifies an SNS message, and confirms the subscription
``ses.py``  translates the SES event that the message contains
==========  =============================================================
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from engage.api import (
    Fetch,
    PayloadInvalid,
    Provider,
    ProviderContext,
    SignatureMismatch,
    Signing,
    Translation,
    WebhookRequest,
)
from engage.webhooks import parse_object, registration

from . import ses, sns

__all__ = ["AmazonSes", "engage_register_webhook"]


class AmazonSes(Provider):
    """SES events from the allowed topics."""

    setup = (
        "1. SNS: create a topic. Add its ARN to the option allowed_topic_arns, and restart\n"
        "   engage.\n"
        "2. SNS: subscribe the URL to the topic (protocol HTTPS, raw message delivery off).\n"
        "   engage confirms the subscription unless the option auto_confirm is off.\n"
        "3. SES: add the topic as an event destination of the configuration set, and send\n"
        "   with that configuration set.\n"
        "4. Send e-mails with the tag userId, and their events belong to that user."
    )

    # Only the region of the topic is called, see sns.py. The label before .amazonaws.com must be a
    # region: "sns.s3-us-west-2" would be someone's bucket.
    hosts = (sns.HOST,)
    opt_out_channels = ("email",)
    # SNS limits a message to 256 KiB. As a string in JSON it can be three times as long.
    max_body = 1024 * 1024
    signing = Signing(members=sns.NOTIFICATION, signature_member="Signature", encoding="base64")

    def __init__(self, options: Mapping[str, Any], context: ProviderContext) -> None:
        """:raises ConfigError: if a pinned certificate cannot be read."""
        pinned = options.get("signing_cert_pem", [])
        self._topics = frozenset(options["allowed_topic_arns"])
        self._pinned = [
            sns.pinned_certificate(pem) for pem in ([pinned] if isinstance(pinned, str) else pinned)
        ]
        # An operator who pins the certificate wants no outgoing calls.
        self._auto_confirm = bool(options.get("auto_confirm", not self._pinned))
        self._versions = ("2",) if options.get("require_v2", False) else ("1", "2")

    def credentials(self) -> Sequence[bytes]:
        """Return the topics: if two workspaces allow one, its messages would verify in both."""
        return [topic.encode() for topic in sorted(self._topics)]

    def needs(self, request: WebhookRequest) -> Fetch | None:
        """Return the certificate to fetch, unless one is pinned.

        :raises SignatureMismatch: if the message can be refused without the certificate.
        """
        envelope = self._envelope(request)
        return None if self._pinned else Fetch(envelope.certificate_url, check=sns.certificate)

    def verify(self, request: WebhookRequest, fetched: bytes | None) -> None:
        """Check the signature of the SNS message.

        :raises SignatureMismatch: if it is not SNS's, or not from an allowed topic.
        """
        envelope = self._envelope(request)
        if self._pinned:
            certificates = self._pinned
        elif fetched is not None:
            certificates = [sns.certificate(fetched)]
        else:
            raise SignatureMismatch("the certificate was not fetched")
        now = datetime.datetime.fromtimestamp(request.now, datetime.UTC)
        if not any(envelope.is_signed_by(certificate, now) for certificate in certificates):
            raise SignatureMismatch(
                "the signature is for another message, or made with another key"
            )

    def translate(self, request: WebhookRequest) -> Translation:
        """Return one event for each recipient that the SES event is about."""
        message = parse_object(request.body)
        kind = message["Type"]
        if kind == "UnsubscribeConfirmation":
            return Translation(ignored=1, types=[kind])
        if kind == "SubscriptionConfirmation":
            if not self._auto_confirm:
                # Kept as a dead letter: the link in it is the only way to confirm by hand.
                raise PayloadInvalid(
                    "auto_confirm is off: confirm with the SubscribeURL in the body", kind=kind
                )
            return Translation(ignored=1, call=sns.confirmation(message), types=[kind])
        content = message["Message"]
        if content.startswith("Successfully validated SNS topic for Amazon SES"):
            return Translation(ignored=1)
        return ses.translate(parse_object(content), message)

    def _envelope(self, request: WebhookRequest) -> sns.Envelope:
        return sns.read_envelope(request, topics=self._topics, versions=self._versions)


engage_register_webhook = registration("amazon-ses", AmazonSes)
