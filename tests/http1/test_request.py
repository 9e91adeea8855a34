# SPDX-License-Identifier: Apache-2.0
"""Heads of requests; ``test_connection_refused.py`` has the answers to bad ones."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engage.errors import ApiError
from engage.http1.request import MAX_HEADERS, BadRequestError, Request, check_beginning
from support.each import each

PLAIN = (
    b"POST /v1/track?a=b HTTP/1.1\r\nHost: a\r\nX-One: 1\r\nx-one: 2\r\nContent-Length: 5\r\n\r\n"
)


def test_a_head_is_parsed() -> None:
    """Names of headers in any case, values without the white space around them."""
    head = Request(PLAIN.replace(b"X-One: 1", b"X-One:\t 1 \t"))
    assert (head.method, head.target, head.version) == ("POST", "/v1/track?a=b", "HTTP/1.1")
    assert head.headers.get_list("X-One") == ["1", "2"]
    assert (head.length, head.chunked, head.keep_alive) == (5, False, True)
    assert not head.expects_continue


@each("value, expects", [("100-continue", True), ("100-Continue", True), ("x", False)])
def test_only_100_continue_is_a_known_expectation(value: str, expects: bool) -> None:
    """HTTP/1.0 has no expectations."""
    raw = PLAIN.replace(b"X-One: 1", f"Expect: {value}".encode())
    assert Request(raw).expects_continue is expects
    assert not Request(raw.replace(b"HTTP/1.1", b"HTTP/1.0")).expects_continue


@each("digits", [1, 19, 20, 4300, 4301, 60_000])
def test_the_digits_of_a_length_are_limited(digits: int) -> None:
    """To 19: ``int()`` raises for thousands of them, and leading zeros need not end."""
    raw = PLAIN.replace(b"Content-Length: 5", b"Content-Length: %0*d" % (digits, 5))
    if digits <= 19:
        assert Request(raw).length == 5
    else:
        with pytest.raises(BadRequestError):
            Request(raw)


def test_the_number_of_headers_is_limited() -> None:
    """For every method."""
    for method in (b"POST", b"BREW"):
        for count in (MAX_HEADERS, MAX_HEADERS + 1):
            raw = method + b" / HTTP/1.1\r\nHost: a\r\n" + b"a: b\r\n" * (count - 1) + b"\r\n"
            if count == MAX_HEADERS:
                assert len(Request(raw).headers.get_list("a")) == MAX_HEADERS - 1
            else:
                with pytest.raises(ApiError):
                    Request(raw)


@given(st.binary(max_size=200), st.integers(0, len(PLAIN)), st.integers(0, 20))
@example(b"", 0, 0)
@example(b"\n", 0, 0)
def test_any_bytes_are_a_head_or_refused(noise: bytes, at: int, cut: int) -> None:
    """With one of two errors; no bytes are two heads."""
    raw = PLAIN[:at] + noise + PLAIN[at + cut :]
    end = raw.find(b"\r\n\r\n")
    if end < 0:
        return
    try:
        head = Request(raw[: end + 4])
    except (BadRequestError, ApiError):
        return
    assert b"\n" not in raw[: end + 4].replace(b"\r\n", b"")
    assert head.chunked == ("Transfer-Encoding" in head.headers)
    lengths = head.headers.get_list("Content-Length")
    assert len(lengths) + head.chunked <= 1
    assert head.length == (int(lengths[0]) if lengths else 0)
    assert all("\r" not in value and "\n" not in value for _, value in head.headers.get_all())


@given(st.lists(st.sampled_from([b"GET ", b"/", b"\r\n", b"\r", b"\n", b"a: b", b"\0"])))
def test_a_head_may_be_checked_in_pieces(pieces: list[bytes]) -> None:
    """The pieces are refused exactly when the whole head is."""
    buffer, searched, refused = bytearray(), 0, False
    for piece in pieces:
        buffer += piece
        try:
            check_beginning(buffer, searched)
        except BadRequestError:
            refused = True
            break
        searched = len(buffer)
    whole = bytearray(b"".join(pieces))
    if not whole:
        return
    if refused:
        with pytest.raises(BadRequestError):
            check_beginning(whole, 0)
    else:
        check_beginning(whole, 0)
