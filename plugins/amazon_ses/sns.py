# SPDX-License-Identifier: Apache-2.0
"""Verifies a message of SNS.

SNS signs some fields of the message with the key of a certificate that it publishes. Two things
make this scheme dangerous, and both are checked before anything is fetched:

- The URL of the certificate is *in the message* and is not signed. It must be a URL of SNS in the
  topic's region. No other host, port, path or user is called.
- Anyone with an AWS account can make SNS sign a message to any URL. A signature therefore proves
  nothing without the allow-list of topics, which is a required option.

A ``SubscriptionConfirmation`` is answered by calling a URL that is built from the signed topic and
token. The URL in the message must agree with it, and is never called itself.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final
from urllib.parse import parse_qs, quote, urlsplit

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from engage.api import ConfigError, Fetch, PayloadInvalid, SignatureMismatch, WebhookRequest
from engage.webhooks import decode_base64, one_header, parse_envelope

__all__ = [
    "HOST",
    "NOTIFICATION",
    "Envelope",
    "certificate",
    "confirmation",
    "pinned_certificate",
    "read_envelope",
]

#: A regular expression for the hosts of SNS.
HOST: Final = r"sns\.[a-z]{2,}(?:-[a-z]+)+-[0-9]{1,2}\.amazonaws\.com(?:\.cn)?"

#: The signed fields, in the order in which they are signed.
NOTIFICATION: Final = ("Message", "MessageId", "Subject", "Timestamp", "TopicArn", "Type")
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
    "Notification": NOTIFICATION,
    "SubscriptionConfirmation": _CONFIRMATION,
    "UnsubscribeConfirmation": _CONFIRMATION,
}
_HASHES: Final[Mapping[str, Callable[[], hashes.HashAlgorithm]]] = {
    "1": hashes.SHA1,
    "2": hashes.SHA256,
}
#: Headers that repeat a field of the body; if both are present they must agree.
_MIRRORED: Final = {
    "x-amz-sns-message-type": "Type",
    "x-amz-sns-message-id": "MessageId",
    "x-amz-sns-topic-arn": "TopicArn",
}
_CERTIFICATE_PATH: Final = re.compile(r"/SimpleNotificationService-[0-9A-Fa-f]{1,64}\.pem")
_ARN: Final = re.compile(r"arn:[a-z-]+:sns:([a-z0-9-]+):[0-9]{12}:[A-Za-z0-9_.-]+")
#: Line breaks separate the signed fields and are not escaped, so a field with a line break could
#: pass for a part of its neighbour. Only ``Message`` may contain one. SNS's own values are shorter
#: than 1 KiB.
_ONE_LINE: Final = re.compile(r"[^\x00-\x1f\x7f\u0085\u2028\u2029]{0,4096}")


@dataclasses.dataclass(frozen=True, slots=True)
class Envelope:
    """An SNS message whose unsigned parts are checked."""

    kind: str
    fields: Mapping[str, str]
    version: str
    signature: bytes
    certificate_url: str

    def is_signed_by(self, signer: x509.Certificate, now: datetime.datetime) -> bool:
        """Return whether a certificate is valid and its key made the signature.

        :raises SignatureMismatch: if it is not the certificate of a strong RSA key.
        """
        if not signer.not_valid_before_utc <= now <= signer.not_valid_after_utc:
            return False
        try:
            _public_key(signer).verify(
                self.signature, self._signed(), padding.PKCS1v15(), _HASHES[self.version]()
            )
        except InvalidSignature:
            return False
        return True

    def _signed(self) -> bytes:
        lines = [
            f"{name}\n{self.fields[name]}\n" for name in _SIGNED[self.kind] if name in self.fields
        ]
        return "".join(lines).encode()


def read_envelope(
    request: WebhookRequest, *, topics: Collection[str], versions: Collection[str]
) -> Envelope:
    """Check everything that can be checked without the certificate.

    :param topics: the ARNs of the allowed topics.
    :param versions: the accepted values of ``SignatureVersion``.
    :raises SignatureMismatch: if something is wrong.
    """
    try:
        document = parse_envelope(request.body)
    except PayloadInvalid as error:
        raise SignatureMismatch("not an SNS message") from error
    kind = document.get("Type")
    if not isinstance(kind, str) or kind not in _SIGNED:
        raise SignatureMismatch("not a type of SNS message")
    for header, field in _MIRRORED.items():
        if request.values(header) and one_header(request, header) != document.get(field):
            raise SignatureMismatch(f"{header} is not the {field} of the body")
    version = document.get("SignatureVersion")
    if not isinstance(version, str) or version not in versions:
        raise SignatureMismatch("this SignatureVersion is not accepted")
    fields = _signed_fields(kind, document)
    topic = fields["TopicArn"]
    if topic not in topics:
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
    return Envelope(
        kind=kind,
        fields=fields,
        version=version,
        signature=decode_base64(signature),
        certificate_url=str(url),
    )


def _signed_fields(kind: str, document: Mapping[str, object]) -> dict[str, str]:
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
    return fields


def certificate(pem: bytes) -> x509.Certificate:
    """Read a certificate.

    :raises ValueError: if it is not a certificate in PEM form.
    :raises SignatureMismatch: if it is not the certificate of a strong RSA key.
    """
    read = x509.load_pem_x509_certificate(pem)
    _public_key(read)
    return read


def pinned_certificate(pem: str) -> x509.Certificate:
    """Read a certificate from the option ``signing_cert_pem``.

    :raises ConfigError: if it is not an RSA certificate in PEM form.
    """
    try:
        return certificate(pem.encode())
    except (ValueError, SignatureMismatch) as error:
        raise ConfigError("signing_cert_pem: not an RSA certificate in PEM form") from error


def confirmation(message: Mapping[str, str]) -> Fetch:
    """Return the call that confirms a subscription.

    :param message: a verified ``SubscriptionConfirmation``.
    """
    topic, token = message["TopicArn"], message["Token"]
    host, _ = _sns_url(message["SubscribeURL"], _region(topic))
    query = f"TopicArn={quote(topic, safe=':')}&Token={quote(token, safe='')}"
    return Fetch(f"https://{host}/?Action=ConfirmSubscription&{query}", cacheable=False)


def _public_key(signer: x509.Certificate) -> rsa.RSAPublicKey:
    key = signer.public_key()
    if not isinstance(key, rsa.RSAPublicKey) or key.key_size < 2048:
        raise SignatureMismatch("the certificate's key is not an RSA key of at least 2048 bits")
    return key


def _region(topic: str) -> str:
    match = _ARN.fullmatch(topic)
    if match is None:
        raise SignatureMismatch("TopicArn is not the name of a topic")
    return match[1]


def _sns_url(url: object, region: str) -> tuple[str, str]:
    """Return host and path of a URL of SNS in this region.

    :raises SignatureMismatch: if it is anything else, or has more than host, path and query.
    """
    china = r"\.cn" if region.startswith("cn-") else ""
    # The whole text is matched, not a parser's parts: parsers disagree about unusual URLs.
    match = re.fullmatch(
        rf"https://(sns\.{re.escape(region)}\.amazonaws\.com{china})(/[!-~]*)",
        url if isinstance(url, str) else "",
    )
    if match is None or "\\" in match[2] or "#" in match[2]:
        raise SignatureMismatch("a URL in the message is not a URL of SNS in the topic's region")
    return match[1], match[2]


def _check_subscribe_url(fields: Mapping[str, str], region: str) -> None:
    url = fields["SubscribeURL"]
    _sns_url(url, region)
    query = parse_qs(urlsplit(url).query, keep_blank_values=True)
    for name in ("TopicArn", "Token"):
        if query.get(name) != [fields[name]]:
            raise SignatureMismatch(f"SubscribeURL is of another {name}")
