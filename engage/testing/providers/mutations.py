# SPDX-License-Identifier: Apache-2.0
"""Changes of a genuine delivery, each of which a provider must refuse or handle."""

from __future__ import annotations

import base64
import functools
import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl, urlencode

import orjson
from hypothesis import strategies as st

from engage.api import WebhookRequest

#: The bytes of one signed part, and a function that returns the delivery with other bytes instead.
Part = tuple[bytes, Callable[[bytes], WebhookRequest]]

#: The keys and indices that lead to a value within a JSON value.
Path = tuple[str | int, ...]

#: Any JSON value.
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)

#: Bodies that no provider sends. They may be signed.
JUNK = {
    "empty": b"",
    "not JSON": b"{not json",
    "not UTF-8": b'{"a": "\xff\xfe"}',
    "null": b"null",
    "a number": b"12345678901234567890123",
    "a string": b'"text"',
    "an empty object": b"{}",
    "an empty array": b"[]",
    "an array of nothing": b'[null, 1, [], {}, "x"]',
    "10 000 elements": b"[" + b",".join([b"{}"] * 10_000) + b"]",
    "nested 100 000 deep": b"[" * 100_000 + b"]" * 100_000,
    "objects nested 100 000 deep": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
}

#: Texts that some parsers take for a number, and that are not timestamps.
ODD_TIMESTAMPS = ("", " 1", "1x", "1e9", "1_000", "+1", "-1", "0x1", "1.0", "1" * 20, "١٢٣", "nan")


def header_part(request: WebhookRequest, header: str, pattern: str, group: str) -> Part:
    """Return a part of a header as a signed part.

    :param pattern: a regular expression that finds the part in the value.
    :param group: the name of its group that is the part.
    """
    [value] = request.values(header)
    match = re.search(pattern, value)
    assert match is not None, f"{header}: {pattern} does not match"
    start, end = match.span(group)

    def change(content: bytes) -> WebhookRequest:
        changed = value[:start] + content.decode("latin-1") + value[end:]
        others = [pair for pair in request.headers if pair[0].lower() != header.lower()]
        return replace(request, headers=[*others, (header, changed)])

    return value[start:end].encode("latin-1"), change


def member_part(request: WebhookRequest, path: str) -> Part:
    """Return the text at a dotted path of a JSON body as a signed part."""
    body = orjson.loads(request.body)
    keys = tuple(path.split("."))
    value = functools.reduce(operator.getitem, keys, body)
    assert isinstance(value, str), f"{path}: not a text in the body"

    def change(content: bytes) -> WebhookRequest:
        # Bytes that are not UTF-8 are sent unchanged.
        changed = with_value(body, keys, content.decode("utf-8", "surrogateescape"))
        text = json.dumps(changed, ensure_ascii=False)
        return replace(request, body=text.encode("utf-8", "surrogateescape"))

    return value.encode(), change


def with_members(body: bytes, members: Mapping[str, Any]) -> bytes:
    """Return a JSON object with more members, however deeply it is nested; else the same bytes."""
    if not (body.startswith(b"{") and body.endswith(b"}")):
        return body
    added = orjson.dumps(members)[1:]
    return body[:-1] + (b"," if body[1:-1].strip() else b"") + added


def form_parts(request: WebhookRequest) -> Iterator[Part]:
    """Yield the names and values of a form. They are decoded: an escape has several spellings."""
    fields = parse_qsl(request.body.decode("ascii"), keep_blank_values=True)
    for index, pair in enumerate(fields):
        for place, text in enumerate(pair):

            def change(content: bytes, index: int = index, place: int = place) -> WebhookRequest:
                changed: list[tuple[str | bytes, str | bytes]] = [*fields]
                old = changed[index]
                changed[index] = (content, old[1]) if place == 0 else (old[0], content)
                return replace(request, body=urlencode(changed).encode())

            if text:
                yield text.encode(), change


def flip_bit(content: bytes, bit: int) -> bytes:
    """Return the content with one bit changed."""
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def other_spellings(text: str) -> Iterator[str]:
    """Yield other Base64 texts for the same bytes: the last character has bits without meaning."""
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    stem = text.rstrip("=")
    padding = text[len(stem) :]
    for character in alphabet:
        other = stem[:-1] + character + padding
        if other != text and base64.b64decode(other) == base64.b64decode(text):
            yield other


def paths(value: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the paths of all values within a JSON value, including that of the value itself."""
    yield path
    if isinstance(value, dict):
        for key, member in value.items():
            yield from paths(member, (*path, key))
    elif isinstance(value, list):
        for index, member in enumerate(value):
            yield from paths(member, (*path, index))


def with_value(value: Any, path: Path, new: Any) -> Any:
    """Return a copy of a JSON value with another value at a path."""
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = with_value(value[path[0]], path[1:], new)
    return copy
