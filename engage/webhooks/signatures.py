# SPDX-License-Identifier: Apache-2.0
"""Decoding and checking signatures, secrets and times of signing; always in constant time."""

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

    :raises SignatureMismatch: any other spelling.
    """
    if not _HEX.fullmatch(value):
        raise SignatureMismatch("the signature is not lower-case hex")
    return bytes.fromhex(value)


def decode_base64(value: str) -> bytes:
    """Decode a signature in canonical base64: standard alphabet, padded, unused bits zero.

    :raises SignatureMismatch: any other spelling.
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
    """Return if one of the signatures is the HMAC of one of the texts with one of the keys.

    Every comparison is made, each in constant time, whichever matches.

    :param keys: the secrets, several during a rotation; an empty one never matches.
    :param signed: the signed bytes, or several candidates (a URL with and without its port).
    :param signatures: decoded signatures of the delivery; at most 16 are looked at.
    :param algorithm: a name of :mod:`hashlib`.
    :raises SignatureMismatch: none is.
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
    """Return if a static credential is one of ``keys``; every comparison in constant time.

    Hashes are compared, so that not even the length of a secret shows.

    :raises SignatureMismatch: it is not.
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

    :param value: the header's text: 1 to 12 ASCII digits, nothing else (``1e9``, ``1_000`` and
        `` 1`` are numbers to Python and other servers, so one signature would fit many spellings).
    :param now: seconds since 1970.
    :param past: how many seconds it may be old, inclusive; ``None``: any.
    :param future: how many seconds it may be ahead, inclusive; ``None``: any.
    :return: seconds since 1970.
    :raises SignatureMismatch: it is not such a number, or outside the window.
    """
    if not _TIMESTAMP.fullmatch(value):
        raise SignatureMismatch("the timestamp is not a whole number of seconds")
    seconds = int(value)
    age = int(now) - seconds
    if past is not None and age > past:
        raise SignatureMismatch(f"signed {age} s ago, at most {past} s are allowed")
    if future is not None and -age > future:
        raise SignatureMismatch(f"signed {-age} s in the future, at most {future} s are allowed")
    return seconds


def check_standard_webhook(
    request: WebhookRequest,
    keys: Sequence[bytes],
    *,
    prefixes: Sequence[str] = ("webhook",),
    tolerance: int = 300,
) -> None:
    """Check a delivery signed as the Standard Webhooks specification says.

    HMAC-SHA256 over ``id.timestamp.body``, in a header that lists signatures with their versions.

    :param keys: from :func:`standard_webhook_key`.
    :param prefixes: of the three headers' names; of each header the first prefix that is there
        counts, and must be there once.
    :param tolerance: seconds between signing and arrival, both ways.
    :raises SignatureMismatch: it is not so signed.
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
        # v1a is another algorithm, and versions to come are not ours to judge.
        if version == "v1":
            signatures.append(decode_base64(value))
    check_timestamp(values["timestamp"], request.now, past=tolerance, future=tolerance)
    signed = f"{values['id']}.{values['timestamp']}.".encode("latin-1") + request.body
    check_hmac(keys, signed, signatures)
