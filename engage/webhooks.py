# SPDX-License-Identifier: Apache-2.0
"""PUBLIC: what several webhook providers share.

Everything is pure. What verifies raises :class:`~engage.api.SignatureMismatch`, what translates
raises :class:`~engage.api.PayloadInvalid`; neither message holds a value of the delivery.

=====================================  ============================================================
reading a request                      :func:`one_header` :func:`optional_header`
                                       :func:`form_fields` :func:`form_bytes`
                                       :func:`parse_json` :func:`parse_object`
decoding a signature                   :func:`decode_hex` :func:`decode_base64`
checking it                            :func:`check_hmac` :func:`check_secret`
                                       :func:`check_timestamp` :func:`check_standard_webhook`
options                                :func:`secrets` :func:`standard_webhook_key`
                                       :func:`public_url` :func:`options_schema`
nothing signed but a password          :class:`StaticCredentialProvider`
making events                          :func:`track` :func:`message_id` :func:`event_id`
                                       :func:`unix_time` :func:`iso_time` :func:`at`
                                       :func:`merged` :func:`spread` :func:`text`
                                       :func:`user_id` :func:`own_user_id`
                                       :func:`email_recipient` :func:`phone_recipient`
=====================================  ============================================================
"""

from __future__ import annotations

import base64
import binascii
import datetime
import email.utils
import hashlib
import hmac
import importlib.resources
import json
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import parse_qsl

import orjson

from engage.api import (
    ConfigError,
    PayloadInvalid,
    Provider,
    ProviderContext,
    Recipient,
    SignatureMismatch,
    Signing,
    WebhookRequest,
    identifier_value,
)

__all__ = [
    "StaticCredentialProvider",
    "at",
    "check_hmac",
    "check_secret",
    "check_standard_webhook",
    "check_timestamp",
    "content_id",
    "decode_base64",
    "decode_hex",
    "email_recipient",
    "event_id",
    "form_bytes",
    "form_fields",
    "iso_time",
    "merged",
    "message_id",
    "one_header",
    "optional_header",
    "options_schema",
    "own_user_id",
    "parse_json",
    "parse_object",
    "phone_recipient",
    "public_url",
    "secrets",
    "signed_url",
    "spread",
    "standard_webhook_key",
    "text",
    "track",
    "unix_time",
    "user_id",
]

#: Values that a JSON text may have, counted before it is parsed (a comma, a bracket, a brace each).
MAX_VALUES: Final = 1_000_000
#: Fields that a form may have.
MAX_FIELDS: Final = 1_000

_TIMESTAMP: Final = re.compile(r"[0-9]{1,12}", re.ASCII)
_HEX: Final = re.compile(r"(?:[0-9a-f]{2})+", re.ASCII)
_LONG_NUMBER: Final = re.compile(rb"[0-9]{19}")
_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_NAMESPACE: Final = uuid.UUID("6f1d8a3e-3c0a-5a83-9a41-0f5b1c8f6f0e")


# ------------------------------------------------------------------------------ reading a request
def one_header(request: WebhookRequest, name: str) -> str:
    """Read a header that takes part in the authentication.

    :return: its value as it stands.
    :raises SignatureMismatch: it is missing, empty, or there twice. (No provider sends two, and
        servers differ in which of them they believe.)
    """
    values = request.values(name)
    if len(values) != 1:
        raise SignatureMismatch(f"{name}: expected once, found {len(values)} times")
    if not values[0]:
        raise SignatureMismatch(f"{name}: empty")
    return values[0]


def optional_header(request: WebhookRequest, name: str) -> str | None:
    """:return: the value of a header that is no secret and proves nothing; the first one's."""
    values = request.values(name)
    return values[0] if values else None


def form_bytes(data: bytes) -> list[tuple[bytes, bytes]]:
    """Decode ``application/x-www-form-urlencoded``, whatever characters it is about to hold.

    :return: names and values in their order, empty values kept: what providers sign.
    :raises PayloadInvalid: it has too many fields.
    """
    try:
        # Latin-1 there and back again: every byte is itself.
        pairs = parse_qsl(
            data.decode("latin-1"),
            keep_blank_values=True,
            encoding="latin-1",
            max_num_fields=MAX_FIELDS,
        )
    except ValueError as error:
        raise PayloadInvalid("the body is not a form") from error
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs]


