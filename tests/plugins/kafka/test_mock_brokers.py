# SPDX-License-Identifier: Apache-2.0
"""What every log promises about appending, on librdkafka's mock brokers: they need no Java.

Members of a group wait three seconds for others there, so the rest is tested on real nodes only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from engage.testing.log.appending import LogAppendTests
from engage.testing.log.harness import LogSubject
from support import kafka


class TestMockBrokers(LogSubject, LogAppendTests):
    """Three brokers in the process of the test."""

    plugin = "engage_plugins.kafka"
    servers: str

    @pytest.fixture(autouse=True)
    def _have_brokers(self) -> Iterator[None]:
        with kafka.mock() as self.servers:
            yield

    def options(self, tmp_path: Path) -> Mapping[str, Any]:
        return {"servers": self.servers, "topic": "events", "allow_weak_acknowledgement": True}

    def can(self, feature: str) -> bool:
        return feature == "durable"

    def test_the_largest_record_of_the_core_is_stored(self) -> None:  # type: ignore[override]
        """These brokers do not report how much they take, so it is refused."""

    def test_the_largest_record_of_the_core_is_taken_as_a_dead_one(self) -> None:  # type: ignore[override]
        """It is refused, too."""
