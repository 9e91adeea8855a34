# SPDX-License-Identifier: Apache-2.0
"""Decoding of chunked bodies; ``test_connection_refused.py`` has requests with bad ones."""

from __future__ import annotations

import itertools

import httptools
from hypothesis import given
from hypothesis import strategies as st

from engage.http1.body import BadChunkError, ChunkedBody

HEAD = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"


class _Reference:
    """A body as llhttp decodes it."""

    def __init__(self) -> None:
        self.body = b""
        self.complete = False

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = True


def _decode(data: bytes, cuts: list[int]) -> tuple[bytes, bool, bytes] | None:
    """Return the decoded body, whether it is complete, and the rest; ``None`` if it is refused."""
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
def test_any_chunks_are_decoded(
    parts: list[bytes], rest: bytes, cuts: list[int], upper: bool
) -> None:
    """Wherever the bytes are cut; the bytes after the body stay."""
    data = b"".join(
        (b"%X;ext=1\r\n%b\r\n" if upper else b"%x\r\n%b\r\n") % (len(part), part) for part in parts
    )
    data += b"0\r\n\r\n" + rest
    assert _decode(data, cuts) == (b"".join(parts), True, rest)


@given(
    st.lists(
        st.sampled_from(
            [
                *(b"\r\n", b"\n", b"\r", b"0", b"1", b"a", b"3", b";", b" ", b"abc", b"x:y", b"="),
                *(b'q"', b'"'),
            ]
        ),
        max_size=14,
    ),
    st.lists(st.integers(0, 40), max_size=4),
)
def test_the_decoder_is_as_strict_as_llhttp(pieces: list[bytes], cuts: list[int]) -> None:
    """A body that we accept as complete is complete for llhttp, and the same."""
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


def test_very_many_chunks_take_several_calls() -> None:
    """One call decodes what takes half a millisecond; it stops, and the next one goes on."""
    body = b"7\r\n       \r\n" * 10_000 + b"0\r\n\r\nrest"
    chunks, buffer, into = ChunkedBody(), bytearray(body), bytearray()
    calls = 1
    while not chunks.take(buffer, into):
        assert chunks.stopped
        calls += 1
    assert not chunks.stopped
    assert calls == 41
    assert into == b" " * 70_000
    assert buffer == b"rest"


def test_a_call_that_waits_for_more_has_not_stopped() -> None:
    chunks, buffer, into = ChunkedBody(), bytearray(b"7\r\n   "), bytearray()
    assert not chunks.take(buffer, into)
    assert not chunks.stopped
