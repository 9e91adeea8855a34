# SPDX-License-Identifier: Apache-2.0
import contextlib
import sqlite3
from pathlib import Path

from engage.testing import LogConformance


class TestTape(LogConformance):
    plugin = "engage_tape"

    def options(self, tmp_path):
        return {"path": str(tmp_path / "events.tape")}

    def break_log(self, options):
        Path(options["path"]).rename(options["path"] + ".away")
        Path(options["path"]).mkdir()

    def mend_log(self, options):
        Path(options["path"]).rmdir()
        Path(options["path"] + ".away").rename(options["path"])

    def expire(self, options, offsets):
        with contextlib.closing(sqlite3.connect(options["path"])) as db, db:
            delete = "DELETE FROM records WHERE partition = ? AND offset < ?"
            db.executemany(delete, offsets.items())
