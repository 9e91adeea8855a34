# SPDX-License-Identifier: Apache-2.0
"""engage.http1.sockets opens the listening socket; its errors say what to change."""

from __future__ import annotations

import socket

import pytest

from engage.api import EngageError
from engage.http1.sockets import listen, url_of


def test_port_0_is_a_free_port() -> None:
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        assert url_of(sock) == f"http://127.0.0.1:{port}"
        socket.create_connection(("127.0.0.1", port)).close()


def test_a_name_is_looked_up_and_ipv4_is_preferred() -> None:
    with listen("localhost", 0) as sock:
        assert url_of(sock).startswith("http://127.0.0.1:")


def test_no_host_is_every_address() -> None:
    with listen("", 0) as sock:
        assert url_of(sock).startswith("http://0.0.0.0:")


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_an_ipv6_address_is_bracketed() -> None:
    try:
        sock = listen("::1", 0)
    except EngageError:
        pytest.skip("no IPv6 here")
    with sock:
        assert url_of(sock) == f"http://[::1]:{sock.getsockname()[1]}"


def test_a_taken_port_is_one_clear_line() -> None:
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(EngageError) as caught:
            listen("127.0.0.1", port)
    assert str(caught.value) == (
        f"cannot listen on 127.0.0.1:{port}: address already in use"
        " (change server.host, server.port)"
    )


def test_a_host_of_another_machine_is_an_error() -> None:
    with pytest.raises(EngageError, match=r"^server\.host, server\.port: 'no\.such\.invalid'"):
        listen("no.such.invalid", 0)
    with pytest.raises(EngageError, match=r"cannot listen on 192\.0\.2\.1:"):
        listen("192.0.2.1", 0)
