# SPDX-License-Identifier: Apache-2.0
"""The promises of every log, on three Kafka nodes."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from engage.testing import LogConformance
from support import kafka

pytestmark = pytest.mark.kafka


@pytest.mark.timeout(600, func_only=True)
class TestThreeNodes(LogConformance):
    """Everything, with the settings that engage requires."""

    plugin = "engage_plugins.kafka"
    nodes: kafka.Cluster

    @pytest.fixture(autouse=True)
    def _have_nodes(self, kafka_nodes: kafka.Cluster) -> None:
        self.nodes = kafka_nodes

    def options(self, tmp_path: Path) -> Mapping[str, Any]:
        return {"servers": self.nodes.servers(), "topic": f"t{uuid.uuid4().hex}"}

    def break_log(self, options: Mapping[str, Any]) -> None:
        for node in kafka.NODES:
            self.nodes.pause(node)

    def mend_log(self, options: Mapping[str, Any]) -> None:
        for node in kafka.NODES:
            self.nodes.resume(node)

    def expire(self, options: Mapping[str, Any], offsets: Mapping[int, int]) -> None:
        self.nodes.delete_records(options["topic"], offsets)
