# SPDX-License-Identifier: Apache-2.0
"""Turns the bytes of a body into a JSON value; safe for hostile input.

No value is silently changed: :func:`decode_json` refuses integers outside the signed 64-bit range,
numbers outside the range of a double, and half of a surrogate pair. :func:`decode_items` then finds
the items that have them, and reads the others. Limits apply *before* the cost arises: the
decompressed size is checked while decompressing, the number of values before parsing, and the depth
without recursion.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import orjson

from engage.api.json_values import IDS, integer, read_json, storable, structure
from engage.errors import ApiError, Limit, Problem, body_too_large, from_problems, pointer

if TYPE_CHECKING:
    from engage.config import Limits

__all__ = [
    "SLICE",
    "Encoding",
    "Faulty",
    "check_encoding",
    "decode_items",
    "decode_json",
    "decode_json_in_slices",
    "decompress",
    "decompress_in_slices",
    "read_item",
    "text_too_deep",
    "too_deep",
]

Encoding = Literal["identity", "gzip", "deflate"]

_ENCODINGS: Final[dict[str, Encoding]] = {
    "": "identity",
    "identity": "identity",
    "gzip": "gzip",
    # RFC 9110 section 8.4.1.3: treat it as gzip.
    "x-gzip": "gzip",
    "deflate": "deflate",
}

_BOM: Final = b"\xef\xbb\xbf"
_GZIP_MAGIC: Final = b"\x1f\x8b"

#: Bytes passed to zlib at once. Kept small, because zlib copies what a gzip member leaves unused.
_CHUNK: Final = 64 * 1024
#: Bytes that are decompressed in one turn of the event loop.
SLICE: Final = 1024 * 1024
#: Bytes of output that a byte of input counts as. A compressed body can consist of blocks without
#: any output: 5 MiB of them take 230 ms, as much as 80 MiB of output.
_INPUT_WEIGHT: Final = 8
#: A gzip body with more members than this is an attack, not a log file.
_MAX_MEMBERS: Final = 1000

_GZIP: Final = 16 + zlib.MAX_WBITS
_RAW: Final = -zlib.MAX_WBITS

#: Replaces every digit by 0, so that one ``in`` finds a run of digits.
_DIGITS: Final = bytes.maketrans(b"123456789", b"000000000")
#: 2**63 has 19 digits: a number with fewer digits is always in range.
_LONG_RUN: Final = b"0" * 19
#: In valid JSON outside of strings: a number, a string with its end if that is near, and what is
#: between them. One match takes a few milliseconds at most: a string may have millions of escapes.
_TOKEN: Final = re.compile(
    rb'-?[0-9][0-9.eE+-]*|"[^"\\]*(?:\\.[^"\\]*){0,10000}("?)|[^"0-9-]{1,65536}', re.DOTALL
)
#: The same within a string that has begun before.
_REST: Final = re.compile(rb'[^"\\]*(?:\\.[^"\\]*){0,10000}("?)', re.DOTALL)
#: Bytes that are searched for integers in one turn of the event loop.
_TOKENS_SLICE: Final = 256 * 1024
#: First bytes of numbers.
_NUMBER: Final = frozenset(b"-0123456789")
#: A number with one of these is not an integer.
_FLOAT: Final = frozenset(b".eE")

#: Bytes of a body from which its brackets are not counted.
_UNCOUNTED: Final = 16 * 1024
#: For the depth of a text: what is neither a bracket nor a quote, and brackets as braces.
_NOT_STRUCTURE: Final = bytes(byte for byte in range(256) if byte not in b'{}[]"')
_AS_BRACES: Final = bytes.maketrans(b"[]", b"{}")


class Faulty(dict[str, Any]):
    """An item that is JSON, but has a value that cannot be stored as it was sent.

    It is empty, so it is invalid by the schema of every item, and valid items cost nothing for it.

    :param value: what orjson writes as it was sent.
    :param error: why the item is refused.
    """

    def __init__(self, value: Any, error: ApiError) -> None:
        self.value = value
        self.error = error


def check_encoding(content_encoding: str | Sequence[str] | None) -> Encoding:
    """Read the header ``Content-Encoding``.

    :param content_encoding: the value of the header, or all values if it was sent several times.
    :return: the encoding of the body.
    :raises ApiError: 415 ``unsupported_encoding`` for any other encoding.
    """
    if not content_encoding:
        return "identity"
    if not isinstance(content_encoding, str):
        content_encoding = ", ".join(content_encoding)
    encoding = _ENCODINGS.get(content_encoding.strip().lower())
    if encoding is None:
        raise ApiError("unsupported_encoding", "Content-Encoding must be gzip, deflate or identity")
    return encoding


def decompress(body: bytes, encoding: Encoding, limit: Limit) -> bytes:
    """Undo the content encoding.

    :param limit: the maximum decompressed size; checked while decompressing.
    :return: the decompressed body.
    :raises ApiError: 413 ``body_too_large``; 400 ``invalid_encoding`` if the body is truncated,
        corrupt, or followed by other bytes.
    """
    parts: list[bytes] = []
    for _ in _decompressing(body, encoding, limit, parts):
        pass
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def decompress_in_slices(body: bytes, encoding: Encoding, limit: Limit) -> bytes:
    """Undo the content encoding as :func:`decompress` does, a slice in each turn of the event loop.

    20 MiB take about 50 ms: too long for other requests to wait.
    """
    parts: list[bytes] = []
    size = 0
    for count in _decompressing(body, encoding, limit, parts):
        size += count
        if size >= SLICE:
            size = 0
            await asyncio.sleep(0)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _decompressing(
    body: bytes, encoding: Encoding, limit: Limit, parts: list[bytes]
) -> Iterator[int]:
    """Decompress into ``parts``; yield the work of each part, in bytes of output."""
    if encoding == "identity":
        if len(body) > limit.bytes:
            raise body_too_large(limit)
        parts.append(body)
        return
    try:
        if encoding == "gzip":
            yield from _inflate(body, _GZIP, limit, parts)
            return
        if _looks_like_zlib(body):
            try:
                yield from _inflate(body, zlib.MAX_WBITS, limit, parts)
                return
            except (zlib.error, EOFError):
                parts.clear()  # a raw deflate stream can begin like a zlib header
        yield from _inflate(body, _RAW, limit, parts)
    except (zlib.error, EOFError):
        raise ApiError("invalid_encoding", f"the body is not valid {encoding}") from None


def _looks_like_zlib(body: bytes) -> bool:
    return len(body) >= 2 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0


def _inflate(body: bytes, wbits: int, limit: Limit, parts: list[bytes]) -> Iterator[int]:
    """Decompress a body into ``parts``; yield the work of each part, in bytes of output.

    :raises ApiError: 413 ``body_too_large``.
    :raises zlib.error: if the body is corrupt.
    :raises EOFError: if the body is truncated, or followed by other bytes.
    """
    room = limit.bytes
    members = 1
    stream = zlib.decompressobj(wbits)
    for start in range(0, len(body), _CHUNK):
        data = body[start : start + _CHUNK]
        # zlib may hold output back when it has returned as much as it was asked for.
        held_back = False
        while data or held_back:
            if stream.eof:
                if wbits != _GZIP:
                    raise EOFError
                if not data.strip(b"\0"):
                    break  # zeros after a gzip member are padding
                members += 1
                if members > _MAX_MEMBERS:
                    raise EOFError
                stream = zlib.decompressobj(wbits)
            # One byte more than there is room for distinguishes "full" from "too large".
            most = min(room + 1, SLICE)
            part = stream.decompress(data, most)
            held_back = len(part) == most and not stream.eof
            room -= len(part)
            if room < 0:
                raise body_too_large(limit)
            parts.append(part)
            before = len(data)
            data = stream.unused_data if stream.eof else stream.unconsumed_tail
            yield len(part) + _INPUT_WEIGHT * (before - len(data))
    if not stream.eof:
        raise EOFError


def decode_json(data: bytes, limits: Limits) -> Any:
    """Parse a small body; :func:`decode_json_in_slices` is for any other.

    The body must be UTF-8; a byte order mark is ignored. If a key occurs twice, its last value
    counts.

    :return: the JSON value.
    :raises ApiError: 400 ``invalid_json``; 413 ``body_too_large`` if the body has too many values.
    """
    value = _parse(data, limits)
    _check_depth(data, value, limits)
    for _ in _checking_integers(data):
        pass
    return value


async def decode_json_in_slices(data: bytes, limits: Limits) -> Any:
    """Parse a body as :func:`decode_json` does, in several turns of the event loop."""
    # While a large body is parsed, the garbage collector would look again and again at containers
    # that are all alive: 60 ms instead of 6 for 160,000 lists.
    gc.disable()
    try:
        value = _parse(data, limits)
    finally:
        gc.enable()
    if len(data) > SLICE:
        # Parsing took most of what one turn may take.
        await asyncio.sleep(0)
    _check_depth(data, value, limits)
    for _ in _checking_integers(data):
        await asyncio.sleep(0)
    return value


def decode_items(data: bytes, limits: Limits, refusal: ApiError, *, batch: bool) -> Any:
    """Parse a body that :func:`decode_json` refused, item by item; this takes far longer.

    :param refusal: the error of :func:`decode_json`.
    :param batch: whether the items are in the member ``batch``; otherwise the body is the item.
    :return: the JSON value, with a :class:`Faulty` in place of each item that cannot be stored.
    :raises ApiError: 400 ``invalid_json``, if the body is not JSON, naming an item that is not, or
        if a value outside of the items cannot be stored.
    """
    if refusal.code != "invalid_json":
        raise refusal
    data = data.removeprefix(_BOM)
    if not batch:
        return _decode_item(data, limits, refusal)
    skeleton, items = _split(data)
    body = _decode_item(skeleton, limits, refusal)
    if type(body) is Faulty:
        raise body.error
    places = body.get("batch") if type(body) is dict else None
    # Of a batch with more items, only their number counts: it is refused.
    if type(places) is list and len(places) <= limits.batch_events:
        within = dataclasses.replace(limits, json_depth=limits.json_depth - 2)
        for index, place in enumerate(places):
            try:
                places[index] = decode_json(items[place], within)
            except ApiError as error:
                problem = Problem(f"/batch/{index}", error.message.removeprefix("the body "))
                refusal = from_problems([problem], "invalid_json")
                places[index] = _decode_item(items[place], within, refusal)
    return body


def read_item(data: bytes) -> tuple[Any, list[Problem]]:
    """Parse an item that may have values that cannot be stored.

    :return: what orjson writes with these values as they were sent, and a problem for each.
    :raises ValueError: if it is not JSON.
    """
    unstorable: list[tuple[tuple[str, ...], str]] = []
    value = storable(read_json(data), lambda path: len(path) == 1 and path[0] in IDS, unstorable)
    return value, [Problem("".join(map(pointer, path)), message) for path, message in unstorable]


def _decode_item(data: bytes, limits: Limits, refusal: ApiError) -> Any:
    """:raises ApiError: ``refusal``, if it is not JSON."""
    try:
        value, problems = read_item(data)
    except ValueError:
        raise refusal from None
    if too_deep(value, limits.json_depth):
        rule = f"may have {limits.json_depth} levels here (limits.json_depth)"
        problems = [Problem("", f"is nested too deeply; it {rule}")]
    return Faulty(value, from_problems(problems, "invalid_json")) if problems else value


def _split(data: bytes) -> tuple[bytes, list[bytes]]:
    """Cut the elements out of the arrays that are members of a JSON object.

    :return: the text with the number of each element in its place, and the elements.
    """
    pieces: list[bytes] = []
    items: list[bytes] = []
    position = 0
    start: int | None = None  # where an element of such an array begins
    for offset, sign, depth in structure(data):
        if depth != 1:
            continue
        if start is not None and sign in b",]" and (item := data[start:offset]).strip():
            pieces += data[position:start], b"%d" % len(items)
            items.append(item)
            position = offset
        start = offset + 1 if sign == b"[" or (sign == b"," and start is not None) else None
    return b"".join((*pieces, data[position:])), items


def _parse(data: bytes, limits: Limits) -> Any:
    """Parse a body, without the checks of its depth and its integers."""
    size = len(data)
    # A value takes at least one byte, so a smaller body needs no count.
    if size > limits.json_values and _count_openings(data) + data.count(b",") > limits.json_values:
        raise ApiError(
            "body_too_large",
            f"the body has too many values; the limit is {limits.json_values} (limits.json_values)",
        )
    if data.startswith(_BOM):
        data = data[3:]
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise _invalid_json(data, error, limits) from None


def _check_depth(data: bytes, value: Any, limits: Limits) -> None:
    # The text is checked in a fraction of the time of the value, unless it is large.
    checks_text = len(data) <= SLICE
    # A body with fewer brackets cannot be that deep. In a text of this size, counting them would
    # take as long as the check.
    if not (checks_text and len(data) > _UNCOUNTED) and _count_openings(data) <= limits.json_depth:
        return
    if checks_text:
        deep = text_too_deep(data, limits.json_depth)
    else:
        deep = too_deep(value, limits.json_depth)
    if deep:
        raise _nested_too_deep(limits)


def _checking_integers(data: bytes) -> Iterator[None]:
    """Refuse integers beyond 64 bits, which orjson silently turns into floats.

    :param data: valid JSON. What is yielded are points at which other work can be done.
    :raises ApiError: 400 ``invalid_json``.
    """
    if _LONG_RUN not in data.translate(_DIGITS):
        return
    position, turn_ends = 0, _TOKENS_SLICE
    pattern = _TOKEN
    while (token := pattern.match(data, position)) is not None and token.end() > position:
        start, position = position, token.end()
        if position > turn_ends:
            yield
            turn_ends = position + _TOKENS_SLICE
        if token[1] is not None:
            pattern = _TOKEN if token[1] else _REST
        elif position - start >= len(_LONG_RUN) and data[start] in _NUMBER:
            text = token[0]
            if _FLOAT.isdisjoint(text):
                _check_integer(text)


def _count_openings(data: bytes) -> int:
    return data.count(b"{") + data.count(b"[")


def too_deep(value: Any, limit: int) -> bool:
    """Return whether a JSON value is nested more deeply than ``limit``; a scalar has depth 0."""
    level = [value] if type(value) is dict or type(value) is list else []
    for _ in range(limit):
        if not level:
            return False
        below: list[Any] = []
        for container in level:
            for child in container.values() if type(container) is dict else container:
                kind = type(child)
                if kind is dict or kind is list:
                    below.append(child)
        level = below
    return bool(level)


def text_too_deep(data: bytes, limit: int) -> bool:
    """Return what :func:`too_deep` returns for the value of a JSON text.

    :param data: valid JSON.
    """
    if b"\\" in data:
        # Afterwards, every quote begins or ends a string.
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    brackets = data.translate(_AS_BRACES, _NOT_STRUCTURE).replace(b'""', b"")
    if b'"' in brackets:  # Some strings contain brackets.
        brackets = b"".join(brackets.split(b'"')[::2])
    for _ in range(limit):
        if not brackets:
            return False
        # Removes the innermost level.
        brackets = brackets.replace(b"{}", b"")
    return bool(brackets)


def _check_integer(text: bytes) -> None:
    if type(integer(text.decode())) is not int:
        raise ApiError(
            "invalid_json",
            "an integer is outside the signed 64-bit range (-2**63 to 2**63-1);"
            " send it as a string",
        )


def _nested_too_deep(limits: Limits) -> ApiError:
    return ApiError(
        "invalid_json",
        f"the body is nested too deeply; the limit is {limits.json_depth} levels"
        " (limits.json_depth)",
    )


def _invalid_json(data: bytes, error: orjson.JSONDecodeError, limits: Limits) -> ApiError:
    if not data.strip(b" \t\r\n"):
        return ApiError("invalid_json", "the body is empty")
    if "depth limit" in error.msg or "ecursion" in error.msg:
        return _nested_too_deep(limits)
    if data.startswith(_GZIP_MAGIC):
        return ApiError(
            "invalid_json", "the body is compressed; send the header Content-Encoding: gzip"
        )
    try:
        data.decode()
    except UnicodeDecodeError:
        return ApiError("invalid_json", "the body is not valid UTF-8")
    # orjson's message names the syntax error and its place, never a value.
    return ApiError(
        "invalid_json",
        f"the body is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})",
    )
