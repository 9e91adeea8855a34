# SPDX-License-Identifier: Apache-2.0
"""Decodes and checks signatures, secrets and times of signing; compares in constant time."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from typing import Final

from engage.api import SignatureMismatch, WebhookRequest

__all__ = [
    "check_hmac",
    "check_secret",
    "check_standard_webhook",
    "check_timestamp",
    "decode_base64",
    "decode_hex",
]

_TIMESTAMP: Final = re.compile(r"[0-9]{1,12}", re.ASCII)
_HEX: Final = re.compile(r"(?:[0-9a-f]{2})+", re.ASCII)


def decode_hex(value: str) -> bytes:
    """Decode a signature in canonical (lower-case) hex.

    :raises SignatureMismatch: if it is spelt in any other way.
    """
    if not _HEX.fullmatch(value):
        raise SignatureMismatch("the signature is not lower-case hex")
    return bytes.fromhex(value)


def decode_base64(value: str) -> bytes:
    """Decode a signature in canonical base64: standard alphabet, padded, unused bits zero.

    :raises SignatureMismatch: if it is spelt in any other way.
    """
    try:
        decoded = base64.b64decode(value.encode("ascii"), validate=True)
    except (ValueError, binascii.Error) as error:
        raise SignatureMismatch("the signature is not base64") from error
    if not decoded or base64.b64encode(decoded).decode("ascii") != value:
        raise SignatureMismatch("the signature is not in canonical base64")
    return decoded


def check_hmac(
    keys: Sequence[bytes],
    signed: bytes | Sequence[bytes],
    signatures: Iterable[bytes],
    *,
    algorithm: str = "sha256",
) -> None:
    """Check that one of the signatures is the HMAC of one of the texts with one of the keys.

    All pairs are compared, each in constant time, even after one has matched.

    :param keys: the secrets, several during a rotation; an empty one never matches.
    :param signed: the signed bytes, or several candidates (such as a URL with and without its
        port).
    :param signatures: the decoded signatures of the delivery; only the first 16 are checked.
    :param algorithm: the name of a hash of :mod:`hashlib`.
    :raises SignatureMismatch: if no signature matches.
    """
    texts = [signed] if isinstance(signed, bytes) else list(signed)
    offered = list(signatures)[:16]
    found = False
    for key in keys:
        if not key:
            continue
        for message in texts:
            expected = hmac.digest(key, message, algorithm)
            for signature in offered:
                found |= hmac.compare_digest(expected, signature)
    if not found:
        raise SignatureMismatch("the signature does not match")


def check_secret(keys: Sequence[bytes], offered: bytes) -> None:
    """Check that a static credential is one of ``keys``, in constant time.

    Hashes are compared, so the time does not depend on the length of a secret either.

    :raises SignatureMismatch: if it is not one of them.
    """
    digest = hashlib.sha256(offered).digest()
    found = False
    for key in keys:
        found |= bool(key) and hmac.compare_digest(hashlib.sha256(key).digest(), digest)
    if not found:
        raise SignatureMismatch("the credential does not match")


def check_timestamp(
    value: str, now: float, *, past: int | None = 300, future: int | None = 300
) -> int:
    """Check the time at which a delivery was signed.

    :param value: the header's text: 1 to 12 ASCII digits and nothing else. (``1e9``, ``1_000`` and
        `` 1`` are numbers to Python too; with them, one signature would fit several spellings.)
    :param now: the current time, in seconds since 1970.
    :param past: how many seconds old the time may be, inclusive; ``None``: any.
    :param future: how many seconds ahead the time may be, inclusive; ``None``: any.
    :return: the time, in seconds since 1970.
    :raises SignatureMismatch: if it is not such a number, or outside the window.
    """
    if not _TIMESTAMP.fullmatch(value):
        raise SignatureMismatch("the timestamp is not a whole number of seconds")
    seconds = int(value)
    age = int(now) - seconds
    if past is not None and age > past:
        raise SignatureMismatch(f"signed {age} s ago; the limit is {past} s")
    if future is not None and -age > future:
        raise SignatureMismatch(f"signed {-age} s in the future; the limit is {future} s")
    return seconds


def check_standard_webhook(
    request: WebhookRequest,
    keys: Sequence[bytes],
    *,
    prefixes: Sequence[str] = ("webhook",),
    tolerance: int = 300,
) -> None:
    """Check that a delivery is signed as the Standard Webhooks specification says.

    The signature is HMAC-SHA256 over ``id.timestamp.body``, in a header that lists signatures with
    their versions.

    :param keys: the results of :func:`standard_webhook_key`.
    :param prefixes: prefixes of the three headers' names. Of each header, the first prefix that
        occurs counts, and it must occur once.
    :param tolerance: how many seconds may lie between signing and arrival, in either direction.
    :raises SignatureMismatch: if it is not.
    """
    values = {}
    for part in ("id", "timestamp", "signature"):
        spellings = (request.values(f"{prefix}-{part}") for prefix in prefixes)
        found = next(filter(None, spellings), ())
        if len(found) != 1 or not found[0]:
            raise SignatureMismatch(f"{prefixes[0]}-{part}: expected once")
        values[part] = found[0]
    signatures = []
    for item in values["signature"].split(" ")[:16]:
        version, comma, value = item.partition(",")
        if not comma:
            raise SignatureMismatch("a signature without a version")
        # v1a is another algorithm; unknown versions are skipped.
        if version == "v1":
            signatures.append(decode_base64(value))
    check_timestamp(values["timestamp"], request.now, past=tolerance, future=tolerance)
    signed = f"{values['id']}.{values['timestamp']}.".encode("latin-1") + request.body
    check_hmac(keys, signed, signatures)
