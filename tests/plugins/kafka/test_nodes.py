# SPDX-License-Identifier: Apache-2.0
"""The nodes of the tests: they start although another process takes a port of theirs."""

from __future__ import annotations

import socket

import pytest

from support import kafka
from support.mongo import free_port


@pytest.mark.kafka
@pytest.mark.timeout(600, func_only=True)
def test_other_ports_are_chosen_if_one_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = free_port
    with socket.create_server(("127.0.0.1", choose())) as taken:
        ports = [taken.getsockname()[1]]
        monkeypatch.setattr(kafka, "free_port", lambda: ports.pop() if ports else choose())
        with kafka.own(nodes=(1,)) as nodes:
            assert nodes.running(1)
            assert taken.getsockname()[1] not in nodes.ports[1].values()
        assert not ports
