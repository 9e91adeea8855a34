# SPDX-License-Identifier: Apache-2.0
"""The SQLite storage passes the conformance suite, writing in a thread."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engage.testing import StorageConformance
from support.rules import RuleTests


class TestSqlite(RuleTests, StorageConformance):
    """The store is broken by a folder in place of its file."""

    plugin = "engage_plugins.sqlite"
    syncs_with_os = False

    def options(self, tmp_path: Path) -> Mapping[str, Any]:
        return {"path": str(tmp_path / "engage.db"), "writer": "thread"}

    def can(self, feature: str) -> bool:
        return feature != "several-processes"

    def break_store(self, options: Mapping[str, Any]) -> None:
        path = Path(options["path"])
        path.rename(path.with_suffix(".away"))
        path.mkdir()

    def mend_store(self, options: Mapping[str, Any]) -> None:
        path = Path(options["path"])
        path.rmdir()
        path.with_suffix(".away").rename(path)
