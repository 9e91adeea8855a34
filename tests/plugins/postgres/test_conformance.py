# SPDX-License-Identifier: Apache-2.0
"""The PostgreSQL storage passes the conformance suite on a server that is killed and restarted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from engage.testing import StorageConformance
from support import postgres
from support.rules import RuleTests

pytestmark = pytest.mark.long


class TestPostgres(RuleTests, StorageConformance):
    """Each test has a schema of its own."""

    plugin = "engage_plugins.postgres"
    syncs_with_os = False

    def options(self, tmp_path: Path) -> Mapping[str, Any]:
        return postgres.shared().options()

    def break_store(self, options: Mapping[str, Any]) -> None:
        postgres.shared().kill()

    def mend_store(self, options: Mapping[str, Any]) -> None:
        postgres.shared().start()
