# SPDX-License-Identifier: Apache-2.0
"""Amazon SNS for tests: a key, a certificate, and messages signed with them."""

from __future__ import annotations

import base64
import datetime
import json
import time
from collections.abc import Mapping
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.x509.oid import NameOID

REGION = "eu-west-1"
TOPIC = f"arn:aws:sns:{REGION}:123456789012:ses-events"
HOST = f"https://sns.{REGION}.amazonaws.com"
CERTIFICATE_URL = f"{HOST}/SimpleNotificationService-0123456789abcdef.pem"

_CONFIRMATION = ("Message", "MessageId", "SubscribeURL", "Timestamp", "Token", "TopicArn", "Type")
#: Type → the fields that are signed, in that order.
SIGNED = {
    "Notification": ("Message", "MessageId", "Subject", "Timestamp", "TopicArn", "Type"),
    "SubscriptionConfirmation": _CONFIRMATION,
    "UnsubscribeConfirmation": _CONFIRMATION,
}

KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
OTHER_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
ELLIPTIC_KEY = ec.generate_private_key(ec.SECP256R1())


def certificate(
    key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey = KEY,
    *,
    now: float | None = None,
    days: tuple[int, int] = (-1, 1),
) -> bytes:
    """Return a self-signed certificate in PEM, valid for those days around ``now``."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "sns.amazonaws.com")])
    moment = datetime.datetime.fromtimestamp(time.time() if now is None else now, datetime.UTC)
    since, until = (moment + datetime.timedelta(days=day) for day in days)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, since, until)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def notification(message: Any, **changes: Any) -> dict[str, Any]:
    """Return an unsigned message of SNS."""
    text = message if isinstance(message, str) else json.dumps(message)
    return {
        "Type": "Notification",
        "MessageId": "22b80b92-fdea-4c2c-8f9d-bdfb0c7bf324",
        "TopicArn": TOPIC,
        "Message": text,
        "Timestamp": "2023-11-14T22:13:20.000Z",
        "SignatureVersion": "2",
        "SigningCertURL": CERTIFICATE_URL,
        **changes,
    }


def confirmation(kind: str = "SubscriptionConfirmation", **changes: Any) -> dict[str, Any]:
    """Return an unsigned message about a subscription."""
    token = changes.get("Token", "2336412f37f")
    url = f"{HOST}/?Action=ConfirmSubscription&TopicArn={TOPIC}&Token={token}"
    own = {"Type": kind, "Token": token, "SubscribeURL": url}
    return notification("You have chosen …") | own | changes


def sign(envelope: Mapping[str, Any], key: rsa.RSAPrivateKey = KEY) -> bytes:
    """Return the signature, as Amazon describes it."""
    fields = [name for name in SIGNED[envelope["Type"]] if name in envelope]
    text = "".join(f"{name}\n{envelope[name]}\n" for name in fields)
    digest = hashes.SHA1() if envelope["SignatureVersion"] == "1" else hashes.SHA256()
    return key.sign(text.encode(), padding.PKCS1v15(), digest)


def signed(envelope: Mapping[str, Any], key: rsa.RSAPrivateKey = KEY) -> dict[str, Any]:
    """Return the message with its signature."""
    return {**envelope, "Signature": base64.b64encode(sign(envelope, key)).decode()}


#: URLs that are not of SNS in the region of the topic, or have other parts than host, path, query.
ELSEWHERE: tuple[Any, ...] = (
    *(
        f"{start}/SimpleNotificationService-0a.pem"
        for start in (
            *("http://sns.eu-west-1.amazonaws.com", "https://evil.example"),
            *("https://sns.s3.amazonaws.com", "https://sns.s3-us-west-2.amazonaws.com"),
            "https://sns.eu-west-1.s3.amazonaws.com",
            # Another region than that of the topic, and China.
            *("https://sns.us-east-1.amazonaws.com", "https://sns.eu-west-1.amazonaws.com.cn"),
            "https://SNS.EU-WEST-1.AMAZONAWS.COM",
            "https://sns.eu-west-1.amazonaws.com.evil.example",
            *("https://sns.eu-west-1.amazonaws.com.", "https://sns.eu-west-1.amazonaws.com:443"),
            "https://sns.eu-west-1.amazonaws.com:8443",
            "https://sns.eu-west-1.amazonaws.com@evil.example",
            "https://user:pass@sns.eu-west-1.amazonaws.com",
            "https://evil.example\\@sns.eu-west-1.amazonaws.com",
            "https://evil.example#@sns.eu-west-1.amazonaws.com",
            *("https://sns.eu-west-1.amazonaws.com\n", " https://sns.eu-west-1.amazonaws.com"),
            *("https:///sns.eu-west-1.amazonaws.com", "https:sns.eu-west-1.amazonaws.com"),
            *("//sns.eu-west-1.amazonaws.com", "https://sns.eu-west-1.amazonaws。com"),
            *("https://sns.eu-west-1%2eamazonaws.com", "https://169.254.169.254", "https://[::1]"),
            "https://localhost",
        )
    ),
    "https://sns.eu-west-1.amazonaws.com/SimpleNotificationService-0a.pem\n",
    *("file:///etc/passwd", "", None, 7, [f"{HOST}/SimpleNotificationService-0a.pem"]),
)
