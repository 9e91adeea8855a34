# SPDX-License-Identifier: Apache-2.0
"""Chunked bodies; what happens to a request with a bad one is in ``test_http1_refused.py``."""

from __future__ import annotations

import itertools

import httptools
from hypothesis import given
from hypothesis import strategies as st

from engage.http1.chunked import BadChunkError, ChunkedBody

HEAD = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"


class _Reference:
    """llhttp's idea of a body."""

    def __init__(self) -> None:
        self.body = b""
        self.complete = False

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = True


def _decode(data: bytes, cuts: list[int]) -> tuple[bytes, bool, bytes] | None:
    """:return: what was decoded, whether it was complete, what remains; ``None``: refused."""
    chunks, buffer, into = ChunkedBody(), bytearray(), bytearray()
    complete = False
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    try:
        for start, end in itertools.pairwise(edges):
            buffer += data[start:end]
            if not complete:
                complete = chunks.take(buffer, into)
    except BadChunkError:
        return None
    return bytes(into), complete, bytes(buffer)


@given(
    st.lists(st.binary(min_size=1, max_size=40), max_size=8),
    st.binary(max_size=20),
    st.lists(st.integers(0, 400), max_size=10),
    st.booleans(),
)
def test_chunks_survive(parts: list[bytes], rest: bytes, cuts: list[int], upper: bool) -> None:
    """Whatever was sent in chunks comes out, wherever it was cut; what follows is untouched."""
    data = b"".join(
        (b"%X;ext=1\r\n%b\r\n" if upper else b"%x\r\n%b\r\n") % (len(part), part) for part in parts
    )
    data += b"0\r\n\r\n" + rest
    assert _decode(data, cuts) == (b"".join(parts), True, rest)


@given(
    st.lists(
        st.sampled_from(
            [
                b"\r\n",
                b"\n",
                b"\r",
                b"0",
                b"1",
                b"a",
                b"3",
                b";",
                b" ",
                b"abc",
                b"x:y",
                b"=",
                b'q"',
                b'"',
            ]
        ),
        max_size=14,
    ),
    st.lists(st.integers(0, 40), max_size=4),
)
def test_no_laxer_than_the_parser(pieces: list[bytes], cuts: list[int]) -> None:
    """What we take as a complete body, llhttp takes too, and as the same bytes."""
    data = b"".join(pieces)
    ours = _decode(data, cuts)
    assert ours == _decode(data, [])
    if ours is None or not ours[1]:
        return
    reference = _Reference()
    parser = httptools.HttpRequestParser(reference)
    parser.feed_data(HEAD)
    parser.feed_data(data[: len(data) - len(ours[2])])
    assert reference.complete
    assert reference.body == ours[0]
