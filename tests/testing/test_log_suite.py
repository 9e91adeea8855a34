# SPDX-License-Identifier: Apache-2.0
"""The suite for logs passes with a log in memory, and finds the flaw of each other log here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from engage.testing import LogConformance
from support.memory_log import BROKERS


class TestMemoryLog(LogConformance):
    """The log of the tests."""

    plugin = "support.memory_log"

    def options(self, tmp_path: Path) -> Mapping[str, Any]:
        return {"name": str(tmp_path)}

    @pytest.fixture(autouse=True)
    def _forget(self, tmp_path: Path) -> Iterator[None]:
        yield
        BROKERS.pop(str(tmp_path), None)

    def can(self, feature: str) -> bool:
        return feature != "durable"

    def break_log(self, options: Mapping[str, Any]) -> None:
        BROKERS[options["name"]].down = True

    def mend_log(self, options: Mapping[str, Any]) -> None:
        BROKERS[options["name"]].down = False

    def expire(self, options: Mapping[str, Any], places: Mapping[int, int]) -> None:
        for partition, place in places.items():
            BROKERS[options["name"]].expire(partition, place)
