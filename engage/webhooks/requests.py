# SPDX-License-Identifier: Apache-2.0
"""Reads a request (headers, forms, JSON) and checks its signature. Sizes are bounded; secrets are
compared in constant time.

``verify`` runs on what anyone may send. :func:`form_bytes`, :func:`parse_envelope` and
:func:`body_members` are for it: their time grows with the size of the body and with nothing else,
and decoding runs in C. 5 MiB of the worst form take about 50 ms. :func:`parse_json` and
:func:`parse_object` are for ``translate``, because they may parse a body twice.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import orjson

from engage.api import PayloadInvalid, SignatureMismatch, WebhookRequest
from engage.api.json_values import IDS, read_json, storable
from engage.webhooks.translation import at

__all__ = [
    "body_members",
    "check_hmac",
    "check_secret",
    "check_standard_webhook",
    "check_timestamp",
    "decode_base64",
    "decode_hex",
    "form_bytes",
    "form_fields",
    "form_values",
    "one_header",
    "optional_header",
    "parse_envelope",
    "parse_json",
    "parse_object",
]

#: Maximum number of commas, brackets and braces in a JSON text, counted before it is parsed.
MAX_VALUES: Final = 1_000_000
#: Maximum number of fields in a form.
MAX_FIELDS: Final = 1_000
#: Maximum number of commas, brackets and braces in a JSON text that is parsed to verify it.
MAX_ENVELOPE_VALUES: Final = 50_000

_LONG_NUMBER: Final = re.compile(rb"[0-9]{19}")
#: Maps hex digits to ``h`` and every other byte except ``%`` to ``x``.
_ESCAPES: Final = bytes(
    ord("%")
    if byte == ord("%")
    else ord("h")
    if chr(byte) in "0123456789abcdefABCDEF"
    else ord("x")
    for byte in range(256)
)
_TIMESTAMP: Final = re.compile(r"[0-9]{1,12}", re.ASCII)
_HEX: Final = re.compile(r"(?:[0-9a-f]{2})+", re.ASCII)


def one_header(request: WebhookRequest, name: str) -> str:
    """Return the value of a header that the authentication depends on.

    :raises SignatureMismatch: if it is missing, empty or repeated. (No provider repeats one, and
        servers differ in which of two they use.)
    """
    values = request.values(name)
    if len(values) != 1:
        raise SignatureMismatch(f"{name}: expected once, found {len(values)} times")
    if not values[0]:
        raise SignatureMismatch(f"{name}: empty")
    return values[0]


def optional_header(request: WebhookRequest, name: str) -> str | None:
    """Return the value of a header that proves nothing, or ``None``; the first of several."""
    values = request.values(name)
    return values[0] if values else None


def form_bytes(data: bytes) -> list[tuple[bytes, bytes]]:
    """Decode ``application/x-www-form-urlencoded`` to bytes in any encoding.

    :return: names and values in their order, including empty values; this is what providers sign.
    :raises PayloadInvalid: if it has more than 1000 fields, or a ``%`` without two hex digits.
    """
    if data.count(b"&") >= MAX_FIELDS:
        raise PayloadInvalid("the body is not a form: it has too many fields")
    # Counted instead of searched: a search takes time for each of a million escapes.
    if b"%" in data and data.translate(_ESCAPES).count(b"%hh") != data.count(b"%"):
        raise PayloadInvalid("the body is not a form: a % is not followed by two hex digits")
    pairs = (field.partition(b"=") for field in data.split(b"&") if field)
    return [(_unquote(name), _unquote(value)) for name, _, value in pairs]


def _unquote(text: bytes) -> bytes:
    """Decode the valid escapes of a form; twenty times as fast as urllib.

    Quoted-printable is the same encoding with ``=`` instead of ``%``, and its decoder runs in C.
    """
    text = text.replace(b"+", b" ")
    if b"%" not in text:
        return text
    return binascii.a2b_qp(text.replace(b"=", b"=3D").replace(b"%", b"="))


def form_fields(data: bytes) -> list[tuple[str, str]]:
    """Decode ``application/x-www-form-urlencoded``.

    :return: names and values in their order, including empty values.
    :raises PayloadInvalid: if it is not UTF-8, or not a form for :func:`form_bytes`.
    """
    try:
        return [(name.decode(), value.decode()) for name, value in form_bytes(data)]
    except UnicodeDecodeError as error:
        raise PayloadInvalid("the body is not UTF-8") from error


def form_values(pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Collect the fields of a form by name, without losing a value.

    :param pairs: names and values, such as the result of :func:`form_fields`.
    :return: name → value; of a name that is repeated, the list of its values in their order.
    """
    by_name: dict[str, list[str]] = {}
    for name, value in pairs:
        by_name.setdefault(name, []).append(value)
    return {name: values[0] if len(values) == 1 else values for name, values in by_name.items()}


