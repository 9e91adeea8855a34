# SPDX-License-Identifier: Apache-2.0
"""The storage in memory passes the suite that every storage must pass."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engage.testing import StorageConformance
from engage.testing.memory_store import stored
from support.rules import RuleTests


class TestMemoryStore(RuleTests, StorageConformance):
    plugin = "engage.testing.memory_store"

    def options(self, tmp_path: Path) -> Mapping[str, Any]:
        return {"name": str(tmp_path)}

    def can(self, feature: str) -> bool:
        return feature not in ("several-processes", "durable")

    def break_store(self, options: Mapping[str, Any]) -> None:
        stored(options["name"]).available = False

    def mend_store(self, options: Mapping[str, Any]) -> None:
        stored(options["name"]).available = True
