# SPDX-License-Identifier: Apache-2.0
"""The conformance suite of storages on one kind of server, and what a part of it needs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from engage.testing import StorageConformance
from engage.testing.storage.harness import Subject
from support import mongo
from support.mongo_proxy import Proxy
from support.rules import RuleTests

#: Parts of names of tests that wait for calls to fail; they get short time limits.
_FAILING = (
    "nothing_is_ack",
    "every_method",
    "opening_a_broken",
    "acknowledged_events",
    "has_no_effect",
)
_IMPATIENT = "timeoutMS=6000&serverSelectionTimeoutMS=500"
#: The same of tests in which an erasure waits for as long as a call may take.
_WAITING = ("another_process_forgets", "what_happens_later")


class OnServer(Subject):
    """The storage on one kind of server.

    To break the store, a durable server is killed; another one is behind a proxy that hangs up."""

    plugin = "engage_plugins.mongo"
    syncs_with_os = False
    kind: ClassVar[str]
    driver: ClassVar[str] = "motor"
    proxy: Proxy | None = None

    @pytest.fixture(autouse=True)
    def _proxied(self) -> Any:
        yield
        if self.proxy is not None:
            self.proxy.down()

    def options(self, tmp_path: Path) -> Mapping[str, Any]:
        server = mongo.shared(self.kind)
        failing = any(part in tmp_path.name for part in _FAILING)
        waiting = any(part in tmp_path.name for part in _WAITING)
        # A write may take long if the machine is busy.
        seconds = 10 if waiting else 60
        url = server.url(options=_IMPATIENT if failing else f"timeoutMS={seconds}000")
        if failing and self.kind == "java":
            self.proxy = Proxy(server.address)
            database = url.rpartition("/")[2].partition("?")[0]
            url = self.proxy.url(database, _IMPATIENT)
        return {"url": url, "driver": self.driver}

    def can(self, feature: str) -> bool:
        if feature in ("atomic-updates", "nested-arrays", "code-point-order"):
            return mongo.can(self.kind, feature)
        if feature == "transactions":
            return False
        # A server that is not of the tests is not killed.
        return self.kind != "url" or feature != "break"

    def break_store(self, options: Mapping[str, Any]) -> None:
        if self.proxy is not None:
            self.proxy.down()
        else:
            mongo.shared(self.kind).kill()

    def mend_store(self, options: Mapping[str, Any]) -> None:
        if self.proxy is not None:
            self.proxy.up()
        else:
            mongo.shared(self.kind).start()


class Conformance(OnServer, RuleTests, StorageConformance):
    """The suite on one kind of server."""
