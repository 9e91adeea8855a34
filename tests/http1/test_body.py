# SPDX-License-Identifier: Apache-2.0
"""Bodies, by length and by chunks. Through a connection they are tested in ``test_connection``."""

from __future__ import annotations

import pytest

from engage.http1.body import BadChunkError, Body, BodyTooLargeError


def test_a_body_with_a_length_is_taken_once_it_is_complete() -> None:
    body = Body(5, chunked=False)
    assert body.take(bytearray(b"abc"), 5) is None
    assert not body.complete
    buffer = bytearray(b"abcdeGET /")
    assert body.take(buffer, 5) == b"abcde"
    assert buffer == b"GET /"
    assert body.complete


def test_a_chunked_body_is_taken_once_it_is_complete() -> None:
    body = Body(0, chunked=True)
    buffer = bytearray(b"3\r\nabc\r\n2\r\nd")
    assert body.take(buffer, 5) is None
    assert not body.complete
    buffer += b"e\r\n0\r\n\r\nGET /"
    assert body.take(buffer, 5) == b"abcde"
    assert buffer == b"GET /"
    assert body.complete


def test_a_body_over_its_limit_is_refused_before_it_is_complete() -> None:
    with pytest.raises(BodyTooLargeError):
        Body(6, chunked=False).take(bytearray(), 5)
    with pytest.raises(BodyTooLargeError):
        Body(0, chunked=True).take(bytearray(b"6\r\nabcdef"), 5)


def test_a_body_is_discarded_as_it_arrives() -> None:
    for body, data in (
        (Body(5, chunked=False), b"abcde"),
        (Body(0, chunked=True), b"5\r\nabcde\r\n0\r\n\r\n"),
    ):
        first, rest = bytearray(data[:4]), bytearray(data[4:] + b"GET /")
        assert not body.discard(first)
        assert not first
        assert body.discard(rest)
        assert rest == b"GET /"
        assert body.complete


def test_chunks_that_cannot_be_decoded_are_refused() -> None:
    for method in (lambda body, data: body.take(data, 5), Body.discard):
        with pytest.raises(BadChunkError):
            method(Body(0, chunked=True), bytearray(b"no chunk\r\n"))