def form_fields(data: bytes) -> list[tuple[str, str]]:
    """Decode ``application/x-www-form-urlencoded``.

    :return: names and values in their order, empty values kept.
    :raises PayloadInvalid: it is not UTF-8, or has too many fields.
    """
    try:
        return [(name.decode(), value.decode()) for name, value in form_bytes(data)]
    except UnicodeDecodeError as error:
        raise PayloadInvalid("the body is not UTF-8") from error


def parse_json(data: bytes | str) -> Any:
    """Parse JSON without changing anything silently.

    :raises PayloadInvalid: it is not UTF-8, not JSON, nested too deeply, holds too many values, or
        something that cannot be kept as it is (``NaN``, an integer beyond 64 bits).
    """
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    raw = raw.removeprefix(b"\xef\xbb\xbf")
    # Counted first, because 20 MiB of ``[],`` cost seconds and a gigabyte.
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") > MAX_VALUES:
        raise PayloadInvalid("the body holds too many values")
    try:
        value = orjson.loads(raw)
        # orjson makes a float of an integer beyond 64 bits; only the slow parser sees the digits.
        if _LONG_NUMBER.search(raw):
            value = json.loads(raw, parse_int=_integer)
    except (ValueError, TypeError, RecursionError) as error:
        raise PayloadInvalid("the body is not JSON that can be kept") from error
    return value


def _integer(digits: str) -> int:
    # Not int() first: Python refuses to convert thousands of digits.
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**63:
        raise ValueError("an integer beyond 64 bits")
    return int(digits)


def parse_object(data: bytes | str) -> dict[str, Any]:
    """Parse JSON that must be an object.

    :raises PayloadInvalid: it is not.
    """
    value = parse_json(data)
    if not isinstance(value, dict):
        raise PayloadInvalid("the body is not a JSON object")
    return value


# ------------------------------------------------------------------------------------- signatures
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
    :param prefixes: of the three headers' names; each header must be there once, whichever prefix.
    :param tolerance: seconds between signing and arrival, both ways.
    :raises SignatureMismatch: it is not so signed.
    """
    values = {}
    for part in ("id", "timestamp", "signature"):
        found = [value for prefix in prefixes for value in request.values(f"{prefix}-{part}")]
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


# ---------------------------------------------------------------------------------------- options
def standard_webhook_key(secret: str) -> bytes:
    """Decode a secret of the Standard Webhooks form: base64, with or without ``whsec_`` before it.

    :raises ConfigError: it is not base64, or shorter than 16 bytes.
    """
    encoded = secret.removeprefix("whsec_")
    try:
        key = base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except (ValueError, binascii.Error) as error:
        raise ConfigError("secret: is not base64") from error
    if len(key) < 16:
        raise ConfigError(f"secret: too short ({len(key)} bytes, at least 16)")
    return key


def public_url(options: Mapping[str, Any], context: ProviderContext) -> str | None:
    """Read the option ``public_url`` of a provider that signs the URL.

    :return: the URL as it is registered at the provider, if it is not ``[server] public_url`` with
        this server's path; else ``None``.
    :raises ConfigError: there is neither.
    """
    own = options.get("public_url")
    if own is None and context.public_url is None:
        raise ConfigError(
            "this provider signs the URL: set server.public_url to the address under which it"
            " reaches this server"
        )
    return own


def secrets(options: Mapping[str, Any], name: str) -> list[str]:
    """Read a secret that may be one string or, during a rotation, a list of them.

    :raises ConfigError: it is missing, or one of them is empty.
    """
    value = options.get(name)
    found = [value] if isinstance(value, str) else list(value or ())
    if not found or not all(isinstance(secret, str) and secret for secret in found):
        raise ConfigError(f"{name}: a secret is required, an empty one lets everybody sign")
    return found


def options_schema(package: str, path: str) -> dict[str, Any]:
    """Read a provider's JSON Schema of options that is packaged with it.

    :param package: an importable package, such as ``engage_schemas``.
    :param path: of the file inside it, such as ``plugins/webhooks/acme.json``.
    """
    found = importlib.resources.files(package).joinpath(path)
    schema: dict[str, Any] = orjson.loads(found.read_bytes())
    return schema


# ----------------------------------------------------------------------------------- making events
def signed_url(own: str | None, request: WebhookRequest) -> str:
    """:return: the URL that the provider signed: the option ``public_url`` (with the request's
    query unless it has one of its own), or the request's public URL."""
    if own is None:
        return request.url
    return own if "?" in own or not request.query else f"{own}?{request.query}"


