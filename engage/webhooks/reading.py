# SPDX-License-Identifier: Apache-2.0
"""Reading a request: headers, forms, JSON. Nothing is changed silently, everything bounded."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import parse_qsl

import orjson

from engage.api import PayloadInvalid, SignatureMismatch, WebhookRequest

__all__ = [
    "form_bytes",
    "form_fields",
    "one_header",
    "optional_header",
    "parse_json",
    "parse_object",
]

#: Values that a JSON text may have, counted before it is parsed (a comma, a bracket, a brace each).
MAX_VALUES: Final = 1_000_000
#: Fields that a form may have.
MAX_FIELDS: Final = 1_000

_LONG_NUMBER: Final = re.compile(rb"[0-9]{19}")


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


def parse_json(data: bytes | str, *, elements: str | None = None) -> Any:
    """Parse JSON without changing anything silently.

    Of a list, an element that holds something that cannot be kept as it is (a lone surrogate, a
    number beyond 64 bits) costs only itself: ``None`` stands in its place.

    :param elements: where such a list stands in an object, a dotted path of keys.
    :raises PayloadInvalid: it is not UTF-8, not JSON, nested too deeply, holds too many values, or
        something that cannot be kept as it is, outside such a list.
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
        try:
            return _without_bad_elements(raw, elements)
        except (ValueError, TypeError, RecursionError):
            raise PayloadInvalid("the body is not JSON that can be kept") from error
    return value


def _integer(digits: str) -> int:
    # Not int() first: Python refuses to convert thousands of digits.
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**63:
        raise ValueError("an integer beyond 64 bits")
    return int(digits)


def _without_bad_elements(raw: bytes, path: str | None) -> Any:
    """Parse again what orjson refused, which the standard library may not.

    :raises ValueError: it is no JSON after all.
    :raises TypeError: what cannot be kept is not in an element.
    """
    # What stands for a number that cannot be kept cannot be printed.
    value = json.loads(
        raw.decode(),
        parse_int=lambda digits: _number(_integer, digits),
        parse_float=lambda digits: _number(_finite, digits),
        parse_constant=_finite,
    )
    found = value
    for key in path.split(".") if path is not None and isinstance(value, dict) else ():
        found = found.get(key) if isinstance(found, dict) else None
    if isinstance(found, list):
        found[:] = [element if _printable(element) else None for element in found]
    orjson.dumps(value)
    return value


def _number(read: Callable[[str], float], digits: str) -> object:
    try:
        return read(digits)
    except ValueError:
        return object()


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError("not a number that JSON has")
    return number


def _printable(value: object) -> bool:
    try:
        orjson.dumps(value)
    except TypeError:
        return False
    return True


def parse_object(data: bytes | str, *, elements: str | None = None) -> dict[str, Any]:
    """Parse JSON that must be an object.

    :param elements: see :func:`parse_json`.
    :raises PayloadInvalid: it is not.
    """
    value = parse_json(data, elements=elements)
    if not isinstance(value, dict):
        raise PayloadInvalid("the body is not a JSON object")
    return value
