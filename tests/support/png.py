# SPDX-License-Identifier: Apache-2.0
"""Small PNG files of screenshots: at most 256 colours, without a further package."""

from __future__ import annotations

import collections
import struct
import zlib

_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def small(png: bytes) -> bytes:
    """Return a screenshot with a palette. Rarer colours become the nearest frequent one.

    :param png: 8 bits for each of red, green, blue and perhaps alpha, as Chromium writes it.
    """
    width, height, rows = _rows(png)
    counts: collections.Counter[bytes] = collections.Counter()
    pixels = []
    for row in rows:
        line = [row[i : i + 3] for i in range(0, len(row), 3)]
        counts.update(line)
        pixels.append(line)
    palette = [color for color, _ in counts.most_common(256)]
    index = {color: number for number, color in enumerate(palette)}
    for color in counts:
        if color not in index:
            index[color] = min(range(len(palette)), key=lambda n: _distance(palette[n], color))
    data = b"".join(b"\0" + bytes(index[color] for color in line) for line in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    parts = [
        (b"IHDR", header),
        (b"PLTE", b"".join(palette)),
        (b"IDAT", zlib.compress(data, 9)),
        (b"IEND", b""),
    ]
    return _SIGNATURE + b"".join(_chunk(kind, content) for kind, content in parts)


def _distance(one: bytes, other: bytes) -> int:
    return sum((a - b) ** 2 for a, b in zip(one, other, strict=True))


def _chunk(kind: bytes, content: bytes) -> bytes:
    crc = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", crc)


def _rows(png: bytes) -> tuple[int, int, list[bytes]]:
    """Return width, height, and the rows with three bytes for each pixel."""
    assert png.startswith(_SIGNATURE)
    place, data, width, height, channels = len(_SIGNATURE), b"", 0, 0, 0
    while place < len(png):
        (length,) = struct.unpack_from(">I", png, place)
        kind, content = png[place + 4 : place + 8], png[place + 8 : place + 8 + length]
        place += 12 + length
        if kind == b"IHDR":
            width, height, depth, color = struct.unpack_from(">IIBB", content)
            assert (depth, color) in ((8, 2), (8, 6)), "not a screenshot"
            channels = 3 if color == 2 else 4
        elif kind == b"IDAT":
            data += content
    raw = zlib.decompress(data)
    size = width * channels
    before = bytearray(size)
    rows = []
    for y in range(height):
        start = y * (size + 1)
        before = _unfiltered(raw[start], raw[start + 1 : start + 1 + size], before, channels)
        if channels == 3:
            rows.append(bytes(before))
        else:
            row = bytearray(width * 3)
            for part in range(3):
                row[part::3] = before[part::4]
            rows.append(bytes(row))
    return width, height, rows


def _unfiltered(kind: int, line: bytes, above: bytearray, step: int) -> bytearray:
    """Undo the filter of a row, see section 9 of the specification of PNG."""
    row = bytearray(line)
    for i, value in enumerate(line):
        left = row[i - step] if i >= step else 0
        up = above[i]
        if kind == 0:
            break
        if kind == 1:
            guess = left
        elif kind == 2:
            guess = up
        elif kind == 3:
            guess = (left + up) // 2
        else:
            corner = above[i - step] if i >= step else 0
            each = left + up - corner
            guess = min((left, up, corner), key=lambda one: abs(each - one))
        row[i] = (value + guess) & 255
    return row