def event_id(*parts: str) -> str:
    """Make a message id of what tells one event from every other of this provider.

    :param parts: such as the kind, the message and the time. Different parts, different ids.
    :return: a UUIDv5, the same whenever the parts are.
    """
    return str(uuid.uuid5(_NAMESPACE, "".join(f"{len(part)}:{part}" for part in parts)))


def content_id(value: object) -> str:
    """Make a message id of an element to which the provider gave none: of all that it holds, so
    that the same element has the same id again.

    :param value: of decoded JSON.
    """
    return event_id(orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode())


def message_id(*candidates: object) -> str | None:
    """:return: the first candidate that can be a message id as it stands: an integer's digits, or a
    string of at most 256 characters that is not blank."""
    for candidate in candidates:
        found = text(candidate)
        if found is not None and len(found) <= 256:
            return found
    return None


def unix_time(seconds: object) -> str | None:
    """:return: RFC 3339 UTC with milliseconds of seconds since 1970 (a number, or digits with an
    optional fraction as a string); ``None`` for anything else or outside the years 1970 to 9999."""
    if isinstance(seconds, str):
        try:
            seconds = float(seconds) if seconds.isascii() and seconds[:1].isdigit() else None
        except ValueError:
            return None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        return None
    if not 0 <= seconds < 253_402_300_800:
        return None
    return _rfc3339(round(seconds * 1000))


def iso_time(value: object) -> str | None:
    """Read a date and time of ISO 8601, any number of digits of a second; UTC if it names no zone.

    :return: RFC 3339 UTC with milliseconds; ``None`` for what is not one, or outside the years 1970
        to 9999.
    """
    if not isinstance(value, str) or len(value) > 64 or not value.isascii():
        return None
    try:
        moment = datetime.datetime.fromisoformat(value.strip())
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=datetime.UTC)
        millis = (moment - _EPOCH) // datetime.timedelta(milliseconds=1)
    except (ValueError, OverflowError):
        return None
    return _rfc3339(millis) if 0 <= millis < 253_402_300_800_000 else None


def _rfc3339(millis: int) -> str:
    moment = _EPOCH + datetime.timedelta(milliseconds=millis)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{millis % 1000:03d}Z"


def at(value: object, path: str) -> object:
    """:return: what stands at a dotted path of keys; ``None`` if there is nothing."""
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def merged(*layers: object, without: Iterable[str] = ()) -> dict[str, Any]:
    """Merge objects into one: of two with the same key the earlier layer wins.

    :param layers: anything but an object, and values that are ``None``, are left out.
    :param without: keys that have a field of their own.
    """
    left_out = frozenset(without)
    result: dict[str, Any] = {}
    for layer in layers:
        if isinstance(layer, Mapping):
            for key, value in layer.items():
                if value is not None and key not in left_out:
                    result.setdefault(key, value)
    return result


def spread(
    properties: Mapping[str, Any], custom: object, key: str, *, without: Iterable[str] = ()
) -> dict[str, Any]:
    """Lay a sender's own values (tags, metadata, custom arguments) beside a provider's properties.

    :param custom: an object; anything else is kept as it is under ``key``, unless empty.
    :param key: where all of ``custom`` is kept as well, should one of its names be taken by another
        value.
    :param without: keys of ``custom`` that have a field of their own.
    """
    result = dict(properties)
    if not isinstance(custom, Mapping):
        if custom:
            result[key] = custom
        return result
    own = merged(custom, without=without)
    if any(name in result and result[name] != value for name, value in own.items()):
        result[key] = dict(custom)
    for name, value in own.items():
        result.setdefault(name, value)
    return result


