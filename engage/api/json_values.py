# SPDX-License-Identifier: Apache-2.0
"""Reads JSON that orjson refuses or would change, by one rule for requests and for deliveries.

orjson refuses a whole text for half of a surrogate pair, a number beyond the range of a double or
too many levels, and makes a float of any integer beyond 64 bits. Here, only the value is refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any, Final

import orjson

__all__ = ["CUT", "IDS", "integer", "read_json", "storable", "structure"]

#: Members that are ids: a changed id could be that of another.
IDS: Final = frozenset({"messageId", "userId", "anonymousId", "groupId", "previousId"})
#: What stands in a text for a container that is too deep to be read: a number that is refused.
CUT: Final = b"1e99999"
_CUT: Final = orjson.Fragment(CUT)
#: Levels that are read: orjson writes 254, and ``limits.json_depth`` is at most 250.
_LEVELS: Final = 253
#: Half of a surrogate pair.
_HALF: Final = re.compile("[\ud800-\udfff]")
#: Everything up to the next sign of the structure, or to the end, in a text without escapes.
_SIGN: Final = re.compile(rb'(?:[^"{}\[\],]++|"[^"]*+"?)*+([{}\[\],]|\Z)')

_Path = tuple[str, ...]


def structure(data: bytes) -> Iterator[tuple[int, bytes, int]]:
    """Yield the brackets, braces and commas of a JSON text.

    :return: offset, sign, and the number of containers around the one that it belongs to.
    """
    # As long as before. Afterwards, every quote begins or ends a string.
    data = data.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    depth = -1
    for match in _SIGN.finditer(data):
        sign = match[1]
        if not sign:
            return
        depth += sign in b"{["
        yield match.start(1), sign, depth
        depth -= sign in b"}]"


def read_json(data: bytes) -> Any:
    """Parse JSON; :func:`storable` makes of the result what orjson can write.

    An integer beyond 64 bits becomes the double that equals it or prints as the same number, as
    JavaScript and Go print it; a number without such a double an ``orjson.Fragment``.

    :raises ValueError: if it is not JSON (RFC 8259) in UTF-8.
    """
    text = _shallow(data).decode()
    return json.loads(text, parse_int=integer, parse_float=_double, parse_constant=_constant)


def storable(
    value: Any,
    is_id: Callable[[_Path], bool],
    problems: list[tuple[_Path, str]],
    path: _Path = (),
) -> Any:
    """Return a value of :func:`read_json` with U+FFFD in place of half a surrogate pair.

    An id with such a half, and an object in which two keys would become one, are left as they were
    sent: as an ``orjson.Fragment``. Below the first level, there is no ``writeKey``.

    :param is_id: whether the value at a path of keys is an id.
    :param problems: gets the path of each ``orjson.Fragment``, and what is wrong with it.
    """
    kind = type(value)
    if kind is list:
        places = enumerate(value)
        return [storable(inner, is_id, problems, (*path, str(at))) for at, inner in places]
    if kind is dict:
        members = {
            name: storable(value[name], is_id, problems, (*path, name))
            for name in value
            if not path or name != "writeKey"
        }
        result = {_HALF.sub("\ufffd", name): members[name] for name in members}
        if len(result) == len(members):
            return result
        parts = [
            json.dumps(name).encode() + b":" + orjson.dumps(members[name])
            for name in members
            if name not in ("writeKey", "userHash")
        ]
        value = orjson.Fragment(b"{" + b",".join(parts) + b"}")
        problem = "has two keys that differ only in half of a surrogate pair (half an emoji)"
    elif kind is str and not value.isascii() and _HALF.search(value):
        if not is_id(path):
            return _HALF.sub("\ufffd", value)
        value = orjson.Fragment(json.dumps(value))
        problem = "is an id with half of a surrogate pair (half an emoji)"
    elif kind is orjson.Fragment:
        number = "is neither a signed 64-bit integer nor a double; send it as a string"
        problem = "is nested too deeply" if value is _CUT else number
    else:
        return value
    problems.append((tuple(_HALF.sub("\ufffd", name) for name in path), problem))
    return value


def integer(digits: str) -> object:
    """Read an integer as :func:`read_json` does."""
    # int() takes time that grows with the square of the digits; 64 bits have 19 at most.
    if len(digits) <= 20 and -(2**63) <= int(digits) < 2**63:
        return int(digits)
    double = float(digits)
    same = Decimal(digits) in (Decimal(double), Decimal(repr(double)))
    return double if same else orjson.Fragment(digits)


def _double(digits: str) -> object:
    number = float(digits)
    if math.isfinite(number):
        return number
    return _CUT if digits == CUT.decode() else orjson.Fragment(digits)


def _constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _shallow(data: bytes) -> bytes:
    """Return a JSON text with :data:`CUT` in place of each container that is too deep."""
    if data.count(b"{") + data.count(b"[") <= _LEVELS:
        return data
    pieces: list[bytes] = []
    position = 0
    for offset, sign, depth in structure(data):
        if depth == _LEVELS and sign in b"{[":
            pieces += data[position:offset], CUT
        elif depth == _LEVELS and sign in b"}]":
            position = offset + 1
    return b"".join((*pieces, data[position:]))
