# SPDX-License-Identifier: Apache-2.0
"""From which address a client sends."""

from __future__ import annotations

import ipaddress

import pytest

from engage.http1.addresses import client_address, networks

NETWORKS = [ipaddress.ip_network("10.0.0.0/8"), ipaddress.ip_network("::1")]


@pytest.mark.parametrize(
    ("peer", "forwarded", "address"),
    [
        ("192.0.2.1", None, "192.0.2.1"),
        ("192.0.2.1", "198.51.100.7", "192.0.2.1"),
        ("10.0.0.1", None, "10.0.0.1"),
        ("10.0.0.1", "198.51.100.7", "198.51.100.7"),
        ("::ffff:10.0.0.1", "198.51.100.7", "198.51.100.7"),
        ("10.0.0.1", "203.0.113.9, 198.51.100.7", "198.51.100.7"),
        ("10.0.0.1", "203.0.113.9, 198.51.100.7, 10.9.9.9", "198.51.100.7"),
        ("::1", "10.0.0.2", "10.0.0.2"),
        ("10.0.0.1", "198.51.100.7:4711", "198.51.100.7"),
        ("10.0.0.1", "203.0.113.9, 198.51.100.7:4711, 10.9.9.9:80", "198.51.100.7"),
        ("10.0.0.1", "[2606:4700::1]", "2606:4700::1"),
        ("10.0.0.1", "[2606:4700::1]:4711", "2606:4700::1"),
        ("10.0.0.1", "2606:4700::1:4711", "2606:4700::1:4711"),
        ("10.0.0.1", "[2606:4700::1]4711", "10.0.0.1"),
        ("10.0.0.1", "[]", "10.0.0.1"),
        ("10.0.0.1", ":80", "10.0.0.1"),
        ("10.0.0.1", "198.51.100.7:http", "10.0.0.1"),
        ("10.0.0.1", "nonsense", "10.0.0.1"),
        ("10.0.0.1", "203.0.113.9, nonsense", "10.0.0.1"),
        ("10.0.0.1", "", "10.0.0.1"),
        ("", "198.51.100.7", ""),
    ],
)
def test_only_trusted_proxies_name_the_address_of_a_client(
    peer: str, forwarded: str | None, address: str
) -> None:
    values = [] if forwarded is None else [forwarded]
    assert client_address(peer, values, NETWORKS) == address


@pytest.mark.parametrize(
    ("peer", "forwarded", "address"),
    [
        ("192.0.2.1", None, "192.0.2.1"),
        ("192.0.2.1", "unknown", "192.0.2.1"),
        ("10.0.0.1", None, "10.0.0.1"),
        ("10.0.0.1", "198.51.100.7:4711", "198.51.100.7"),
        ("::1", "10.0.0.2", "10.0.0.2"),
        ("10.0.0.1", "unknown", ""),
        ("10.0.0.1", "_hidden", ""),
        ("10.0.0.1", "", ""),
        ("10.0.0.1", "for=198.51.100.7", ""),
        ("10.0.0.1", "nonsense", ""),
        ("10.0.0.1", "198.51.100.7, unknown", ""),
        ("10.0.0.1", "unknown, 198.51.100.7", "198.51.100.7"),
        ("10.0.0.1", "unknown, 10.9.9.9", ""),
        ("10.0.0.1", "::ffff:203.0.113.7", "203.0.113.7"),
        ("::ffff:203.0.113.7", None, "203.0.113.7"),
        ("10.0.0.1", "2606:4700:0:0::ABCD", "2606:4700::abcd"),
        ("", None, ""),
    ],
)
def test_a_record_has_an_address_only_if_it_is_that_of_the_client(
    peer: str, forwarded: str | None, address: str
) -> None:
    values = [] if forwarded is None else [forwarded]
    assert client_address(peer, values, NETWORKS, certain=True) == address


@pytest.mark.parametrize("text", ["::ffff:10.0.0.1", "::ffff:a00:0/104", "::ffff:0:0/96"])
def test_a_trusted_proxy_may_be_written_as_a_mapped_address(text: str) -> None:
    """As a listener on ``::`` sees it."""
    for peer in ("10.0.0.1", "::ffff:10.0.0.1"):
        assert client_address(peer, ["198.51.100.7"], networks([text])) == "198.51.100.7"
    assert client_address("2606:4700::1", ["198.51.100.7"], networks([text])) == "2606:4700::1"
