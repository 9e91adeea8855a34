# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

from engage.testing import StorageConformance


class TestLedger(StorageConformance):
    plugin = "engage_ledger"
    syncs_with_os = False  # SQLite does it, and the suite cannot see it

    def options(self, tmp_path):
        return {"path": str(tmp_path / "ledger.db")}

    def break_store(self, options):
        Path(options["path"]).rename(options["path"] + ".away")
        Path(options["path"]).mkdir()

    def mend_store(self, options):
        Path(options["path"]).rmdir()
        Path(options["path"] + ".away").rename(options["path"])
