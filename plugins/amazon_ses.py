# SPDX-License-Identifier: Apache-2.0
"""Amazon SES, whose events come through an SNS topic.

SNS signs a handful of fields of its envelope with the key of a certificate that it publishes. Two
things make that scheme dangerous, and both are dealt with before anything is fetched:

- The URL of the certificate stands *in the message* and is not signed. It must be that of SNS
  itself, in the region of the topic: no other host, port, path or user may be called.
- Anybody with an AWS account can make SNS sign a message to any URL. A signature therefore proves
  nothing without the allow-list of topics, which is a required option.

A ``SubscriptionConfirmation`` is answered by a call whose URL is rebuilt from the signed topic and
token; the URL in the message must agree with it, and is never itself called.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import parse_qs, quote, urlsplit

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from engage.api import (
    ConfigError,
    Fetch,
    PayloadInvalid,
    Provider,
    ProviderContext,
    ProviderFactory,
    Recipient,
    Register,
    SignatureMismatch,
    Signing,
    TranslatedEvent,
    Translation,
    WebhookRequest,
    hookimpl,
)
from engage.webhooks import (
    decode_base64,
    email_recipient,
    event_id,
    iso_time,
    merged,
    message_id,
    one_header,
    options_schema,
    own_user_id,
    parse_object,
    text,
    track,
)

#: Signed fields in the order in which they are signed.
_NOTIFICATION: Final = ("Message", "MessageId", "Subject", "Timestamp", "TopicArn", "Type")
_CONFIRMATION: Final = (
    "Message",
    "MessageId",
    "SubscribeURL",
    "Timestamp",
    "Token",
    "TopicArn",
    "Type",
)
_SIGNED: Final[Mapping[str, Sequence[str]]] = {
    "Notification": _NOTIFICATION,
    "SubscriptionConfirmation": _CONFIRMATION,
    "UnsubscribeConfirmation": _CONFIRMATION,
}
_HASHES: Final[Mapping[str, Callable[[], hashes.HashAlgorithm]]] = {
    "1": hashes.SHA1,
    "2": hashes.SHA256,
}
#: Headers that repeat what is in the body; where both are there they must agree.
_MIRRORED: Final = {
    "x-amz-sns-message-type": "Type",
    "x-amz-sns-message-id": "MessageId",
    "x-amz-sns-topic-arn": "TopicArn",
}
_HOST: Final = r"sns\.[a-z]{2,}(?:-[a-z]+)+-[0-9]{1,2}\.amazonaws\.com(?:\.cn)?"
_CERTIFICATE_PATH: Final = re.compile(r"/SimpleNotificationService-[0-9A-Fa-f]{1,64}\.pem")
_ARN: Final = re.compile(r"arn:[a-z-]+:sns:([a-z0-9-]+):[0-9]{12}:[A-Za-z0-9_.-]+")
#: The line breaks between fields are not escaped when they are signed, so a field that may hold one
#: could take over a part of its neighbour. Only ``Message`` may. SNS's own are below 1 KiB.
_ONE_LINE: Final = re.compile(r"[^\x00-\x1f\x7f\u0085\u2028\u2029]{0,4096}")


@dataclasses.dataclass(frozen=True, slots=True)
class _Envelope:
    """An SNS message whose every unsigned part was checked."""

    kind: str
    fields: Mapping[str, str]
    version: str
    signature: bytes
    certificate_url: str

    @property
    def string_to_sign(self) -> bytes:
        lines = [
            f"{name}\n{self.fields[name]}\n" for name in _SIGNED[self.kind] if name in self.fields
        ]
        return "".join(lines).encode()


class AmazonSes(Provider):
    """SES events of the allowed topics."""

    setup = (
        "SNS: subscribe this URL (protocol HTTPS, raw message delivery off) to a topic, "
        "and put the\n"
        "topic's ARN into allowed_topic_arns. SES: add the topic as an event destination "
        "of the configuration\n"
        "set. The subscription is confirmed by itself unless auto_confirm is off.\n"
        "Send e-mails with the tag userId, and their events belong to that user."
    )

    # A label that is a region: "sns.s3-us-west-2" would be somebody's bucket. What is fetched must
    # besides be of the region of the topic.
    hosts = (_HOST,)
    # The signature and all that it covers stand in the body.
    signing = Signing()

    def __init__(self, options: Mapping[str, Any], context: ProviderContext) -> None:
        """:raises ConfigError: a pinned certificate cannot be read."""
        pinned = options.get("signing_cert_pem", [])
        self._topics = frozenset(options["allowed_topic_arns"])
        self._pinned = [_pinned(pem) for pem in ([pinned] if isinstance(pinned, str) else pinned)]
        # Who pins the certificate wants no outgoing calls.
        self._auto_confirm = bool(options.get("auto_confirm", not self._pinned))
        self._versions = ("2",) if options.get("require_v2", False) else ("1", "2")

    def credentials(self) -> Sequence[bytes]:
        """See :meth:`Provider.credentials`: a topic that two workspaces believe would fit both."""
        return [topic.encode() for topic in sorted(self._topics)]

    def needs(self, request: WebhookRequest) -> Fetch | None:
        """See :meth:`Provider.needs`: the certificate, unless it is pinned."""
        envelope = self._envelope(request)
        return None if self._pinned else Fetch(envelope.certificate_url, check=_certificate)

    def verify(self, request: WebhookRequest, fetched: bytes | None) -> None:
        """See :meth:`Provider.verify`."""
        envelope = self._envelope(request)
        if self._pinned:
            certificates = self._pinned
        elif fetched is not None:
            certificates = [_certificate(fetched)]
        else:
            raise SignatureMismatch("the certificate was not fetched")
        now = datetime.datetime.fromtimestamp(request.now, datetime.UTC)
        for certificate in certificates:
            if _signed_by(certificate, envelope, now):
                return
        raise SignatureMismatch("the signature is of another message, or of another key")

    def translate(self, request: WebhookRequest) -> Translation:
        """An SES event becomes one event for each recipient that it is about."""
        envelope = parse_object(request.body)
        kind = envelope["Type"]
        if kind == "UnsubscribeConfirmation":
            return Translation(ignored=1)
        if kind == "SubscriptionConfirmation":
            if not self._auto_confirm:
                # Kept, because the only way to confirm by hand is the link that stands in it.
                raise PayloadInvalid(
                    "auto_confirm is off: confirm with the SubscribeURL in the body"
                )
            return Translation(ignored=1, call=_confirmation(envelope))
        message = envelope["Message"]
        if message.startswith("Successfully validated SNS topic for Amazon SES"):
            return Translation(ignored=1)
        return _translate(parse_object(message), envelope)

    def _envelope(self, request: WebhookRequest) -> _Envelope:
        """Check all that can be checked without the certificate.

        :raises SignatureMismatch: what is wrong.
        """
        try:
            document = parse_object(request.body)
        except PayloadInvalid as error:
            raise SignatureMismatch("not an SNS message") from error
        kind = document.get("Type")
        if not isinstance(kind, str) or kind not in _SIGNED:
            raise SignatureMismatch("not a type of SNS message")
        for header, field in _MIRRORED.items():
            if request.values(header) and one_header(request, header) != document.get(field):
                raise SignatureMismatch(f"{header} is not the {field} of the body")
        version = document.get("SignatureVersion")
        if not isinstance(version, str) or version not in self._versions:
            raise SignatureMismatch("this SignatureVersion is not accepted")
        fields: dict[str, str] = {}
        for name in _SIGNED[kind]:
            value = document.get(name)
            if name == "Subject" and value is None:
                continue
            if not isinstance(value, str):
                raise SignatureMismatch(f"{name} is missing")
            if name != "Message" and _ONE_LINE.fullmatch(value) is None:
                raise SignatureMismatch(f"{name} is too long, or more than one line")
            fields[name] = value
        topic = fields["TopicArn"]
        if topic not in self._topics:
            raise SignatureMismatch("the topic is not in allowed_topic_arns")
        region = _region(topic)
        url = document.get("SigningCertURL")
        _, path = _sns_url(url, region)
        if _CERTIFICATE_PATH.fullmatch(path) is None:
            raise SignatureMismatch("SigningCertURL is not that of a certificate of SNS")
        if "SubscribeURL" in fields:
            _check_subscribe_url(fields, region)
        signature = document.get("Signature")
        if not isinstance(signature, str):
            raise SignatureMismatch("Signature is missing")
        return _Envelope(
            kind=kind,
            fields=fields,
            version=version,
            signature=decode_base64(signature),
            certificate_url=str(url),
        )


# ------------------------------------------------------------------------------------- verification
def _certificate(pem: bytes) -> x509.Certificate:
    certificate = x509.load_pem_x509_certificate(pem)
    _public_key(certificate)
    return certificate


def _pinned(pem: str) -> x509.Certificate:
    try:
        certificate = _certificate(pem.encode())
    except (ValueError, SignatureMismatch) as error:
        raise ConfigError("signing_cert_pem: not an RSA certificate in PEM form") from error
    return certificate


def _public_key(certificate: x509.Certificate) -> rsa.RSAPublicKey:
    key = certificate.public_key()
    if not isinstance(key, rsa.RSAPublicKey) or key.key_size < 2048:
        raise SignatureMismatch("the certificate is not of an RSA key of at least 2048 bits")
    return key


def _signed_by(certificate: x509.Certificate, envelope: _Envelope, now: datetime.datetime) -> bool:
    if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
        return False
    try:
        _public_key(certificate).verify(
            envelope.signature,
            envelope.string_to_sign,
            padding.PKCS1v15(),
            _HASHES[envelope.version](),
        )
    except InvalidSignature:
        return False
    return True


def _region(topic: str) -> str:
    match = _ARN.fullmatch(topic)
    if match is None:
        raise SignatureMismatch("TopicArn is not the name of a topic")
    return match[1]


def _sns_url(url: object, region: str) -> tuple[str, str]:
    """:return: host and path of a URL of SNS in this region.
    :raises SignatureMismatch: it is anything else, or anything more than host, path and query.
    """
    china = r"\.cn" if region.startswith("cn-") else ""
    # The whole text is matched, not a parser's parts: parsers disagree about the odd ones.
    match = re.fullmatch(
        rf"https://(sns\.{re.escape(region)}\.amazonaws\.com{china})(/[!-~]*)",
        url if isinstance(url, str) else "",
    )
    if match is None or "\\" in match[2] or "#" in match[2]:
        raise SignatureMismatch("a URL of the message is not of SNS in the region of the topic")
    return match[1], match[2]


def _check_subscribe_url(fields: Mapping[str, str], region: str) -> None:
    url = fields["SubscribeURL"]
    _sns_url(url, region)
    query = parse_qs(urlsplit(url).query, keep_blank_values=True)
    for name in ("TopicArn", "Token"):
        if query.get(name) != [fields[name]]:
            raise SignatureMismatch(f"SubscribeURL is of another {name}")


def _confirmation(envelope: Mapping[str, str]) -> Fetch:
    topic, token = envelope["TopicArn"], envelope["Token"]
    host, _ = _sns_url(envelope["SubscribeURL"], _region(topic))
    query = f"TopicArn={quote(topic, safe=':')}&Token={quote(token, safe='')}"
    return Fetch(f"https://{host}/?Action=ConfirmSubscription&{query}", cacheable=False)


# -------------------------------------------------------------------------------------- translation
_NAMES: Final[Mapping[str, str]] = {
    "Send": "Email Sent",
    "Delivery": "Email Delivered",
    "Open": "Email Opened",
    "Click": "Email Link Clicked",
    "Bounce": "Email Bounced",
    "Complaint": "Email Marked as Spam",
    "DeliveryDelay": "Email Delayed",
    "Reject": "Email Dropped",
    "Rendering Failure": "Email Dropped",
    "Subscription": "Email Unsubscribed",
}
#: Where the details of a kind stand, when that is not its name in lower camel case.
_DETAILS: Final[Mapping[str, str]] = {
    "Rendering Failure": "failure",
    "DeliveryDelay": "deliveryDelay",
}
#: Where the details name the recipients that the event is about.
_RECIPIENTS: Final[Mapping[str, str]] = {
    "Bounce": "bouncedRecipients",
    "Complaint": "complainedRecipients",
    "Delivery": "recipients",
    "DeliveryDelay": "delayedRecipients",
}
_BOUNCES: Final[Mapping[str, str]] = {
    "Permanent": "hard",
    "Transient": "soft",
    "Undetermined": "undetermined",
}


def _translate(message: Mapping[str, Any], envelope: Mapping[str, Any]) -> Translation:
    kind = text(message.get("eventType")) or text(message.get("notificationType"))
    if kind is None:
        raise PayloadInvalid("the message is not an event of SES")
    if kind not in _NAMES:
        return Translation(ignored=1)
    mail = _object(message.get("mail"))
    details = _object(message.get(_DETAILS.get(kind, kind.lower())))
    tags = {
        name: values[0]
        for name, values in _object(mail.get("tags")).items()
        if isinstance(values, list) and values
    }
    user, taken = own_user_id(tags)
    addresses = _recipients(kind, details, mail)
    if user is not None:
        # The tags are those of the message: it went to one user, however many addresses that has.
        addresses = addresses[:1]
    delivery = message_id(envelope["MessageId"]) or event_id(envelope["MessageId"])
    events = []
    for index, recipient in enumerate(addresses or [None]):
        properties = merged(
            {"email": recipient.value if recipient else None, "bounceType": _bounce(details)},
            message,
            # Tags of SES's own, such as ses:source-ip, stay among the tags of the mail.
            {name: value for name, value in tags.items() if ":" not in name},
            {"sns": merged(envelope, without=_NOT_KEPT)},
            without=taken,
        )
        document = track(
            _subscription(details) if kind == "Subscription" else _NAMES[kind],
            message_id=delivery if index == 0 else event_id(delivery, str(index)),
            timestamp=iso_time(details.get("timestamp")) or iso_time(mail.get("timestamp")),
            user=user,
            properties=properties,
        )
        events.append(TranslatedEvent(document, recipient))
    return Translation(events=events)


#: Of the envelope: what was translated, and what would let who reads it end the subscription.
_NOT_KEPT: Final = frozenset(
    {"Message", "Signature", "SignatureVersion", "SigningCertURL", "Type", "UnsubscribeURL"}
)


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _recipients(kind: str, details: Mapping[str, Any], mail: Mapping[str, Any]) -> list[Recipient]:
    """Whom the event is about, each once.

    If it names nobody, the first of those to whom the mail went: who of several opened it, SES does
    not know.
    """
    found: dict[str, Recipient] = {}
    listed = details.get(_RECIPIENTS.get(kind, ""))
    for item in listed if isinstance(listed, list) else []:
        recipient = email_recipient(item.get("emailAddress") if isinstance(item, dict) else item)
        if recipient is not None:
            found.setdefault(recipient.value, recipient)
    if found:
        return list(found.values())
    destination = mail.get("destination")
    first = email_recipient(*destination) if isinstance(destination, list) else None
    return [] if first is None else [first]


def _bounce(details: Mapping[str, Any]) -> str | None:
    return _BOUNCES.get(str(details.get("bounceType")))


def _subscription(details: Mapping[str, Any]) -> str:
    """A change of preferences is one of both names: what is left after it decides."""
    preferences = _object(details.get("newTopicPreferences"))
    topics = preferences.get("topicSubscriptionStatus")
    listed = topics if isinstance(topics, list) else []
    statuses = [_object(topic).get("subscriptionStatus") for topic in listed]
    if preferences.get("unsubscribeAll") is False and "OptOut" not in statuses:
        return "Email Resubscribed"
    return "Email Unsubscribed"


@hookimpl
def engage_register_webhook(register: Register[ProviderFactory]) -> None:
    """Bring ``amazon-ses``."""
    register(
        "amazon-ses",
        AmazonSes,
        options_schema("engage_schemas", "plugins/webhooks/amazon-ses.json"),
    )