def text(value: object) -> str | None:
    """:return: a string that is not blank, or an integer's digits; ``None`` for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return str(value)
    return value if isinstance(value, str) and value.strip() else None


def user_id(*candidates: object) -> str | None:
    """:return: the first candidate that can be a user id (1 to 512 characters, not blank)."""
    for candidate in candidates:
        found = text(candidate)
        if found is not None and len(found) <= 512:
            return found
    return None


def own_user_id(custom: object) -> tuple[str | None, tuple[str, ...]]:
    """Find the user among a sender's own values (tags, metadata, custom arguments).

    :return: what stands under ``userId``, else under ``user_id``; and the key that it was found
        under, which has a field of its own then.
    """
    for key in ("userId", "user_id"):
        found = user_id(custom.get(key)) if isinstance(custom, Mapping) else None
        if found is not None:
            return found, (key,)
    return None, ()


def email_recipient(*candidates: object) -> Recipient | None:
    """:return: the first candidate that is an address (``Name <address>`` is one too)."""
    for candidate in candidates:
        if not isinstance(candidate, str) or len(candidate) > 2048:
            continue
        address = candidate
        if "<" in candidate:
            address = email.utils.parseaddr(candidate)[1]
        if "@" in address and identifier_value("email", address) is not None:
            return Recipient("email", address.strip())
    return None


def phone_recipient(*candidates: object) -> Recipient | None:
    """:return: the first candidate that is a phone number (``whatsapp:+1…`` is one too)."""
    for candidate in candidates:
        if isinstance(candidate, str):
            number = candidate.rpartition(":")[2]
            if identifier_value("phone", number) is not None:
                return Recipient("phone", number)
    return None


def track(
    name: str,
    *,
    message_id: str,
    timestamp: str | None,
    user: str | None = None,
    properties: Mapping[str, Any] | None = None,
    context: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Make the document of a track event; what is ``None`` is left out.

    :param name: the event's name.
    :param message_id: the provider's id of this very event.
    :param timestamp: RFC 3339; ``None``: when it arrived.
    :param user: the user's id, if the provider gave one.
    """
    document: dict[str, Any] = {"type": "track", "event": name, "messageId": message_id}
    if user is not None:
        document["userId"] = user
    if timestamp is not None:
        document["timestamp"] = timestamp
    document["properties"] = dict(properties or {})
    if context is not None:
        document["context"] = dict(context)
    return document


# ------------------------------------------------------------------------------ static credentials
class StaticCredentialProvider(Provider):
    """A provider whose deliveries carry a secret in a header, and are signed by nobody.

    The secret proves that the sender knows it; nothing proves that the body is the sender's. A
    subclass brings ``translate``. Options: ``header`` and ``value`` (one or several), the header's
    whole value; or ``basic_user`` and ``basic_password`` (one or several) for HTTP Basic.
    """

    def __init__(self, options: Mapping[str, Any], context: ProviderContext) -> None:
        """:raises ConfigError: a secret is missing or empty."""
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
        """See :meth:`Provider.credentials`: what stands in the header."""
        if not self._basic:
            return self._keys
        return [b"Basic " + base64.b64encode(key) for key in self._keys]

    def verify(self, request: WebhookRequest, fetched: bytes | None) -> None:
        """See :meth:`Provider.verify`."""
        value = one_header(request, self._header)
        if self._basic:
            # Compared whole: the name cannot hold a colon, so there is one way to split it.
            scheme, _, encoded = value.partition(" ")
            if scheme.lower() != "basic":
                raise SignatureMismatch("the credential is not Basic")
            check_secret(self._keys, decode_base64(encoded.strip(" ")))
        else:
            check_secret(self._keys, value.encode("latin-1"))
