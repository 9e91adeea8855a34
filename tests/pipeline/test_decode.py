# SPDX-License-Identifier: Apache-2.0
"""Decoding of bodies: compression, and JSON within the limits."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gzip
import json
import struct
import zlib
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engage.config import DEFAULT_LIMITS
from engage.errors import ApiError
from engage.pipeline.decode import (
    SLICE,
    check_encoding,
    decode_json,
    decode_json_in_slices,
    decompress,
    decompress_in_slices,
    text_too_deep,
    too_deep,
)
from support.each import each
from support.pipeline import limit

TEXT = b'{"userId": "u-1"}' * 100


def raw_deflate(data: bytes) -> bytes:
    """Return deflate without the zlib wrapper."""
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


def refused(data: bytes, **limits: Any) -> ApiError:
    """Return the error for ``data``."""
    with pytest.raises(ApiError) as caught:
        decode_json(data, dataclasses.replace(DEFAULT_LIMITS, **limits))
    return caught.value


# ---------------------------------------------------------------------------------------- encoding
@each(
    "header, encoding",
    [
        *((None, "identity"), ("", "identity"), ([], "identity"), ("identity", "identity")),
        *(("gzip", "gzip"), (" GZip ", "gzip"), ("x-gzip", "gzip"), (["gzip"], "gzip")),
        ("deflate", "deflate"),
    ],
)
def test_known_encodings_are_accepted(header: Any, encoding: str) -> None:
    assert check_encoding(header) == encoding


@each(
    "header",
    [
        *("br", "gzip, gzip", "zstd", "gzip,identity", ["gzip", "gzip"], "compress"),
        *("gzip,deflate", "gzip;q=1", "*", "identity, br"),
    ],
)
def test_unknown_encodings_are_refused(header: Any) -> None:
    with pytest.raises(ApiError) as caught:
        check_encoding(header)
    assert (caught.value.status, caught.value.code) == (415, "unsupported_encoding")


@each(
    "encoding, body",
    [
        *(("identity", TEXT), ("gzip", gzip.compress(TEXT, mtime=0))),
        ("gzip", gzip.compress(TEXT[:50], mtime=0) + gzip.compress(TEXT[50:], mtime=0)),
        (
            "gzip",
            gzip.compress(b"", mtime=0)
            + gzip.compress(TEXT, mtime=0)
            + gzip.compress(b"", mtime=0),
        ),
        ("gzip", gzip.compress(TEXT, mtime=0) + b"\0" * 512),
        ("gzip", b"".join(gzip.compress(TEXT[i : i + 2], mtime=0) for i in range(0, len(TEXT), 2))),
        *(("deflate", zlib.compress(TEXT)), ("deflate", raw_deflate(TEXT))),
    ],
)
def test_a_body_is_decompressed_up_to_the_limit(encoding: Any, body: bytes) -> None:
    assert decompress(body, encoding, limit(len(TEXT))) == TEXT
    with pytest.raises(ApiError) as caught:
        decompress(body, encoding, limit(len(TEXT) - 1))
    assert (caught.value.status, caught.value.code) == (413, "body_too_large")
    assert "limits.event_bytes" in caught.value.message


def test_raw_deflate_that_looks_like_zlib_is_decompressed() -> None:
    """A stored block of the right length begins like a zlib header."""
    data = b"x" * 30
    for size in range(1, 400):
        block = b"\x78" + struct.pack("<HH", size, size ^ 0xFFFF)
        if (block[0] << 8 | block[1]) % 31 == 0:
            break
    # 0x78 = not final, type 0 ("stored"), the other bits are padding.
    data = b"x" * size
    stream = block + data + b"\x01\x00\x00\xff\xff"
    assert zlib.decompress(stream, wbits=-zlib.MAX_WBITS) == data
    assert decompress(stream, "deflate", limit(1000)) == data


@given(st.binary(max_size=300_000), st.sampled_from(["gzip", "zlib", "raw"]), st.integers(1, 4))
def test_any_body_is_decompressed(data: bytes, packing: str, members: int) -> None:
    if packing == "gzip":
        step = max(len(data) // members, 1)
        parts = [data[i : i + step] for i in range(0, max(len(data), 1), step)]
        body, encoding = b"".join(map(gzip.compress, parts)), "gzip"
    else:
        body, encoding = (zlib.compress if packing == "zlib" else raw_deflate)(data), "deflate"
    assert decompress(body, encoding, limit(max(len(data), 1))) == data  # type: ignore[arg-type]


@each(
    "encoding, body",
    [
        *(("gzip", b""), ("gzip", TEXT), ("gzip", zlib.compress(TEXT))),
        *(("gzip", gzip.compress(TEXT, mtime=0)[:-1]), ("gzip", gzip.compress(TEXT, mtime=0)[:10])),
        ("gzip", gzip.compress(TEXT, mtime=0) + b"more"),
        ("gzip", gzip.compress(TEXT, mtime=0) + gzip.compress(TEXT, mtime=0)[:-1]),
        ("gzip", gzip.compress(TEXT, mtime=0)[:-8] + b"\0" * 8),
        *(("gzip", gzip.compress(b"", mtime=0) * 1001), ("deflate", b""), ("deflate", TEXT)),
        *(("deflate", gzip.compress(TEXT, mtime=0)), ("deflate", zlib.compress(TEXT)[:-1])),
        *(("deflate", zlib.compress(TEXT) + b"more"), ("deflate", raw_deflate(TEXT)[:-1])),
        ("deflate", raw_deflate(TEXT) + b"\0"),
    ],
)
def test_damaged_compression_is_refused(encoding: Any, body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        decompress(body, encoding, limit(10_000_000))
    assert (caught.value.status, caught.value.code) == (400, "invalid_encoding")


@given(st.data())
def test_no_damage_raises_another_exception(data: st.DataObject) -> None:
    body = bytearray(gzip.compress(TEXT, mtime=0))
    for _ in range(data.draw(st.integers(1, 5))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ApiError):
        decompress(bytes(body), "gzip", limit(100_000))


def test_a_bomb_costs_no_more_memory_than_the_limit() -> None:
    """A gigabyte of zeros, compressed to a megabyte: the same block again and again."""
    blocks = []
    for wbits in (31, -15):
        packer = zlib.compressobj(wbits=wbits)
        blocks.append(packer.compress(b"\0" * 2**20) + packer.flush(zlib.Z_FULL_FLUSH))
    bomb = blocks[0] + blocks[1] * 1023
    with pytest.raises(ApiError) as caught:
        decompress(bomb, "gzip", limit(2**20))
    assert caught.value.code == "body_too_large"


# -------------------------------------------------------------------------------------------- JSON
@each(
    "data",
    [
        *(b"", b" ", b"\xef\xbb\xbf", b"\xef\xbb\xbf\xef\xbb\xbf{}", b"hello", b"{} {}", b"{}{}"),
        *(b'{"a":1,}', b"[1,]", b"{'a':1}", b"// no\n{}", b'{"a":/**/1}', b"NaN"),
        *(b'{"a":Infinity}', b"-Infinity", b"1e999", b"-1e400", b"01", b"+1", b".5"),
        *(b"9223372036854775808", b"-9223372036854775809", b'{"a":[18446744073709551616]}'),
        *(b"9" * 400, b"-" + b"9" * 400, b'{"a":' + b"1" * 5000 + b"}", b'"\\ud800"', b'"\\udc00"'),
        *(b'"\\udc00\\ud800"', b'{"\\ud800":1}', b'"\xed\xa0\x80"', b'"\xff"', b'{"a":"\xc3"}'),
        *(b'"\xe2\x82"', b'"\xc0\xaf"', b'"\xe9"', '{"a":1}'.encode("utf-16-le")),
        *('{"a":1}'.encode("utf-16"), '{"a":1}'.encode("utf-32-le"), b'"\x01"', b'"tab\tinside"'),
        *(b'{"a"', b'"\\x41"'),
    ],
)
def test_bytes_that_are_not_json_are_refused(data: bytes) -> None:
    error = refused(data)
    assert (error.status, error.code) == (400, "invalid_json")
    assert len(error.message) < 200


@each(
    "data, words",
    [
        *((b"", "empty"), (b'"\xff"', "UTF-8"), (gzip.compress(b"{}"), "Content-Encoding")),
        *((b"[" * 65 + b"]" * 65, "limits.json_depth"), (b"9" * 19, "64-bit"), (b"{", "line 1")),
    ],
)
def test_the_message_names_the_rule(data: bytes, words: str) -> None:
    assert words in refused(data).message


@each("opening, closing", [(b"[", b"]"), (b'{"a":', b"}"), (b'[{"]":', b"}]"), (b'["]",', b"]")])
def test_nesting_of_more_than_64_levels_is_refused(opening: bytes, closing: bytes) -> None:
    """Brackets in strings do not count."""
    per = len(closing)
    for levels in (63, 64):
        times = levels // per
        decode_json(opening * times + b"1" + closing * times, DEFAULT_LIMITS)
    for levels in (66, 1000, 1026, 100_000):
        times = levels // per
        error = refused(opening * times + b"1" + closing * times)
        assert "json_depth" in error.message


@each("first", [b"", b"[[]]," * 1000, b"[[]]," + b" " * SLICE])
def test_nesting_of_65_levels_is_refused(first: bytes) -> None:
    """In a small body and in a large one; many brackets side by side are not deep."""
    decode_json(b"[" + first + b"[" * 63 + b"]" * 64, DEFAULT_LIMITS)
    assert refused(b"[" + first + b"[" * 64 + b"]" * 65).code == "invalid_json"


nested = st.recursive(
    st.none() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=5),
    lambda child: st.lists(child, max_size=3) | st.dictionaries(st.text(max_size=3), child),
    max_leaves=20,
)


@given(nested, st.integers(1, 6))
def test_too_deep_agrees_with_the_depth(value: Any, limit: int) -> None:
    def depth(value: Any) -> int:
        if isinstance(value, dict):
            return 1 + max(map(depth, value.values()), default=0)
        if isinstance(value, list):
            return 1 + max(map(depth, value), default=0)
        return 0

    assert too_deep(value, limit) == (depth(value) > limit)


#: Strings that look like the structure of a text, with escapes.
bracketed = st.text('[]{},: a"\\\né', max_size=6)


@given(
    st.recursive(
        st.none() | bracketed,
        lambda child: st.lists(child, max_size=3) | st.dictionaries(bracketed, child, max_size=3),
        max_leaves=20,
    ),
    st.integers(1, 6),
    st.sampled_from([None, 1]),
)
def test_the_depth_of_a_text_is_that_of_its_value(
    value: Any, limit: int, indent: int | None
) -> None:
    for ascii_only in (False, True):
        text = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode()
        assert text_too_deep(text, limit) == too_deep(value, limit)


@each("text", ["]" * 70, r"\\" * 70, r"\"]" * 70])
def test_brackets_in_strings_do_not_hide_the_depth(text: str) -> None:
    """Neither in a small body nor in a large one, with escapes or without."""
    for padding in ("", " " * SLICE):
        deep = f'{"[" * 40}"{text}",{"[" * 40}1{"]" * 80}{padding}'
        assert "json_depth" in refused(deep.encode()).message
        flat = "[" + f'["{text}"],' * 100 + "1]" + padding
        decode_json(flat.encode(), DEFAULT_LIMITS)


@given(nested)
def test_json_of_other_libraries_is_decoded_the_same(value: Any) -> None:
    assert decode_json(json.dumps(value).encode(), DEFAULT_LIMITS) == value
    assert decode_json(orjson.dumps(value), DEFAULT_LIMITS) == value


def test_the_number_of_values_is_limited() -> None:
    most = DEFAULT_LIMITS.json_values
    decode_json(b"[" + b"1," * (most - 1) + b"1]", DEFAULT_LIMITS)
    error = refused(b"[" + b"1," * most + b"1]")
    assert (error.status, error.code) == (413, "body_too_large")
    assert "limits.json_values" in error.message
    # They are counted before the body is parsed: this is not JSON.
    assert refused(b"[]," * most).status == 413
    assert refused(b"{" * (most + 1)).status == 413


@each("escapes", [9_999, 10_000, 10_001, 20_000, 35_000])
def test_long_numbers_are_checked_beside_long_strings_and_blanks(escapes: int) -> None:
    """A string with very many escapes, and many blanks, are searched in several steps."""
    long = json.dumps('\\"' * (escapes // 2) + "\\" * (escapes % 2) + '9" 9' * 50 + "9" * 40)
    for blanks in (0, 65_535, 65_536, 200_000):
        for number in (2**63 - 1, -(2**63)):
            text = f'{{"a":{long},{" " * blanks}"b":{number}{" " * blanks},"c":{long}}}'
            assert decode_json(text.encode(), DEFAULT_LIMITS) == json.loads(text)
            wrong = text.replace(str(number), str(number * 10))
            assert "64-bit" in refused(wrong.encode()).message


NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70),
    st.sampled_from([2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**18, 10**19]),
    st.floats(allow_nan=False, allow_infinity=False),
)
#: Text that looks like numbers, quotes and escapes.
DIGITS = st.text(alphabet='0123456789"\\-.eE', max_size=40)


@given(
    st.recursive(
        st.one_of(NUMBERS, DIGITS),
        lambda inner: st.lists(inner) | st.dictionaries(DIGITS, inner),
        max_leaves=20,
    )
)
def test_exactly_the_integers_beyond_64_bits_are_refused(value: Any) -> None:
    text = json.dumps(value)
    found: list[int] = []
    json.loads(text, parse_int=lambda digits: found.append(int(digits)))
    if all(-(2**63) <= number < 2**63 for number in found):
        assert decode_json(text.encode(), DEFAULT_LIMITS) == value
    else:
        assert "64-bit" in refused(text.encode()).message


async def test_a_body_is_decoded_in_slices_as_at_once() -> None:
    data = json.dumps(
        {"text": "é" * 1_500_000, "numbers": [2**63 - 1, 0.1], "digits": "9" * 3_000_000}
    ).encode()
    for body, encoding in (
        (data, "identity"),
        (gzip.compress(data, mtime=0), "gzip"),
        (gzip.compress(data[:100]) + gzip.compress(data[100:]), "gzip"),
        (raw_deflate(data), "deflate"),
        (zlib.compress(data), "deflate"),
    ):
        room = limit(len(data))
        assert await decompress_in_slices(body, encoding, room) == data  # type: ignore[arg-type]
        assert decompress(body, encoding, room) == data  # type: ignore[arg-type]
    assert await decode_json_in_slices(data, DEFAULT_LIMITS) == json.loads(data)
    with pytest.raises(ApiError) as caught:
        await decode_json_in_slices(data[:-1] + b', "n": 9999999999999999999}', DEFAULT_LIMITS)
    assert "64-bit" in caught.value.message


async def test_the_loop_turns_between_slices() -> None:
    """Other work is done once for each slice, and not only before and after all of them."""
    done = 0

    async def work() -> None:
        nonlocal done
        while True:
            done += 1
            await asyncio.sleep(0)

    working = asyncio.ensure_future(work())
    text = b'["' + b"x" * (8 * SLICE) + b'", 1234567890123456789' + b", 1" * 200_000 + b"]"
    await decompress_in_slices(gzip.compress(text, 1), "gzip", limit(len(text)))
    assert done >= 8
    done = 0
    await decode_json_in_slices(text, DEFAULT_LIMITS)
    assert done >= 3
    working.cancel()


@each("size", [0, 1, 2**20 - 1, 2**20, 2**20 + 1, 3 * 2**20 + 258])
async def test_output_that_ends_with_a_slice_is_complete(size: int) -> None:
    for data in (b"a" * size, bytes(index % 251 for index in range(size))):
        for body, encoding in (
            (gzip.compress(data, mtime=0), "gzip"),
            (raw_deflate(data), "deflate"),
        ):
            room = limit(size)
            assert await decompress_in_slices(body, encoding, room) == data  # type: ignore[arg-type]