def parse_json(data: bytes | str, *, elements: str | None = None) -> Any:
    """Parse JSON; half of a surrogate pair becomes U+FFFD, and nothing else is changed silently.

    If the JSON is a list, an element with a value that cannot be stored as it is (a number that is
    neither an integer of 64 bits nor a double, an id with half of a surrogate pair) is replaced by
    ``None``, and the other elements are kept.

    :param elements: the dotted path of keys to such a list, if the JSON is an object.
    :raises PayloadInvalid: if it is not JSON in UTF-8 or has too many values, or if it has a value
        outside such a list that cannot be stored as it is.
    """
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    raw = raw.removeprefix(b"\xef\xbb\xbf")
    # Counted first, because parsing 20 MiB of ``[],`` takes seconds and a gigabyte.
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") > MAX_VALUES:
        raise PayloadInvalid("the body has too many values")
    # orjson reads an integer beyond 64 bits as a float, and more levels than it writes.
    if not _LONG_NUMBER.search(raw):
        with contextlib.suppress(orjson.JSONDecodeError, orjson.JSONEncodeError):
            value = orjson.loads(raw)
            orjson.dumps(value)
            return value
    try:
        value = member = read_json(raw)
    except ValueError:
        raise PayloadInvalid("the body is not JSON") from None
    for key in elements.split(".") if elements is not None and isinstance(value, dict) else ():
        member = member.get(key) if isinstance(member, dict) else None
    if isinstance(member, list):
        member[:] = [None if problems else element for element, problems in map(_stored, member)]
    value, problems = _stored(value)
    if problems:
        raise PayloadInvalid(f"the body cannot be stored: a value in it {problems[0][1]}")
    return value


def _stored(value: Any) -> tuple[Any, list[Any]]:
    """Return a value as it can be stored, and what in it cannot."""
    problems: list[Any] = []
    return storable(value, _is_id, problems), problems


def _is_id(path: tuple[str, ...]) -> bool:
    return bool(path) and path[-1] in IDS  # at any depth: services return what senders gave them


def parse_envelope(data: bytes) -> dict[str, Any]:
    """Parse a body that contains its signature, for ``verify``.

    Integers beyond 64 bits become floats, so only strings may be used of the result.

    :raises PayloadInvalid: if it is not a JSON object, or has more than 50,000 values.
    """
    if data.count(b",") + data.count(b"[") + data.count(b"{") > MAX_ENVELOPE_VALUES:
        raise PayloadInvalid("the body has too many values")
    try:
        value = orjson.loads(data.removeprefix(b"\xef\xbb\xbf"))
    except orjson.JSONDecodeError as error:
        raise PayloadInvalid("the body is not JSON") from error
    if not isinstance(value, dict):
        raise PayloadInvalid("the body is not a JSON object")
    return value


def body_members(request: WebhookRequest, *paths: str) -> list[str]:
    """Return the texts at dotted paths of a JSON body that contains its signature, for ``verify``.

    :param paths: such as ``signature.token``.
    :raises SignatureMismatch: if the body is none for :func:`parse_envelope`, or if one of the
        values is missing, empty or not a text.
    """
    try:
        document = parse_envelope(request.body)
    except PayloadInvalid as error:
        raise SignatureMismatch(str(error)) from error
    members = []
    for path in paths:
        value = at(document, path)
        if not isinstance(value, str) or not value:
            raise SignatureMismatch(f"{path}: missing, empty or not a text")
        members.append(value)
    return members


def parse_object(data: bytes | str, *, elements: str | None = None) -> dict[str, Any]:
    """Parse JSON that must be an object; see :func:`parse_json`.

    :raises PayloadInvalid: if it is not JSON that can be stored, or not an object.
    """
    value = parse_json(data, elements=elements)
    if not isinstance(value, dict):
        raise PayloadInvalid("the body is not a JSON object")
    return value


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
    matches = False
    for key in keys:
        if not key:
            continue
        for message in texts:
            expected = hmac.digest(key, message, algorithm)
            for signature in offered:
                matches |= hmac.compare_digest(expected, signature)
    if not matches:
        raise SignatureMismatch("the signature does not match")


def check_secret(keys: Sequence[bytes], offered: bytes) -> None:
    """Check that a static credential is one of ``keys``, in constant time.

    Hashes are compared, so the time does not depend on the length of a secret either.

    :raises SignatureMismatch: if it is not one of them.
    """
    digest = hashlib.sha256(offered).digest()
    matches = False
    for key in keys:
        matches |= bool(key) and hmac.compare_digest(hashlib.sha256(key).digest(), digest)
    if not matches:
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
    headers: dict[str, list[str]] = {}
    for name, value in request.headers:
        headers.setdefault(name.lower(), []).append(value)
    values = {}
    for part in ("id", "timestamp", "signature"):
        names = [f"{prefix}-{part}".lower() for prefix in prefixes]
        sent = next((headers[name] for name in names if name in headers), ())
        if len(sent) != 1 or not sent[0]:
            raise SignatureMismatch(f"{prefixes[0]}-{part}: expected once")
        values[part] = sent[0]
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
