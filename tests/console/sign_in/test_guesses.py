# SPDX-License-Identifier: Apache-2.0
"""Wrong passwords in the audit: one entry an hour and network."""

from __future__ import annotations

from engage.console.sign_in.guesses import NETWORKS, Guesses
from support.console import Clock


def test_the_guesses_of_a_network_share_an_entry_for_an_hour() -> None:
    clock = Clock()
    guesses = Guesses(clock)
    entry, address, count = guesses.add("192.0.2.1")
    assert (address, count) == ("192.0.2.1", 1)
    assert guesses.add("192.0.2.1") == (entry, "192.0.2.1", 2)
    other = guesses.add("2001:db8::1")
    assert other[0] != entry
    assert guesses.add("2001:db8::2") == (other[0], "2001:db8::2", 2)
    clock.now += 3600
    later = guesses.add("192.0.2.1")
    assert later[0] != entry
    assert later[2] == 1


def test_many_networks_share_one_entry_more() -> None:
    guesses = Guesses(Clock())
    added = [guesses.add(f"192.0.2.{number}") for number in range(200)]
    assert len({entry for entry, _, _ in added}) == NETWORKS + 1
    assert added[-1][1:] == ("other networks", 200 - NETWORKS)
