# SPDX-License-Identifier: Apache-2.0
"""From which address a client sends: its own, also through reverse proxies that are trusted."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence

__all__ = ["Network", "client_address", "is_within", "network_of", "networks", "parsed_address"]

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

#: As the Application Gateway of Azure writes addresses, and other proxies if they are told to.
_WITH_PORT = re.compile(r"\[(?P<v6>[^\]]*)\](?::\d+)?|(?P<v4>[^:]*):\d+")


def networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Return the networks that a config names, such as ``10.0.0.0/8``; it was checked."""
    parsed = [ipaddress.ip_network(text) for text in texts]
    # As the addresses that are compared with them: mapped IPv6 as IPv4.
    firsts = [parsed_address(str(network.network_address)) for network in parsed]
    return tuple(
        network
        if first is None or first.version == network.version
        else ipaddress.ip_network((first, network.prefixlen - 96))
        for network, first in zip(parsed, firsts, strict=True)
    )


def client_address(
    peer: str, forwarded: Sequence[str], trusted: Sequence[Network], *, certain: bool = False
) -> str:
    """Return the address of a client, which may have come through reverse proxies.

    :param peer: the address that opened the connection.
    :param forwarded: the values of ``X-Forwarded-For``; their addresses may have ports.
    :param trusted: ``server.trusted_proxies``.
    :param certain: for a record of who it was.
    :return: the last address that no trusted proxy has; ``peer`` unless a trusted proxy sent it.
        With ``certain``, a mapped address as IPv4, and ``""`` if a trusted proxy sent another text,
        such as ``unknown``.
    """
    address = peer
    for hop in reversed([hop.strip() for hop in ",".join(forwarded).split(",")]):
        if (parts := _WITH_PORT.fullmatch(hop)) is not None:
            hop = parts["v6"] or parts["v4"] or ""
        if not is_within(address, trusted):
            break
        if parsed_address(hop) is None:
            if certain and forwarded:
                return ""
            break
        address = hop
    return str(parsed_address(address) or "") if certain else address


def is_within(address: str, networks: Sequence[Network]) -> bool:
    """Return whether an address is in one of the networks."""
    parsed = parsed_address(address)
    return parsed is not None and any(parsed in network for network in networks)


def network_of(address: str) -> str:
    """Return the addresses that one client can use: with IPv6, a network of 64 bits."""
    parsed = parsed_address(address)
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((int(parsed) >> 64 << 64, 64)))
    return str(parsed or address)


def parsed_address(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return an address, a mapped IPv6 address as IPv4; ``None`` if the text is not one."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return None
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        return parsed.ipv4_mapped
    return parsed
